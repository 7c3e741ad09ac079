"""Repeated CPU calls: compare what the caller may change, then run only the kernels."""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from clocher_kernels.library.host import BoundOp
from clocher_kernels.library.signature import facts
from clocher_kernels.ops.contract import OpSpec
from clocher_kernels.torch.stored import as_numpy, state_of

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
    for place, (param, value) in enumerate(zip(facts(spec.name).given, positional, strict=False)):
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
