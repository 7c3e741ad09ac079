"""A case of an op as a back end is given it: random inputs, a Plan of one call, what it costs."""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import STORAGE, from_f32
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.contract import (
    Case,
    Cost,
    OpSpec,
    Param,
    Tolerance,
    Value,
    dtype_of,
    nearest,
    rows_of,
)
from clocher_kernels.ops.quantize import GROUPED, groups_of, quantize
from clocher_kernels.plan import Attr, Buffer, Call, Plan
from clocher_kernels.quant_tensor import encode


def inputs(spec: OpSpec, case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    """Return the value of each parameter that a case has, except "out" ones.

    Numbers are normal, those of a matrix over the root of its columns. Integers that select are in
    range, and differ within a row of several. What the op's own `make` gives is taken as it is.
    """
    made = spec.make(case, rng) if spec.make else {}
    for param in spec.params:
        absent = param.optional and not case.options.get(param.name)
        if param.kind != "out" and param.name not in made and not absent:
            made |= _drawn(param, case, rng)
    return made


def _drawn(param: Param, case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    shape = param.shape(case.sizes)
    if param.below:
        count = case.sizes[param.below]
        some = rng.integers(0, count, shape)
        if len(shape) > 1:
            some = np.argsort(rng.random((*shape[:-1], count)), axis=-1)[..., : shape[-1]]
        return {param.name: some.astype(STORAGE[param.dtype])}
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(param.std)
    if param.kind == "matrix":
        values *= np.float32(shape[-1] ** -0.5)
        return {param.name: encode(values, parse_format(case.formats[param.name]))}
    if case.formats.get(param.name) != "i8":
        return {param.name: values}
    group = int(case.attrs["group"])
    codes = np.empty(shape, np.int8)
    scale = np.empty((*shape[:-1], groups_of(shape[-1], group)), np.float32)
    quantize(x=values, q=codes, scale=scale, group=group, **GROUPED)
    return {param.name: codes, f"{param.name}_scale": scale}


def case_plan(spec: OpSpec, case: Case, values: Mapping[str, Value]) -> Plan:
    """Build the Plan of one call of an op, so that every back end can be asked to execute it.

    Buffers and weights are named like the parameters. "out" sizes come from the case.
    """
    buffers: dict[str, Buffer] = {}
    args: dict[str, str] = {}
    weights = []
    for p in spec.params:
        if p.kind != "out" and p.name not in values:
            continue
        args[p.name] = p.name
        if p.kind in ("matrix", "vector"):
            weights.append(p.name)
            continue
        if p.kind == "out":
            buffers[p.name] = Buffer(p.shape(case.sizes), p.dtype, rows_of(p), "output")
        else:
            array = values[p.name]
            assert isinstance(array, np.ndarray)
            role: Literal["state", "input"] = "state" if p.kind == "inout" else "input"
            buffers[p.name] = Buffer(array.shape, dtype_of(p, array, case.attrs), rows_of(p), role)
    tokens, rows = case.sizes.get("M", 1), case.sizes.get("R", 1)
    call = Call(spec.name, args, dict(case.attrs))
    return Plan(tokens, rows, buffers, {}, tuple(weights), (call,))


def cost(spec: OpSpec, values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    """Return what a call costs at least.

    If the op does not say: each argument of `values`, outputs too, moves once, "inout" ones twice,
    and of what integers select only what they select; a product of N rows of K is 2 N K operations
    for each vector.
    """
    if spec.cost is not None:
        return spec.cost(values, attrs)
    there = [p for p in spec.params if p.name in values]
    selecting = {p.below: values[p.name] for p in there if p.below}
    moved = 0
    for p in there:
        value = values[p.name]
        nbytes, ids = value.nbytes, selecting.get(p.letters[0])
        if isinstance(ids, np.ndarray):
            count = value.shape[0]
            nbytes = nbytes * len(np.unique(nearest(ids, count))) // count
        moved += nbytes * (2 if p.kind == "inout" else 1)
    w = spec.matrix
    if w is None or w.letters[-2] in selecting:  # rows of a table are looked up
        arrays = [v for v in values.values() if isinstance(v, np.ndarray)]
        return Cost(moved, 0 if w else spec.flops * max(a.size for a in arrays))
    n, k = values[w.name].shape[-2:]
    chosen = selecting.get(w.letters[0])
    x = values["x"]
    assert isinstance(x, np.ndarray)
    vectors = chosen.size if isinstance(chosen, np.ndarray) else x.size // k
    return Cost(moved, 2 * vectors * n * k)


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
    name: str,
    kv: str,
    m: int,
    kind: str,
    n: int,
    h: int,
    d: int,
    *,
    blocks: int = 4,
    size: int = 16,
    window: int = 0,
    sinks: bool = False,
    listed: bool = False,
    **more: Attr,
) -> Case:
    """Spell one attention case: M tokens of a kind, N query heads over H of D values."""
    sizes = {"M": m, "N": n, "H": h, "D": d, "F": n * d, "S": 3, "B": blocks, "T": size}
    sizes |= {"P": 3 * blocks, **({"W": -(-blocks // 64)} if listed else {})}
    attrs: dict[str, Attr] = {"kv_dtype": kv, "scale": d**-0.5, "window": window, **more}
    options = {"tokens": kind, "sinks": sinks, "listed": listed}
    limit = _INT8 if kv == "i8" else None
    return Case(f"{name}-{kv}-m{m}-n{n}-h{h}-d{d}", sizes, attrs, {}, options, limit)
