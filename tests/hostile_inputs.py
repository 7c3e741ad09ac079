"""Inputs that select what is not there: ids, slots, positions, page numbers, rows out of range."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from op_cases import OpRun

from clocher_kernels.ops.contract import Value

_CELLS = ("positions", "ends", "ancestors")
"""Parameters that select cells of the cache."""
KINDS = ("below", "far below", "past", "far past", "mixed")
_EVERY_CELL = np.uint64((1 << 64) - 1)


def selectors(op: OpRun) -> list[str]:
    """Return the inputs of a case that select something."""
    cells = _CELLS if "pages" in op.values else ()
    return [p.name for p in op.spec.params if p.below or p.name in cells]


def _count(op: OpRun, name: str) -> int:
    """Return how many there are to select from."""
    sizes, below = op.case.sizes, op.spec.param(name).below
    return sizes[below] if below else sizes["B"] * sizes["T"] + (name == "ends")


def hostile(op: OpRun) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield values of a case in which some or all selectors are out of range, by kind."""
    names = selectors(op)
    for kind in KINDS if names else ():
        yield kind, {**op.values, **{name: _bad(op, name, kind) for name in names}}
    for name in names if len(names) > 1 else ():
        yield f"{name} alone", {**op.values, name: _bad(op, name, "mixed")}


def _bad(op: OpRun, name: str, kind: str) -> np.ndarray:
    value: Any = op.values[name]
    if name == "ancestors":
        if kind != "mixed":
            return np.full_like(value, _EVERY_CELL)
        rng = np.random.default_rng(len(value))
        masks = rng.integers(0, 1 << 64, value.shape, np.uint64) >> rng.integers(
            0, 64, value.shape, np.uint64
        )
        return np.where(rng.random(value.shape) < 0.5, masks, value)
    count, low, high = _count(op, name), -(1 << 31), (1 << 31) - 1
    bad = {"below": -1, "far below": low, "past": count, "far past": high}
    if kind in bad:
        return np.full_like(value, bad[kind])
    rng = np.random.default_rng(value.size)
    drawn = rng.choice([-1, -count, low, low + 1, count, count + 1, high - 64, high], value.shape)
    return np.where(rng.random(value.shape) < 0.5, drawn, value).astype(np.int32)


def careless(op: OpRun) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield values of `sample` that are no settings, and logits that are no numbers."""
    if op.spec.name != "sample":
        return
    floats = (np.nan, -1.0, np.inf, -np.inf, 1e-45, 3e38, 0.0)
    for name in ("temperature", "top_p"):
        for number in floats:
            yield f"{name} {number}", {**op.values, name: np.full_like(op.values[name], number)}
    for number in (-1, -(1 << 31), (1 << 31) - 1):
        for name in ("top_k", "draws", "masked"):
            yield f"{name} {number}", {**op.values, name: np.full_like(op.values[name], number)}
    for number in (np.nan, np.inf, -np.inf):
        yield f"logits {number}", {**op.values, "logits": np.full_like(op.values["logits"], number)}
