"""Prompts read and tokenised by threads ahead of the model, in order, in a ring of slots."""

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Self

from clocher_kernels.guards import refuse_in_window
from clocher_runtime.text.prompts import Line, Prompt

MAX_WORKERS = 8
RING_BYTES = 4 << 20
"""Limit of prompt bytes prepared ahead of a micro-batch."""

_AUTO_PROMPTS = 64
_ON_BATCHES = 2
_JOIN_S = 1.0


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
        # Lines per turn of a thread: a switch costs as much as a short prompt.
        self._block = max(1, self._capacity // (2 * workers))
        self._slots: list[tuple[Prompt, int] | None] = [None] * self._capacity
        # Prompt indices, all counted from the first line: head <= ready <= claimed.
        self._head = self._ready = self._claimed = 0
        self._bytes = 0  # of lines between head and claimed
        self._busy = 0  # threads that are reading or tokenising
        self._filling = overlap
        self._ended = self._closed = False
        self._error: BaseException | None = None
        # Reading may block for long, so it must not hold the ring's lock.
        self._reading = threading.Lock()
        ring = threading.Lock()
        self._room, self._filled = threading.Condition(ring), threading.Condition(ring)
        self._threads = [
            threading.Thread(target=self._work, name=f"prompts-{number}", daemon=True)
            for number in range(workers if ahead else 0)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._room:
            self._closed = True
            self._room.notify_all()
        patience = _JOIN_S
        for thread in self._threads:
            thread.join(patience)
            if thread.is_alive():  # blocked on a pipe without a writer
                patience = 0

    def __iter__(self) -> Iterator[list[Prompt]]:
        while group := self._take() if self._capacity else self._make():
            yield group

    def _make(self) -> list[Prompt]:
        refuse_in_window("tokenise a prompt")
        return [self._prepare(line) for line in islice(self._lines, self._batch)]

    def _take(self) -> list[Prompt]:
        with self._filled:
            if self._overlap:
                self._filled.wait_for(lambda: self._has_batch() or self._error)
            elif not self._has_batch():
                self._filling = True
                self._room.notify()
                self._filled.wait_for(lambda: self._is_at_rest() or self._error)
                self._filling = False
            if self._error is not None:
                raise self._error
            group = []
            for index in range(self._head, min(self._head + self._batch, self._ready)):
                found = self._slots[index % self._capacity]
                assert found is not None
                self._slots[index % self._capacity] = None
                prompt, size = found
                group.append(prompt)
                self._bytes -= size
            self._head += len(group)
            self._room.notify()
            return group

    def _work(self) -> None:
        try:
            while (claim := self._claim()) is not None:
                first, lines = claim
                self._put(first, [(self._prepare(line), len(line.content)) for line in lines])
        except BaseException as error:  # raised in the consumer
            with self._room:
                self._error, self._closed = error, True
                self._room.notify_all()
                self._filled.notify()

    def _claim(self) -> tuple[int, list[Line]] | None:
        """Read and number the next lines, once there is room; None at the end."""
        with self._reading:
            with self._room:
                self._room.wait_for(lambda: self._is_over() or (self._filling and self._fits()))
                if self._is_over():
                    return None
                self._busy += 1
                room = min(self._block, self._head + self._capacity - self._claimed)
                room_bytes = RING_BYTES - self._bytes
            if not self._overlap:
                refuse_in_window("tokenise a prompt")
            lines, size = [], 0
            for line in islice(self._lines, room):
                lines.append(line)
                size += len(line.content)
                if size >= room_bytes:
                    break
            with self._room:
                if not lines:
                    self._ended = True
                    self._busy -= 1
                    self._filled.notify()
                    return None
                first = self._claimed
                self._claimed += len(lines)
                self._bytes += size
                return first, lines

    def _put(self, first: int, prompts: list[tuple[Prompt, int]]) -> None:
        with self._filled:
            for index, prompt in enumerate(prompts, start=first):
                self._slots[index % self._capacity] = prompt
            self._busy -= 1
            while self._ready < self._claimed and self._slots[self._ready % self._capacity]:
                self._ready += 1
            if self._has_batch() if self._overlap else self._is_at_rest():
                self._filled.notify()

    def _has_batch(self) -> bool:
        if self._ready - self._head >= self._batch:
            return True
        return self._ended and self._ready == self._claimed

    def _is_at_rest(self) -> bool:
        return not self._busy and (self._ended or not self._fits())

    def _fits(self) -> bool:
        count = self._claimed - self._head
        return count < self._capacity and (count < self._batch or self._bytes < RING_BYTES)

    def _is_over(self) -> bool:
        return self._closed or self._ended


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
