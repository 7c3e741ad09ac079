"""Execution of a step: drafts, inputs, and the tokens that were drawn."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np

from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_kernels.plan import DRAW_INPUTS, TOKEN_INPUTS, Executor
from clocher_runtime.engine.pages import KvPages
from clocher_runtime.engine.requests import OutputQueue, Request, Score, Token
from clocher_runtime.engine.timing import SpanKind, StepSums, StepTimes, Tally
from clocher_runtime.speculation.draft import MAX_DRAFT, NO_DRAFT, Pending
from clocher_runtime.speculation.gate import ForwardCosts, Trial
from clocher_runtime.speculation.speculator import Counts, Speculator

_LISTS = ("allowed", "edit_ids", "edits")

Part = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""


class StepInputs:
    """The live input buffers of an executor, without the page tables."""

    def __init__(self, executor: Executor) -> None:
        self._executor, inputs = executor, (*TOKEN_INPUTS, "rows", *DRAW_INPUTS, *_LISTS)
        inputs += tuple({"adapters"} & executor.plan.buffers.keys())
        self._arrays = {name: executor.array(name) for name in inputs}
        self._edits = len(self._arrays["edit_ids"]) // len(executor.array("pages"))

    def stage(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Write the inputs of a step; return its tokens and output rows."""
        start = row = masks = edits = 0
        columns: dict[str, list[float]] = {name: [] for name in self._arrays if name not in _LISTS}
        for number, (request, count) in enumerate(parts, 1):
            written = size = lists = 0
            if request.constraint is not None and request.rows(count):
                written = request.restrict(self._arrays["allowed"][masks:])
            if request.edits is not None and request.rows(count):
                size, lists = self._edit(request, edits, number * self._edits)
            cells, draft, sampling = request.cells, request.draft, request.sampling
            masks_behind = request.masks if count == request.waiting_tokens else ()
            drafted, rows = len(draft.tokens) + len(masks_behind), request.rows(count)
            total, first = count + drafted, request.made + drafted + 1 - rows
            begin = [edits + size * min(i, lists - 1) for i in range(rows)]
            ends: Sequence[int] = range(cells + 1, cells + total + 1)
            if request.whole_blocks:
                ends = [(end + request.block - 1) // request.block * request.block for end in ends]
            draws = range(first, first + rows) if drafted else [request.made] * rows
            added: dict[str, Sequence[float]] = {
                "ids": (*request.ids[cells : cells + count], *draft.tokens, *masks_behind),
                "slots": [request.slot] * total,
                "positions": range(cells, cells + total),
                "ends": (*ends[: total - len(masks_behind)], *[cells + total] * len(masks_behind)),
                "ancestors": [0] * total,
                "adapters": [request.adapter] * total,
                "rows": range(start + total - rows, start + total),
                "masked": range(masks + 1, masks + 1 + rows) if written else [0] * rows,
                "edit_begin": begin,
                "edit_end": [each + size for each in begin],
                "temperature": [0.0 if request.on_host else sampling.temperature] * rows,
                "top_k": [sampling.top_k] * rows,
                "top_p": [sampling.top_p] * rows,
                "min_p": [sampling.min_p] * rows,
                "seeds": [sampling.seed] * rows,
                "draws": [0] * rows if request.denoises else draws,  # where the host draws
            }
            for name, column in columns.items():
                column += added[name]
            start, row, masks = start + total, row + rows, masks + written
            edits += size * lists
        for name, column in columns.items():
            self._arrays[name][: len(column)] = column
        self._executor.upload(masks, edits)
        return start, row

    def blank(self, tokens: int, now: Callable[[], int]) -> int:
        """Execute a step of tokens that belong to no sequence; return nanoseconds."""
        plan = self._executor.plan
        rows, logits = min(tokens, plan.rows), plan.buffers.get("logits")
        vocabulary = logits.shape[1] if logits else 1
        counts = [1] * (rows - 1) + [tokens - rows + 1]
        # Varied ids: equal tokens would all read the same experts.
        ids = [(7919 * i + 1) % vocabulary for i in range(tokens)]
        parts: list[Part] = [
            (Request(ids=ids[i : i + count], queue=OutputQueue(1)), count)
            for i, count in enumerate(counts)
        ]
        began = now()
        self._executor.step(*self.stage(parts))
        self._executor.fetch("sampled", rows)
        return now() - began

    def _edit(self, request: Request, at: int, end: int) -> tuple[int, int]:
        """Write the edits of a request at a place, and cut its draft to what fits before `end`.

        Return the edits of a list, and how many lists there are.
        """
        edits, sampling, draft = request.edits, request.sampling, request.draft
        if edits is None or not self._edits or request.on_host or request.denoises:
            return 0, 0
        drafted = draft.tokens if sampling.penalises else ()
        while drafted and at + (1 + len(drafted)) * (edits.count + len(drafted)) > end:
            drafted = drafted[:-1]
            request.draft = draft.first(len(drafted))
        size = edits.write(self._arrays["edit_ids"], self._arrays["edits"], at, drafted)
        return size, 1 + len(drafted)


Rows = tuple[Request, slice]
"""A request, and its output rows in a forward."""
_BARE_EVERY = 32
"""One in so many forwards drafts no blocks, for comparison."""


class Forwards:
    """Executes the steps of a scheduler.

    `counts`: forwards after a sequence's first, and tokens; `denoising`: all of block models;
    `costs`: times without block drafts.
    """

    def __init__(
        self, executor: Executor, pages: KvPages, speculator: Speculator | None = None
    ) -> None:
        self.times, self.sums, self.speculator = StepTimes(), StepSums(), speculator
        self.counts = Counts() if speculator is None else speculator.counts
        self.denoising = Counts()
        self.costs, self._trial = ForwardCosts(executor.plan.rows), Trial()
        self._ahead = 0  # forwards that could draft blocks
        self._measures_later = False
        self._executor, self._pages = executor, pages
        self._inputs = StepInputs(executor)
        self._staged: list[Request] = []  # requests whose inputs the device advances by itself
        self._launched: list[Rows] = []  # of the step that was launched before its turn
        self._ended = 0

    @property
    def launched(self) -> list[Part]:
        """What is left of the step that was launched ahead."""
        return [(request, 1) for request, _ in self._launched]

    def forget(self, request: Request | None = None) -> None:
        """Rewrite all inputs in the next forward; with a request, if the last one had it.

        A step that was launched ahead is dropped, or the request's row of it.
        """
        if request is None or request in self._staged:
            self._staged = []
        self._launched = [each for each in self._launched if request not in (None, each[0])]

    def blank(self, tokens: int = 1) -> int:
        """Execute a step of tokens that belong to no sequence; return nanoseconds."""
        self.forget()
        self._pages.changed = False
        return self._inputs.blank(tokens, self.times.now)

    def warm(self, measure: bool = True) -> None:
        """Warm up, and `measure` what drafts cost; else the first forward that has some does."""
        self.blank()
        self._measures_later = not measure
        if self.speculator is not None and measure:
            self.speculator.costs.measure(self.blank)

    def run(self, parts: list[Part], stays: bool = False) -> int:
        """Execute a forward and put its tokens into the output queues; return those computed.

        `stays`: no other request can be in the next one, which may then be launched ahead.
        """
        decodes = sum(request.decodes for request, _ in parts)
        prompt = sum(count for request, count in parts if not request.decodes)
        only_decodes, speculator = decodes == len(parts), self.speculator
        drafts = speculator is not None and speculator.trial.is_on
        if speculator is not None and drafts and only_decodes and self._measures_later:
            self._measures_later = False
            speculator.costs.measure(self.blank)
        launched, self._launched = self._launched, []
        window = parts[0][0].queue.window  # that of all: see `Scheduler.submit`
        kind: SpanKind = "prefill" if prompt else "decode"
        span = window.span(kind, prompt or decodes, bool(launched)) if window else None
        with span or nullcontext(Tally(0)) as tally:
            began = drafted = self._ended if launched else self.times.now()
            if launched:
                tokens, rows = len(parts), launched[-1][1].stop
            else:
                if only_decodes:
                    if drafts:
                        self._draft(parts)
                    self._look_ahead(parts)
                drafted = self.times.now()
                tokens, rows = self._begin(parts, only_decodes)
                self._executor.step(tokens, rows)
            following = partial(self._launch_next, parts) if stays and not drafts else None
            sampled = self._executor.fetch("sampled", rows, following).tolist() if rows else []
            wanted, logits, hidden = launched or list(_rows(parts)), None, None
            if any(isinstance(request, Score) and request.hidden for request, _ in parts):
                hidden = self._executor.peek("last", rows)
            if any(request.wants_logits for request, _ in parts):
                logits = self._executor.fetch("logits", rows)
            made = self._verify(wanted, sampled, logits, drafts)
            _notify(made)
            ahead = [request for request, _ in self._launched]
            tally.ahead = any(not (each.is_done or each.queue.is_over) for each in ahead)
            self._ended = ended = self.times.now()
            decoded = sum(len(of) for request, of in made.items() if request.made > len(of))
            self.sums.add(prompt, decoded, ended - began)
            if rows:  # otherwise a GPU may still be at it
                if not launched:  # callers may have paused while it waited
                    self.times.add(tokens, ended - drafted)
                if speculator is not None and not prompt:
                    counts = speculator.costs.note(tokens, ended - drafted)
                    speculator.judge(decodes, decoded, drafted - began + counts)
                elif not prompt and any(request.looks_ahead for request, _ in parts):
                    if self._is_bare or not self._trial.is_on:
                        self.costs.note(decodes, ended - began)
                    if not self._is_bare or not self._trial.is_on:
                        self._trial.note(ended - began, decoded / decodes, self.costs.ns[decodes])
            if not prompt:
                tally.tokens, tally.sequences = decoded, decodes
        for request, each in wanted:  # what callers do with rows takes no time of the step's
            if isinstance(request, Score) and not (request.queue.is_over or request.is_faulty):
                found = hidden if request.hidden else logits
                assert found is not None
                request.score(found[each])
        return tokens

    def _room(self, parts: list[Part]) -> tuple[int, int]:
        """Return the tokens of a step without drafts, and how many draft tokens fit."""
        plan, base = self._executor.plan, sum(count for _, count in parts)
        return base, min(plan.rows - len(parts), plan.tokens - base)

    def _draft(self, parts: list[Part]) -> None:
        assert self.speculator is not None
        requests, pending = [], []
        for request, _ in parts:
            most = min(MAX_DRAFT, request.budget - request.made - 1)
            if request.track is not None and most > 0:
                pending.append(Pending(request.track, request.ids, most))
                requests.append((request, request.cells + request.waiting_tokens))
        if not pending:
            return
        drafts = self.speculator.draft(pending, *self._room(parts))
        for (request, cells), draft in zip(requests, drafts, strict=True):
            # Drafts take no pages from other requests.
            if draft.tokens and self._pages.reserve(request, cells + len(draft.tokens)):
                request.draft = draft

    def _look_ahead(self, parts: list[Part]) -> None:
        ahead = [request for request, _ in parts if request.looks_ahead]
        self._ahead += bool(ahead)
        if not ahead or not self._trial.is_on or self._is_bare:
            return
        _, room = self._room(parts)
        for request in ahead:
            request.look_ahead(room)
            cells = request.cells + request.waiting_tokens + request.behind
            if not self._pages.reserve(request, cells):  # drafts take no pages from others
                request.draft, request.masks = NO_DRAFT, ()
            room -= request.behind

    @property
    def _is_bare(self) -> bool:
        return self._ahead % _BARE_EVERY == 2

    def _begin(self, parts: list[Part], only_decodes: bool) -> tuple[int, int]:
        """Write the inputs of a step, unless the device continues by itself; return its size."""
        requests = [request for request, _ in parts]
        alone = only_decodes and all(not r.behind and r.waiting_tokens == 1 for r in requests)
        if alone and self._staged == requests:
            self._send_tables()
            return len(parts), len(parts)
        self._pages.changed = False
        size = self._inputs.stage(parts)
        # Constraints and penalties change after each token, which only the host knows.
        goes_on = alone and all(r.constraint is None and not r.sampling.penalises for r in requests)
        self._staged = requests if goes_on else []
        return size

    def _send_tables(self) -> None:
        if self._pages.changed:
            self._executor.upload_tables()
            self._pages.changed = False

    def _launch_next(self, parts: list[Part]) -> None:
        """Launch the next step, if it is this one again whatever this one draws."""
        requests = [request for request, _ in parts]
        if self._staged == requests and all(map(self._repeats, requests)):
            self._send_tables()
            self._executor.step(len(parts), len(parts))
            self._launched = list(_rows(parts))

    def _repeats(self, request: Request) -> bool:
        return (
            request.made + 1 < request.budget
            and not (request.wants_logits or request.looks_ahead or request.queue.is_over)
            and self._pages.reserve(request, request.cells + 2)
        )

    def _verify(
        self, wanted: list[Rows], sampled: list[int], logits: np.ndarray | None, drafts: bool
    ) -> dict[Request, list[Token]]:
        made: dict[Request, list[Token]] = {}
        for request, rows in wanted:
            drawn, queue = sampled[rows], request.queue
            if isinstance(request, Score) or queue.is_over:
                request.is_faulty = NO_TOKEN in drawn
                continue
            began = request.forwards > 0
            request.forwards += 1
            if request.on_host:
                self._staged = []  # the device went on with its own token
            tokens = request.advance(drawn, None if logits is None else logits[rows])
            made[request] = tokens
            queue.tokens.extend(tokens)
            if (snapshot := request.snapshot) is not None:
                queue.snapshots[request.index] = snapshot
                self.denoising.forwards += 1
                self.denoising.tokens += len(tokens)
            if began and tokens and drafts and self.speculator and request.track is not None:
                request.track.sent = request.draft  # without what had no room, or was forbidden
                ids = [token.id for token in tokens]
                self.speculator.learn(request.track, ids, len(ids) - 1)
            elif began:  # nothing can be drafted for it, or drafts pause
                self.counts.forwards += 1
                self.counts.tokens += len(tokens) if request.made > len(tokens) else 0
        return made


def _rows(parts: list[Part]) -> Iterator[Rows]:
    start = 0
    for request, count in parts:
        if rows := request.rows(count):
            yield request, slice(start, start + rows)
            start += rows


def _notify(made: dict[Request, list[Token]]) -> None:
    """Tell callers how many tokens they got; their errors end their own call."""
    if all(request.queue.after_token is None for request in made):
        return
    counts: Counter[OutputQueue] = Counter()
    for request, tokens in made.items():
        counts[request.queue] += len(tokens)
    for queue, count in counts.items():
        if queue.after_token is not None and count:
            try:
                queue.after_token(count)
            except Exception as error:
                queue.error = error
