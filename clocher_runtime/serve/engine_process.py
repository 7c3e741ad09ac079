"""The engine process, outside: start, restart after a crash, the results of each request."""

import asyncio
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from clocher_runtime.config.commands import ServeConfig, of_engine
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.serve.errors import ApiError, failure, from_failure, invalid
from clocher_runtime.serve.messages import (
    Broken,
    Cancel,
    Failed,
    Made,
    Reader,
    Ready,
    Scored,
    Start,
    State,
    Step,
    Submit,
    ToServer,
    Unsure,
    encode,
)
from clocher_runtime.serve.metrics import ServerMetrics

MAX_FAILURES, FAILURE_S = 3, 600.0
"""So many failures within so many seconds end the server."""
QUIET_S = 10.0
"""Seconds without a message (or 5 steps, if longer) after which the engine counts as stuck."""
WEDGED_S = 120.0
"""Seconds without a message (or 20 steps, if longer) after which the process is killed."""
RETRY_S = 2.0
_FADING = 0.98
_SOCKET_BYTES = 4 << 20
MAX_UNREAD, UNREAD_S = 256, 5.0
"""A request with so many unread tokens in a sequence for so many seconds is cancelled."""
_FAR_BEHIND = 1 << 16  # unread tokens of a sequence, at any speed
TOGETHER = 64
"""Tokens that a whole response takes at once: waking for each costs the steps."""


class News(NamedTuple):
    """An event of a sequence."""

    sequence: int
    what: Made | Unsure | Scored


class Job:
    """The sequences of a request, by their engine ids `numbers`; `cancel` stops one there.

    A `read` that has to wait is woken by `at_once` events, or the last one of a sequence.
    """

    def __init__(
        self, numbers: Sequence[int], cancel: Callable[[int, str], None], at_once: int = 1
    ) -> None:
        self._open = {number: index for index, number in enumerate(numbers)}
        self._numbers, self._cancel, self._at_once = list(numbers), cancel, at_once
        self._limit: asyncio.TimerHandle | None = None
        self._news: list[News] = []
        self._unread_since = 0.0
        self._error: ApiError | None = None
        self._stirred = asyncio.Event()

    async def read(self) -> list[News]:
        """Wait for events and return them, [] at the end; raises ApiError."""
        while not self._news and self._error is None and self._open:
            self._stirred.clear()
            await self._stirred.wait()
        news, self._news = self._news, []
        if not self._open and self._limit is not None:
            self._limit.cancel()
        if not news and self._error is not None:
            raise self._error
        return news

    def end(self, sequence: int, how: str = "abort") -> None:
        """Cancel a sequence; `how` it ended is for the metrics."""
        number = self._numbers[sequence]
        if self._open.pop(number, None) is not None:
            self._cancel(number, how)
        self._stirred.set()

    def close(self) -> None:
        """Cancel all sequences and drop unread events."""
        for sequence in range(len(self._numbers)):
            self.end(sequence)
        self._news.clear()
        if self._limit is not None:
            self._limit.cancel()

    def expire(self, seconds: float) -> None:
        """Fail after some time, unless finished by then."""
        late = failure("timeout", seconds=seconds)
        self._limit = asyncio.get_running_loop().call_later(seconds, self.fail, late)

    def put(self, number: int, what: Made | Unsure | Scored, last: bool, now: float) -> None:
        """Add an event to a sequence; `now` is the event loop's time."""
        index = self._open.get(number)
        if index is None:
            return
        if last:
            del self._open[number]
        if not self._news:
            self._unread_since = now
        self._news.append(News(index, what))
        unread = len(self._news) / len(self._numbers)
        late = now - self._unread_since > UNREAD_S
        if unread > MAX_UNREAD and (late or unread > _FAR_BEHIND):
            self.fail(failure("slow_reader"))
        if last or len(self._news) >= self._at_once:
            self._stirred.set()

    def fail(self, error: ApiError) -> None:
        """End all sequences with an error."""
        self.close()
        self._error = error
        self._stirred.set()


@dataclass(slots=True)
class _Running:
    """A running sequence; times are the event loop's."""

    job: Job
    prompt: int
    only_scored: bool
    began: float
    last: float  # time of its last token
    made: int = 0


