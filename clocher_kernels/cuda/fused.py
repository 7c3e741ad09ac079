"""Runs of calls (`ops.rewrite.runs`) as one launch each, or two: what a step needs fewer of.

A function of `FUSED` gets a run, the arguments and attributes of each call, and what `stacked` made
of their weights; it returns no launch where it does not fit, and the calls are lowered one by one.
For a single token attention enters the token's keys itself. A norm is a launch of its own: made by
every program of the matmul alike it cost a sixth of a step (docs/adr/0048).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from clocher_kernels.cuda import kv
from clocher_kernels.cuda.attention import attention
from clocher_kernels.cuda.bricks import in_bricks
from clocher_kernels.cuda.elementwise import quantize, rms_norm
from clocher_kernels.cuda.few_tokens import few
from clocher_kernels.cuda.gemv_bytes import MOST_SLICED
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.moe import router
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.cuda.scalar import Linear, Tail
from clocher_kernels.formats.floats import Float, Fp8
from clocher_kernels.formats.integers import Int8
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.linear import sums_exactly
from clocher_kernels.ops.rewrite import Run

Given = Mapping[str, Any]
Stacked = tuple[DeviceTensor, torch.Tensor | None]
"""Weights of a run as one, row by row, and their biases."""


def stacked(run: Run, values: dict[str, Any]) -> Stacked | None:
    """Stack the weights of a run; `values` then has views of it. None if they do not fit."""
    calls = [call for call in run.calls if call.op == "linear"]
    if not calls:
        return None
    if len(calls) == 1:
        own = values[calls[0].args["w"]]
        return own, values.get(calls[0].args.get("bias", ""))
    biases = [call.args["bias"] for call in calls if "bias" in call.args]
    whole = stack([values[call.args["w"]] for call in calls])
    if whole is None or len(biases) not in (0, len(calls)):
        return None
    rows = [values[call.args["w"]].shape[0] for call in calls]
    for call, part in zip(calls, cut(whole, rows), strict=True):
        values[call.args["w"]] = part
    return whole, torch.cat([values[name] for name in biases]) if biases else None


def stack(tensors: Sequence[DeviceTensor]) -> DeviceTensor | None:
    """Return matrices of one format as one, row by row; None if a plane has no row for each.

    Nor where only some of them, or only the whole, are in bricks.
    """
    (fmt, width), planes = (tensors[0].format, tensors[0].shape[1:]), dict[str, torch.Tensor]()
    shape = (sum(w.shape[0] for w in tensors), *width)
    if any((w.format, w.shape[1:]) != (fmt, width) for w in tensors) or len(width) != 1:
        return None
    if len({in_bricks(fmt, each) for each in (shape, *(w.shape for w in tensors))}) > 1:
        return None
    for name in tensors[0].planes:
        parts = [w.planes[name] for w in tensors]
        if isinstance(fmt, Ternary) and name == "scale":
            parts = [p.expand(w.shape[0]) for p, w in zip(parts, tensors, strict=True)]
        pairs = zip(parts, tensors, strict=True)
        if any(len(part) * w.rows_of(name) != w.shape[0] for part, w in pairs):
            return None
        planes[name] = torch.cat(parts)
    return DeviceTensor(shape, fmt, planes)


def cut(stacked: DeviceTensor, rows: Sequence[int]) -> list[DeviceTensor]:
    """Return the matrices, of some `rows` each, that `stack` put together: views."""
    planes = {
        name: plane.split([n // stacked.rows_of(name) for n in rows])
        for name, plane in stacked.planes.items()
    }
    return [
        DeviceTensor((n, stacked.shape[1]), stacked.format, {k: p[i] for k, p in planes.items()})
        for i, n in enumerate(rows)
    ]


def _rows(calls: Sequence[Given], device: Device) -> list[Launch]:
    """Return the launch of a norm and codes that the first calls of a run make, if they do."""
    first, codes = calls[0], next((call for call in calls[:2] if "q" in call), None)
    norm = first if "eps" in first else None
    if codes is not None:
        own = {} if norm is None else {"gain": norm["weight"], "eps": norm["eps"]}
        return quantize(**{**codes, "x": first["x"]}, **own, device=device)
    return [] if norm is None else rms_norm(**norm, device=device)


def _products(
    run: Run, calls: Sequence[Given], whole: Stacked | None, device: Device
) -> list[Launch]:
    linears = [call for call in calls if "w" in call]
    last = linears[-1]
    if whole is None or len(last["x"]) > MOST_SLICED or not _fits(calls, whole[0]):
        return []
    w, bias = whole
    y, *more = [call["y"] for call in linears]
    after = {n: last[n] for n in ("activation", "cap", "times", "residual") if n in last}
    gated = len(linears) == 2 and "times" in last
    if gated:
        del after["times"]
    tail = Tail(bias, **after, gated=gated, more=() if gated else tuple(more))
    product = Linear(last["x"], w, y, device, last.get("x_scale"), tail)
    return _rows(calls, device) + few(product)


def _routers(
    run: Run, calls: Sequence[Given], whole: Stacked | None, device: Device
) -> list[Launch]:
    *_, product, choice = calls
    if whole is None or len(product["x"]) > MOST_SLICED or not _fits(calls, whole[0]):
        return []
    if not isinstance(product["w"].format, Float | Int8 | Fp8):
        return []
    return _rows(calls, device) + router(product, choice, device)


def _fits(calls: Sequence[Given], w: DeviceTensor) -> bool:
    """Return whether a norm is one of whole rows, and codes are those that the weight takes."""
    whole = "eps" not in calls[0] or len(calls[0]["weight"]) == w.shape[1]
    coded = any("x_scale" in call for call in calls)
    return whole and (not coded or sums_exactly(w.format, 0))


def _heads(run: Run, calls: Sequence[Given], whole: Stacked | None, device: Device) -> list[Launch]:
    """Norm and rotate queries and keys, append, and attend if that comes next."""
    at = next(i for i, call in enumerate(run.calls) if call.op == "kv_append")
    append, last = calls[at], calls[at + 1] if at + 1 < len(calls) else None
    key, dim = run.calls[at].args["k"], append["k_cache"].shape[3]
    q, turns = None if last is None else last["q"], dict[str, Any]()
    for own, call in zip(run.calls[:at], calls, strict=False):
        who = "k" if own.args["x"] == key else "q"
        q = call["x"] if who == "q" else q
        if own.op == "rope":
            angles, half = call["cos"].shape
            if call["head"] not in (0, dim) or turns.get("HALF", half) != half or 2 * half > dim:
                return []
            turns |= {f"{who}_cos": call["cos"], f"{who}_sin": call["sin"]}
            turns |= {"HALF": half, "ANGLES": min(angles, turns.get("ANGLES", angles))}
        else:
            if len(call["weight"]) != dim or turns.get("EPS", call["eps"]) != call["eps"]:
                return []
            turns |= {f"{who}_gain": call["weight"], "EPS": call["eps"]}
    cells = {n: v for n, v in append.items() if n not in ("k", "v", "cache_dtype")}
    given = kv.heads_given(append["k"], append["v"], cells, append["cache_dtype"], q) | turns
    # Keys of fp32 leave no registers for the heads.
    if last is not None and len(append["k"]) == 1 and append["cache_dtype"] != "f32":
        return attention(**last, heads_of=given, device=device)
    return kv.enter_all(given, device) + ([] if last is None else attention(**last, device=device))


FUSED: dict[str, Callable[[Run, Sequence[Given], Stacked | None, Device], list[Launch]]] = {
    "products": _products,
    "router": _routers,
    "heads": _heads,
}
"""Kind of a run -> function that lowers it."""
