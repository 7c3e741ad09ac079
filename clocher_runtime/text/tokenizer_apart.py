"""A tokenizer in a process of its own: for unusual files and long texts, which may do anything."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from clocher_runtime.text.text_process import PROCESS

BASE_SECONDS = 5.0
LOADED_BYTES_PER_SECOND = 1 << 20
CHARS_PER_SECOND = 1 << 16
BASE_BYTES = 512 << 20
BYTES_PER_LOADED_BYTE = 24
BYTES_PER_CHAR = 256


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
        seconds = BASE_SECONDS + len(text) / LOADED_BYTES_PER_SECOND
        self._load = (seconds, BASE_BYTES + BYTES_PER_LOADED_BYTE * len(text))
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

    def _ask(self, operation: str, size: int, **arguments: Any) -> Any:
        return PROCESS.ask(
            operation,
            BASE_SECONDS + size / CHARS_PER_SECOND,
            BASE_BYTES + BYTES_PER_CHAR * size,
            (self._source, self._load),
            **arguments,
        )
