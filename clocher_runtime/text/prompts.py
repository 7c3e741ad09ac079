"""The prompts of a run: where they come from, and how one is made ready for the model."""

import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from clocher_kernels.errors import OutOfMemory, UsageError
from clocher_runtime.config.values import shown

DEFAULT_PROMPT = "def fibonacci(n):\n"
MAX_STDIN_CHARS = 64 << 20
MAX_LINE_BYTES = 4 << 20
MAX_SKIPPED_BYTES = 1 << 30
"""Of a line that is too long: what goes on like that is no text, and may have no end."""
_CHUNK_BYTES = 1 << 16
_EXPECTED = 'expected an object with text under "prompt" or token ids under "ids"'
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt as it was given: a line of a file without its end, text, or token ids."""

    number: int  # of the line in its file, from 1
    content: bytes | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that can be generated from, or the reason why it cannot."""

    ids: Sequence[int]  # empty if there is an error
    text: str | None = None  # None where the prompt was given as ids, or cannot be read
    error: str | None = None  # where the prompt stands and what is wrong with it
    where: str = ""  # where the prompt stands


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the ids of a text; one that is surely longer than `room` tokens is refused."""


class PromptSource:
    """The prompts of a run, in their order. They can be iterated once for each round.

    A file is read as it is needed, never as a whole. Where its name ends in `.jsonl`, a line is an
    object with text under `prompt` or token ids under `ids`; else a line is a prompt. Blank lines
    do not count.

    Args:
        file: of prompts; None for a single one.
        single: the prompt where there is no file, text or token ids.
        rounds: how often all prompts are read.

    Raises UsageError: the file or standard input cannot be read, or has no prompt, or is to be read
    for several rounds and can be read once only.
    """

    def __init__(
        self, file: Path | None, single: str | tuple[int, ...] | None = None, rounds: int = 1
    ) -> None:
        self._file: FileIO | None = None
        self._name = "" if file is None else f"prompts file {file}"
        self.jsonl = file is not None and file.suffix == ".jsonl"
        if file is None:
            self._single = Line(1, single if isinstance(single, tuple) else _text(single))
            self._head: Iterator[Line] = iter([self._single])
            return
        try:
            # Unbuffered: no lock that a thread still holds when the process ends.
            self._file = FileIO(file)
        except OSError as error:
            raise UsageError(f"{self._name}: {error.strerror}") from None
        if rounds > 1 and not self._file.seekable():
            raise UsageError(f"{self._name}: --rounds needs a file that can be read again")
        self._head = self._read()

    def peek(self, count: int) -> list[Line]:
        """Return the first prompts, at most `count`, without using them up; raises UsageError."""
        first = list(islice(self._head, count))
        if not first:
            raise UsageError(f"{self._name}: no prompts; put one on each line")
        self._head = chain(first, self._head)
        return first

    def lines(self) -> Iterator[Line]:
        """Return an iterator over all prompts, from the first one."""
        head, self._head = self._head, self._again()
        return head

    def where(self, line: Line) -> str:
        """Return the place of a prompt, for messages."""
        return f"{self._name}, line {line.number}" if self._name else f"prompt {line.number}"

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _again(self) -> Iterator[Line]:
        if self._file is None:
            yield self._single
        else:
            self._file.seek(0)
            yield from self._read()

    def _read(self) -> Iterator[Line]:
        for number, line in enumerate(split_lines(self._chunks()), start=1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield Line(number, line)

    def _chunks(self) -> Iterator[bytes]:
        assert self._file is not None
        try:
            while chunk := self._file.read(_CHUNK_BYTES):
                yield chunk
        except OSError as error:
            raise UsageError(f"{self._name}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Preparation:
    """Turns what was given into what can be generated from. Threads may share one."""

    source: PromptSource
    tokenizer: Encodes | None  # None where the model has none: then only token ids will do
    check: Callable[[Sequence[int]], None]  # raises UsageError for ids that the model cannot use
    room: int | None = None  # tokens that a prompt may have

    def __call__(self, line: Line) -> Prompt:
        """Decode, parse, tokenise and check a prompt; what is wrong becomes its `error`."""
        text, where = None, self.source.where(line)
        try:
            content = line.content
            if isinstance(content, bytes):
                content = self._parse(content)
            ids: Sequence[int] = content if isinstance(content, tuple) else ()
            if isinstance(content, str):
                text = content
                if self.tokenizer is None:
                    raise UsageError("text, but the model has no tokenizer; give token ids")
                ids = self.tokenizer.encode(text, room=self.room)
            self.check(ids)
        except (UsageError, OutOfMemory) as error:
            return Prompt((), text, f"{where}: {error}", where)
        return Prompt(ids, text, None, where)

    def _parse(self, line: bytes) -> str | tuple[int, ...]:
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"longer than {MAX_LINE_BYTES} bytes; shorten it")
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"not UTF-8: {error}") from None
        return parse_json_prompt(text) if self.source.jsonl else text


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file without their ends.

    Only a line feed ends a line: a prompt may contain form feeds and Unicode line separators. Of a
    line that is longer than `MAX_LINE_BYTES` only the beginning is kept, and that is longer too.

    Raises UsageError: a line goes on for more than `MAX_SKIPPED_BYTES`.
    """
    held, skipped = b"", 0
    for chunk in chunks:
        end, *following = chunk.split(b"\n")
        if len(held) <= MAX_LINE_BYTES:
            held += end
        elif (skipped := skipped + len(end)) > MAX_SKIPPED_BYTES:
            raise UsageError(
                f"a line of the prompts goes on for more than {MAX_SKIPPED_BYTES} bytes; give a "
                "text file with a prompt on each line"
            )
        for line in following:
            yield held
            held, skipped = line, 0
    if held:
        yield held


