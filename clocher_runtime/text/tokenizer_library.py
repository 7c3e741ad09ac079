"""The `tokenizers` library: its calls, with whatever they raise turned into `Refused`.

The library raises `Exception` itself for every reason, and panics where its authors saw none.
Unusual files and long texts, with which it may do anything, have a process of their own.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import tokenizers

from clocher_runtime.text.text_process import PROCESS, Refused
from clocher_runtime.text.tokenizer_limits import MAX_TOKEN_CHARS

_MESSAGE_CHARS = 200


class LibraryTokenizer:
    """A tokenizer of the library.

    Args:
        text: a tokenizer.json.

    Attributes:
        vocab_size: number of ids, added tokens included.

    Raises:
        Refused: the library cannot load it.
    """

    def __init__(self, text: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            # The file may ask for both, for training; a prompt is neither cut nor filled up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        except BaseException as error:
            raise _typed(error) from None

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with those that the file puts around it if `special`.

        Raises:
            Refused: there are none, or the text is not valid Unicode.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        except (TypeError, UnicodeError):
            raise Refused("unicode", "not valid Unicode text") from None
        except BaseException as error:
            raise _typed(error) from None
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids.

        Raises:
            Refused: there is none, or it is longer than tokens can be.
        """
        try:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        except BaseException as error:
            raise _typed(error) from None
        if len(text) > MAX_TOKEN_CHARS * len(ids):
            raise Refused("refused", f"{len(ids)} tokens with a text of {len(text)} characters")
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, None if there is no such id."""
        try:
            found: str | None = self._tokenizer.id_to_token(token)
        except OverflowError:
            return None
        return found

    def to_text(self) -> str:
        """Return its tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text


def _typed(error: BaseException) -> BaseException:
    """Return what is to be raised in place of an error of the library."""
    # A panic of Rust is no Exception, and its class cannot be imported.
    ours = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    if isinstance(error, MemoryError) or not ours:
        return error
    text = str(error)
    return Refused(
        "refused", text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."
    )


BASE_SECONDS = 5.0
LOADED_BYTES_PER_SECOND = 1 << 20
CHARS_PER_SECOND = 1 << 16
BASE_BYTES = 512 << 20
BYTES_PER_LOADED_BYTE = 24
BYTES_PER_CHAR = 256


def loading_limits(text: str) -> tuple[float, int]:
    """Return the seconds and bytes that loading a tokenizer.json in a process apart may take."""
    seconds = BASE_SECONDS + len(text) / LOADED_BYTES_PER_SECOND
    return seconds, BASE_BYTES + BYTES_PER_LOADED_BYTE * len(text)


class TokenizerApart:
    """A tokenizer that nobody vouches for, with the methods of `LibraryTokenizer`.

    Args:
        text: a tokenizer.json.

    Attributes:
        vocab_size: number of ids, added tokens included.

    Raises:
        Refused: it cannot be loaded in the time and memory that its size deserves.
    """

    def __init__(self, text: str) -> None:
        self._source = (sha256(text.encode()).hexdigest(), text)
        self._load = loading_limits(text)
        self.vocab_size: int = self._ask("vocab_size", 0)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text; see `LibraryTokenizer.encode`."""
        ids: list[int] = self._ask("encode", len(text), text=text, special=special)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids; see `LibraryTokenizer.decode`."""
        text: str = self._ask("decode", len(ids), ids=list(ids), skip_special=skip_special)
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, None if there is no such token."""
        found: int | None = self._ask("token_to_id", len(text), text=text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it; see `LibraryTokenizer.id_to_token`."""
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
