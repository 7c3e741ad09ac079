"""What callers ask a session for, and the queue where its tokens are put."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import NO_TOKEN, allows, words_for
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.engine.pages import Sequence as Cached
from clocher_runtime.engine.sampling import sample_on_host
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.speculation.draft import NO_DRAFT, Draft
from clocher_runtime.speculation.track import Track

Finish = Literal["", "stop", "length"]


@dataclass(slots=True)
class Token:
    """One generated token of the prompt `sequence` of a call.

    Attributes:
        finish: why nothing follows: "stop" if the id or a constraint ends the sequence, "length" if
            as many as were asked for are made, or the context is full; "" if something follows.
        logits: what it was drawn from, [V] fp32, if they were asked for.
        cached: with the first token, tokens of the prompt that were found in the cache.
        forwards: with the last token, forwards that the tokens of the sequence took.
    """

    sequence: int
    id: int
    finish: Finish = ""
    logits: np.ndarray | None = field(default=None, compare=False)
    cached: int = field(default=0, compare=False)
    forwards: int = field(default=0, compare=False)

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return bool(self.finish)


class Snapshot(NamedTuple):
    """A sequence whose blocks are denoised, after some forwards.

    `open`: ids behind it that are not final: the rest of the block, masks included, or what
    lossless decoding verifies next.
    """

    forwards: int
    open: Sequence[int]


@dataclass(slots=True, eq=False)
class OutputQueue:
    """Where the tokens of a call are put until its caller takes them.

    Attributes:
        open: requests of the call that have not ended.
        window, after_token, logits: see `Session.generate`.
        snapshots: by index, of sequences whose blocks are denoised.
        error: what ended the call early.
        left: the caller has gone.
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
        """Whether nothing more is put into it."""
        return self.left or self.error is not None or not self.open

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or nothing will ever be."""
        return bool(self.tokens) or self.is_over


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Cached):
    """A sequence of a call that makes one token after the other, with drafts or without.

    Attributes:
        index: which prompt of the call it is.
        budget: tokens to make; `made` so far stand at the end of `ids`.
        stop: ids that end it.
        track: what is drafted for it; None: nothing is.
        forwards: that could have made tokens.
        found: tokens that were in the cache when it ran for the first time; None before.
        draft: tokens that the step verifies, and `kept`: how many of them were accepted.
        masks: tokens computed behind the text and the draft, which see each other.
        is_faulty: its logits were not finite.
    """

    reuses_cache: ClassVar[bool] = True

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

    @property
    def block(self) -> int:
        """Tokens that have to be computed together."""
        return 1

    @property
    def waiting_tokens(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return len(self.ids) - self.cells

    @property
    def decodes(self) -> bool:
        """Whether it goes on from the last token made."""
        return self.made > 0 and self.waiting_tokens == 1

    @property
    def behind(self) -> int:
        """Tokens behind the text in the forward that computes the last of it."""
        return len(self.draft.tokens) + len(self.masks)

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of its rows are needed on the host."""
        return self.queue.logits or self.sampling.on_host

    @property
    def snapshot(self) -> Snapshot | None:
        """Where it stands; None: no blocks are denoised."""
        return None

    def rows(self, count: int) -> int:
        """Return the output rows of a step that computes so many tokens of the text."""
        return 1 + self.behind if count == self.waiting_tokens else 0

    def least_rows(self, count: int) -> int:
        """Return the output rows that such a step needs at least, drafts left out."""
        return max(1, len(self.masks))

    def taken(self, count: int) -> int:
        """Return the tokens of such a step, drafts left out."""
        return count + (len(self.masks) if count == self.waiting_tokens else 0)

    def piece(self, room: int, rows: int) -> int | None:
        """Return how many tokens of the text a step with this room computes; None: none."""
        count = self.waiting_tokens
        if count + len(self.masks) <= room:
            return count if count or self.masks else None
        count = min(count - 1, room) // self.block * self.block  # a block comes as a whole
        return count if count > 0 else None

    def restrict(self, masks: np.ndarray) -> int:
        """Write which tokens may come next, and after each draft token; return how many masks.

        The draft is cut where a token of it is not allowed, or the sequence may end. An error of
        the constraint ends the call. `masks` is [C, W] u32, written from the first on.
        """
        constraint = self.constraint
        if constraint is None or self.queue.is_over:
            return 0
        try:
            constraint.fill(masks[0])
            written = 1
            for node, token in enumerate(self.draft.tokens):
                if not allows(masks[node], token):
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
        """Return the token that the host draws from logits, [V] fp32."""
        mask = None
        if self.constraint is not None:
            mask = np.zeros(words_for(logits.size), np.uint32)
            self.constraint.fill(mask)
        prompt = len(self.ids) - self.made
        return sample_on_host(logits, self.ids, prompt, self.made, self.sampling, mask)

    def advance(self, sampled: Sequence[int], logits: np.ndarray | None) -> list[Token]:
        """Go on with the tokens that were drawn, as far as the draft had them right; return them.

        An error of what the caller gave ends the call; `is_faulty`: the logits were not finite.

        Args:
            sampled: what the device drew after the text, and after each token of the draft.
            logits: what from, [1 + draft, V] fp32, if they are wanted.
        """
        made: list[Token] = []
        self.kept, drafted = 0, self.draft.tokens
        for place, token in enumerate(sampled[: 1 + len(drafted)]):
            if token == NO_TOKEN:
                self.is_faulty = True
                break
            row = None if logits is None else logits[place]
            try:
                if self.sampling.on_host and token >= 0:
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
        """Go on with a token that was drawn. Raises UsageError."""
        if token < 0:
            raise UsageError(
                f"after {self.made} tokens the constraint allows no token of this model; it has to "
                "allow some, or be over"
            )
        self.ids.append(token)
        self.made += 1
        if self.constraint is not None:
            self.constraint.take(token)
        finish: Finish = ""
        if token in self.stop or (self.constraint is not None and self.constraint.is_over):
            finish = "stop"
        elif self.made >= self.budget:
            finish = "length"
        cached = (self.found or 0) if self.made == 1 else 0
        return Token(self.index, token, finish, logits, cached, self.forwards if finish else 0)

    def committed(self) -> None:
        """Note that the keys of the step are in the cache: its draft is of the past."""
        self.draft, self.kept = NO_DRAFT, 0

    def leave(self) -> None:
        """Hold no draft any more; the request may run again later."""
        self.draft = NO_DRAFT
        if self.track is not None and self.track.reader is not None:
            self.track.reader.leave()


Take = Callable[[int, np.ndarray], None]
"""Takes a position and the logits after it, [V] fp32, valid during the call."""


@dataclass(slots=True, eq=False, kw_only=True)
class Score(Request):
    """A sequence whose logits are handed over, position by position; nothing is made."""

    reuses_cache: ClassVar[bool] = False

    scored: Take

    @property
    def wants_logits(self) -> bool:
        return True

    def rows(self, count: int) -> int:
        return count

    def least_rows(self, count: int) -> int:
        return count

    def piece(self, room: int, rows: int) -> int | None:
        return min(self.waiting_tokens, room, rows) or None

    def score(self, logits: np.ndarray) -> bool:
        """Hand over the logits of the last tokens computed, [T, V]; return whether all are done."""
        try:
            for position, row in enumerate(logits, self.cells - len(logits)):
                self.scored(position, row)
        except Exception as error:
            self.queue.error = error
            return False
        return self.cells == len(self.ids)
