"""The block of a text that is being denoised."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clocher_runtime.diffusion.rules import MOST_EDITS, Rule, View

Array = np.ndarray


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
        ids: of the active block; none: the next pass begins a block.
        fixed: how many of them are the prompt's, or were given away.
        edited: passes since the block has had no mask.
        settled: whether the last pass changed nothing, or was the last that may.
        logits: [V] fp32 of each position of the text when its token was written, where wanted.
    """

    size: int
    mask: int
    rule: Rule
    whole_blocks: bool
    ids: list[int] = field(default_factory=list)
    fixed: int = 0
    edited: int = 0
    settled: bool = False
    logits: dict[int, Array] = field(default_factory=dict)

    def begin(self, known: Sequence[int]) -> None:
        """Begin a block with the ids that are known of it, if none is active.

        Args:
            known: ids of the text from the block's first position on.
        """
        if not self.ids:
            self.ids = [*known, *[self.mask] * (self.size - len(known))]
            self.fixed = len(known)
            self.edited = 0

    def write(self, chosen: Sequence[int], chance: Array, entropy: Array) -> list[int]:
        """Write what the rule takes of a pass; return the positions written.

        Args:
            chosen: a token for each position, none the mask.
            chance: [B] f64, its probability.
            entropy: [B] f64, of each distribution, in nats.
        """
        ids, new = np.array(self.ids), np.array(chosen)
        own = np.arange(self.size) >= self.fixed
        is_open = own & (ids == self.mask)
        changes = own & ~is_open & (ids != new)
        wrote = self.rule.write(View(is_open, chance, entropy, changes))
        self.edited += not is_open.any()
        places = [int(at) for at in np.flatnonzero(wrote)]
        for at in places:
            self.ids[at] = int(chosen[at])
        self.settled = not places or self.edited >= MOST_EDITS
        return places

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


def distribution(logits: Array, mask: int) -> tuple[Array, Array]:
    """Return log probabilities [B, V] f64 without the mask, and entropies [B] in nats.

    Args:
        logits: [B, V] fp32, not written to.
        mask: its id.
    """
    rows = logits.astype(np.float64)
    rows[:, mask] = -np.inf
    rows -= rows.max(axis=1, keepdims=True)
    weights = np.exp(rows)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        spread = np.where(weights > 0, weights * rows, 0.0).sum(axis=1, keepdims=True)
    return rows - np.log(total), (np.log(total) - spread / total)[:, 0]
