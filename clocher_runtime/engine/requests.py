"""Requests to a session, the queue of their tokens, and sampling beyond the Plan's op."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError, counted
from clocher_kernels.ops.sampling import NO_TOKEN, NONE_ALLOWED, allows, choose, edited, words_for
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import Constraint, Edits, Sampling
from clocher_runtime.engine.pages import Sequence as Cached
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.speculation.draft import NO_DRAFT, Draft, Track

Finish = Literal["", "stop", "length"]
_NONE_LEFT = (
    "biases or logits processors left no token that is allowed; leave at least one above -inf"
)


@dataclass(slots=True)
class Token:
    """One generated token of prompt number `sequence` of a call.

    `finish`: "stop", "length", or "" if more follow; `logits` [V] fp32 if requested; `cached`:
    prompt tokens found in the cache, with the first token; `forwards` taken, with the last.
    """

    sequence: int
    id: int
    finish: Finish = ""
    logits: np.ndarray | None = field(default=None, compare=False)
    cached: int = field(default=0, compare=False)
    forwards: int = field(default=0, compare=False)

    @property
    def last(self) -> bool:
        return bool(self.finish)


class Snapshot(NamedTuple):
    """A denoised sequence after some forwards; `open`: trailing ids that are not final."""

    forwards: int
    open: Sequence[int]


@dataclass(slots=True, eq=False)
class OutputQueue:
    """Where the tokens of a call wait for its caller.

    `open`: unfinished requests; `error`: what ended the call early; `left`: the caller has gone.
    """

    open: int
    window: TimedWindow | None = None
    after_token: Callable[[int], None] | None = None
    logits: bool = False
    tokens: deque[Token] = field(default_factory=deque)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    error: BaseException | None = None
    left: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be added."""
        return self.left or self.error is not None or not self.open

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or nothing will follow."""
        return bool(self.tokens) or self.is_over


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Cached):
    """A sequence of a call that generates autoregressively, with drafts or without.

    `index`: of its prompt; `budget`: tokens to generate, of which the `made` last of `ids` exist;
    `track`: its speculation; `found`: cached tokens, None before it first ran; `draft`: tokens to
    verify, of which `kept` were accepted; `masks`: after the draft, see each other; `is_faulty`:
    its logits were not finite; `is_done`: nothing is left; `on_host`: the host draws; `block`:
    tokens that have to be computed together, and see each other in `whole_blocks`.
    """

    reuses_cache: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = False
    """Whether it drafts with masks behind its tokens: `look_ahead`."""
    denoises: ClassVar[bool] = False
    """Whether its masks are denoised in place, by draws of the host."""

    queue: OutputQueue
    index: int = 0
    budget: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    track: Track | None = None
    made: int = 0
    forwards: int = 0
    found: int | None = None
    draft: Draft = NO_DRAFT
    kept: int = 0
    masks: Sequence[int] = ()
    is_faulty: bool = False
    is_done: bool = False
    edits: Edits | None = None
    on_host: bool = False
    block: int = 1
    whole_blocks: bool = False

    def __post_init__(self) -> None:
        sampling = self.sampling
        if sampling.penalises or sampling.logit_bias:
            self.edits = Edits(sampling, self.ids, len(self.ids) - self.made)
        # What edits would change is wanted as it is.
        self.on_host = sampling.on_host or (self.edits is not None and self.queue.logits)

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return len(self.ids) - self.cells

    @property
    def decodes(self) -> bool:
        return self.made > 0 and self.waiting_tokens == 1

    @property
    def behind(self) -> int:
        """Extra tokens in the forward that computes the last of its ids."""
        return len(self.draft.tokens) + len(self.masks)

    @property
    def wants_logits(self) -> bool:
        """Whether its logits are needed on the host."""
        return self.queue.logits or self.on_host

    @property
    def snapshot(self) -> Snapshot | None:
        return None

    def look_ahead(self, room: int) -> None:
        """Draft with up to so many tokens behind its own, if it `looks_ahead`."""

    def rows(self, count: int) -> int:
        """Output rows of a step that computes `count` of its tokens."""
        return 1 + self.behind if count == self.waiting_tokens else 0

    def taken(self, count: int) -> int:
        """Tokens of such a step, without drafts."""
        return count + (len(self.masks) if count == self.waiting_tokens else 0)

    def piece(self, room: int, rows: int) -> int | None:
        """Return how many of its tokens a step with this room computes; None: none."""
        count = self.waiting_tokens
        if count + len(self.masks) <= room:
            return count if count or self.masks else None
        count = min(count - 1, room) // self.block * self.block  # a block comes as a whole
        return count if count > 0 else None

    def restrict(self, masks: np.ndarray) -> int:
        """Write masks [C, W] u32 for the next token and after each draft token; return how many.

        The draft is cut at a token that is not allowed. An error ends the call.
        """
        constraint = self.constraint
        if constraint is None or self.queue.is_over:
            return 0
        try:
            constraint.fill(masks[0])
            written = 1
            for node, token in enumerate(self.draft.tokens):
                # What ends the text is not taken: llguidance could not take it back.
                if token in self.stop or not allows(masks[node], token):
                    break
                constraint.take(token)
                if constraint.is_over:
                    constraint.undo(1)
                    break
                constraint.fill(masks[written])
                written += 1
            if written > 1:
                constraint.undo(written - 1)
        except Exception as error:
            self.queue.error, self.draft = error, NO_DRAFT
            return 0
        self.draft = self.draft.first(written - 1)
        return written

    def sample(self, logits: np.ndarray) -> int:
        mask = None
        if self.constraint is not None:
            mask = np.zeros(words_for(logits.size), np.uint32)
            self.constraint.fill(mask)
        return self.draw(logits, self.made, mask)

    def draw(self, logits: np.ndarray, number: int, mask: np.ndarray | None = None) -> int:
        """Return a token drawn on the host from logits, [V] fp32. Raises UsageError.

        Processors act after the edits and before the other steps of the sampling op. Deterministic
        in seed, `number` and logits.
        """
        sampling, edits = self.sampling, self.edits
        if edits is None:
            row = logits.copy()
        else:
            row = edited(logits, edits.ids[: edits.count], edits.values[: edits.count])
        for process in sampling.processors:
            row = _processed(process(list(self.ids), row), row.shape)
        cuts = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        token = choose(row, mask, *cuts, sampling.seed, number)
        if token == NO_TOKEN:
            raise UsageError("logits processors made infinite logits; only -inf is allowed")
        if token == NONE_ALLOWED:
            raise UsageError(_NONE_LEFT)
        return token

    def advance(self, sampled: Sequence[int], logits: np.ndarray | None) -> list[Token]:
        """Take the drawn tokens as far as the draft was right; return them.

        `logits`: [1 + draft, V] fp32 if wanted. Errors of the caller's functions end the call.
        """
        made: list[Token] = []
        self.kept, drafted = 0, self.draft.tokens
        for place, token in enumerate(sampled[: 1 + len(drafted)]):
            if token == NO_TOKEN:
                self.is_faulty = True
                break
            row = None if logits is None else logits[place]
            try:
                if self.on_host and token >= 0:
                    assert row is not None
                    token = self.sample(row)
                wanted = row.copy() if row is not None and self.queue.logits else None
                made.append(self.take(token, wanted))
            except Exception as error:
                self.queue.error = error
                break
            if made[-1].last or place == len(drafted) or drafted[place] != token:
                break
            self.kept += 1
        return made

    def take(self, token: int, logits: np.ndarray | None) -> Token:
        """Append a token that was drawn. Raises UsageError."""
        if token < 0 and self.constraint is None:
            raise UsageError(_NONE_LEFT)
        if token < 0:
            raise UsageError(
                f"after {counted(self.made, 'token')} the constraint allows no token of this "
                "model; it has to allow some, or be over"
            )
        self.ids.append(token)
        self.made += 1
        if self.edits is not None:
            self.edits.take(token)
        if self.constraint is not None:
            self.constraint.take(token)
        finish: Finish = ""
        if token in self.stop or (self.constraint is not None and self.constraint.is_over):
            finish = "stop"
        elif self.made >= self.budget:
            finish = "length"
        self.is_done = bool(finish)
        cached = (self.found or 0) if self.made == 1 else 0
        return Token(self.index, token, finish, logits, cached, self.forwards if finish else 0)

    def committed(self) -> None:
        self.draft, self.kept = NO_DRAFT, 0

    def leave(self) -> None:
        """Drop the draft; the request may run again later."""
        self.draft = NO_DRAFT
        if self.track is not None and self.track.reader is not None:
            self.track.reader.leave()


Take = Callable[[int, np.ndarray], None]
"""Takes a position and its row (the logits after it, [V] fp32), valid during the call."""


@dataclass(slots=True, eq=False, kw_only=True)
class Score(Request):
    """A sequence whose logits are delivered by position; nothing is generated.

    `hidden`: the states before the final norm instead; `last_only`: those of the last token, so
    that long pieces need a single output row.
    """

    reuses_cache: ClassVar[bool] = False

    scored: Take
    hidden: bool = False
    last_only: bool = False

    @property
    def wants_logits(self) -> bool:
        return not self.hidden

    def rows(self, count: int) -> int:
        return int(count == self.waiting_tokens) if self.last_only else count

    def piece(self, room: int, rows: int) -> int | None:
        return min(self.waiting_tokens, room, room if self.last_only else rows) or None

    def score(self, found: np.ndarray) -> None:
        """Deliver the rows [T, V] of the tokens just computed."""
        first = len(self.ids) - 1 if self.last_only else self.cells
        try:
            for position, row in enumerate(found, first):
                self.scored(position, row)
        except Exception as error:
            self.queue.error = error
        self.is_done = first + len(found) == len(self.ids)


def _processed(row: object, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(row)
    if array.shape != shape or not np.issubdtype(array.dtype, np.floating):
        raise UsageError(
            f"a logits processor returned {shown(row)}; expected an array of {shape[0]} numbers"
        )
    if np.isnan(array).any():
        raise UsageError("a logits processor returned NaN; expected numbers, or -inf to forbid")
    return array.astype(np.float32)
