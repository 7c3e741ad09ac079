"""The contract of an op called alone: sizes, outputs, attributes, its Plan."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case, OpSpec, Param
from clocher_kernels.ops.rewrite import quantize_activations, quantize_for_ternary
from clocher_kernels.plan import Attr, Plan
from clocher_kernels.quant_tensor import QuantTensor

LIBRARY = ("linear", "bsr_linear", "route", "moe_gate_up", "moe_down", "attention", "kv_append")
ACT_GROUP = 128
ACT_PREC = ("", "int8", "fp32")
"""Activations of integer weights; "" is the back end's default."""
_HALF = {"I": "J"}
"""Dimension letter -> the letter of twice its size: gate and up are rows of one matrix."""


class AttrOf(NamedTuple):
    """An op's scalar setting: its type, and its default or `inspect.Parameter.empty`."""

    type: type
    default: Any


class Facts(NamedTuple):
    """Properties of a contract.

    `given` are the caller's arguments, required ones first, `letters` their dimension letters,
    `attributes` the scalar ones. `untold` are letters of outputs that no argument has.
    """

    given: tuple[Param, ...]
    letters: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, AttrOf]
    untold: tuple[str, ...]
    outputs: tuple[Param, ...]


@cache
def facts(name: str) -> Facts:
    """Return the properties of an op's contract."""
    spec = OPS[name]
    params = sorted((p for p in spec.params if p.kind != "out"), key=lambda p: p.optional)
    outputs = tuple(p for p in spec.params if p.kind == "out")
    told = {letter for p in params for letter in p.letters}
    told |= {half for half, whole in _HALF.items() if whole in told}
    letters = dict.fromkeys(letter for p in outputs for letter in p.letters)
    names = {p.name for p in spec.params}
    taken = inspect.signature(spec.reference).parameters.values()
    attributes = {p.name: AttrOf(p.annotation, p.default) for p in taken if p.name not in names}
    return Facts(
        tuple(params),
        {p.name: p.letters for p in params},
        attributes,
        tuple(letter for letter in letters if letter not in told),
        outputs,
    )


def sizes_of(
    spec: OpSpec, shapes: Mapping[str, Sequence[int]], more: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of a call's dimension letters; ShapeError if arguments do not fit."""
    sizes = dict(more)
    for param in facts(spec.name).given:
        shape = shapes.get(param.name)
        if shape is None:
            continue
        letters = facts(spec.name).letters[param.name]
        if len(shape) != len(letters):
            raise ShapeError(
                f"{spec.name}: {param.name!r} has shape {list(shape)}; expected [{param.dims}]"
            )
        for letter, size in zip(letters, shape, strict=True):
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
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, str],
    formats: Mapping[str, Format],
    sizes: Mapping[str, int],
    attrs: Mapping[str, Attr],
    act_prec: str,
) -> Plan:
    """Return the Plan of one op, with quantisation of its activations if needed; M at capacity."""
    # Arrays with shape and type but no memory.
    values: dict[str, Any] = {
        name: np.broadcast_to(np.zeros((), STORAGE[dtype]), shapes[name])
        for name, dtype in dtypes.items()
    }
    plan = case_plan(spec, Case("call", sizes, attrs), {**values, **dict.fromkeys(formats)})  # type: ignore[dict-item]
    plan = quantize_for_ternary(plan, formats)
    return quantize_activations(plan, formats, ACT_GROUP) if act_prec == "int8" else plan


def checked_attributes(spec: OpSpec, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
    """Return all attributes, with defaults; UsageError for a missing or unknown one."""
    known = facts(spec.name).attributes
    for name in attrs.keys() - known:
        raise UsageError(f"{spec.name} has no attribute {name!r}; it has {', '.join(known)}")
    whole = {name: attrs.get(name, each.default) for name, each in known.items()}
    for name, value in whole.items():
        if value is inspect.Parameter.empty:
            raise UsageError(f"{spec.name}: no attribute {name!r}; give it by name")
    return whole


def shapes_of(values: Mapping[str, np.ndarray | QuantTensor]) -> dict[str, Sequence[int]]:
    """Return the shapes of arguments."""
    return {name: value.shape for name, value in values.items()}


def one_of_act_prec(act_prec: str, names: Iterable[str] = ACT_PREC) -> str:
    """Return `act_prec`; UsageError if it is not one of `names`."""
    if act_prec not in names:
        spelled = ", ".join(repr(each) for each in names)
        raise UsageError(f"act_prec is {act_prec!r}; expected one of {spelled}")
    return act_prec
