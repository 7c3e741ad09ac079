"""The block of a sequence that is being denoised."""

from collections.abc import Callable, Sequence

import numpy as np

from clocher_runtime.diffusion.rules import MOST_EDITS, Rule, View, is_calm, temperature_of
from clocher_runtime.models.spec import BlockDiffusion

Array = np.ndarray

Draw = Callable[[Array, int], int]
"""Returns the token drawn for a position from logits [V] fp32, in which the mask is -inf."""


class Canvas:
    """The active block of one sequence: known ids and masks; empty between blocks.

    `painted`: what the model sees, under a rule that uses noise; `fixed`: leading ids of the
    prompt, or delivered; `edited`: forwards since the last mask was filled; `settled`: the last
    forward changed nothing, or was the last allowed; `top`: the previous top-1 tokens; `logits`:
    [V] fp32 of each position when its token was written, where wanted.
    """

    def __init__(self, blocks: BlockDiffusion, rule: Rule, vocabulary: int, seed: int) -> None:
        self.size, self.rule = blocks.block, rule
        self._blocks, self._vocabulary, self._seed = blocks, vocabulary, seed
        self.ids: list[int] = []
        self.painted: list[int] = []
        self.fixed = self.begun = self.forwards = self.edited = 0
        self.settled = False
        self.top: Array | None = None
        self.logits: dict[int, Array] = {}

    @property
    def whole_blocks(self) -> bool:
        """Whether tokens of finished blocks see their whole block."""
        return self._blocks.context == "block"

    def begin(self, known: Sequence[int]) -> None:
        """Begin a block with its known ids, if none is active."""
        if not self.ids:
            self.ids = [*known, *[self._blocks.mask] * (self.size - len(known))]
            self.fixed = len(known)
            self.begun += 1
            self.forwards = self.edited = 0
            self.top = None
            if self.rule.forwards:
                self.painted = np.where(self._own(), self._noise(), self.ids).tolist()

    @property
    def waits(self) -> bool:
        """Whether the next forward makes the block's first token, from the last one before it."""
        return self._blocks.shift and not self.fixed and self.ids[0] == self._blocks.mask

    @property
    def shown(self) -> list[int]:
        """Ids that the next forward sees; none if it makes the first token."""
        return [] if self.waits else self.painted or self.ids

    def see(self, logits: Array, draw: Draw | None = None, keep: bool = False) -> None:
        """Write what the rule commits; `keep` also stores the logits of written tokens.

        `logits`: [B, V] fp32, or [1, V] of the last token before the block. `draw` None: top-1.
        """
        waits, temperature = self.waits, 1.0
        asked = np.arange(self.size) == 0 if waits else self._asked()
        if self.rule.forwards and not waits:
            temperature = temperature_of(self.forwards, self.rule.forwards)
        places = np.flatnonzero(asked)
        rows = places - (self._blocks.shift and not waits)  # whose logits are of these positions
        heated = logits[rows] / np.float32(temperature)
        heated[:, self._blocks.mask] = -np.inf
        chances, entropies = distribution(heated)
        top, chosen = np.array(self.ids), np.array(self.ids)
        top[asked] = chosen[asked] = heated.argmax(axis=1)
        if draw is not None:
            chosen[asked] = [draw(row, int(at)) for at, row in zip(places, heated, strict=True)]
        chance, entropy = np.zeros(self.size), np.zeros(self.size)
        chance[asked] = chances[np.arange(len(places)), chosen[asked]]
        entropy[asked] = entropies
        if waits:
            wrote = asked
            self.ids[0] = int(chosen[0])
            if self.painted:
                self.painted[0] = self.ids[0]
        else:
            self.forwards += 1
            if self.rule.forwards:
                wrote = self._paint(top, chosen, chance, entropy)
            else:
                wrote = self._write(chosen, chance, entropy)
        for at, row in zip(places, rows, strict=True) if keep else ():
            if wrote[at]:
                self.logits[int(at)] = logits[row].copy()

    def _asked(self) -> Array:
        own = self._own()
        is_open = own & (np.array(self.ids) == self._blocks.mask)
        if self.rule.forwards or not is_open.any():
            return own
        part = np.arange(self.size) // self._blocks.part
        now = is_open & (part == part[is_open.argmax()])
        asked: Array = now | (own & ~is_open) if self.rule.edits else now
        return asked

    def _write(self, chosen: Array, chance: Array, entropy: Array) -> Array:
        ids, own = np.array(self.ids), self._own()
        is_open = own & (ids == self._blocks.mask)
        changes = own & ~is_open & (ids != chosen)
        self.edited += not is_open.any()
        now = is_open & self._asked()
        wrote = self.rule.write(View(now, chance, entropy, changes))
        self.ids = np.where(wrote, chosen, ids).tolist()
        self.settled = not wrote.any() or self.edited >= MOST_EDITS
        return wrote

    def _paint(self, top: Array, chosen: Array, chance: Array, entropy: Array) -> Array:
        """Set what the next forward sees, or write the whole block; return where, [B] bool."""
        own = self._own()
        before, self.top = self.top, top[own]
        if self.forwards == self.rule.forwards or is_calm(self.top, before, entropy[own]):
            self.ids = np.where(own, top, self.ids).tolist()
            self.painted = []
            return own
        none = np.zeros_like(own)
        taken = self.rule.write(View(own, chance, entropy, none))
        self.painted = np.where(taken, chosen, self.painted).tolist()
        noise = own & ~taken
        self.painted = np.where(noise, self._noise(), self.painted).tolist()
        return none

    def _own(self) -> Array:
        return np.arange(self.size) >= max(self.fixed, self._blocks.shift)

    def _noise(self) -> Array:
        """Return random ids without the mask, [B], deterministic in seed, block and forward."""
        rng = np.random.default_rng([self._seed, self.begun, self.forwards])
        ids = rng.integers(0, self._vocabulary - 1, self.size)
        return ids + (ids >= self._blocks.mask)

    def sure(self) -> list[int]:
        """Return the ids that follow the known ones and are final."""
        open_ = (at for at in range(self.fixed, self.size) if self.ids[at] == self._blocks.mask)
        end = next(open_, self.size)
        if self.rule.edits and not (end == self.size and self.settled):
            return []
        found = self.ids[self.fixed : end]
        self.fixed = end
        if end == self.size:
            self.ids, self.settled = [], False
        return found


def distribution(logits: Array) -> tuple[Array, Array]:
    """Return the probabilities [B, V] f64 of logits [B, V] fp32, and entropies [B] in nats."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    chances = np.exp(rows)
    total = chances.sum(axis=1, keepdims=True)
    rows[chances == 0] = 0
    chances /= total
    return chances, np.log(total)[:, 0] - (chances * rows).sum(axis=1)
