"""The `tokenizers` library, with its errors and panics turned into `Refused`."""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import tokenizers

from clocher_runtime.text.text_process import PROCESS, Refused
from clocher_runtime.text.tokenizer_limits import MAX_TOKEN_CHARS

BASE_SECONDS, BASE_BYTES = 5.0, 512 << 20
LOADED_BYTES_PER_SECOND, BYTES_PER_LOADED_BYTE = 1 << 20, 24
CHARS_PER_SECOND, BYTES_PER_CHAR = 1 << 16, 256
_MESSAGE_CHARS = 200


def _tried(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        ours = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not ours:
            raise
        text = str(error)
        short = text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."
        raise Refused("refused", short) from None


class LibraryTokenizer:
    """A tokenizer of the library, from a tokenizer.json; raises Refused."""

    def __init__(self, text: str) -> None:
        self._tokenizer = _tried(partial(tokenizers.Tokenizer.from_str, text))
        # The file may ask for truncation and padding, for training; prompts have neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with those that the file adds if `special`."""
        try:
            text.encode()
        except UnicodeError:
            raise Refused("unicode", "not valid Unicode text") from None
        encode = self._tokenizer.encode
        ids: list[int] = _tried(lambda: encode(text, add_special_tokens=special).ids)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids; raises Refused if longer than tokens can be."""
        decode = self._tokenizer.decode
        text: str = _tried(lambda: decode(list(ids), skip_special_tokens=skip_special))
        if len(text) > MAX_TOKEN_CHARS * len(ids):
            raise Refused("refused", f"{len(ids)} tokens with a text of {len(text)} characters")
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None."""
        try:
            found: str | None = self._tokenizer.id_to_token(token)
        except OverflowError:
            return None
        return found

    def to_text(self) -> str:
        """Return its tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text


def loading_limits(text: str) -> tuple[float, int]:
    """Return the seconds and bytes allowed for loading a tokenizer.json in a process apart."""
    seconds = BASE_SECONDS + len(text) / LOADED_BYTES_PER_SECOND
    return seconds, BASE_BYTES + BYTES_PER_LOADED_BYTE * len(text)


class TokenizerApart:
    """A tokenizer in its own process, like `LibraryTokenizer`; raises Refused over its limits."""

    def __init__(self, text: str) -> None:
        self._source = (sha256(text.encode()).hexdigest(), text)
        self._load = loading_limits(text)
        self.vocab_size: int = self._ask("vocab_size", 0)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._ask("encode", len(text), text=text, special=special)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids."""
        text: str = self._ask("decode", len(ids), ids=list(ids), skip_special=skip_special)
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None."""
        found: int | None = self._ask("token_to_id", len(text), text=text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None."""
        found: str | None = self._ask("id_to_token", 0, token=token)
        return found

    def _ask(self, operation: str, size: int, **arguments: Any) -> Any:
        return PROCESS.ask(
            operation,
            BASE_SECONDS + size / CHARS_PER_SECOND,
            BASE_BYTES + BYTES_PER_CHAR * size,
            (self._source, self._load),
            **arguments,
        )
