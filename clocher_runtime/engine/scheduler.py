"""The step loop that all callers of a session share: who computes what in the next step.

A step takes first one token of each sequence that is being decoded, then pieces of prompts, oldest
first, as many tokens as the Plan has room for, and while anyone decodes only so many that the step
is expected to end in time. Requests join and leave between steps. If the cache is out of pages, the
newest sequence gives its own back and waits; what it had is found in the cache, or computed, again.

A token's logits depend on nothing but its own sequence, so neither company nor preemption changes
what a request gets.
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack

from clocher_kernels.errors import DeviceError, NonFinite, OutOfMemory, SessionBusy
from clocher_runtime.engine.backends import Executor, Weights
from clocher_runtime.engine.nonfinite import explain
from clocher_runtime.engine.pages import Census, KvPages
from clocher_runtime.engine.passes import Done, Passes
from clocher_runtime.engine.requests import Request
from clocher_runtime.engine.step_inputs import Part
from clocher_runtime.engine.timing import StepSums, StepTimes
from clocher_runtime.speculation.draft import NO_DRAFT
from clocher_runtime.speculation.speculator import Speculator

_WITH_PROMPTS = 1.5  # of the time of a step without prompts, a step with some may take
_LEAST_PIECE = 4  # tokens of a prompt that a step takes however long it lasts


class Scheduler:
    """Requests, and the steps that serve them. Callers see to it that one step runs at a time.

    Args:
        executor: its Plan has the inputs of every Plan.
        pages: the cache of its Plan.
        slots: sequences side by side.
        weights: what the executor is bound to, for the explanation of a fault.
        act_prec: how activations are stored, for that too.
        itl_ms: expected length of a step, above which no more of a prompt is taken while somebody
            decodes.
        speculator: guesses tokens; None: nobody does.

    Attributes:
        kv_hits: keys of earlier tokens that were found in the cache, by all tokens.
        kv_misses: tokens that were computed.
        reused: tokens that were found in the cache instead.
        preempted: how often a sequence had to give its pages back.
        passes: what executes steps.
        pages: see there.
    """

    def __init__(
        self,
        executor: Executor,
        pages: KvPages,
        slots: int,
        weights: Weights,
        act_prec: str,
        itl_ms: float,
        speculator: Speculator | None = None,
    ) -> None:
        self.passes = Passes(executor, pages, speculator)
        self.itl_ms = itl_ms
        self.kv_hits = self.kv_misses = self.reused = self.preempted = 0
        self._executor, self.pages = executor, pages
        self._weights, self._act_prec = weights, act_prec
        self._count, self._slots = slots, list(range(slots))[::-1]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._awake, self._is_awake = ExitStack(), False

    @property
    def sums(self) -> StepSums:
        """What all steps add up to."""
        return self.passes.sums

    @property
    def times(self) -> StepTimes:
        """How long steps take."""
        return self.passes.times

    @property
    def speculator(self) -> Speculator | None:
        """Who guesses tokens."""
        return self.passes.speculator

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait."""
        return len(self._running), len(self._waiting)

    def census(self) -> list[Census]:
        """Count the pages of each pool."""
        return self.pages.census()

    def submit(self, requests: Sequence[Request]) -> None:
        """Put the requests of a call at the end of those that wait.

        Args:
            requests: of one call.

        Raises:
            SessionBusy: another call is being measured, or runs beside this one that shall be.
        """
        box = requests[0].box
        for other in {r.box for r in (*self._running, *self._waiting)}:
            if (box.window or other.window) and box.window is not other.window:
                raise SessionBusy(
                    "generate: a measured generation shares its steps with no other; finish or "
                    "close the other one first, or load a second session"
                )
        self._waiting.extend(requests)

    def step(self) -> None:
        """Do the next step, if there is anything to do.

        What goes wrong for one call ends that call; what goes wrong for all ends all of them. The
        error is in the mailbox.
        """
        try:
            self.sweep()
            parts = self._choose()
            if parts:
                self._wake()
                self._serve(parts)
            elif self._waiting and not self._running:
                raise OutOfMemory(  # `Session` lets no such request in
                    f"the KV cache has no room for a text of {len(self._waiting[0].ids)} tokens; "
                    "raise --context"
                )
        except Exception as error:
            self.passes.forget()
            self.end_all(error)
        except BaseException as cut:  # Ctrl-C: it is the caller's, and nobody else's
            self._begin_anew(DeviceError(f"a step was cut off by {type(cut).__name__}; ask again"))
            raise
        self.rest()

    def sweep(self) -> None:
        """Let requests go whose callers have left, or whose call has failed."""
        if any(r.box.is_over for r in self._running):
            for request in [r for r in self._running if r.box.is_over]:
                self._retire(request)
        if any(r.box.is_over for r in self._waiting):
            self._waiting = deque(r for r in self._waiting if not r.box.is_over)

    def rest(self) -> None:
        """Let the executor sleep if there is nothing to do."""
        if self.is_idle and self._is_awake:
            assert not self.pages.used, "nobody runs, and pages are held"
            self._is_awake = False
            self._awake.close()

    def _wake(self) -> None:
        if not self._is_awake:
            self._awake.enter_context(self._executor.running())
            self._is_awake = True

    def end_all(self, error: BaseException) -> None:
        """End every call with an error."""
        for request in (*self._running, *self._waiting):
            request.box.error = error
        self.sweep()
        self.rest()

    def _begin_anew(self, error: BaseException) -> None:
        """End every call, and trust nothing that was noted of them."""
        for request in (*self._running, *self._waiting):
            request.box.error = error
        self._running, self._waiting = [], deque()
        self.passes.forget()
        self._slots = list(range(self._count))[::-1]
        self.pages.reset()
        if self.speculator is not None:
            self.speculator.reset()
        self.rest()

    # Who computes what.

    def _choose(self) -> list[Part]:
        """Return the requests of the next step and how many tokens each computes."""
        decoding = sum(r.waiting_tokens + len(r.masks) for r in self._running if r.decodes)
        room = self._executor.plan.tokens - decoding
        if decoding and (self._waiting or not all(r.decodes for r in self._running)):
            # Who comes would wait for ever if those who are there needed all of the time.
            limit = max(self.itl_ms, _WITH_PROMPTS * self.times.expected_ms(decoding))
            room = min(room, max(self.times.most(limit) - decoding, _LEAST_PIECE))
        rows = self._executor.plan.rows
        parts: list[Part] = []
        preempted = self.preempted
        for request in list(self._running):
            if request.slot < 0:  # it just lost its pages
                continue
            piece = request.waiting_tokens if request.decodes else request.piece(room)
            if piece is None:
                continue
            count = piece if request.scored is None else min(piece, rows)
            if (count or request.masks) and self._reserve(request, count):
                parts.append((request, count))
                room -= 0 if request.decodes else _taken(request, count)
                rows -= _rows_taken(request, count)
        while self._waiting and self._slots and room and rows and self.preempted == preempted:
            request = self._waiting[0]
            reuse = request.scored is None
            if not self.pages.admit(request, self._slots[-1], reuse):
                break
            self._waiting.popleft()
            self._slots.pop()
            self._running.append(request)
            self.reused += request.cells
            if request.found is None:  # what it finds once it was preempted is its own
                request.found = request.cells
            piece = request.piece(room)
            if piece is None:  # its turn comes with the next step
                break
            count = piece if reuse else min(piece, rows)
            if self._reserve(request, count):
                parts.append((request, count))
                room -= _taken(request, count)
                rows -= _rows_taken(request, count)
        return parts

    def _reserve(self, request: Request, count: int) -> bool:
        """Get pages for the next tokens of a request, from the newest if there are none left.

        Returns:
            Whether it has them; otherwise it waits again.
        """
        while not self.pages.reserve(request, request.cells + _taken(request, count)):
            newest = self._running[-1]
            self._retire(newest)
            self._waiting.appendleft(newest)
            self.preempted += 1
            if newest is request:
                return False
        return True

    def _retire(self, request: Request, forget: bool = False) -> None:
        """Take slot and pages from a request that runs."""
        self._running.remove(request)
        self._slots.append(request.slot)
        self.pages.release(request, forget)
        request.draft, request.guesses = NO_DRAFT, ()
        if request.track is not None and request.track.reader is not None:
            request.track.reader.leave()
        self.passes.forget(request)

    # A step.

    def _serve(self, parts: list[Part]) -> None:
        """Execute a step, note what is in the cache now, and let go who has ended."""
        done = self.passes.run(parts)
        if self.pages.keeps:
            self.kv_misses += done.tokens
            self.kv_hits += sum(_keys_before(request, count) for request, count in parts)
        for request, count in parts:
            if request.slot >= 0:
                self.pages.commit(request, request.cells + count + request.kept)
                request.draft, request.kept = NO_DRAFT, 0
                if request.ahead is not None:
                    request.masks = ()
        self._deliver(done)
        if done.is_faulty:  # last, for it does steps of its own
            self._fail([request for request, _ in parts if request.is_faulty])

    def _deliver(self, done: Done) -> None:
        """Hand logits over to requests that score; let those go that have ended."""
        for request, rows in done.rows:
            box = request.box
            if box.is_over or request.is_faulty:
                continue
            if request.scored is not None:
                assert done.logits is not None
                ended = request.score(done.logits[rows])
            else:
                ended = bool(made := done.made[request]) and made[-1].last
            if ended:
                box.open -= 1
                self._retire(request)

    # What went wrong.

    def _fail(self, requests: list[Request]) -> None:
        """End the calls of requests whose logits were not finite."""
        for request in requests:
            request.is_faulty = False
            if request.box.is_over:
                continue
            found = explain(self._executor, self._weights, self._act_prec, self._again(request))
            request.box.error = NonFinite(str(found), request.index)
            self._retire(request, forget=True)
        self.passes.forget()

    def _again(self, request: Request) -> Generator[tuple[int, int], None, None]:
        """Stage all tokens of a request again, step by step; yield their counts and of rows."""
        slot = request.slot
        self.pages.release(request, forget=True)
        if not self.pages.admit(request, slot, reuse=False):
            request.slot = slot
            return
        while request.waiting_tokens:
            count = min(request.waiting_tokens, self._executor.plan.tokens)
            if request.scored is not None:
                count = min(count, self._executor.plan.rows)
            if not self.pages.reserve(request, request.cells + _taken(request, count)):
                return
            yield self.passes.stage([(request, count)])
            self.pages.commit(request, request.cells + count)


def _taken(request: Request, count: int) -> int:
    """Return the tokens of a step that a request takes with so many of its text."""
    return count + (len(request.masks) if count == request.waiting_tokens else 0)


def _rows_taken(request: Request, count: int) -> int:
    """Return the output rows that a request takes at least."""
    return count if request.scored is not None else max(1, len(request.masks))


def _keys_before(request: Request, count: int) -> int:
    """Return the keys that the tokens of a request find in the cache or in their step."""
    count += len(request.draft.tokens)
    return count * request.cells + count * (count - 1) // 2
