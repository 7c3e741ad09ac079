"""The linears of a layer: where they get their inputs, what is told of them, whole texts at once.

The ops over whole texts are what the references of the op table define, without their loops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clocher_kernels.ops import OPS, of_experts, written
from clocher_kernels.ops.rewrite import CODES
from clocher_kernels.plan import Call
from clocher_kernels.quant_tensor import QuantTensor


@dataclass(frozen=True, slots=True)
class Site:
    """Linears that read the same input."""

    layer: int  # index of the layer; -1 for the head
    # names of the linears' tensors; of the experts', those that read all tokens' input
    weights: tuple[str, ...]


class Observer(Protocol):
    """What is told of the inputs while a layer is computed."""

    def linear(self, site: Site, x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the tokens in `rows`."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: "ExpertInputs", rows: np.ndarray
    ) -> None:
        """Take the inputs of the next tokens (numbers `rows`) that chose an expert."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: "Hidden") -> None:
        """Learn that an expert has seen all its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertInputs:
    """Inputs of an expert's two products: x [m, K], gated [m, I], router weights [m]."""

    x: np.ndarray
    gated: np.ndarray
    router: np.ndarray


Hidden = Callable[[np.ndarray], ExpertInputs]
"""Compute an expert's hidden layer for any tokens of its layer, numbers [m]; router weights 1."""


def source_of(call: Call) -> str:
    """Return the buffer with the float input of a product."""
    return call.args["x"].removesuffix(CODES)


def multiplies(call: Call) -> bool:
    """Return whether a call multiplies tokens by a matrix, their own or that of experts."""
    return call.op == "linear" or of_experts(call)


def sites_of(layer: int, calls: Sequence[Call]) -> dict[int, Site]:
    """Return, for the first product of each input, the products that share it."""
    first: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for number, call in enumerate(calls):
        if multiplies(call) and OPS[call.op].param("x").dims == "M K":
            start = first.setdefault(source_of(call), number)
            members.setdefault(start, []).append(call.args["w"])
        for name in written(call):
            first.pop(name, None)
    return {start: Site(layer, tuple(names)) for start, names in members.items()}


_QUERIES = 256


def causal_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    head_dim: int,
    scale: float,
    window: int,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """Attend over one whole sequence: the `attention` op for tokens 0 .. T-1 of an empty cache.

    `q`: [T, H D] fp32; `k`: [T, Hkv D] fp32; `v`: [T, Hkv D] fp32; `head_dim`: D; `scale`: factor
    of the dot product; `window`: visible keys, the query included; 0 for all; `sinks`: [H], one
    logit per head that enlarges the denominator. Returns [T, H D] fp32.
    """
    length = len(q)
    queries = q.reshape(length, -1, head_dim)
    keys, values = k.reshape(length, -1, head_dim), v.reshape(length, -1, head_dim)
    group = queries.shape[1] // keys.shape[1]
    out = np.empty_like(queries)
    for start in range(0, length, _QUERIES):
        stop = min(start + _QUERIES, length)
        first = max(0, start - window + 1) if window else 0
        distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        for head in range(queries.shape[1]):
            source = head // group
            logits = queries[start:stop, head] @ keys[first:stop, source].T
            logits *= np.float32(scale)
            logits[hidden] = -np.inf
            top = logits.max(axis=1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[head])
            np.exp(logits - top, out=logits)
            total = logits.sum(axis=1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks[head] - top)
            out[start:stop, head] = (logits @ values[first:stop, source]) / total
    return out.reshape(q.shape)


def clamped_swiglu(product: np.ndarray, limit: float, alpha: float) -> np.ndarray:
    """Return the gated hidden layer [m, I] of interleaved products [m, 2 I]; see `ops.moe`."""
    gate, up = np.minimum(product[:, 0::2], limit), np.clip(product[:, 1::2], -limit, limit)
    return np.asarray((up + 1) * gate / (1 + np.exp(-alpha * gate)), np.float32)


def expert_matrix(tensor: QuantTensor, expert: int) -> np.ndarray:
    """Decode one expert of a tensor [E, N, K]: fp32 [N, K]."""
    planes = {name: plane[expert] for name, plane in tensor.planes.items()}
    return tensor.format.decode(planes, tensor.shape[1:])


def look_up_rows(table: QuantTensor, ids: np.ndarray | slice) -> np.ndarray:
    """Decode the rows of a table [V, K] that are asked for: fp32 [m, K]."""
    if all(plane.shape[0] == table.shape[0] for plane in table.planes.values()):
        planes = {name: plane[ids] for name, plane in table.planes.items()}
        rows = len(next(iter(planes.values())))
        return table.format.decode(planes, (rows, table.shape[1]))
    return table.decode()[ids]
