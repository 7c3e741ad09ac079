"""The step loop that all callers of a session share: who computes what in the next step.

A step takes first one token of each sequence that is being decoded, then pieces of prompts, oldest
first, as many tokens as the Plan has room for, and while anyone decodes only so many that the step
is expected to end in time. Requests join and leave between steps. If the cache is out of pages, the
newest sequence gives its own back and waits; what it had is found in the cache, or computed, again.

A token's logits depend on nothing but its own sequence, so neither company nor preemption changes
what a request gets.
"""

from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np

from clocher_kernels.errors import DeviceError, NonFinite, OutOfMemory, SessionBusy
from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import Executor, Weights
from clocher_runtime.engine.nonfinite import explain
from clocher_runtime.engine.pages import Census, KvPages
from clocher_runtime.engine.requests import Mailbox, Request
from clocher_runtime.engine.step_inputs import StepInputs
from clocher_runtime.engine.timing import SpanKind, StepSums, StepTimes

Part = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""
Row = tuple[Request, int]
"""A request, and the position of a token whose logits are wanted."""

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

    Attributes:
        kv_hits: keys of earlier tokens that were found in the cache, by all tokens.
        kv_misses: tokens that were computed.
        reused: tokens that were found in the cache instead.
        preempted: how often a sequence had to give its pages back.
        sums: what all steps add up to.
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
    ) -> None:
        self.itl_ms, self.times, self.sums = itl_ms, StepTimes(), StepSums()
        self.kv_hits = self.kv_misses = self.reused = self.preempted = 0
        self._executor, self.pages = executor, pages
        self._weights, self._act_prec = weights, act_prec
        self._inputs = StepInputs(executor)
        self._count, self._slots = slots, list(range(slots))[::-1]
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest first
        self._staged: list[Request] = []  # what the device goes on with by itself
        self._awake, self._is_awake = ExitStack(), False

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

    def submit(self, requests: Sequence[Request], warm: bool) -> None:
        """Put the requests of a call at the end of those that wait.

        Args:
            requests: of one call.
            warm: compile now what their sampling needs and an earlier warm-up left out.

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
        if warm:
            self._inputs.choose(requests[0].sampling)
            self._staged = []
            self._executor.warm()
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
            self._staged = []
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
        self._running, self._waiting, self._staged = [], deque(), []
        self._slots = list(range(self._count))[::-1]
        self.pages.reset()
        self.rest()

    def blank_step(self) -> None:
        """Execute a step of one token that belongs to no sequence."""
        self._staged = []
        blank = Request(ids=[0], box=Mailbox(1), index=0, budget=1, sampling=Sampling())
        self._stage([(blank, 1)], [(blank, 0)])
        self._executor.step(1, 1)

    # Who computes what.

    def _choose(self) -> list[Part]:
        """Return the requests of the next step and how many tokens each computes."""
        decoding = sum(r.decodes for r in self._running)
        room = self._executor.plan.tokens - decoding
        if decoding and (self._waiting or decoding < len(self._running)):
            # Who comes would wait for ever if those who are there needed all of the time.
            limit = max(self.itl_ms, _WITH_PROMPTS * self.times.expected_ms(decoding))
            room = min(room, max(self.times.most(limit) - decoding, _LEAST_PIECE))
        rows = self._executor.plan.rows
        parts: list[Part] = []
        preempted = self.preempted
        for request in list(self._running):
            if request.slot < 0:  # it just lost its pages
                continue
            count = 1 if request.decodes else min(request.waiting_tokens, room)
            if request.scored is not None:
                count = min(count, rows)
            if count and self._reserve(request, count):
                parts.append((request, count))
                room -= 0 if request.decodes else count
                rows -= 1 if request.scored is None else count
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
            count = min(request.waiting_tokens, room, *([] if reuse else [rows]))
            if self._reserve(request, count):
                parts.append((request, count))
                room -= count
                rows -= 1 if reuse else count
        return parts

    def _reserve(self, request: Request, count: int) -> bool:
        """Get pages for the next tokens of a request, from the newest if there are none left.

        Returns:
            Whether it has them; otherwise it waits again.
        """
        while not self.pages.reserve(request, request.cells + count):
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
        if request in self._staged:
            self._staged = []

    # A step.

    def _serve(self, parts: list[Part]) -> None:
        """Execute a step and put what it made into the mailboxes."""
        requests = [request for request, _ in parts]
        decodes = sum(r.decodes for r in requests)
        only_decodes = decodes == len(parts)
        tokens, rows = sum(count for _, count in parts), _rows(parts)
        with self._span(requests, tokens - decodes, decodes):
            began = self.times.now()
            if not only_decodes or self._staged != requests or self.pages.changed:
                self._stage(parts, rows)
                # After each token a constraint allows others, which only the host knows.
                goes_on = only_decodes and all(r.constraint is None for r in requests)
                self._staged = requests if goes_on else []
            self._executor.step(tokens, len(rows))
            _tell(rows)
            sampled = self._executor.fetch("sampled", len(rows)).tolist() if rows else []
            took = self.times.now() - began
            self.sums.add(tokens - decodes, decodes, took)
            if rows:  # otherwise a GPU may still be at it
                self.times.add(tokens, took)
        if self.pages.keeps:
            self.kv_misses += tokens
            self.kv_hits += sum(count * r.cells + count * (count - 1) // 2 for r, count in parts)
        table = self._logits(rows)  # before a fault is looked for: that does steps of its own
        if NO_TOKEN in sampled:
            self._fail({r for (r, _), id_ in zip(rows, sampled, strict=True) if id_ == NO_TOKEN})
        for request, count in parts:
            if request.slot >= 0:
                self.pages.commit(request, request.cells + count)
        self._deliver(rows, sampled, table)

    def _logits(self, rows: list[Row]) -> np.ndarray | None:
        """Return the logits of a step [R, V], None if nobody wants them."""
        if any(r.scored is not None or r.box.logits or r.sampling.on_host for r, _ in rows):
            return self._executor.fetch("logits", len(rows))
        return None

    def _span(
        self, requests: list[Request], prompt: int, decodes: int
    ) -> AbstractContextManager[None]:
        """Return the span that measures a step, if one of its calls wants that."""
        for request in requests:
            if request.box.window is not None:
                kind: SpanKind = "prefill" if prompt else "decode"
                return request.box.window.span(kind, prompt or decodes)
        return nullcontext()

    def _stage(self, parts: list[Part], rows: list[Row]) -> tuple[int, int]:
        self.pages.changed = False
        return self._inputs.stage(parts, rows)

    def _deliver(self, rows: list[Row], sampled: list[int], table: np.ndarray | None) -> None:
        """Give each request what was made in its rows."""
        for row, ((request, position), token) in enumerate(zip(rows, sampled, strict=True)):
            box = request.box
            if box.is_over:
                continue
            try:
                ended = self._take(request, position, token, None if table is None else table[row])
            except Exception as error:  # of a function that the caller gave
                box.error = error
                continue
            if ended:
                box.open -= 1
                self._retire(request)

    def _take(self, request: Request, position: int, token: int, logits: np.ndarray | None) -> bool:
        """Give a request what was made in a row of it; return whether that was its last."""
        if request.scored is not None:
            assert logits is not None
            request.scored(position, logits)
            return position == len(request.ids) - 1
        if request.sampling.on_host and token >= 0:
            assert logits is not None
            self._staged = []  # the device went on with its own token
            token = request.draw(logits)
        wanted = logits.copy() if logits is not None and request.box.logits else None
        made = request.take(token, wanted)
        request.box.tokens.append(made)
        return made.last

    # What went wrong.

    def _fail(self, requests: set[Request]) -> None:
        """End the calls of requests whose logits were not finite."""
        for request in requests:
            if request.box.is_over:
                continue
            found = explain(self._executor, self._weights, self._act_prec, self._again(request))
            request.box.error = NonFinite(str(found), request.index)
            self._retire(request, forget=True)
        self._staged = []

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
            if not self.pages.reserve(request, request.cells + count):
                return
            parts = [(request, count)]
            yield self._stage(parts, _rows(parts))
            self.pages.commit(request, request.cells + count)


def _rows(parts: list[Part]) -> list[Row]:
    """Return the request and the position of each token of a step whose logits are wanted."""
    rows: list[Row] = []
    for request, count in parts:
        if request.scored is not None:
            rows += [(request, request.cells + i) for i in range(count)]
        elif count == request.waiting_tokens:
            rows.append((request, request.cells + count - 1))
    return rows


def _tell(rows: list[Row]) -> None:
    """Tell callers how many tokens the step made for them; their errors are their own."""
    if all(request.box.after_token is None for request, _ in rows):
        return
    counts = Counter(r.box for r, _ in rows if r.scored is None and not r.box.is_over)
    for box, count in counts.items():
        if box.after_token is not None:
            try:
                box.after_token(count)
            except Exception as error:
                box.error = error
