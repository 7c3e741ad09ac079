"""The block of a sequence that is being denoised, and the rules that commit its tokens.

Rules are pure functions of one forward's results; the caller excludes the mask id.

| rule | writes |
| --- | --- |
| `static:N` | the ceil(block / N) open positions of the highest p |
| `dynamic:T` | all open positions with p > T, but at least what `static` would |
| `threshold:T` | all open positions with p > T, but at least the best one |
| `factor:F` | the n best open positions, the largest n with (n + 1)(1 - p_n) < F, at least one |
| `entropy:E` | open positions in order of entropy while their sum without the largest is <= E |
| `joint:T,E` | `threshold:T`, and tokens written before where another one has p > E |

Sources: SDAR (Cheng et al. 2025), LLaDA (static, dynamic); Fast-dLLM (Wu et al. 2025; threshold,
factor); Ben-Hamu et al. 2025 (EB-sampler; over the whole distribution's entropy); LLaDA2.1 (joint).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clocher_runtime.diffusion import parse
from clocher_runtime.models.spec import BlockDiffusion

Array = np.ndarray
Draw = Callable[[Array, int], int]
"""Returns the token drawn for a position from logits [V] fp32, in which the mask is -inf."""

MOST_EDITS = 16
"""Forwards that `joint` may spend on a block without a mask."""


class View(NamedTuple):
    """Results of a forward over B positions, [B] bool or f64; `entropy` is in nats.

    `chance`: probability of the chosen token; `changes`: written, but another one was chosen.
    """

    is_open: Array
    chance: Array
    entropy: Array
    changes: Array


_STEPS = 4  # of `dynamic`, a usual block's


def static(view: View, steps: float) -> Array:
    """Return the positions to write, [B] bool: a fixed share of the block, highest p first."""
    return _best(view, -(-len(view.is_open) // int(steps)))


def dynamic(view: View, least: float, steps: int = _STEPS) -> Array:
    """Return all open positions above a probability, but at least what `static` would."""
    above = view.is_open & (view.chance > least)
    usual = static(view, steps)
    return above if above.sum() >= usual.sum() else usual


def threshold(view: View, least: float) -> Array:
    """Return all open positions above a probability, but at least the best one."""
    above = view.is_open & (view.chance > least)
    return above if above.any() else _best(view, 1)


def factor(view: View, limit: float) -> Array:
    """Return the n best open positions for the largest n with (n + 1)(1 - p_n) < limit."""
    ranked = _ranked(view)
    fits = [n for n, at in enumerate(ranked, 1) if (n + 1) * (1 - view.chance[at]) < limit]
    return _best(view, max(fits, default=1))


def entropy(view: View, bound: float) -> Array:
    """Return open positions by rising entropy while their sum but for the largest is <= bound."""
    places = np.flatnonzero(view.is_open)
    ranked = places[np.argsort(view.entropy[places], kind="stable")]
    before = np.cumsum(view.entropy[ranked]) - view.entropy[ranked]  # the last is the largest
    out = np.zeros_like(view.is_open)
    out[ranked[before <= bound]] = True  # the first has nothing before it
    return out


def joint(view: View, least: float, least_edit: float) -> Array:
    """Return what `threshold` does, and written positions where another p > `least_edit`."""
    fresh = threshold(view, least) if view.is_open.any() else np.zeros_like(view.is_open)
    return fresh | (view.changes & (view.chance > least_edit))


def _ranked(view: View) -> Array:
    places = np.flatnonzero(view.is_open)
    return places[np.argsort(-view.chance[places], kind="stable")]


def _best(view: View, count: int) -> Array:
    out = np.zeros_like(view.is_open)
    out[_ranked(view)[:count]] = True
    return out


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its numbers; `write` returns the positions to write, [B] bool.

    `edits`: it rewrites tokens, so blocks are final only at their end.
    """

    text: str
    write: Callable[[View], Array]
    edits: bool = False


_RULES: tuple[Callable[..., Array], ...] = (static, dynamic, threshold, factor, entropy, joint)
_WRITES = {rule.__name__: rule for rule in _RULES}


def rule_of(text: str) -> Rule:
    """Return the rule of a text such as "threshold:0.9". Raises UsageError."""
    name, numbers = parse(text)
    return Rule(text, lambda view: _WRITES[name](view, *numbers), edits=name == "joint")


class Canvas:
    """The active block of one sequence: known ids and masks; empty between blocks.

    `fixed`: leading ids of the prompt, or delivered; `edited`: forwards since the last mask was
    filled; `settled`: the last forward changed nothing, or was the last allowed; `logits`: [V] fp32
    of each position when its token was written, where wanted.
    """

    def __init__(self, blocks: BlockDiffusion, rule: Rule) -> None:
        self.size, self.rule, self._blocks = blocks.block, rule, blocks
        self.ids: list[int] = []
        self.fixed = self.edited = 0
        self.settled = False
        self.logits: dict[int, Array] = {}

    def begin(self, known: Sequence[int]) -> None:
        """Begin a block with its known ids, if none is active."""
        if not self.ids:
            self.ids = [*known, *[self._blocks.mask] * (self.size - len(known))]
            self.fixed, self.edited = len(known), 0

    @property
    def waits(self) -> bool:
        """Whether the next forward makes the block's first token, from the last one before it."""
        return self._blocks.shift and not self.fixed and self.ids[0] == self._blocks.mask

    @property
    def shown(self) -> list[int]:
        """Ids that the next forward sees; none if it makes the first token."""
        return [] if self.waits else self.ids

    def see(self, logits: Array, draw: Draw | None = None, keep: bool = False) -> None:
        """Write what the rule commits; `keep` also stores the logits of written tokens.

        `logits`: [B, V] fp32, or [1, V] of the last token before the block. `draw` None: top-1.
        """
        waits = self.waits
        asked = np.arange(self.size) == 0 if waits else self._asked()
        places = np.flatnonzero(asked)
        rows = places - (self._blocks.shift and not waits)  # whose logits are of these positions
        known = logits[rows]
        known[:, self._blocks.mask] = -np.inf
        chances, entropies = distribution(known)
        chosen = np.array(self.ids)
        chosen[asked] = known.argmax(axis=1)
        if draw is not None:
            chosen[asked] = [draw(row, int(at)) for at, row in zip(places, known, strict=True)]
        chance, entropy = np.zeros(self.size), np.zeros(self.size)
        chance[asked] = chances[np.arange(len(places)), chosen[asked]]
        entropy[asked] = entropies
        if waits:
            wrote = asked
            self.ids[0] = int(chosen[0])
        else:
            wrote = self._write(chosen, chance, entropy)
        for at, row in zip(places, rows, strict=True) if keep else ():
            if wrote[at]:
                self.logits[int(at)] = logits[row].copy()

    def _asked(self) -> Array:
        own = self._own()
        is_open = own & (np.array(self.ids) == self._blocks.mask)
        if not is_open.any():
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

    def _own(self) -> Array:
        return np.arange(self.size) >= max(self.fixed, self._blocks.shift)

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
