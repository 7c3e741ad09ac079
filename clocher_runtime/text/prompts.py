"""The prompts of a run: their sources, and their preparation by threads ahead of the model."""

import json
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, Self

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


class PromptSource:
    """The prompts of a run, in order; iterate once per round.

    Files are streamed. In a `.jsonl` file a line is an object with text under `prompt` or token ids
    under `ids`, else a line is a prompt; blank lines are skipped. `single` is the prompt without a
    file. Raises UsageError: unreadable, empty, or not rereadable for several rounds.
    """

    def __init__(
        self, file: Path | None, single: str | tuple[int, ...] | None = None, rounds: int = 1
    ) -> None:
        self._file: BinaryIO | None = None
        self._name = "" if file is None else f"prompts file {file}"
        self.jsonl = file is not None and file.suffix == ".jsonl"
        self._head = self._read()
        if file is None:
            self._single = Line(1, single if isinstance(single, tuple) else _text(single))
            return
        try:
            self._file = file.open("rb")
        except OSError as error:
            raise UsageError(f"{self._name}: {error.strerror}") from None
        if rounds > 1 and not self._file.seekable():
            raise UsageError(f"{self._name}: --rounds needs a file that can be read again")

    def peek(self, count: int) -> list[Line]:
        """Return up to `count` first prompts without consuming them; raises UsageError."""
        first = list(islice(self._head, count))
        if not first:
            raise UsageError(f"{self._name}: no prompts; put one on each line")
        self._head = chain(first, self._head)
        return first

    def lines(self) -> Iterator[Line]:
        """Return an iterator over all prompts, from the first."""
        head, self._head = self._head, self._read(again=True)
        return head

    def where(self, line: Line) -> str:
        """Return the place of a prompt, for messages."""
        return f"{self._name}, line {line.number}" if self._name else f"prompt {line.number}"

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self, again: bool = False) -> Iterator[Line]:
        if self._file is None:
            yield self._single
            return
        try:
            if again:
                self._file.seek(0)
            for number, line in enumerate(read_lines(self._file), start=1):
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip():
                    yield Line(number, line)
        except OSError as error:
            raise UsageError(f"{self._name}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prepares prompts for generation; thread-safe."""

    source: PromptSource
    encode: Callable[..., list[int]] | None  # of a tokenizer; None: only token ids are accepted
    check: Callable[[Sequence[int]], object]  # raises UsageError for invalid ids
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
                if self.encode is None:
                    raise UsageError("text, but the model has no tokenizer; give token ids")
                ids = self.encode(text, room=self.room)
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


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    r"""Yield lines without their "\n", their only end; raises UsageError after `MAX_SKIPPED_BYTES`.

    A line longer than `MAX_LINE_BYTES` is cut, but stays longer than that.
    """
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest, skipped = line, 0
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
            if (skipped := skipped + len(rest)) > MAX_SKIPPED_BYTES:
                raise UsageError(
                    f"a line of the prompts goes on for more than {MAX_SKIPPED_BYTES} bytes; give "
                    "a text file with a prompt on each line"
                )
        yield line.removesuffix(b"\n")


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
    """Return piped standard input, None if there is none or it is an empty file.

    Waits `wait_s` for the first byte, as some programs leave an unused pipe open. Raises
    UsageError, also for an empty pipe, whose writer failed; TimeoutError.
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
    return _text("-") if stat.S_ISFIFO(mode) else read_stdin() or None


def _text(prompt: str | None) -> str:
    if prompt != "-":
        return DEFAULT_PROMPT if prompt is None else prompt
    if text := read_stdin():
        return text
    raise UsageError("standard input is empty; give a prompt, or </dev/null for the usual one")


def read_stdin() -> str:
    """Return standard input; raises UsageError."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give it a text to read")
    try:
        text = sys.stdin.read(MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: {error}") from None
    except OSError as error:
        raise UsageError(f"standard input: {error.strerror}") from None
    if len(text) > MAX_STDIN_CHARS:
        raise UsageError(f"standard input: more than {MAX_STDIN_CHARS} characters; shorten it")
    return text


class PromptPipeline:
    """The micro-batches of a round, as a context manager that ends the threads.

    The consumer reads lines into the ring, and threads prepare them: with `overlap` while the
    consumer uses a micro-batch, else only while it waits for one, so they never share the machine
    with a timed span. `prepare` must be thread-safe; `ahead` is the number of micro-batches in the
    ring; 0: no threads, prompts are prepared on demand.
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
        self._pool = ThreadPoolExecutor(workers, "prompts-")  # starts threads as they are needed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[list[Prompt]]:
        while group := self._take() if self._capacity else self._make():
            yield group

    def _make(self) -> list[Prompt]:
        refuse_in_window("tokenise a prompt")
        return [self._prepare(line) for line in islice(self._lines, self._batch)]

    def _take(self) -> list[Prompt]:
        if len(self._ring) < self._batch:
            refuse_in_window("tokenise a prompt")
            self._fill()
            if not self._overlap:
                wait([prompt for prompt, _ in self._ring])
        group = [self._ring.popleft() for _ in range(min(self._batch, len(self._ring)))]
        self._bytes -= sum(size for _, size in group)
        if self._overlap:
            self._fill()
        return [prompt.result() for prompt, _ in group]

    def _fill(self) -> None:
        """Read lines into the ring while there is room for them."""
        while (count := len(self._ring)) < self._capacity:
            if count >= self._batch and self._bytes >= RING_BYTES:
                return
            if (line := next(self._lines, None)) is None:
                return
            self._ring.append((self._pool.submit(self._prepare, line), len(line.content)))
            self._bytes += len(line.content)


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
