"""Torch tensors as kernel arguments, converted once per tensor object until it is written to."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError
from clocher_kernels.formats import Bsr, Format, Plane, parse_format
from clocher_kernels.library.host import Bound
from clocher_kernels.library.signature import facts, sizes_of
from clocher_kernels.ops.contract import OpSpec, Param
from clocher_kernels.quant_tensor import QuantTensor

TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "e8m0": torch.uint8,
    "i32": torch.int32,
    "u32": torch.int32,
    "u64": torch.int64,
    "i64": torch.int64,
}
"""Element type -> torch's; codes of 8-bit floats are bytes."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def as_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """View a CPU tensor as a NumPy array, which keeps the memory but not the object alive."""
    bits = tensor.detach()
    if bits.dtype in (torch.bfloat16, torch.float16):
        bits = bits.view(torch.int16)
    array: np.ndarray = bits.numpy()
    return array.view(STORAGE[dtype])


def from_numpy(array: np.ndarray, dtype: str) -> torch.Tensor:
    """Copy an array of an element type to a tensor."""
    bits = {"bf16": "i2", "f16": "i2", "u32": "i4", "u64": "i8"}.get(dtype)
    copied = np.array(array.view(bits) if bits else array, order="C")
    return torch.from_numpy(copied).view(TYPES[dtype])


@dataclass(slots=True)
class Kept:
    """A cached result: states of its tensors, value, and ops bound to it on the CPU."""

    states: tuple[tuple[int, int], ...]
    value: Any
    bound: Bound = field(default_factory=dict)


def state_of(tensor: torch.Tensor, live: bool = False) -> tuple[int, int]:
    """Return what changes with the memory, and on writes if neither `live` nor inference mode."""
    return tensor.data_ptr(), 0 if live or tensor.is_inference() else tensor._version


_kept: MutableMapping[torch.Tensor, dict[Any, Kept]] = WeakTensorKeyDictionary()


def kept(
    tensors: Sequence[torch.Tensor], what: object, make: Callable[[], Any], *, live: bool = False
) -> Kept:
    """Return the result of `make` for `what` and these tensors, cached while the first lives."""
    states = tuple([state_of(t, live) for t in tensors])
    key = (what, tuple(id(t) for t in tensors[1:]))
    uses = _kept.setdefault(tensors[0], {})
    found = uses.get(key)
    if found is None or found.states != states:
        found = uses[key] = Kept(states, make())
    return found


def planes_of(
    planes: Sequence[torch.Tensor], name: str, shape: Sequence[int]
) -> tuple[Format, dict[str, torch.Tensor]]:
    """Return a matrix's format and planes by name; ShapeError if wrong or not contiguous."""
    fmt, shape = parse_format(name), tuple(shape)
    if isinstance(fmt, Bsr) and len(planes) > 1:
        fmt = replace(fmt, nnzb=len(planes[1]))
    expected: dict[str, Plane] = fmt.planes(shape)
    if len(planes) != len(expected):
        raise ShapeError(
            f"{name}: {len(planes)} planes; expected {len(expected)}: {', '.join(expected)}"
        )
    for (plane_name, plane), got in zip(expected.items(), planes, strict=True):
        if tuple(got.shape) != plane.shape or got.dtype != TYPES[plane.dtype]:
            raise ShapeError(
                f"{name}: plane {plane_name!r} of a {list(shape)} matrix is "
                f"{got.dtype}{list(got.shape)}; expected {TYPES[plane.dtype]}{list(plane.shape)}"
            )
        if not got.is_contiguous():
            raise ShapeError(
                f"{name}: plane {plane_name!r} is not contiguous; call contiguous() on it once"
            )
        if got.device != planes[0].device:
            raise ShapeError(f"{name}: planes on {planes[0].device} and on {got.device}")
    return fmt, dict(zip(expected, planes, strict=True))


def host_matrix(planes: Sequence[torch.Tensor], name: str, shape: Sequence[int]) -> Kept:
    """Return a matrix of CPU tensors as a QuantTensor."""

    def make() -> QuantTensor:
        fmt, named = planes_of(planes, name, shape)
        dtypes = {n: plane.dtype for n, plane in fmt.planes(tuple(shape)).items()}
        made = QuantTensor(tuple(shape), fmt, {n: as_numpy(t, dtypes[n]) for n, t in named.items()})
        made.check()
        return made

    return kept(planes, (name, tuple(shape), "host"), make)


def sizes(spec: OpSpec, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the dimension letters stand for, checked."""
    shapes = {
        p.name: found[f"{p.name}_shape"] if p.kind == "matrix" else found[p.name].shape
        for p in facts(spec.name).given
        if p.name in found
    }
    told: dict[str, Any] = sizes_of(spec, shapes, {n: found[n] for n in facts(spec.name).untold})
    return told


def type_of(spec: OpSpec, param: Param, found: Mapping[str, Any]) -> torch.dtype:
    """Return the type of an output."""
    lead = found[facts(spec.name).given[0].name].dtype
    return lead if param.narrow and lead in _FLOATS else TYPES[param.dtypes[0]]


def typed(
    spec: OpSpec, param: Param, tensor: torch.Tensor, attrs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Return a tensor of a type that the contract has, and the name of the type.

    Floats may be given in any of torch's three; what the contract has as fp32 becomes that.
    """
    known = param.dtypes or (str(attrs["kv_dtype"]),)
    for dtype in known:
        if tensor.dtype == TYPES[dtype]:
            return tensor, dtype
    if "f32" in known and param.dtypes and param.kind != "inout" and tensor.dtype in _FLOATS:
        return tensor.float(), "f32"
    expected = " or ".join(str(TYPES[dtype]) for dtype in known)
    raise ShapeError(f"{spec.name}: {param.name!r} is {tensor.dtype}; expected {expected}")
