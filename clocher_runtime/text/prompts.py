"""The prompts of a run: their sources, and their preparation by threads ahead of the model."""

import json
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from itertools import chain, islice
from pathlib import Path
from typing import Protocol, Self

from clocher_kernels.errors import OutOfMemory, UsageError
from clocher_kernels.guards import refuse_in_window
from clocher_runtime.config.values import shown

DEFAULT_PROMPT = "def fibonacci(n):\n"
MAX_STDIN_CHARS = 64 << 20
MAX_LINE_BYTES = 4 << 20
MAX_SKIPPED_BYTES = 1 << 30
"""Limit of an overlong line: beyond it, it is not text and may never end."""
MAX_WORKERS = 8
RING_BYTES = 4 << 20
"""Limit of prompt bytes prepared ahead of a micro-batch."""
_AUTO_PROMPTS, _ON_BATCHES = 64, 2
_JOIN_S = 1.0
_CHUNK_BYTES = 1 << 16
_EXPECTED = 'expected an object with text under "prompt" or token ids under "ids"'
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt as given: a line of a file without its end, text, or token ids."""

    number: int  # line number in its file, from 1
    content: bytes | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready for generation, or its error."""

    ids: Sequence[int]  # empty if there is an error
    text: str | None = None  # None if the prompt was given as ids, or is unreadable
    error: str | None = None  # the prompt's place, and its problem
    where: str = ""  # the prompt's place


