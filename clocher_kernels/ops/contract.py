"""What an op is: its parameters, its NumPy reference, its cases, its tolerance and its cost.

`OpSpec` is the contract, and what is known of an op stands nowhere else. Parity tests,
microbenches, rooflines and docs/ops.md are generated from the table of them (`ops.OPS`); back ends
only add speed.

Activations are stored as fp32 or as int8 codes. A parameter `x` that takes both is int8 if scales
stand beside it (`x_scale`); the attribute `group` says how many columns share one.

Integers that select something (token ids, slots, positions, ends, ancestors, page numbers, rows,
experts) are data, and data may be wrong: the device steps them on by itself, and a caller may hand
over anything. So no op reads or writes beside its arrays, whatever they hold. What is read with an
index out of range is read with the nearest one in range, and what is written with one is dropped.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from clocher_kernels.dtypes import STORAGE, from_f32
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_kernels.plan import Attr, Call, Rows
from clocher_kernels.quant_tensor import QuantTensor

Kind = Literal["in", "out", "inout", "matrix", "vector"]
Value = np.ndarray | QuantTensor


@dataclass(frozen=True, slots=True)
class Param:
    """A formal parameter of an op, as the annotation of an argument of its reference.

    Attributes:
        kind: "in", "out", "inout" are buffers; "matrix" is a QuantTensor used as stored; "vector"
            is an fp32 array that the loader decoded (biases, norm weights, sinks, tables).
        dims: dimension letters, for the reader and for shape checks: "M K". A letter stands for
            the same size in every parameter of a call. "A*" is any number of dimensions, none too;
            A is the product of their sizes. A number is a size.
        dtype: element types that it may have: "f32", "f32 i8"; "" for matrices (any format) and KV
            planes (any KV dtype).
        below: of integers that select, the letter of what they number: they are in 0 .. size - 1.
        narrow: a GPU may store it in 16 bits.
        std: standard deviation of random inputs.
        name: that of the argument, filled in by `OpSpec.params`; `optional` if its default is None.
    """

    kind: Kind
    dims: str
    dtype: str = "f32"
    below: str = ""
    narrow: bool = False
    std: float = 1.0
    name: str = ""
    optional: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that it may have; empty for any."""
        return tuple(self.dtype.split())

    @property
    def letters(self) -> tuple[str, ...]:
        """The dimension letters."""
        return tuple(dim.rstrip("*") for dim in self.dims.split() if not dim.isdigit())

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape; a letter for any number of dimensions has one, or none if no size."""
        dims = [d for d in self.dims.split() if d[-1] != "*" or d[:-1] in sizes]
        return tuple(int(d) if d.isdigit() else sizes[d.rstrip("*")] for d in dims)

    def sizes(self, shape: Sequence[int]) -> dict[str, int] | None:
        """Return what the letters stand for in an array of this shape; None if it does not fit."""
        dims, found, rest = self.dims.split(), {}, list(shape)
        for place, dim in enumerate(dims):
            count = len(rest) - (len(dims) - place - 1) if dim[-1] == "*" else 1
            if not 0 <= count <= len(rest) or (dim[-1] != "*" and not rest):
                return None
            size = math.prod(rest[:count])
            if not dim.isdigit():
                found[dim.rstrip("*")] = size
            elif size != int(dim):
                return None
            rest = rest[count:]
        return None if rest else found


In, Out, InOut = partial(Param, "in"), partial(Param, "out"), partial(Param, "inout")
Matrix, Vector = partial(Param, "matrix", dtype=""), partial(Param, "vector")


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
_STORED = {
    "f32": Tolerance(1e-3, 12e-3),
    "f16": Tolerance(1e-3, 12e-3),
    "bf16": Tolerance(5e-3, 60e-3),
}
"""What a GPU may be off by, by how activations are stored."""
_OTHER_ORDER = 5
"""A GPU adds in another order and has other functions."""


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
        formats: matrix parameter -> format name; "i8" for an `x` of int8 codes.
        options: names of the optional parameters that are there, and what else the maker of inputs
            wants to know.
        tolerance: if it is not the op's.
        missing: back end -> why it has no kernel for this.
    """

    id: str
    sizes: Mapping[str, int]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


NO_CODES = {"cuda": "int8 activations are for ternary weights there; others multiply 16-bit ones"}
"""Back end -> why it does not multiply int8 activations by what is not ternary."""
_NO_BLOCKS = {"cuda": "these blocks are read by the CPU; convert them to another format"}


def no_blocks(fmt: str) -> Mapping[str, str]:
    """Return back end -> why it does not read the format, if it is one of ggml's."""
    return _NO_BLOCKS if fmt in KINDS and KINDS[fmt].above is None else {}


