"""A pass of the model over the tokens of a step: guesses, inputs, and what was drawn."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np

from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import Executor
from clocher_runtime.engine.pages import KvPages
from clocher_runtime.engine.requests import Mailbox, Request, Token
from clocher_runtime.engine.step_inputs import Part, StepInputs
from clocher_runtime.engine.timing import SpanKind, StepSums, StepTimes, Tally
from clocher_runtime.speculation.draft import NO_DRAFT
from clocher_runtime.speculation.gate import ForwardCosts, Trial
from clocher_runtime.speculation.speculator import MAX_DRAFT, Counts, Pending, Speculator

Rows = tuple[Request, slice]
"""A request, and its output rows of a pass."""
_BARE_EVERY = 32
"""Passes that could guess blocks, of which one does not, for comparison."""


class Done(NamedTuple):
    """What a pass has done.

    Attributes:
        tokens: that it computed, guesses included.
        rows: of its output rows, whose they are.
        made: tokens of each request that generates.
        logits: [R, V] fp32, valid until the next pass; None if nobody wanted them.
        is_faulty: whether a row of it was not finite.
    """

    tokens: int
    rows: list[Rows]
    made: dict[Request, list[Token]]
    logits: np.ndarray | None
    is_faulty: bool


class Passes:
    """What executes the steps of a scheduler.

    Args:
        executor: its Plan has the inputs of every Plan.
        pages: the cache of its Plan.
        speculator: guesses tokens; None: nobody does.

    Attributes:
        times: how long passes take.
        sums: what all passes add up to.
        speculator: see there.
        turns: passes that went on with texts, once for each text in them.
        costs: what passes take that could guess blocks and do not.
        denoising: passes and tokens of texts whose blocks are denoised.
    """

    def __init__(
        self, executor: Executor, pages: KvPages, speculator: Speculator | None = None
    ) -> None:
        self.times, self.sums, self.speculator = StepTimes(), StepSums(), speculator
        self.turns, self.denoising = 0, Counts()
        self.costs, self._trial = ForwardCosts(executor.plan.rows), Trial()
        self._ahead = 0  # passes that could guess blocks
        self._executor, self._pages = executor, pages
        self._inputs = StepInputs(executor)
        self._staged: list[Request] = []  # what the device goes on with by itself

    @property
    def counts(self) -> Counts:
        """Passes and their tokens, where nobody guesses."""
        return Counts(forwards=self.turns, tokens=self.sums.decode_tokens)

    def forget(self, request: Request | None = None) -> None:
        """Write all inputs of the next pass anew if a request was in the last, or in any case."""
        if request is None or request in self._staged:
            self._staged = []

    def blank(self, tokens: int = 1) -> int:
        """Execute a step of tokens that belong to no sequence; return its time in nanoseconds."""
        self._staged = []
        logits = self._executor.plan.buffers.get("logits")
        vocabulary = logits.shape[1] if logits else 1
        # Of many kinds: tokens that are alike would read the same experts.
        ids = [(7919 * i + 1) % vocabulary for i in range(tokens)]
        blank = Request(ids=ids, box=Mailbox(1), index=0, budget=1, sampling=Sampling())
        blank.scored = _nobody
        began = self.times.now()
        self._executor.step(*self.stage([(blank, tokens)]))
        self._executor.fetch("sampled", tokens)
        return self.times.now() - began

    def warm(self) -> None:
        """Execute steps, so that what they need is there, and learn what guesses cost."""
        self.blank()
        if self.speculator is not None:
            self.speculator.costs.measure(self.blank)

    def run(self, parts: list[Part]) -> Done:
        """Execute a pass and put what it made into the mailboxes."""
        requests = [request for request, _ in parts]
        decoding = [part for part in parts if part[0].decodes]
        prompt = sum(count for request, count in parts if not request.decodes)
        with self._span(requests, prompt, len(decoding)) as tally:
            began = self.times.now()
            speculator = self.speculator
            guesses = speculator is not None and speculator.trial.is_on
            if speculator is not None and guesses and len(decoding) == len(parts):
                self._draft(speculator, parts)
            if len(decoding) == len(parts):
                self._look_ahead(parts)
            drafted = self.times.now()
            tokens, rows = self._begin(parts, len(decoding) == len(parts))
            self._executor.step(tokens, rows)
            sampled = self._executor.fetch("sampled", rows).tolist() if rows else []
            wanted, table = list(_rows(parts)), self._logits(parts, rows)
            made = self._verify(wanted, sampled, table, guesses)
            self._look(made)
            _tell(made)
            ended = self.times.now()
            decoded = sum(len(of) for request, of in made.items() if request.made > len(of))
            self.sums.add(prompt, decoded, ended - began)
            if rows:  # otherwise a GPU may still be at it
                self.times.add(tokens, ended - drafted)
                if speculator is not None and not prompt:
                    speculator.costs.note(tokens, ended - drafted)
                    speculator.judge(len(decoding), decoded, ended - began)
                elif not prompt and any(request.ahead is not None for request in requests):
                    self._judge(len(decoding), decoded, ended - began)
            if not prompt:
                tally.tokens, tally.sequences = decoded, len(decoding)
        return Done(tokens, wanted, made, table, NO_TOKEN in sampled)

    def _draft(self, speculator: Speculator, parts: list[Part]) -> None:
        """Let the requests of a pass that only decodes have something guessed."""
        plan, base = self._executor.plan, sum(count for _, count in parts)
        texts, guessed = [], []
        for request, _ in parts:
            most = min(MAX_DRAFT, request.budget - request.made - 1)
            if request.track is not None and most > 0:
                texts.append(Pending(request.track, request.ids, most))
                guessed.append((request, request.cells + request.waiting_tokens))
        if not texts:
            return
        room = min(plan.rows - len(parts), plan.tokens - base)
        for (request, cells), draft in zip(
            guessed, speculator.draft(texts, base, room), strict=True
        ):
            # Guesses take no pages from anybody.
            if draft.tokens and self._pages.reserve(request, cells + len(draft.tokens)):
                request.draft = draft

    def _look_ahead(self, parts: list[Part]) -> None:
        """Let requests of a pass that only decodes verify their last guess and make the next."""
        self._ahead += any(request.ahead is not None for request, _ in parts)
        if not self._trial.is_on or self._is_bare:
            return
        plan, waiting = self._executor.plan, sum(count for _, count in parts)
        room = min(plan.rows - len(parts), plan.tokens - waiting)
        for request, _ in parts:
            if request.ahead is None:
                continue
            request.look_ahead(min(room, 2 * request.ahead.block - 1))
            cells = request.cells + request.waiting_tokens + request.behind
            if not self._pages.reserve(request, cells):  # guesses take no pages from anybody
                request.draft, request.masks = NO_DRAFT, ()
            room -= request.behind

    @property
    def _is_bare(self) -> bool:
        """Whether this pass only tells what one takes that guesses no blocks."""
        return self._ahead % _BARE_EVERY == 2

    def _judge(self, sequences: int, made: int, ns: int) -> None:
        """Learn what a pass took that may have guessed blocks; stop doing so where it loses."""
        if self._is_bare or not self._trial.is_on:
            self.costs.note(sequences, ns)
        if not self._is_bare or not self._trial.is_on:
            known = self.costs.known and sequences < len(self.costs.ns)
            self._trial.note(ns, made / sequences, self.costs.ns[sequences] if known else 0.0)

    def _begin(self, parts: list[Part], only_decodes: bool) -> tuple[int, int]:
        """Write the inputs of a step, unless the device goes on by itself; return its size."""
        requests = [request for request, _ in parts]
        alone = only_decodes and all(not r.behind and r.waiting_tokens == 1 for r in requests)
        if alone and self._staged == requests and not self._pages.changed:
            return len(parts), len(parts)
        size = self.stage(parts)
        # After each token a constraint allows others, which only the host knows.
        goes_on = alone and all(r.constraint is None for r in requests)
        self._staged = requests if goes_on else []
        return size

    def stage(self, parts: list[Part]) -> tuple[int, int]:
        """Write the inputs of a pass; return its tokens and output rows."""
        self._pages.changed = False
        return self._inputs.stage(parts)

    def _logits(self, parts: list[Part], rows: int) -> np.ndarray | None:
        """Return the logits of a step [R, V], None if nobody wants them."""
        if any(r.wants_logits for r, _ in parts):
            return self._executor.fetch("logits", rows)
        return None

    def _span(
        self, requests: list[Request], prompt: int, decodes: int
    ) -> AbstractContextManager[Tally]:
        """Return the span that measures a step, if one of its calls wants that."""
        for request in requests:
            if request.box.window is not None:
                kind: SpanKind = "prefill" if prompt else "decode"
                return request.box.window.span(kind, prompt or decodes)
        return nullcontext(Tally(0))

    def _verify(
        self, wanted: list[Rows], sampled: list[int], table: np.ndarray | None, guesses: bool
    ) -> dict[Request, list[Token]]:
        """Return what each request has made, and put it into its mailbox."""
        made: dict[Request, list[Token]] = {}
        for request, rows in wanted:
            drawn = sampled[rows.start : rows.stop]
            if request.scored is not None or request.box.is_over:
                request.is_faulty = NO_TOKEN in drawn
                continue
            self.turns += request.passes > 0
            request.passes += 1
            if request.canvas is not None:
                request.is_faulty = NO_TOKEN in drawn
                assert table is not None
                made[request] = [] if request.is_faulty else request.denoise(table[rows])
                request.box.tokens.extend(made[request])
                continue
            if request.sampling.on_host:
                self._staged = []  # the device went on with its own token
            began = guesses and request.made > 0
            tokens = made[request] = request.verify(drawn, None if table is None else table[rows])
            if tokens:
                request.guess(drawn[len(drawn) - len(request.masks) :])
            request.box.tokens.extend(tokens)
            if began and tokens and self.speculator is not None:
                ids = [token.id for token in tokens]
                if request.track is not None:
                    request.track.sent = request.draft  # without what had no room, or was forbidden
                    self.speculator.learn(request.track, ids, len(ids) - 1)
                else:  # it cannot be guessed at
                    self.speculator.counts.forwards += 1
                    self.speculator.counts.tokens += len(ids)
        return made

    def _look(self, made: dict[Request, list[Token]]) -> None:
        """Note where texts stand whose blocks are denoised."""
        for request, tokens in made.items():
            if (glance := request.glance) is not None:
                request.box.glances[request.index] = glance
                self.denoising.forwards += 1
                self.denoising.tokens += len(tokens)


def _rows(parts: list[Part]) -> Iterator[Rows]:
    """Yield the requests of a step and the output rows that are theirs."""
    start = 0
    for request, count in parts:
        rows = request.rows(count)
        if rows:
            yield request, slice(start, start + rows)
            start += rows


def _nobody(position: int, logits: np.ndarray) -> None:
    """Take logits that nobody wants."""


def _tell(made: dict[Request, list[Token]]) -> None:
    """Tell callers how many tokens the step made for them; their errors are their own."""
    if all(request.box.after_token is None for request in made):
        return
    counts: Counter[Mailbox] = Counter()
    for request, tokens in made.items():
        counts[request.box] += len(tokens)
    for box, count in counts.items():
        if box.after_token is not None and count:
            try:
                box.after_token(count)
            except Exception as error:
                box.error = error