class Encodes(Protocol):
    """The method needed of a tokenizer."""

    def encode(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the ids of a text; one surely longer than `room` tokens is refused."""


class PromptSource:
    """The prompts of a run, in order; iterate once per round.

    Files are streamed. In a `.jsonl` file a line is an object with text under `prompt` or token ids
    under `ids`, else a line is a prompt; blank lines are skipped. `single` is the prompt without a
    file. Raises UsageError: unreadable, empty, or not rereadable for several rounds.
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
        """Return up to `count` first prompts without consuming them; raises UsageError."""
        first = list(islice(self._head, count))
        if not first:
            raise UsageError(f"{self._name}: no prompts; put one on each line")
        self._head = chain(first, self._head)
        return first

    def lines(self) -> Iterator[Line]:
        """Return an iterator over all prompts, from the first."""
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
    """Prepares prompts for generation; thread-safe."""

    source: PromptSource
    tokenizer: Encodes | None  # None without a tokenizer: only token ids are accepted
    check: Callable[[Sequence[int]], None]  # raises UsageError for invalid ids
    room: int | None = None  # maximum tokens of a prompt

    def __call__(self, line: Line) -> Prompt:
        """Decode, parse, tokenise and check a prompt; errors go to its `error`."""
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
    r"""Yield lines without their "\n", their only end; raises UsageError after `MAX_SKIPPED_BYTES`.

    A line longer than `MAX_LINE_BYTES` is cut, but stays longer than that.
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
    """Return the text or token ids of a JSON prompt; raises UsageError."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:  # of a one-line text
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
    """Return piped standard input, None if there is none or it is empty.

    Waits `wait_s` for the first byte, as some programs leave an unused pipe open. Raises
    UsageError, TimeoutError.
    """
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or not a file of the system
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return None
    if not select.select([number], [], [], wait_s)[0]:
        raise TimeoutError
    return read_stdin("standard input") or None


def _text(prompt: str | None) -> str:
    if prompt != "-":
        return DEFAULT_PROMPT if prompt is None else prompt
    if sys.stdin is None:
        raise UsageError("--prompt -: standard input is closed; give it a text to read")
    if not (text := read_stdin("--prompt -: standard input")):
        limit = MAX_STDIN_CHARS
        raise UsageError(f"--prompt -: expected 1 to {limit} characters on standard input")
    return text


def read_stdin(where: str) -> str:
    """Return standard input; raises UsageError, which begins with `where`."""
    try:
        text = sys.stdin.read(MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: {error}") from None
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from None
    if len(text) > MAX_STDIN_CHARS:
        raise UsageError(f"{where}: more than {MAX_STDIN_CHARS} characters; shorten it")
    return text


class PromptPipeline:
    """The micro-batches of a round, as a context manager that ends the threads.

    Without `overlap` the threads work only while the consumer waits for a micro-batch, so they
    never share the machine with a timed span. `prepare` must be thread-safe; `ahead` is the number
    of micro-batches in the ring; 0: no threads, prompts are prepared on demand.
    """

    def __init__(
        self,
        lines: Iterable[Line],
        prepare: Callable[[Line], Prompt],
        *,
        batch: int = 1,
        ahead: int = 0,
        workers: int = 1,
        overlap: bool = False,
    ) -> None:
        self._lines, self._prepare = iter(lines), prepare
        self._batch, self._capacity, self._overlap = batch, batch * ahead, overlap
        self._ring: deque[tuple[Future[Prompt], int]] = deque()  # with the bytes of their lines
        self._bytes = 0
        self._ended = self._closed = False
        self._changed = threading.Condition()
        # A reader may block for long on a pipe, so it must not keep the process alive.
        self._reader = threading.Thread(target=self._read_on, name="prompts-reader", daemon=True)
        if self._capacity:
            self._pool = ThreadPoolExecutor(workers, "prompts-")

    def __enter__(self) -> Self:
        if self._capacity and self._overlap:
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._capacity:
            self._pool.shutdown(cancel_futures=True)
            if self._overlap:
                self._reader.join(_JOIN_S)

    def __iter__(self) -> Iterator[list[Prompt]]:
        while group := self._take() if self._capacity else self._make():
            yield group

    def _make(self) -> list[Prompt]:
        refuse_in_window("tokenise a prompt")
        return [self._prepare(line) for line in islice(self._lines, self._batch)]

    def _take(self) -> list[Prompt]:
        if not (self._overlap or self._ended or len(self._ring) >= self._batch):
            refuse_in_window("tokenise a prompt")
            while self._fits() and self._read():
                pass
            wait([prompt for prompt, _ in self._ring])
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ring) >= self._batch)
            group = [self._ring.popleft() for _ in range(min(self._batch, len(self._ring)))]
            self._bytes -= sum(size for _, size in group)
            self._changed.notify_all()
        return [prompt.result() for prompt, _ in group]

    def _read_on(self) -> None:
        """Read ahead while there is room; run by the reader."""
        more = True
        while more:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._fits())
            more = self._read()

    def _read(self) -> bool:
        """Give the next line, or an error of it, to a thread; False at the end."""
        line = error = None
        try:
            line = next(self._lines, None)
        except BaseException as raised:
            if not self._overlap:
                raise
            error = raised  # for the consumer
        with self._changed:
            self._ended = self._closed or line is None
            if not self._closed and (line or error):
                size = len(line.content) if line else 0
                self._ring.append((self._pool.submit(self._prepared, line, error), size))
                self._bytes += size
            self._changed.notify_all()
        return not self._ended

    def _prepared(self, line: Line | None, error: BaseException | None) -> Prompt:
        if error is not None:
            raise error
        assert line is not None
        return self._prepare(line)

    def _fits(self) -> bool:
        count = len(self._ring)
        return count < self._capacity and (count < self._batch or self._bytes < RING_BYTES)


def prefetch_depth(prefetch: int | str, batch: int) -> tuple[int, bool]:
    """Return how many micro-batches `--prefetch` prepares ahead, and whether beside the model."""
    if prefetch == "auto":
        return -(-_AUTO_PROMPTS // batch), False
    if prefetch in ("off", 0):
        return 0, False
    return (_ON_BATCHES if prefetch == "on" else int(prefetch)), True


def worker_count(overlap: bool, cpus: int, team: int) -> int:
    """Return how many threads tokenise, of `cpus` of which the model uses `team`."""
    return max(1, min(cpus - team if overlap else cpus, MAX_WORKERS))
