"""Ops over whole texts: what the references of the op table define, without their loops."""

import numpy as np

from clocher_kernels.quant_tensor import QuantTensor

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

    Args:
        q: [T, H D] fp32.
        k: [T, Hkv D] fp32.
        v: [T, Hkv D] fp32.
        head_dim: D.
        scale: factor of the dot product.
        window: visible keys, the query included; 0 for all.
        sinks: [H], one logit per head that enlarges the denominator.

    Returns:
        [T, H D] fp32.
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
    """Return the gated hidden layer [m, I] of interleaved products [m, 2 I]; see `moe_gate_up`."""
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
