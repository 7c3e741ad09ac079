"""What callers ask a session for, and the box in which they find the answer."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import words_for
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.engine.drawing import draw
from clocher_runtime.engine.pages import Sequence as Cached
from clocher_runtime.engine.timing import TimedWindow

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        sequence: index of its prompt in the call.
        finish: why nothing follows: "stop" if the id or a constraint ends the sequence, "length" if
            as many as were asked for are made, or the context is full; "" if something follows.
        logits: what it was drawn from, [V] fp32, if they were asked for.
        cached: with the first token of a sequence, tokens of its prompt that were found in the
            cache; 0 with others.
    """

    sequence: int
    id: int
    finish: Finish = ""
    logits: np.ndarray | None = field(default=None, compare=False)
    cached: int = field(default=0, compare=False)

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return bool(self.finish)


@dataclass(slots=True, eq=False)
class Mailbox:
    """Where the tokens of a call are put until its caller takes them.

    Attributes:
        tokens: made and not taken yet.
        open: requests of the call that have not ended.
        error: what ended the call early.
        left: nobody will take any more.
        window: measures the steps that work for the call.
        after_token: called in a step, with the number of tokens that it made for the call.
        logits: whether tokens carry theirs.
    """

    open: int
    window: TimedWindow | None = None
    after_token: Callable[[int], None] | None = None
    logits: bool = False
    tokens: deque[Token] = field(default_factory=deque)
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
    """A sequence to go on with, one of a call.

    Attributes:
        box: of its call.
        index: which prompt of the call it is.
        budget: tokens to make.
        sampling: how they are chosen.
        stop: ids that end it.
        made: tokens made so far; they stand at the end of `ids`.
        found: tokens that were in the cache when it ran for the first time; None before.
        constraint: which tokens may be made.
        scored: takes each position of the prompt and the logits after it, [V] fp32, valid during
            the call; nothing is made then.
    """

    box: Mailbox
    index: int
    budget: int
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    made: int = 0
    found: int | None = None
    constraint: Constraint | None = None
    scored: Callable[[int, np.ndarray], None] | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return len(self.ids) - self.cells

    @property
    def decodes(self) -> bool:
        """Whether it makes one token a step from the one before."""
        return self.made > 0 and len(self.ids) - self.cells == 1

    def restrict(self, mask: np.ndarray) -> bool:
        """Write which tokens may come next, [W] u32, if there is a constraint.

        Returns:
            Whether it was written; an error of the constraint ends the call instead.
        """
        if self.constraint is None or self.box.is_over:
            return False
        try:
            self.constraint.fill(mask)
        except Exception as error:
            self.box.error = error
            return False
        return True

    def draw(self, logits: np.ndarray) -> int:
        """Return the token that the host draws from logits, [V] fp32."""
        mask = None
        if self.constraint is not None:
            mask = np.zeros(words_for(logits.size), np.uint32)
            self.constraint.fill(mask)
        prompt = len(self.ids) - self.made
        return draw(logits, self.ids, prompt, self.made, self.sampling, mask)

    def take(self, token: int, logits: np.ndarray | None) -> Token:
        """Go on with a token that was drawn.

        Raises:
            UsageError: it is none, for the constraint allows none.
        """
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
        return Token(self.index, token, finish, logits, cached)
