"""`torch.ops.clocher`: the ops of `LIBRARY`, schemas and fake kernels made from the contracts.

A matrix is three arguments: planes (a list of tensors), format name, logical shape. Attributes and
output sizes that no argument has follow the star. Outputs are fp32, or the first argument's type if
the contract lets a GPU store them narrow.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from clocher_kernels.errors import DeviceError, ShapeError, UnsupportedOp
from clocher_kernels.library.host import (
    LIBRARY,
    Bound,
    Host,
    bind,
    host,
    one_of_act_prec,
    stays,
    untold,
)
from clocher_kernels.ops import OPS as CONTRACTS
from clocher_kernels.ops.contract import OpSpec, Param, dtypes_of
from clocher_kernels.torch.stored import (
    as_numpy,
    host_matrix,
    keep,
    kept,
    repeat,
    sizes,
    type_of,
    typed,
)
from cpu_fallback.team.openmp import OpenMP

_PROCESS = os.getpid()


@cache
def _runtime(process: int) -> OpenMP | None:
    # After a fork it would wait for threads that the child does not have.
    return OpenMP.of(torch._C.__file__) if process == _PROCESS else None


def team(threads: int | None = None) -> Host:
    """Return the team of a size; None: as many threads as torch has."""
    return host(torch.get_num_threads() if threads is None else threads, _runtime(os.getpid()))


def awake(threads: int | None = None) -> AbstractContextManager[None]:
    """Return a context in which a team of our own does not sleep between two calls."""
    running: AbstractContextManager[None] = team(threads).executor.running()
    return running


Arguments = Mapping[str, Any]
_SCHEMA_TYPES = {int: "int", float: "float", str: "str", bool: "bool"}


def schema_of(spec: OpSpec) -> str:
    """Return an op's signature in torch's syntax."""
    mutated, args = 0, []
    for p in spec.given:
        if p.kind == "matrix":
            args.append(f"Tensor[] {p.name}")
            continue
        alias = f"(a{mutated}!)" if p.kind == "inout" else ""
        mutated += p.kind == "inout"
        args.append(f"Tensor{alias}{'? ' + p.name + '=None' if p.optional else ' ' + p.name}")
    args.append("*")
    for p in spec.params:
        if p.kind == "matrix":
            args += [f"str {p.name}_format", f"SymInt[] {p.name}_shape"]
    args += [f"SymInt {letter}" for letter in untold(spec)]
    by_default = sorted(spec.attributes.items(), key=lambda a: a[1].default is not _EMPTY)
    for name, each in by_default:
        default = f'"{each.default}"' if each.annotation is str else each.default
        said = "" if each.default is _EMPTY else f"={default}"
        args.append(f"{_SCHEMA_TYPES[each.annotation]} {name}{said}")
    if any("i8" in p.dtypes for p in spec.params if p.kind == "in"):
        args.append('str act_prec=""')
    outs = ", ".join(["Tensor"] * len(spec.outputs))
    return f"({', '.join(args)}) -> {outs if len(spec.outputs) == 1 else f'({outs})'}"


_LIBRARY = torch.library.Library("clocher", "DEF")  # type: ignore[no-untyped-call]
_EMPTY = inspect.Parameter.empty


def _arguments(spec: OpSpec, positional: Sequence[Any], named: Arguments) -> dict[str, Any]:
    names = [p.name for p in spec.given]
    whole = {**dict(zip(names, positional, strict=False)), **named}
    return {name: value for name, value in whole.items() if value is not None}


def _fake(spec: OpSpec, found: Arguments) -> list[torch.Tensor]:
    known, lead = sizes(spec, found), found[spec.given[0].name]
    return [
        lead.new_empty([known[d] for d in p.letters], dtype=type_of(spec, p, found))
        for p in spec.outputs
    ]


def _on_cpu(
    spec: OpSpec, found: Arguments, positional: Sequence[Any], named: Arguments
) -> list[torch.Tensor]:
    """Execute an op on the CPU, with as many threads as torch has."""
    attrs = {name: found[name] for name in spec.attributes if name in found}
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    bound: Bound | None = None
    for p in spec.given:
        if p.name not in found:
            continue
        given_value = found[p.name]
        if p.kind == "matrix":
            whole = host_matrix(given_value, found[f"{p.name}_format"], found[f"{p.name}_shape"])
            values[p.name], bound = whole.value, whole.bound
            continue

        def array(p: Param = p, tensor: torch.Tensor = given_value) -> np.ndarray:
            stored, dtype = typed(spec, p, tensor.detach(), attrs)
            return as_numpy(stored.contiguous(), dtype)

        if not stays(p):
            values[p.name] = array()
            types[p.name] = typed(spec, p, given_value, attrs)[1]
            continue
        is_cache = p.kind != "vector"
        if is_cache and not given_value.is_contiguous():
            raise ShapeError(
                f"{spec.name}: {p.name!r} is not contiguous, and it is used where it lies; "
                "make the cache with torch.zeros"
            )
        one = kept([given_value], (p.name, dtypes_of(p, attrs)), array, live=is_cache)
        values[p.name] = one.value
        bound = one.bound if bound is None and is_cache else bound
    op = bind(
        spec,
        values,
        attrs,
        {} if bound is None else bound,
        team(),
        more={name: found[name] for name in untold(spec)},
        act_prec=found.get("act_prec", ""),
    )
    outs = [(p.name, type_of(spec, p, found)) for p in spec.outputs]
    keep(spec, positional, named, op, types, outs)
    made = op.run(values, sizes(spec, found)["M"])
    return [torch.from_numpy(made[name]).to(dtype) for name, dtype in outs]


def _run(spec: OpSpec, positional: Sequence[Any], named: Arguments) -> list[torch.Tensor]:
    if again := repeat(spec.name, positional, named):
        return again
    found = _arguments(spec, positional, named)
    lead = found[spec.given[0].name]
    for name, value in found.items():
        each = value if isinstance(value, list | tuple) else [value]
        for tensor in each:
            if isinstance(tensor, torch.Tensor) and tensor.device != lead.device:
                raise DeviceError(
                    f"{spec.name}: {name!r} is on {tensor.device} and "
                    f"{spec.given[0].name!r} on {lead.device}; move one of them"
                )
    one_of_act_prec(found.get("act_prec", ""))
    if not sizes(spec, found)["M"]:
        return _fake(spec, found)
    if lead.device.type == "cpu":
        return _on_cpu(spec, found, positional, named)
    if lead.device.type == "cuda":
        from clocher_kernels.torch.gpu import gpu, on_gpu

        return on_gpu(spec, found, gpu(lead.device.index))
    raise DeviceError(
        f"{spec.name}: no kernel for tensors on {lead.device}; move them to the CPU or to CUDA"
    )


def _register(spec: OpSpec) -> Any:
    def shaped(outs: list[torch.Tensor]) -> Any:
        return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)

    def run(*positional: Any, **named: Any) -> Any:
        return shaped(_run(spec, positional, named))

    def fake(*positional: Any, **named: Any) -> Any:
        return shaped(_fake(spec, _arguments(spec, positional, named)))

    def backward(*_: Any) -> None:
        raise UnsupportedOp(f"clocher::{spec.name} has no gradient; it is for inference")

    # `custom_op` would put two more Python functions around each call.
    name = f"clocher::{spec.name}"
    _LIBRARY.define(spec.name + schema_of(spec))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(spec.name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    if not any(p.kind == "inout" for p in spec.params):
        torch.library.register_autograd(name, backward, lib=_LIBRARY)
    packet = getattr(torch.ops.clocher, spec.name)
    shapes = "\n".join(
        f"    {p.name}: {p.kind}, {p.dtype or 'stored'} [{p.dims}]" for p in spec.params
    )
    said = f"{inspect.getdoc(spec.reference)}\n\nShapes:\n{shapes}"
    packet.__doc__ = packet.default.__doc__ = said
    return packet.default


OPS = MappingProxyType({name: _register(CONTRACTS[name]) for name in LIBRARY})
"""The ops by name, also `torch.ops.clocher.NAME`."""
