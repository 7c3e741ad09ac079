"""The contract of an op called alone, and its calls on the CPU, bound once to a weight."""

import inspect
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case, OpSpec, Param, Value, dtype_of, rows_of
from clocher_kernels.ops.rewrite import quantize_activations, quantize_for_ternary, rotate
from clocher_kernels.plan import Attr, Buffer, Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team.openmp import OpenMP
from cpu_fallback.team.placement import Hints, usable_cpus
from cpu_fallback.team.team import aligned

LIBRARY = ("linear", "bsr_linear", "route", "moe_gate_up", "moe_down", "attention", "kv_append")
ACT_PREC = ("", "int8", "fp32")
"""Activations of integer weights; "" is the back end's default."""
_HALF = {"I": "J"}
"""Dimension letter -> the letter of twice its size: gate and up are rows of one matrix."""


@cache
def untold(spec: OpSpec) -> tuple[str, ...]:
    """Return the dimension letters of an op's outputs that no argument has."""
    known = {letter for p in spec.given for letter in p.letters}
    known |= {half for half, whole in _HALF.items() if whole in known}
    letters = dict.fromkeys(letter for p in spec.outputs for letter in p.letters)
    return tuple(letter for letter in letters if letter not in known)


def sizes_of(
    spec: OpSpec, shapes: Mapping[str, Sequence[int]], more: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a call's dimension letters; ShapeError if arguments do not fit."""
    sizes = dict(more)
    for param in spec.given:
        shape = shapes.get(param.name)
        if shape is None:
            continue
        if len(shape) != len(param.letters):
            raise ShapeError(
                f"{spec.name}: {param.name!r} has shape {list(shape)}; expected [{param.dims}]"
            )
        for letter, size in zip(param.letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ShapeError(
                    f"{spec.name}: {param.name!r} has shape {list(shape)}, [{param.dims}], but "
                    f"{letter} is {sizes[letter]} elsewhere in the call"
                )
    for half, whole in _HALF.items():
        if whole in sizes and sizes.setdefault(half, sizes[whole] // 2) * 2 != sizes[whole]:
            raise ShapeError(
                f"{spec.name}: {whole} is {sizes[whole]}, which is not 2 x {half} = "
                f"2 x {sizes[half]}"
            )
    return sizes


def op_plan(
    spec: OpSpec,
    arrays: Mapping[str, tuple[str, Sequence[int]]],
    formats: Mapping[str, Format],
    sizes: Mapping[str, int],
    attrs: Mapping[str, Attr],
    act_prec: str,
) -> Plan:
    """Return the Plan of one op, with quantisation of its activations if needed; M at capacity.

    `arrays` has the element type and the shape of each argument but matrices.
    """
    values: dict[str, Any] = {  # they have no memory
        name: np.broadcast_to(np.zeros((), STORAGE[dtype]), shape)
        for name, (dtype, shape) in arrays.items()
    }
    plan = case_plan(spec, Case("call", sizes, attrs), {**values, **dict.fromkeys(formats)})  # type: ignore[dict-item]
    plan = rotate(quantize_for_ternary(plan, formats), formats)
    return quantize_activations(plan, formats) if act_prec == "int8" else plan


def checked_attributes(spec: OpSpec, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """Return all attributes, with defaults; UsageError for a missing or unknown one."""
    known = spec.attributes
    for name in attrs.keys() - known:
        raise UsageError(f"{spec.name} has no attribute {name!r}; it has {', '.join(known)}")
    whole = {name: attrs.get(name, each.default) for name, each in known.items()}
    for name, value in whole.items():
        if value is inspect.Parameter.empty:
            raise UsageError(f"{spec.name}: no attribute {name!r}; give it by name")
    return whole


def one_of_act_prec(act_prec: str) -> str:
    """Return `act_prec`; UsageError if it is not one of `ACT_PREC`."""
    if act_prec not in ACT_PREC:
        spelled = ", ".join(map(repr, ACT_PREC))
        raise UsageError(f"act_prec is {act_prec!r}; expected one of {spelled}")
    return act_prec


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

    def room(self, name: str, buffer: Buffer) -> np.ndarray:
        """Return an array for a buffer; those of one name share memory."""
        if name not in self._memory or self._memory[name].nbytes < buffer.nbytes:
            self._memory[name] = aligned(buffer.nbytes)
        memory = self._memory[name][: buffer.nbytes]
        return memory.view(STORAGE[buffer.dtype]).reshape(buffer.shape)


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
            memory[name] = there if own else team.room(name, buffer)  # type: ignore[assignment]
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
    attrs, more = checked_attributes(spec, attrs), more or {}
    one_of_act_prec(act_prec)
    sizes = sizes_of(spec, {name: value.shape for name, value in values.items()}, more)
    _require(spec, values, more)
    capacity = _FEW if sizes["M"] <= _FEW else _MANY
    given = [(p, v) for p in spec.params if isinstance(v := values.get(p.name), np.ndarray)]
    signature = tuple((p.name, v.dtype, id(v) if stays(p) else v.shape[1:]) for p, v in given)
    setting = (tuple(attrs.items()), tuple(more.items()), act_prec)
    key = (spec.name, capacity, id(team), signature, setting)
    if key not in bound:
        arrays = {
            p.name: (dtype_of(p, v, attrs), (capacity, *v.shape[1:]) if rows_of(p) else v.shape)
            for p, v in given
        }
        matrices = {n: v for n, v in values.items() if isinstance(v, QuantTensor)}
        formats = {name: w.format for name, w in matrices.items()}
        sizes["M"] = capacity
        plan = op_plan(spec, arrays, formats, sizes, attrs, act_prec or "int8")
        # A copy, so that bound ops are freed with the caller's object.
        own: dict[str, Value] = {p.name: v for p, v in given if stays(p)}
        own |= {n: QuantTensor(w.shape, w.format, w.planes) for n, w in matrices.items()}
        with team.lock:
            bound[key] = BoundOp(spec, plan, own, team)
    return bound[key]


def stays(param: Param) -> bool:
    """Return whether an argument is used in place: weights and caches."""
    return param.kind in ("matrix", "vector", "inout") or "P" in param.letters


def _require(spec: OpSpec, values: Mapping[str, Value], more: Mapping[str, int]) -> None:
    for param in spec.params:
        if param.kind != "out" and not param.optional and param.name not in values:
            raise ShapeError(f"{spec.name}: no argument for {param.name!r}")
    for letter in untold(spec):
        if letter not in more:
            raise UsageError(f"{spec.name}: give the size {letter} of its outputs")
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            known = spec.param(name).dtypes
            if known and value.dtype not in [STORAGE[d] for d in known]:
                expected = " or ".join(str(STORAGE[d]) for d in known)
                raise ShapeError(f"{spec.name}: {name!r} is {value.dtype}; expected {expected}")
