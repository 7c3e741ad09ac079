"""Torch tensors as kernel arguments, converted once until written to; repeated CPU calls."""

import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from clocher_kernels.cuda.prepack import TORCH_DTYPES as TYPES
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError
from clocher_kernels.formats import Format, Plane, parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.library.host import Bound, BoundOp, sizes_of, untold
from clocher_kernels.ops.contract import OpSpec, Param, dtypes_of
from clocher_kernels.quant_tensor import QuantTensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def as_numpy(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    """View a CPU tensor as a NumPy array, which keeps the memory but not the object alive."""
    bits = tensor.detach()
    if bits.dtype in (torch.bfloat16, torch.float16):
        bits = bits.view(torch.int16)
    array: np.ndarray = bits.numpy()
    return array.view(STORAGE[dtype])


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
        for p in spec.given
        if p.name in found
    }
    known: dict[str, Any] = sizes_of(spec, shapes, {n: found[n] for n in untold(spec)})
    return known


def type_of(spec: OpSpec, param: Param, found: Mapping[str, Any]) -> torch.dtype:
    """Return the type of an output."""
    lead: torch.dtype = found[spec.given[0].name].dtype
    own: torch.dtype = TYPES[param.dtypes[0]]
    return lead if param.narrow and lead in _FLOATS else own


def typed(
    spec: OpSpec, param: Param, tensor: torch.Tensor, attrs: Mapping[str, Any]
) -> tuple[Any, str]:
    """Return a tensor of a type that the contract has, and the name of the type.

    Floats may be given in any of torch's three; what the contract has as fp32 becomes that.
    """
    known = dtypes_of(param, attrs)
    for dtype in known:
        if tensor.dtype == TYPES[dtype]:
            return tensor, dtype
    if "f32" in known and param.dtypes and param.kind != "inout" and tensor.dtype in _FLOATS:
        return tensor.float(), "f32"
    expected = " or ".join(str(TYPES[dtype]) for dtype in known)
    raise ShapeError(f"{spec.name}: {param.name!r} is {tensor.dtype}; expected {expected}")


_FEW = 16
_ready: dict[tuple[Any, ...], "Ready"] = {}
"""By op, first plane, tokens and activation type; entries are removed with the plane."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ready.clear)  # threads do not survive a fork


class Ready(NamedTuple):
    """A call that can be repeated.

    `named` are the arguments after the star; `given` tells which of the others are present. `held`:
    place, plane index (-1 for a vector), tensor and state of each bound argument. `rows`: place,
    name, torch type, contract type and row shape of the others. `outs`: name and type of each
    output.
    """

    op: BoundOp
    threads: int
    named: dict[str, Any]
    given: tuple[bool, ...]
    held: tuple[tuple[int, int, "weakref.ref[Any]", tuple[int, int]], ...]
    rows: tuple[tuple[int, str, torch.dtype, str, tuple[int, ...]], ...]
    outs: tuple[tuple[str, torch.dtype], ...]


def _key(name: str, positional: Sequence[Any]) -> tuple[Any, ...] | None:
    for each in positional:
        if isinstance(each, list):
            lead = positional[0]
            return (name, id(each[0]), lead.shape[0] <= _FEW, lead.dtype) if each else None
    return None


def repeat(name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the outputs of a call if a like one was kept; else an empty list."""
    found = _ready.get(_key(name, positional))  # type: ignore[arg-type]
    if (
        found is None
        or found.named != named
        or found.threads != torch.get_num_threads()
        or found.given != tuple([each is not None for each in positional])
    ):
        return []
    for place, plane, held, state in found.held:
        now: Any = positional[place] if plane < 0 else positional[place][plane]
        if held() is not now or state_of(now) != state:  # type: ignore[arg-type]
            return []
    tokens = positional[0].shape[0]
    values: dict[str, np.ndarray] = {}
    for place, param, kind, dtype, row in found.rows:
        now = positional[place]
        if now.dtype is not kind or now.shape != (tokens, *row) or not now.is_cpu:
            return []
        stored = now.float() if dtype == "f32" and kind is not torch.float32 else now
        values[param] = as_numpy(stored, dtype)
    outs = found.op.run(values, tokens)
    made = [torch.from_numpy(outs[param]) for param, _ in found.outs]
    return [
        each if kind is torch.float32 else each.to(kind)
        for each, (_, kind) in zip(made, found.outs, strict=True)
    ]


def _forget(key: tuple[Any, ...], _: object, kept: dict[tuple[Any, ...], Ready] = _ready) -> None:
    kept.pop(key, None)  # an argument: the module may be cleared already


def keep(
    spec: OpSpec,
    positional: Sequence[Any],
    named: Mapping[str, Any],
    op: BoundOp,
    types: Mapping[str, str],
    outs: Sequence[tuple[str, torch.dtype]],
) -> None:
    """Keep a call for repetition; `types` are of unbound arguments."""
    key = _key(spec.name, positional)
    if key is None:
        return
    held, rows = [], []
    for place, (param, value) in enumerate(zip(spec.given, positional, strict=False)):
        if value is None:
            continue
        if param.name in types:
            kind, row = value.dtype, tuple(value.shape[1:])
            rows.append((place, param.name, kind, types[param.name], row))
            continue
        planes = list(enumerate(value)) if isinstance(value, list) else [(-1, value)]
        for plane, tensor in planes:
            if id(tensor) == key[1]:
                seen = weakref.ref(tensor, partial(_forget, key))
            else:
                seen = weakref.ref(tensor)
            held.append((place, plane, seen, state_of(tensor)))
    given = tuple(each is not None for each in positional)
    _ready[key] = Ready(
        op, torch.get_num_threads(), dict(named), given, tuple(held), tuple(rows), tuple(outs)
    )
