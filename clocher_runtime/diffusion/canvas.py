"""The block of a text that is being denoised."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from clocher_runtime.diffusion.rules import MOST_EDITS, Rule, View, heat, is_calm

Array = np.ndarray

Draw = Callable[[Array, int], int]
"""Returns the token drawn from logits [V] fp32, in which the mask is -inf, for a position."""


@dataclass(slots=True)
class Canvas:
    """The active block of one text: what is known of it, and masks.

    Blocks begin at multiples of their size. The first ids of the first block are the end of the
    prompt, which no rule changes.

    Attributes:
        size: positions of a block.
        mask: id of the mask.
        rule: chooses what a pass writes.
        whole_blocks: tokens of finished blocks see their whole block.
        shift: logits of a position are of the next one.
        part: positions that are denoised together.
        vocabulary: ids of the model.
        seed: of noise.
        ids: of the active block; none: the next pass begins a block.
        painted: what the model sees of it, under a rule that shows it noise.
        fixed: how many ids are the prompt's, or were given away.
        begun: blocks that were begun.
        passes: over the active block.
        edited: passes since the block has had no mask.
        settled: whether the last pass changed nothing, or was the last that may.
        likeliest: what ranked first in the pass before, under a rule that shows noise.
        logits: [V] fp32 of each position of the block when its token was written, where wanted.
    """

    size: int
    mask: int
    rule: Rule
    whole_blocks: bool
    shift: bool
    part: int
    vocabulary: int
    seed: int
    ids: list[int] = field(default_factory=list)
    painted: list[int] = field(default_factory=list)
    fixed: int = 0
    begun: int = 0
    passes: int = 0
    edited: int = 0
    settled: bool = False
    likeliest: Array | None = None
    logits: dict[int, Array] = field(default_factory=dict)

    def begin(self, known: Sequence[int]) -> None:
        """Begin a block with the ids that are known of it, if none is active.

        Args:
            known: ids of the text from the block's first position on.
        """
        if not self.ids:
            self.ids = [*known, *[self.mask] * (self.size - len(known))]
            self.fixed = len(known)
            self.begun += 1
            self.passes = self.edited = 0
            self.likeliest = None
            if self.rule.passes:
                self.painted = np.where(self._own(), self._noise(), self.ids).tolist()

    @property
    def waits(self) -> bool:
        """Whether the next pass makes the block's first token, from the last one before it."""
        return self.shift and not self.fixed and self.ids[0] == self.mask

    @property
    def shown(self) -> list[int]:
        """Ids that the next pass sees; none if it makes the first token."""
        return [] if self.waits else self.painted or self.ids

    def see(self, logits: Array, draw: Draw | None = None, keep: bool = False) -> None:
        """Write what the rule takes of a pass.

        Args:
            logits: [B, V] fp32, of what was shown; of the last token before it, if none was.
            draw: see there; None: the likeliest tokens.
            keep: whether logits are wanted of what is written.
        """
        waits = self.waits
        if self.shift and not waits:  # the first token is there
            logits = np.concatenate([logits[:1], logits[:-1]])
        warm = heat(self.passes, self.rule.passes) if self.rule.passes and not waits else 1.0
        heated = logits / np.float32(warm)
        heated[:, self.mask] = -np.inf
        logs, entropy = distribution(heated)
        likeliest = logs.argmax(axis=1)
        chosen = likeliest.copy()
        if draw is not None:
            chosen[:] = [draw(row, at) for at, row in enumerate(heated)]
        if waits:
            wrote = np.arange(self.size) == 0
            self.ids[0] = int(chosen[0])
            if self.painted:
                self.painted[0] = self.ids[0]
        else:
            chance = np.exp(logs[np.arange(self.size), chosen])
            self.passes += 1
            if self.rule.passes:
                wrote = self._paint(likeliest, chosen, chance, entropy)
            else:
                wrote = self._write(chosen, chance, entropy)
        for at in np.flatnonzero(wrote) if keep else ():
            self.logits[int(at)] = logits[at].copy()

    def _write(self, chosen: Array, chance: Array, entropy: Array) -> Array:
        """Write over masks, and over tokens of a rule that edits; return where, [B] bool."""
        ids, own = np.array(self.ids), self._own()
        is_open = own & (ids == self.mask)
        changes = own & ~is_open & (ids != chosen)
        self.edited += not is_open.any()
        part = np.arange(self.size) // self.part
        now = is_open & (part == part[is_open.argmax()])
        wrote = self.rule.write(View(now, chance, entropy, changes))
        self.ids = np.where(wrote, chosen, ids).tolist()
        self.settled = not wrote.any() or self.edited >= MOST_EDITS
        return wrote

    def _paint(self, likeliest: Array, chosen: Array, chance: Array, entropy: Array) -> Array:
        """Paint what the next pass sees, or write the whole block; return where, [B] bool."""
        own = self._own()
        before, self.likeliest = self.likeliest, likeliest[own]
        if self.passes == self.rule.passes or is_calm(self.likeliest, before, entropy[own]):
            self.ids = np.where(own, likeliest, self.ids).tolist()
            self.painted = []
            return own
        none = np.zeros_like(own)
        taken = self.rule.write(View(own, chance, entropy, none))
        self.painted = np.where(taken, chosen, self.painted).tolist()
        noise = own & ~taken
        self.painted = np.where(noise, self._noise(), self.painted).tolist()
        return none

    def _own(self) -> Array:
        """Return which positions a rule may write, [B] bool."""
        return np.arange(self.size) >= max(self.fixed, self.shift)

    def _noise(self) -> Array:
        """Return random ids but the mask, [B]; the same ones for a seed, a block and a pass."""
        rng = np.random.default_rng([self.seed, self.begun, self.passes])
        ids = rng.integers(0, self.vocabulary - 1, self.size)
        return ids + (ids >= self.mask)

    def sure(self) -> list[int]:
        """Return the ids that follow the known ones and will not change any more.

        They count as known from now on; when all are, the block is over.
        """
        open_ = (at for at in range(self.fixed, self.size) if self.ids[at] == self.mask)
        end = next(open_, self.size)
        if self.rule.edits and not (end == self.size and self.settled):
            return []
        found = self.ids[self.fixed : end]
        self.fixed = end
        if end == self.size:
            self.ids, self.settled = [], False
        return found


def distribution(logits: Array) -> tuple[Array, Array]:
    """Return log probabilities [B, V] f64 of logits, and entropies [B] in nats."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    weights = np.exp(rows)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        spread = np.where(weights > 0, weights * rows, 0.0).sum(axis=1, keepdims=True)
    return rows - np.log(total), (np.log(total) - spread / total)[:, 0]
