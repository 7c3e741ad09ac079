"""Single ops on the CPU: `CpuExecutor`s with a Plan of one op, bound once to a weight."""

import os
import threading
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.library.signature import (
    checked_attributes,
    facts,
    one_of_act_prec,
    op_plan,
    shapes_of,
    sizes_of,
)
from clocher_kernels.ops.contract import OpSpec, Param, Value, rows_of
from clocher_kernels.plan import Attr, Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team.hints import Hints
from cpu_fallback.team.openmp import OpenMP
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.team.team import aligned

Bound = dict[Any, "BoundOp"]

_FEW, _MANY = 16, 256
"""Capacities of Plans in tokens; more tokens are split."""


class Host:
    """A thread team (calling thread included), its shared buffers, and its lock."""

    def __init__(self, threads: int, runtime: OpenMP | None = None) -> None:
        self.lock = threading.RLock()
        # How many of its threads are busy elsewhere is the runtime's affair: to it, another number
        # for a while means ending threads and starting them again.
        self.executor = CpuExecutor(
            Plan(1, 1, {}, {}, (), ()),
            {},
            threads,
            hints=Hints(adaptive=runtime is None, runtime=runtime),
        )
        self._memory: dict[str, np.ndarray] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array for a buffer; those of one name share memory."""
        storage = STORAGE[dtype]
        nbytes = prod(shape) * storage.itemsize
        if name not in self._memory or self._memory[name].nbytes < nbytes:
            self._memory[name] = aligned(nbytes)
        return self._memory[name][:nbytes].view(storage).reshape(shape)


@cache
def _host(threads: int, runtime: OpenMP | None, process: int) -> Host:
    return Host(threads, runtime)


def host(threads: int | None = None, runtime: OpenMP | None = None) -> Host:
    """Return the team of a size; None: a thread per usable CPU. UsageError for a bad size."""
    threads = usable_cpus() if threads is None else threads
    if not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads is {threads!r}; expected a whole number from 1")
    return _host(threads, runtime, os.getpid())


class BoundOp:
    """An op with its weights, settings and in-place arrays (`values`), for any number of tokens."""

    def __init__(self, spec: OpSpec, plan: Plan, values: Mapping[str, Value], team: Host) -> None:
        self._team, self._values = team, dict(values)
        memory: dict[str, np.ndarray] = {}
        for name, buffer in plan.buffers.items():
            there = values.get(name)
            own = isinstance(there, np.ndarray)
            memory[name] = there if own else team.room(name, buffer.shape, buffer.dtype)  # type: ignore[assignment]
        weights = {name: values[name] for name in plan.weights}
        self._executor = CpuExecutor(
            plan, weights, team.executor._team.threads, beside=team.executor, memory=memory
        )
        staged = [p for p in spec.params if p.name in plan.buffers and p.name not in values]
        self._ins = [(p.name, memory[p.name], rows_of(p)) for p in staged if p.kind == "in"]
        self._outs = [(p.name, memory[p.name]) for p in staged if p.kind == "out"]
        self._capacity = plan.tokens

    def run(self, values: Mapping[str, Value], tokens: int) -> dict[str, np.ndarray]:
        """Return the outputs for `tokens` tokens; bound arguments among `values` are ignored."""
        capacity = self._capacity
        outs = {name: np.empty((tokens, *room.shape[1:]), room.dtype) for name, room in self._outs}
        with self._team.lock:
            for first in range(0, tokens, capacity):
                count = min(capacity, tokens - first)
                for name, room, follows_tokens in self._ins:
                    value = values[name]
                    assert isinstance(value, np.ndarray)
                    if follows_tokens:
                        room[:count] = value[first : first + count]
                    else:
                        room[...] = value
                self._executor.step(count, 1)
                for name, room in self._outs:
                    outs[name][first : first + count] = room[:count]
        return outs


def bind(
    spec: OpSpec,
    values: Mapping[str, Value],
    attrs: Mapping[str, Attr],
    bound: Bound,
    team: Host,
    *,
    more: Mapping[str, int] | None = None,
    act_prec: str = "",
) -> BoundOp:
    """Return an op bound to its weights, for any number of tokens.

    Matrices, vectors and caches are used in place and must not change while `bound`, the cache of
    bound ops, is kept. `more` has sizes that no argument has. ShapeError, UnsupportedOp or
    UsageError for bad arguments.
    """
    attrs = checked_attributes(spec, attrs)
    one_of_act_prec(act_prec)
    sizes = sizes_of(spec, shapes_of(values), more or {})
    _require(spec, values, more or {})
    tokens = sizes["M"]
    capacity = _FEW if tokens <= _FEW else _MANY
    there = [p for p in spec.params if p.name in values]
    kept = {p.name: values[p.name] for p in there if stays(p)}
    signature = tuple((p.name, p.name in kept or values[p.name].shape[1:]) for p in there)
    objects = tuple(id(each) for each in kept.values() if isinstance(each, np.ndarray))
    setting = (tuple(attrs.items()), tuple((more or {}).items()), act_prec)
    key = (spec.name, capacity, id(team), signature, setting, objects, _types(values))
    if key not in bound:
        with team.lock:
            bound[key] = _bind(spec, values, kept, attrs, sizes, capacity, act_prec, team)
    return bound[key]


def _bind(
    spec: OpSpec,
    values: Mapping[str, Value],
    kept: Mapping[str, Value],
    attrs: Mapping[str, Attr],
    sizes: Mapping[str, int],
    capacity: int,
    act_prec: str,
    team: Host,
) -> BoundOp:
    shapes = {
        p.name: (capacity, *values[p.name].shape[1:]) if rows_of(p) else values[p.name].shape
        for p in spec.params
        if p.name in values
    }
    formats = {n: v.format for n, v in values.items() if isinstance(v, QuantTensor)}
    dtypes = {p.name: _dtype(p, values[p.name], attrs) for p in spec.params if p.name in shapes}
    dtypes = {name: dtype for name, dtype in dtypes.items() if name not in formats}
    plan = op_plan(
        spec, shapes, dtypes, formats, {**sizes, "M": capacity}, attrs, act_prec or "int8"
    )
    # A copy, so that bound ops are freed with the caller's object.
    own = {
        name: QuantTensor(v.shape, v.format, v.planes) if isinstance(v, QuantTensor) else v
        for name, v in kept.items()
    }
    return BoundOp(spec, plan, own, team)


def stays(param: Param) -> bool:
    """Return whether an argument is used in place: weights and caches."""
    return param.kind in ("matrix", "vector", "inout") or "P" in param.letters


def _require(spec: OpSpec, values: Mapping[str, Value], more: Mapping[str, int]) -> None:
    for param in spec.params:
        if param.kind != "out" and not param.optional and param.name not in values:
            raise ShapeError(f"{spec.name}: no argument for {param.name!r}")
    for letter in facts(spec.name).untold:
        if letter not in more:
            raise UsageError(f"{spec.name}: give the size {letter} of its outputs")
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            known = spec.param(name).dtypes
            if known and value.dtype not in [STORAGE[d] for d in known]:
                expected = " or ".join(str(STORAGE[d]) for d in known)
                raise ShapeError(f"{spec.name}: {name!r} is {value.dtype}; expected {expected}")


def _types(values: Mapping[str, Value]) -> tuple[str, ...]:
    return tuple(str(v.dtype) for v in values.values() if isinstance(v, np.ndarray))


def _dtype(param: Param, value: Value, attrs: Mapping[str, Attr]) -> str:
    if isinstance(value, QuantTensor):
        return ""
    known = param.dtypes or (str(attrs["kv_dtype"]),)
    return next((d for d in known if STORAGE[d] == value.dtype), known[0])
