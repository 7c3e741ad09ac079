"""A case of an op as a back end is given it: random inputs, a Plan of one call, what it costs."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import Ggml, Tcq, parse_format
from clocher_kernels.ops.contract import (
    Case,
    Cost,
    OpSpec,
    Param,
    Value,
    dtype_of,
    nearest,
    rows_of,
)
from clocher_kernels.ops.quantize import GROUPED, groups_of, quantize
from clocher_kernels.plan import Attr, Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode


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
    if param.kind == "matrix":
        fmt, std = parse_format(case.formats[param.name]), param.std * shape[-1] ** -0.5
        if isinstance(fmt, Ggml | Tcq):
            return {param.name: QuantTensor(shape, fmt, fmt.drawn(shape, rng, std))}
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(param.std)
    if param.kind == "matrix":
        values *= np.float32(shape[-1] ** -0.5)
        return {param.name: encode(values, fmt)}
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


def cost(spec: OpSpec, values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
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
        if ids is not None:
            count = value.shape[0]
            nbytes = nbytes * len(np.unique(nearest(ids, count))) // count
        moved += nbytes * (2 if p.kind == "inout" else 1)
    w = spec.matrix
    if w is None or w.letters[-2] in selecting:  # rows of a table are looked up
        arrays = [v for v in values.values() if isinstance(v, np.ndarray)]
        return Cost(moved, 0 if w else spec.flops * max(a.size for a in arrays))
    n, k = values[w.name].shape[-2:]
    chosen = selecting.get(w.letters[0])
    vectors = values["x"].size // k if chosen is None else chosen.size
    return Cost(moved, 2 * vectors * n * k)
