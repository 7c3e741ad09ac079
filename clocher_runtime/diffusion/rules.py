"""Rules of block diffusion: which positions of a block take the token a forward chose.

Rules are pure functions of one forward's results; the caller excludes the mask id.

| rule | writes |
| --- | --- |
| `static:N` | the ceil(block / N) open positions of the highest p |
| `dynamic:T` | all open positions with p > T, but at least what `static` would |
| `threshold:T` | all open positions with p > T, but at least the best one |
| `factor:F` | the n best open positions, the largest n with (n + 1)(1 - p_n) < F, at least one |
| `entropy:E` | open positions in order of entropy while their sum without the largest is <= E |
| `joint:T,E` | `threshold:T`, and tokens written before where another one has p > E |
| `canvas:E,N` | all at the end: when the canvas is calm, or after N forwards; noise until then |

Sources: SDAR (Cheng et al. 2025), LLaDA (static, dynamic); Fast-dLLM (Wu et al. 2025; threshold,
factor); Ben-Hamu et al. 2025 (EB-sampler; over the whole distribution's entropy); LLaDA2.1 (joint);
DiffusionGemma in transformers, without self-conditioning (canvas).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clocher_runtime.diffusion.asked import parse

Array = np.ndarray

MOST_EDITS = 16
"""Forwards that `joint` may spend on a block without a mask."""
_HOTTEST, _COOLEST = 0.8, 0.4  # of a canvas
_CALM = 0.005  # mean entropy of a canvas that has come to its end, in nats


class View(NamedTuple):
    """Results of a forward over B positions, [B] bool or f64; `entropy` is in nats.

    `chance`: probability of the chosen token; `changes`: written, but another one was chosen.
    """

    is_open: Array
    chance: Array
    entropy: Array
    changes: Array


def static(view: View, steps: int) -> Array:
    """Return the positions to write, [B] bool: a fixed share of the block, highest p first."""
    return _best(view, -(-len(view.is_open) // steps))


def dynamic(view: View, least: float, steps: int) -> Array:
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


def temperature_of(done: int, forwards: int) -> float:
    """Return the temperature of a canvas's next forward, which falls with each."""
    return _COOLEST + (_HOTTEST - _COOLEST) * (forwards - done) / forwards


def is_calm(top: Array, before: Array | None, entropy: Array) -> bool:
    """Return whether a canvas is finished."""
    stable = before is not None and np.array_equal(top, before)
    return stable and float(entropy.mean()) < _CALM


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

    `edits`: it rewrites tokens, so blocks are final only at their end; `forwards`: limit for a
    canvas of noise, 0 if blocks are of masks.
    """

    text: str
    write: Callable[[View], Array]
    edits: bool = False
    forwards: int = 0


_STEPS = 4  # of `dynamic`, a usual block's

_WRITES: dict[str, Callable[..., Array]] = {
    "static": lambda view, n: static(view, int(n)),
    "dynamic": lambda view, least: dynamic(view, least, _STEPS),
    "threshold": threshold,
    "factor": factor,
    "entropy": entropy,
    "joint": joint,
    "canvas": lambda view, bound, _: entropy(view, bound),
}


def rule_of(text: str) -> Rule:
    """Return the rule of a text such as "threshold:0.9". Raises UsageError."""
    name, numbers = parse(text)
    return Rule(
        text,
        lambda view: _WRITES[name](view, *numbers),
        edits=name == "joint",
        forwards=int(numbers[1]) if name == "canvas" else 0,
    )
