"""What callers ask a session for, and the box in which they find the answer."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.sampling import NO_TOKEN, allows, words_for
from clocher_runtime.diffusion.canvas import Canvas, Draw
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.constraint import Constraint
from clocher_runtime.engine.drawing import draw
from clocher_runtime.engine.pages import Sequence as Cached
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.models.spec import BlockDiffusion
from clocher_runtime.speculation.draft import NO_DRAFT, Draft
from clocher_runtime.speculation.speculator import Track

Finish = Literal["", "stop", "length"]


@dataclass(slots=True)
class Token:
    """One generated token.

    Attributes:
        sequence: index of its prompt in the call.
        finish: why nothing follows: "stop" if the id or a constraint ends the sequence, "length" if
            as many as were asked for are made, or the context is full; "" if something follows.
        logits: what it was drawn from, [V] fp32, if they were asked for.
        cached: with the first token of a sequence, tokens of its prompt that were found in the
            cache; 0 with others.
        passes: with the last token of a sequence, passes that its tokens took; 0 with others.
    """

    sequence: int
    id: int
    finish: Finish = ""
    logits: np.ndarray | None = field(default=None, compare=False)
    cached: int = field(default=0, compare=False)
    passes: int = field(default=0, compare=False)

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return bool(self.finish)


class Glance(NamedTuple):
    """A text whose blocks are denoised, after a pass.

    Attributes:
        passes: that it took so far.
        open: ids that stand behind it and are not sure: the rest of the block, masks included, or
            what lossless decoding verifies next.
    """

    passes: int
    open: Sequence[int]


@dataclass(slots=True, eq=False)
class Mailbox:
    """Where the tokens of a call are put until its caller takes them.

    Attributes:
        tokens: made and not taken yet.
        glances: by their index, texts of the call whose blocks are denoised.
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
    glances: dict[int, Glance] = field(default_factory=dict)
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
        passes: that could have made some.
        found: tokens that were in the cache when it ran for the first time; None before.
        constraint: which tokens may be made.
        track: what is guessed about it; None: nothing is.
        draft: tokens that the step verifies.
        kept: how many of them have come true and stand in the cache where they belong.
        canvas: the block that is denoised; None: each pass makes the next token.
        masks: tokens that a pass computes behind the text and the draft, and that see each other: a
            block, or what lossless decoding guesses from.
        guesses: what it chose for them, to be verified.
        ahead: the blocks that lossless decoding guesses; None: it does not.
        is_faulty: its logits were not finite.
        scored: takes each position of the prompt and the logits after it, [V] fp32, valid during
            the call; nothing is made then.
    """

    box: Mailbox
    index: int
    budget: int
    sampling: Sampling
    stop: frozenset[int] = frozenset()
    made: int = 0
    passes: int = 0
    found: int | None = None
    constraint: Constraint | None = None
    track: Track | None = None
    draft: Draft = NO_DRAFT
    kept: int = 0
    canvas: Canvas | None = None
    masks: Sequence[int] = ()
    guesses: Sequence[int] = ()
    ahead: BlockDiffusion | None = None
    is_faulty: bool = False
    scored: Callable[[int, np.ndarray], None] | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens that have to be computed before the next one can be drawn."""
        return self.text_end - self.cells

    @property
    def text_end(self) -> int:
        """Tokens of the text that are computed as such: all, or those before the active block."""
        known = len(self.ids)
        return known if self.canvas is None else known - known % self.canvas.size

    @property
    def decodes(self) -> bool:
        """Whether it makes tokens from the last ones made, of which all but one were guessed."""
        if self.canvas is not None:
            return self.passes > 0 and self.waiting_tokens <= self.canvas.size
        return self.made > 0 and len(self.ids) - self.cells == 1

    @property
    def behind(self) -> int:
        """Tokens that come behind the text in the pass that computes the last of it."""
        return len(self.draft.tokens) + len(self.masks)

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of its rows are needed on the host."""
        on_host = self.sampling.on_host or self.canvas is not None
        return self.scored is not None or self.box.logits or on_host

    @property
    def glance(self) -> Glance | None:
        """Where it stands; None: no blocks are denoised."""
        if self.canvas is not None:
            seen = self.canvas.painted or self.canvas.ids
            return Glance(self.passes, seen[self.canvas.fixed :])
        return None if self.ahead is None else Glance(self.passes, self.guesses)

    def rows(self, count: int) -> int:
        """Return the output rows of a step that computes so many of its tokens, and its draft."""
        if self.scored is not None:
            return count
        if count != self.waiting_tokens:
            return 0
        whole = self.canvas is not None and self.masks
        return len(self.masks) if whole else 1 + self.behind

    def piece(self, room: int) -> int | None:
        """Return how many tokens of the text a step with this room computes; None: it has none."""
        count = self.waiting_tokens
        if count + len(self.masks) <= room:
            return count if count or self.masks else None
        block = 1 if self.canvas is None else self.canvas.size
        count = min(count - 1, room) // block * block  # what a block sees comes with it
        return count if count > 0 else None

    def begin_block(self) -> None:
        """Lay out the block that the next passes denoise."""
        if self.canvas is not None:
            self.canvas.begin(self.ids[self.text_end :])
            self.masks = self.canvas.shown

    def denoise(self, logits: np.ndarray) -> list[Token]:
        """Write into the block what its rule takes; go on with what is sure then.

        Args:
            logits: [B, V] fp32, of each position; [1, V], of the last before it, if the block waits
                for its first token.

        Returns:
            The tokens, which may be none. An error of what the caller gave ends the call.
        """
        assert self.canvas is not None
        canvas, made = self.canvas, list[Token]()
        try:
            canvas.see(logits, self._drawing(canvas), self.box.logits)
            for token in canvas.sure():
                made.append(self.take(token, canvas.logits.pop(len(self.ids) % canvas.size, None)))
                if made[-1].last:
                    break
        except Exception as error:
            self.box.error = error
        self.begin_block()
        return made

    def _drawing(self, canvas: Canvas) -> Draw | None:
        """Return what draws the tokens of a pass; None: the likeliest ones are taken."""
        sampling, prompt = self.sampling, len(self.ids) - self.made
        first = self.text_end - prompt  # a position is drawn with its own number
        if canvas.rule.passes:  # the rule has temperatures of its own, and draws each time anew
            sampling = replace(sampling, temperature=1.0)
            first = (canvas.begun * canvas.rule.passes + canvas.passes) * canvas.size
        elif not sampling.on_host and not sampling.temperature:
            return None
        return lambda row, at: draw(row, self.ids, prompt, max(first + at, 0), sampling)

    def look_ahead(self, room: int) -> None:
        """Send what was guessed in the pass before, and masks to guess from in the next one.

        Args:
            room: tokens that may come behind the text.
        """
        assert self.ahead is not None
        most = min(room, self.budget - self.made - 1)
        guesses = list(self.guesses[: max(0, most)])
        self.draft = Draft(guesses, [0] * len(guesses))
        block = min(self.ahead.block, room - len(guesses), most - len(guesses))
        self.masks = [self.ahead.mask] * block if block > 1 else ()

    def guess(self, sampled: Sequence[int]) -> None:
        """Keep what was chosen for the masks behind a draft that came true, to be verified.

        Args:
            sampled: a token for each mask; the first is the one that the text itself went on with,
                if it is right.
        """
        whole = self.kept == len(self.draft.tokens)
        right = whole and bool(sampled) and sampled[0] == self.ids[-1]
        self.guesses = [token for token in sampled[1:] if token >= 0] if right else ()

    def restrict(self, masks: np.ndarray) -> int:
        """Write which tokens may come next, and after each token of the draft.

        The draft is cut where a token of it is not allowed, or the text may end.

        Args:
            masks: [C, W] u32, written from the first on.

        Returns:
            How many were written, none without a constraint; an error of it ends the call instead.
        """
        if self.constraint is None or self.box.is_over:
            return 0
        try:
            written = self._restrict(self.constraint, masks)
        except Exception as error:
            self.box.error, self.draft = error, NO_DRAFT
            return 0
        if written <= len(self.draft.tokens):
            self.draft = self.draft.first(written - 1)
        return written

    def _restrict(self, constraint: Constraint, masks: np.ndarray) -> int:
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
        return written

    def draw(self, logits: np.ndarray) -> int:
        """Return the token that the host draws from logits, [V] fp32."""
        mask = None
        if self.constraint is not None:
            mask = np.zeros(words_for(logits.size), np.uint32)
            self.constraint.fill(mask)
        prompt = len(self.ids) - self.made
        return draw(logits, self.ids, prompt, self.made, self.sampling, mask)

    def verify(self, sampled: Sequence[int], logits: np.ndarray | None) -> list[Token]:
        """Go on with the tokens that were drawn, as far as the draft had them right.

        Args:
            sampled: what the device drew after the text, and after each node of the draft.
            logits: what from, [1 + nodes, V] fp32, if somebody wants that.

        Returns:
            The tokens. An error of what the caller gave ends the call; `is_faulty` tells that the
            logits were not finite.
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
                    token = self.draw(row)
                wanted = row.copy() if row is not None and self.box.logits else None
                made.append(self.take(token, wanted))
            except Exception as error:
                self.box.error = error
                break
            if made[-1].last or place == len(drafted) or drafted[place] != token:
                break
            self.kept += 1
        return made

    def score(self, logits: np.ndarray) -> bool:
        """Hand over the logits of its next tokens, [T, V] fp32; return whether they were the last.

        An error of who takes them ends the call.
        """
        assert self.scored is not None
        first = self.cells - len(logits)
        try:
            for position, row in enumerate(logits, first):
                self.scored(position, row)
        except Exception as error:
            self.box.error = error
            return False
        return self.cells == len(self.ids)

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
        return Token(self.index, token, finish, logits, cached, self.passes if finish else 0)
