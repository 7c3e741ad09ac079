"""What an op is: its parameters, its NumPy reference, its cases, its tolerance and its cost.

`OpSpec` is the contract. Parity tests, microbenches, rooflines and docs/ops.md are generated from
the table of them (`ops.OPS`); back ends only add speed.

Integers that select something (token ids, slots, positions, ends, ancestors, page numbers, rows,
experts) are data, and data may be wrong: the device steps them on by itself, and a caller may hand
over anything. So no op reads or writes beside its arrays, whatever they hold. What is read with an
index out of range is read with the nearest one in range, and what is written with one is dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from clocher_kernels.plan import Attr, Buffer, Call, Plan, Rows
from clocher_kernels.quant_tensor import QuantTensor

Kind = Literal["in", "out", "inout", "matrix", "vector"]
Value = np.ndarray | QuantTensor


@dataclass(frozen=True, slots=True)
class Param:
    """A formal parameter of an op.

    Attributes:
        kind: "in", "out", "inout" are buffers; "matrix" is a QuantTensor used as stored; "vector"
            is an fp32 array that the loader decoded (biases, norm weights, sinks, tables).
        dims: dimension letters, for the reader and for shape checks: "M K". A letter stands for
            the same size in every parameter of a call.
        dtype: element type, "" for matrices (any format) and KV planes (any KV dtype).
    """

    name: str
    kind: Kind
    dims: str
    dtype: str = "f32"
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted error, relative to the RMS of the reference: of the RMS and of the maximum.

    (0, 0) asks for equality. Reference and kernel see the same stored weights, so this is
    rounding of the arithmetic alone.
    """

    rms: float
    max: float


EXACT = Tolerance(0.0, 0.0)
FP32 = Tolerance(2e-6, 2e-5)


@dataclass(frozen=True, slots=True)
class Cost:
    """Least memory traffic and arithmetic of a call: bytes that must move, multiply-adds x 2."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Case:
    """One set of sizes and settings that an op is tested on.

    Attributes:
        sizes: dimension letter -> size.
        attrs: attributes of the call.
        formats: matrix parameter -> format name.
        options: choices for the input maker (which optional parameters are present, ...).
    """

    id: str
    sizes: Mapping[str, int]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The contract of an op.

    Attributes:
        reference: takes the arrays by parameter name, the attributes by name, writes the outputs.
            Buffers are sliced to the step's tokens or rows. Arithmetic is fp32 or fp64.
        make: case, random generator -> value of each parameter except "out" ones.
        cost: the arguments of a call -> its cost.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    reference: Callable[..., None]
    make: Callable[[Case, np.random.Generator], dict[str, Value]]
    cases: tuple[Case, ...]
    tolerance: Tolerance
    cost: Callable[[Mapping[str, Value], Mapping[str, Attr]], Cost]

    def param(self, name: str) -> Param:
        """Return the parameter with this name."""
        return next(p for p in self.params if p.name == name)


def nearest(index: np.ndarray | int, count: int) -> Any:
    """Return the numbers in 0 .. count - 1 that are nearest to indices."""
    return np.clip(index, 0, count - 1)


def rows_of(param: Param) -> Rows:
    """Return which step count the leading dimension of a buffer parameter follows."""
    lead = param.dims.split()[0] if param.dims else ""
    return lead if lead in ("M", "R") and param.kind in ("in", "out", "inout") else ""  # type: ignore[return-value]


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
            shape = tuple(case.sizes[d] for d in p.dims.split())
            buffers[p.name] = Buffer(shape, p.dtype, rows_of(p), "output")
        else:
            array = values[p.name]
            assert isinstance(array, np.ndarray)
            dtype = p.dtype or str(case.attrs["kv_dtype"])
            role: Literal["state", "input"] = "state" if p.kind == "inout" else "input"
            buffers[p.name] = Buffer(array.shape, dtype, rows_of(p), role)
    tokens, rows = case.sizes.get("M", 1), case.sizes.get("R", 1)
    call = Call(spec.name, args, dict(case.attrs))
    return Plan(tokens, rows, buffers, {}, tuple(weights), (call,))
