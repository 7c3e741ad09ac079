"""The step loop that all callers of a session share.

A step takes one token of each decoding sequence, then pieces of prompts, oldest first, within the
expected step time. When pages run out, the newest sequence is preempted. Logits depend only on
their own sequence, so batching and preemption do not change results.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from clocher_kernels.errors import DeviceError, NonFinite, OutOfMemory, SessionBusy
from clocher_runtime.engine.binding import Bound
from clocher_runtime.engine.forwards import Forwards, Part
from clocher_runtime.engine.requests import Request
from clocher_runtime.speculation.speculator import Speculator

_WITH_PROMPTS = 1.5  # of the time of a step without prompts, a step with some may take
_LEAST_PIECE = 4  # tokens of a prompt that a step takes however long it lasts


class Scheduler:
    """Requests, and the steps that serve them; callers run one step at a time.

    `kv_hits`, `kv_misses`: keys found by tokens, tokens computed; `reused`: prefix-cache tokens;
    `sums`: totals over all steps; `times`: expected step times.
    """

    def __init__(self, bound: Bound, speculator: Speculator | None = None) -> None:
        self.forwards = Forwards(bound.executor, bound.pages, speculator)
        self.sums, self.times = self.forwards.sums, self.forwards.times
        self.itl_ms, self.pages = bound.config.itl_ms, bound.pages
        self.kv_hits = self.kv_misses = self.reused = self.preempted = 0
        self._bound, self._executor = bound, bound.executor
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._awake, self._is_awake = ExitStack(), False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self._running), len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the requests of a call. Raises SessionBusy."""
        queue = requests[0].queue
        for other in {r.queue for r in (*self._running, *self._waiting)}:
            if (queue.window or other.window) and queue.window is not other.window:
                raise SessionBusy(
                    "generate: a measured generation shares its steps with no other; finish or "
                    "close the other one first, or load a second session"
                )
        self._waiting.extend(requests)

    def step(self) -> None:
        """Do the next step, if there is anything to do."""
        try:
            self.sweep()
            if parts := self.forwards.launched or self._choose():
                if not self._is_awake:
                    self._awake.enter_context(self._executor.running())
                    self._is_awake = True
                self._serve(parts)
            elif self._waiting and not self._running:
                raise OutOfMemory(  # `Session` lets no such request in
                    f"the KV cache has no room for a text of {len(self._waiting[0].ids)} tokens; "
                    "raise --context"
                )
        except Exception as error:
            self.forwards.forget()
            self.end_all(error)
        except BaseException as cut:  # Ctrl-C belongs to the caller
            self._reset(DeviceError(f"a step was cut off by {type(cut).__name__}; ask again"))
            raise
        self.rest()

    def sweep(self) -> None:
        """Remove requests whose callers have left, or whose call has failed."""
        for request in [r for r in self._running if r.queue.is_over]:
            self._retire(request)
        if any(r.queue.is_over for r in self._waiting):
            self._waiting = deque(r for r in self._waiting if not r.queue.is_over)

    def rest(self) -> None:
        """Let the executor sleep if there is nothing to do."""
        if self.is_idle and self._is_awake:
            assert not self.pages.used, "nothing runs, and pages are held"
            self._is_awake = False
            self._awake.close()

    def end_all(self, error: BaseException) -> None:
        """End every call with an error."""
        for request in (*self._running, *self._waiting):
            request.queue.error = error
        self.sweep()
        self.rest()

    def _reset(self, error: BaseException) -> None:
        for request in (*self._running, *self._waiting):
            request.queue.error = error
        self._running, self._waiting = [], deque()
        self.forwards.forget()
        self.pages.reset()
        if self.forwards.speculator is not None:
            self.forwards.speculator.reset()
        self.rest()

    def _choose(self) -> list[Part]:
        decoding = sum(r.waiting_tokens + len(r.masks) for r in self._running if r.decodes)
        room = self._executor.plan.tokens - decoding
        if decoding and (self._waiting or not all(r.decodes for r in self._running)):
            # New requests would starve if the decoding ones used all of the time.
            limit = max(self.itl_ms, _WITH_PROMPTS * self.times.expected_ms(decoding))
            room = min(room, max(self.times.most(limit) - decoding, _LEAST_PIECE))
        rows = self._executor.plan.rows
        parts: list[Part] = []
        preempted = self.preempted
        for request in list(self._running):
            if request.slot < 0:  # it just lost its pages
                continue
            decodes = request.decodes
            count = request.waiting_tokens if decodes else request.piece(room, rows)
            if count is None or not (count or request.masks) or not self._reserve(request, count):
                continue
            parts.append((request, count))
            room -= 0 if decodes else request.taken(count)
            rows -= max(1, request.rows(count))
        while self._waiting and room and rows and self.preempted == preempted:
            request = self._waiting[0]
            if not self.pages.admit(request, request.reuses_cache):
                break
            self._waiting.popleft()
            self._running.append(request)
            self.reused += request.cells
            if request.found is None:  # what it finds once it was preempted is its own
                request.found = request.cells
            count = request.piece(room, rows)
            if count is None:  # its turn comes with the next step
                break
            if self._reserve(request, count):
                parts.append((request, count))
                room -= request.taken(count)
                rows -= max(1, request.rows(count))
        return parts

    def _reserve(self, request: Request, count: int) -> bool:
        while not self.pages.reserve(request, request.cells + request.taken(count)):
            newest = self._running[-1]
            self._retire(newest)
            self._waiting.appendleft(newest)
            self.preempted += 1
            if newest is request:
                return False
        return True

    def _retire(self, request: Request, forget: bool = False) -> None:
        self._running.remove(request)
        self.pages.release(request, forget)
        request.leave()
        self.forwards.forget(request)

    def _serve(self, parts: list[Part]) -> None:
        joins = len(parts) < len(self._running) or (self._waiting and self.pages.slots)
        tokens = self.forwards.run(parts, stays=not joins)
        if self.pages.total:
            self.kv_misses += tokens
            for request, count in parts:
                count += len(request.draft.tokens)
                self.kv_hits += count * request.cells + count * (count - 1) // 2
        for request, count in parts:
            if request.slot >= 0:
                self.pages.commit(request, request.cells + count + request.kept)
                request.committed()
        for request, _ in parts:
            if request.is_done and not request.queue.is_over:
                request.queue.open -= 1
                if request.track is not None:
                    request.track.end(request.ids[-request.made :])
                self._retire(request)
        if faulty := [request for request, _ in parts if request.is_faulty]:
            self._fail(faulty)

    def _fail(self, requests: list[Request]) -> None:
        for request in requests:
            request.is_faulty = False
            if request.queue.is_over:
                continue
            request.queue.error = NonFinite(
                f"got logits that are NaN or infinite within {request.cells} tokens of the "
                "sequence, expected finite ones; get or convert the model again, or, where "
                "activations are fp16, try --act-prec fp32, which has a larger range",
                request.index,
            )
            self._retire(request, forget=True)
        self.forwards.forget()