@dataclass(frozen=True, slots=True)
class Real:
    """Sizes of a real model for the cases of an op, to be timed on.

    Attributes:
        cases: a pattern of case ids, as `fnmatch` has it.
        sizes: dimension letter -> size; what follows from other sizes is left out.
        label: how ids begin; None: like the case's, without its sizes.
    """

    cases: str
    sizes: Mapping[str, int]
    label: str | None = None


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The contract of an op.

    Attributes:
        reference: takes the arrays by parameter name, the attributes by name, writes the outputs;
            its name is the op's, its annotations are the parameters. Buffers are sliced to the
            step's tokens or rows. Arithmetic is fp32 or fp64. Its docstring says of arguments what
            `params` do not.
        real: sizes to time it on; none: the cases' own.
        rounds: a GPU may round on the way, whatever the activations are stored as.
        make: case, random generator -> inputs that `cases.inputs` would not make as they have to
            be.
        cost: every argument of a call, outputs too, and its attributes -> its cost; None: what
            `cases.cost` counts.
        flops: operations for each element of the largest argument, if nothing is multiplied.
    """

    reference: Callable[..., None]
    cases: tuple[Case, ...]
    tolerance: Tolerance
    real: tuple[Real, ...] = ()
    rounds: bool = False
    make: Callable[[Case, "np.random.Generator"], dict[str, Value]] | None = None
    cost: Callable[[Mapping[str, Any], Mapping[str, Attr]], Cost] | None = None
    flops: int = 4

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.reference.__name__

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The formal parameters, in the reference's order."""
        return tuple(
            replace(param, name=name, optional=each.default is None)
            for name, each in inspect.signature(self.reference).parameters.items()
            for param in getattr(each.annotation, "__metadata__", ())
        )

    def param(self, name: str) -> Param:
        """Return the parameter with this name."""
        return next(p for p in self.params if p.name == name)

    @cached_property
    def given(self) -> tuple[Param, ...]:
        """The arguments of a caller, required ones first."""
        arguments = (p for p in self.params if p.kind != "out")
        return tuple(sorted(arguments, key=lambda p: p.optional))

    @cached_property
    def outputs(self) -> tuple[Param, ...]:
        """What a caller gets."""
        return tuple(p for p in self.params if p.kind == "out")

    @cached_property
    def attributes(self) -> Mapping[str, inspect.Parameter]:
        """The scalar parameters of the reference, by name."""
        names = {p.name for p in self.params}
        taken = inspect.signature(self.reference).parameters
        return {name: each for name, each in taken.items() if name not in names}

    @property
    def matrix(self) -> Param | None:
        """The parameter that is a stored matrix, [N, K] or of experts [E, N, K], or None."""
        return next((p for p in self.params if p.kind == "matrix"), None)

    @property
    def narrow(self) -> frozenset[str]:
        """Names of the parameters that a GPU may store in 16 bits."""
        return frozenset(p.name for p in self.params if p.narrow)

    def allowed(
        self, case: Case | None = None, backend: str = "cpu", stored: str = "f32"
    ) -> Tolerance:
        """Return the largest accepted error.

        Args:
            case: one of the op's cases, which may have a tolerance of its own.
            backend: "cpu" or "cuda".
            stored: element type of narrow parameters: "f32", "f16" or "bf16".
        """
        limit = case.tolerance if case and case.tolerance else self.tolerance
        if backend == "cpu" or limit == EXACT:
            return limit
        if self.rounds or stored != "f32":
            # A square has twice the relative error.
            times = 2 if case and case.attrs.get("activation") == "relu2" else 1
            return Tolerance(times * _STORED[stored].rms, times * _STORED[stored].max)
        return Tolerance(_OTHER_ORDER * limit.rms, _OTHER_ORDER * limit.max)


def nearest(index: np.ndarray | int, count: int) -> Any:
    """Return the numbers in 0 .. count - 1 that are nearest to indices."""
    return np.clip(index, 0, count - 1)


def dtypes_of(param: Param, attrs: Mapping[str, Attr]) -> tuple[str, ...]:
    """Return the element types that a buffer parameter may have in a call; caches have one."""
    return param.dtypes or (str(attrs["cache_dtype"]),)


def dtype_of(param: Param, array: np.ndarray, attrs: Mapping[str, Attr]) -> str:
    """Return the element type of an argument."""
    known = dtypes_of(param, attrs)
    return next((d for d in known if STORAGE[d] == array.dtype), known[0])


def rows_of(param: Param) -> Rows:
    """Return which step count the leading dimension of a buffer parameter follows."""
    lead = param.letters[0] if param.dims else ""
    return lead if lead in ("M", "R") and param.kind in ("in", "out", "inout") else ""  # type: ignore[return-value]


def has_codes(call: Call) -> bool:
    """Return whether the activations that a call multiplies are int8 codes."""
    return "x_scale" in call.args


_INT8 = Tolerance(1e-4, 1e-3)
"""A back end may round queries and weights that meet int8 cells to 16 bits."""


def tokens(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    """Make the four integers of each token and a shuffled page table."""
    m, s, b, t = (case.sizes[d] for d in "MSBT")
    capacity = b * t
    kind = case.options.get("tokens", "decode")
    slots = np.arange(m, dtype=np.int32) % s
    ancestors = np.zeros(m, np.uint64)
    if kind in ("prefill", "block"):  # the tokens of slot 0 are consecutive
        slots[:] = 0
        positions = np.arange(capacity - m, capacity, dtype=np.int32)
        # In block diffusion all see the whole block.
        ends = positions + 1 if kind == "prefill" else np.full(m, capacity, np.int32)
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
    dtype = str(case.attrs["cache_dtype"])
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
    attrs: dict[str, Attr] = {"cache_dtype": kv, "scale": d**-0.5, "window": window, **more}
    options = {"tokens": kind, "sinks": sinks, "listed": listed}
    limit = _INT8 if kv == "i8" else None
    return Case(f"{name}-{kv}-m{m}-n{n}-h{h}-d{d}", sizes, attrs, {}, options, limit)
