"""What callers ask a session for, and the box in which they find the answer."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.drawing import draw
from clocher_runtime.engine.pages import Sequence as Cached
from clocher_runtime.engine.timing import TimedWindow

Finish = Literal["", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        sequence: index of its prompt in the call.
        finish: why nothing follows: "stop" if the id ends the sequence, "length" if as many as were
            asked for are made, or the context is full; "" if something follows.
        logits: what it was drawn from, [V] fp32, if they were asked for.
    """

    sequence: int
    id: int
    finish: Finish = ""
    logits: np.ndarray | None = field(default=None, compare=False)

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
        scored: takes each position of the prompt and the logits after it, [V] fp32, valid during
            the call; nothing is made then.
    """

    box: Mailbox
    index: int
    budget: int
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    made: int = 0
    scored: Callable[[int, np.ndarray], None] | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return len(self.ids) - self.cells

    @property
    def decodes(self) -> bool:
        """Whether it makes one token a step from the one before."""
        return self.made > 0 and len(self.ids) - self.cells == 1

    def draw(self, logits: np.ndarray) -> int:
        """Return the token that the host draws from logits, [V] fp32."""
        return draw(logits, self.ids, len(self.ids) - self.made, self.made, self.sampling)

    def take(self, token: int, logits: np.ndarray | None) -> Token:
        """Go on with a token that was drawn."""
        self.ids.append(token)
        self.made += 1
        finish: Finish = ""
        if token in self.stop:
            finish = "stop"
        elif self.made >= self.budget:
            finish = "length"
        return Token(self.index, token, finish, logits)