def parse_json_prompt(text: str) -> str | tuple[int, ...]:
    """Return the text or the token ids of a prompt that is a JSON object; raises UsageError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:  # of a text that is one line
        raise UsageError(f"not JSON: {error.msg}, at column {error.colno}; {_EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}; {_EXPECTED}") from None
    if not isinstance(value, dict):
        raise UsageError(f"got {shown(value)}; {_EXPECTED}")
    given = [key for key in ("prompt", "ids") if key in value]
    if len(given) != 1:
        both = '"prompt" and "ids"' if given else 'neither "prompt" nor "ids"'
        raise UsageError(f"the object has {both}; {_EXPECTED}")
    prompt = value[given[0]]
    if given == ["prompt"] and isinstance(prompt, str):
        return prompt
    if given == ["ids"] and isinstance(prompt, list) and all(type(i) is int for i in prompt):
        return tuple(prompt)
    raise UsageError(f'"{given[0]}" is {shown(prompt)}; {_EXPECTED}')


def piped_text(wait_s: float) -> str | None:
    """Return what is piped into standard input; None where that is no pipe and no file, or empty.

    Waits `wait_s` seconds for the first byte: some programs hand on a pipe that nobody writes to.
    Raises UsageError: it cannot be read, or is too much. TimeoutError: nothing came.
    """
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file of the system
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if not select.select([number], [], [], wait_s)[0]:
        raise TimeoutError
    return _stdin("standard input") or None


def _text(prompt: str | None) -> str:
    """Return the text of `--prompt`."""
    if prompt != "-":
        return DEFAULT_PROMPT if prompt is None else prompt
    if sys.stdin is None:
        raise UsageError("--prompt -: standard input is closed; give it a text to read")
    if not (text := _stdin("--prompt -: standard input")):
        limit = MAX_STDIN_CHARS
        raise UsageError(f"--prompt -: expected 1 to {limit} characters on standard input")
    return text


def _stdin(where: str) -> str:
    try:
        text = sys.stdin.read(MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: {error}") from None
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from None
    if len(text) > MAX_STDIN_CHARS:
        raise UsageError(f"{where}: more than {MAX_STDIN_CHARS} characters; shorten it")
    return text