class _Line(asyncio.Protocol):
    """The engine's messages, handed to `hear` without waking a task for each."""

    def __init__(self, hear: Callable[[Ready | Step], None]) -> None:
        self._hear, self._reader = hear, Reader(ToServer)
        self.broken: Broken | None = None  # the last message of an engine that ends
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if isinstance(message, Broken):
                self.broken = message
            else:
                self._hear(message)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class EngineProcess:
    """The engine process and all jobs; `model` is its name for clients."""

    def __init__(
        self,
        config: ServeConfig,
        stop_ids: tuple[int, ...],
        note: Callable[[str], None],
        model: str,
    ) -> None:
        self._start = Start(of_engine(config), stop_ids)
        self._most = config.batch + config.queue  # sequences running and waiting
        self._note, self.metrics = note, ServerMetrics(model, self)
        self.status: Literal["loading", "ready", "draining", "failed"] = "loading"
        self.ready: Ready | None = None  # None while it loads
        self.state = State()  # state after the last step
        self.pid = self.restarts = 0
        self.exit_code = int(ExitCode.OK)  # the server's, if the status is "failed"
        self.step_s = self._gap_s = 0.0  # longest times between messages under load; both decay
        self.changed = asyncio.Event()
        self._open: dict[int, _Running] = {}
        self._next, self._reserved = 0, 0
        self._writer: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._failures: deque[float] = deque()
        self._heard = self._silent_s = 0.0  # when, or how long before it was killed for it

    @property
    def sequences(self) -> int:
        """Number of unfinished and of reserved sequences."""
        return len(self._open) + self._reserved

    @property
    def age_s(self) -> float:
        """Seconds since the engine's last message."""
        return asyncio.get_running_loop().time() - self._heard

    @property
    def is_stuck(self) -> bool:
        """Whether a message is overdue."""
        return self.status == "ready" and self.age_s > max(QUIET_S, 5 * self.step_s)

    def serving(self) -> Ready:
        """Return what the running engine reported; raises ApiError 503 without one."""
        if self.status != "ready" or self.ready is None:
            raise self._unavailable()
        if self.is_stuck:
            raise failure("stuck")
        return self.ready

    def _unavailable(self) -> ApiError:
        return failure("draining" if self.status == "draining" else "loading")

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve sequences until just before `submit`; raises ApiError 503, 429 (full), 400."""
        self.serving()
        if count > self._most:
            raise invalid(
                f"{count} answers are asked for; this server takes at most {self._most} at a time: "
                "send fewer prompts, or lower n",
                "n",
            )
        if (taken := self.sequences) and taken + count > self._most:
            retry_after = max(1, min(60, round(self.step_s * 10)))
            raise failure("rate_limit_exceeded", waiting=taken, retry_after=retry_after)
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count

    def submit(self, asks: Sequence[Submit]) -> Job:
        """Submit sequences to the engine; raises ApiError if it is gone."""
        if self._writer is None or self.status not in ("ready", "draining"):
            raise self._unavailable()
        numbers = range(self._next, self._next + len(asks))
        self._next += len(asks)
        job = Job(numbers, self._cancel, TOGETHER if asks[0].whole else 1)
        now = asyncio.get_running_loop().time()
        for number, ask in zip(numbers, asks, strict=True):
            self._writer.write(encode(msgspec.structs.replace(ask, id=number)))
            self._open[number] = _Running(job, len(ask.ids), not ask.max_new, now, now)
        return job

    def _cancel(self, number: int, how: str) -> None:
        if number in self._open:  # else it has ended
            self._end(number, how)
            if self._writer is not None:
                self._writer.write(encode(Cancel(number)))

    def _end(self, number: int, how: str) -> None:
        found = self._open.pop(number)
        took = asyncio.get_running_loop().time() - found.began
        self.metrics.ended(how, took, found.prompt, found.made)

    async def run(self) -> None:
        """Keep an engine running until it has failed too often, or this task is cancelled."""
        try:
            while self.status != "failed":
                try:
                    broken = await self._live()
                except OSError as error:  # out of descriptors or memory, perhaps temporarily
                    self._note(f"the engine cannot be started: {error.strerror}; trying again")
                    await asyncio.sleep(RETRY_S)
                    continue
                self._died(broken)
        finally:
            self._kill()
            if self._process is not None:
                await self._process.wait()  # the loop hears of its end while there is a loop

    async def _live(self) -> Broken | None:
        """Start a process and read it to its end; return its last message if it failed."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        loop = asyncio.get_running_loop()
        self._writer, line = await loop.create_connection(lambda: _Line(self._hear), sock=ours)
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "clocher_runtime.serve.engine_main",
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=2,  # standard output belongs to the server
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C is for the server, which ends the engine
                )
            self.pid, self._heard = self._process.pid, loop.time()
            self._writer.write(encode(self._start))
            while not line.ended.done():
                if self.ready and self.age_s > max(WEDGED_S, 20 * self.step_s):
                    self._silent_s = self.age_s
                    self._kill()
                began = loop.time()
                await asyncio.wait({line.ended}, timeout=1.0)
                if loop.time() - began > 1.0 + QUIET_S:  # paused, as the engine perhaps was
                    self._heard = loop.time()
        finally:
            self._writer.close()
            self._writer = None
        await self._process.wait()
        return line.broken

    def _hear(self, message: Ready | Step) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(message, Ready):
            self.ready, self._heard = message, now
            if self.status == "loading":
                self.status = "ready"
            self.changed.set()
            return
        if self._open:  # one long gap may be a pause of the machine; two are the engine's pace
            gap = now - self._heard
            self.step_s = max(min(gap, self._gap_s), _FADING * self.step_s)
            self._gap_s = max(gap, _FADING * self._gap_s)
        if message.state.changed != self.state.changed and message.state.changed:
            self._note(f"{message.state.changed}; requests go on with what is mapped")
        self._heard, self.state = now, message.state
        left = Counter(each.request for each in message.events if isinstance(each, Made))
        for event in message.events:
            if (found := self._open.get(event.request)) is None:
                continue  # cancelled meanwhile
            how = ""  # it ends with this event
            match event:
                case Made():
                    self._count(found, now, left[event.request])
                    left[event.request] -= 1
                    how = event.finish
                case Scored() if found.only_scored:
                    how = "length"
                case Failed():
                    how = "error"
            if how:
                self._end(event.request, how)
            if isinstance(event, Failed):
                error = from_failure(event.kind, event.message)
                if error.code == "internal_error":
                    self._note(f"error: a request failed: {event.kind}")  # no text of it
                found.job.fail(error)
            else:
                found.job.put(event.request, event, bool(how), now)

    def _count(self, running: _Running, now: float, left: int) -> None:
        """Count a token; the `left` tokens of a sequence that arrived together share a gap."""
        gap = (now - running.last) / (left if running.made else 1)
        self.metrics.token(gap, is_first=not running.made)
        running.last += gap
        running.made += 1

    def _died(self, last: Broken | None) -> None:
        assert self._process is not None
        why = f"{last.kind}: {last.message}" if last else f"exit code {self._process.returncode}"
        how = f"the engine crashed ({why})"
        if self._silent_s:
            how = f"the engine did not answer for {self._silent_s:.0f} s and was ended"
        # Errors of the first load, as a missing model, would repeat.
        hopeless = last is not None and self.ready is None and not self.restarts
        self.pid, self.ready, self.state, self._silent_s = 0, None, State(), 0.0
        self.end_all("engine_failed")
        if self.status == "draining":
            return
        now = asyncio.get_running_loop().time()
        self._failures.append(now)
        while self._failures[0] < now - FAILURE_S:
            self._failures.popleft()
        if hopeless or len(self._failures) >= MAX_FAILURES:
            self.status = "failed"
            self.exit_code = last.exit_code if last and last.exit_code else int(ExitCode.DEVICE)
            self._note(f"error: {last.message if hopeless and last else how}")
        else:
            self.status = "loading"
            self.restarts += 1
            self._note(f"{how}; restarting it")
        self.changed.set()

    def drain(self) -> None:
        """Refuse new requests."""
        if self.status != "failed":
            self.status = "draining"

    def end_all(self, code: str) -> None:
        """End each job with an error object of its own: a raised one holds its frames."""
        jobs = {found.job for found in self._open.values()}
        for number in list(self._open):
            self._end(number, "error")
        for job in jobs:
            job.fail(failure(code))

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
