"""Inputs of the ops of a paged cache: tokens of each kind, a shuffled page table, filled planes."""

import numpy as np

from clocher_kernels.dtypes import from_f32
from clocher_kernels.ops.contract import Case, Tolerance, Value
from clocher_kernels.plan import Attr

_INT8 = Tolerance(1e-4, 1e-3)
"""A back end may round queries and weights that meet int8 cells to 16 bits."""


def tokens(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    """Make the four integers of each token and a shuffled page table."""
    m, s, b, t = (case.sizes[d] for d in "MSBT")
    capacity = b * t
    kind = case.options.get("tokens", "decode")
    slots = np.arange(m, dtype=np.int32) % s
    ancestors = np.zeros(m, np.uint64)
    if kind == "prefill":  # the tokens of slot 0 are consecutive
        slots[:] = 0
        positions = np.arange(capacity - m, capacity, dtype=np.int32)
        ends = positions + 1
    elif kind == "block":  # block diffusion: all see the whole block
        slots[:] = 0
        positions = np.arange(capacity - m, capacity, dtype=np.int32)
        ends = np.full(m, capacity, np.int32)
    elif kind == "tree":  # node i hangs from node (i - 1) // 2
        slots[:] = 0
        committed = capacity - m
        ends = np.full(m, committed, np.int32)
        positions = np.zeros(m, np.int32)
        for i in range(m):
            mask, depth, node = 1 << i, 0, i
            while node:
                node = (node - 1) // 2
                mask, depth = mask | 1 << node, depth + 1
            ancestors[i], positions[i] = mask, committed + depth
    else:
        positions = rng.integers(0, capacity, m).astype(np.int32)
        positions[0], positions[-1] = 0, capacity - 1
        ends = positions + 1
    pages = rng.permutation(s * b).reshape(s, b).astype(np.int32)
    return {
        "slots": slots,
        "positions": positions,
        "ends": ends.astype(np.int32),
        "ancestors": ancestors,
        "pages": pages,
    }


def planes(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    """Make the planes of keys and values."""
    shape = tuple(case.sizes[d] for d in "PHTD")
    dtype = str(case.attrs["kv_dtype"])
    made: dict[str, Value] = {}
    for name in "kv":
        if dtype == "i8":
            made[f"{name}_cache"] = rng.integers(-127, 128, shape).astype(np.int8)
            made[f"{name}_scale"] = rng.random(shape[:3], dtype=np.float32) * np.float32(0.02)
        else:
            made[f"{name}_cache"] = from_f32(rng.standard_normal(shape, dtype=np.float32), dtype)
    return made


def paged_case(
    name: str, kv: str, m: int, kind: str, n: int, h: int, d: int, **rest: object
) -> Case:
    """Spell one attention case: M tokens of a kind, N query heads over H of D values."""
    slots, blocks, size = (
        int(str(rest.get(key, usual))) for key, usual in (("slots", 3), ("blocks", 4), ("size", 16))
    )
    sizes = {"M": m, "N": n, "H": h, "D": d, "F": n * d, "S": slots, "B": blocks, "T": size}
    sizes["P"] = slots * blocks
    if rest.get("listed"):
        sizes["W"] = -(-blocks // 64)
    attrs: dict[str, Attr] = {"kv_dtype": kv, "scale": d**-0.5}
    attrs["window"] = int(str(rest.get("window", 0)))
    attrs |= {name: rest[name] for name in ("chunk", "softcap") if name in rest}  # type: ignore[misc]
    options = {"tokens": kind} | {name: rest.get(name, False) for name in ("sinks", "listed")}
    name = f"{name}-{kv}-m{m}-n{n}-h{h}-d{d}"
    limit = _INT8 if kv == "i8" else None
    return Case(name, sizes, attrs, {}, options, limit)
