"""Inputs of linears: the text, hidden states in an unnamed file, statistics, and their readers."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.ops import OPS, of_experts, written
from clocher_kernels.ops.rewrite import CODES
from clocher_kernels.plan import Call
from clocher_kernels.quant_tensor import QuantTensor

HELD_OUT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Concatenated token sequences."""

    ids: np.ndarray  # all tokens, [T] i32
    positions: np.ndarray  # of each token in its sequence, [T] i32
    lengths: tuple[int, ...]  # tokens of each sequence
    held: np.ndarray  # whether a token's sequence is held out from fitting, [T] bool

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.ids)

    def chunks(self, limit: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Yield runs of whole sequences of at most `limit` tokens: (tokens, lengths)."""
        start = 0
        lengths: list[int] = []
        for length in self.lengths:
            if lengths and sum(lengths) + length > limit:
                yield slice(start, start + sum(lengths)), tuple(lengths)
                start, lengths = start + sum(lengths), []
            lengths.append(length)
        yield slice(start, start + sum(lengths)), tuple(lengths)


def make_text(sequences: Sequence[Sequence[int]], seed: int = 0, held_out: int = HELD_OUT) -> Text:
    """Lay sequences out; hold out one in `held_out` (at least one). Raises UsageError."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if len(lengths) < 2 or min(lengths) < 1:
        raise UsageError(
            f"{len(lengths)} calibration sequences of {min(lengths, default=0)} or more tokens; "
            "expected at least 2, none empty: one is held out to judge the others' fit"
        )
    rng = np.random.default_rng(seed)
    count = max(1, round(len(lengths) / held_out))
    chosen = np.zeros(len(lengths), bool)
    chosen[rng.choice(len(lengths), count, replace=False)] = True
    return Text(
        np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        lengths,
        np.repeat(chosen, lengths),
    )


class RowStore:
    """An fp32 array [rows, columns] in an unnamed temporary file."""

    def __init__(self, rows: int, columns: int, directory: Path | None = None) -> None:
        self.shape = (rows, columns)
        nbytes = max(1, rows * columns * 4)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._array = np.frombuffer(self._map, np.float32).reshape(self.shape)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        return self._array[rows].copy()

    def __setitem__(self, rows: slice | np.ndarray, values: np.ndarray) -> None:
        self._array[rows] = values

    def add(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Add to rows, each named once."""
        self._array[rows] += values

    def release(self) -> None:
        """Let the kernel drop the resident pages; the data stays."""
        self._map.madvise(mmap.MADV_DONTNEED)


HELD_ROWS = 512
"""Held-out inputs kept per site or expert."""


class InputStats:
    """Statistics of inputs x_t, weighted by p_t (the router's weight, else 1)."""

    def __init__(self, columns: int, *, hessian: bool = False) -> None:
        self.tokens = 0
        self._second = np.zeros(columns)
        self.hessian_sum = np.zeros((columns, columns), np.float32) if hessian else None
        self._held: list[np.ndarray] = []

    def add(self, x: np.ndarray, held: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Sum inputs x [m, K] fp32 with weights p [m]; `held` [m] are only kept for judging."""
        if x.shape[1] != len(self._second) or held.shape != x.shape[:1]:
            raise ShapeError(
                f"inputs {list(x.shape)} and mask {list(held.shape)}; expected "
                f"[m, {len(self._second)}] and [m]"
            )
        if weights is not None:
            x = x * weights[:, None]
        fit = x if not held.any() else x[~held]
        kept = sum(len(rows) for rows in self._held)
        if kept < HELD_ROWS and len(fit) < len(x):
            self._held.append(x[held][: HELD_ROWS - kept])
        self.tokens += len(fit)
        self._second += np.einsum("ij,ij->j", fit, fit)
        if self.hessian_sum is not None and len(fit):
            self.hessian_sum += fit.T @ fit

    @property
    def importance(self) -> np.ndarray:
        """E[p^2 x^2] of each column, [K]; zeros without tokens."""
        return self._second / max(1, self.tokens)

    @property
    def hessian(self) -> np.ndarray:
        """H = 2/n sum p^2 x x^T, [K, K]; zeros without tokens."""
        if self.hessian_sum is None:
            raise ShapeError("these statistics have no Hessian; ask for one when they are made")
        return self.hessian_sum * np.float32(2 / max(1, self.tokens))

    @property
    def held(self) -> np.ndarray:
        """Held-out inputs, times p, [at most HELD_ROWS, K]."""
        if not self._held:
            return np.zeros((0, len(self._second)), np.float32)
        return np.concatenate(self._held)


@dataclass(frozen=True, slots=True)
class Site:
    """Linears that read the same input."""

    layer: int  # index of the layer; -1 for the head
    # names of the linears' tensors; of the experts', those that read all tokens' input
    weights: tuple[str, ...]


class Observer(Protocol):
    """Receives the inputs while a layer is computed."""

    def linear(self, site: Site, x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the tokens in `rows`."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: "ExpertInputs", rows: np.ndarray
    ) -> None:
        """Take the inputs of the next tokens (numbers `rows`) routed to an expert."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: "Hidden") -> None:
        """An expert has received all its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertInputs:
    """Inputs of an expert's two matmuls: x [m, K], gated [m, I], router weights [m]."""

    x: np.ndarray
    gated: np.ndarray
    router: np.ndarray


Hidden = Callable[[np.ndarray], ExpertInputs]
"""An expert's hidden layer for tokens [m] of its layer, with router weights 1."""


def source_of(call: Call) -> str:
    """Return a matmul's float input buffer."""
    return call.args["x"].removesuffix(CODES)


def multiplies(call: Call) -> bool:
    """Return whether a call is a matmul, dense or of experts."""
    return call.op == "linear" or of_experts(call)


def sites_of(layer: int, calls: Sequence[Call]) -> dict[int, Site]:
    """Return, by the first matmul of each input, the matmuls that share it."""
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
    """Attend over one whole sequence: the `attention` op with an empty cache.

    `q`: [T, H D], `k` and `v`: [T, Hkv D], fp32; `window`: visible keys, the query included; 0 for
    all; `sinks`: [H], logits added to the denominator. Returns [T, H D] fp32.
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
    """Return gated [m, I] of interleaved gate and up [m, 2 I]; see `ops.moe`."""
    gate, up = np.minimum(product[:, 0::2], limit), np.clip(product[:, 1::2], -limit, limit)
    return np.asarray((up + 1) * gate / (1 + np.exp(-alpha * gate)), np.float32)


def expert_matrix(tensor: QuantTensor, expert: int) -> np.ndarray:
    """Decode one expert of a tensor [E, N, K]: fp32 [N, K]."""
    planes = {name: plane[expert] for name, plane in tensor.planes.items()}
    return tensor.format.decode(planes, tensor.shape[1:])


def look_up_rows(table: QuantTensor, ids: np.ndarray | slice) -> np.ndarray:
    """Decode rows of a table [V, K], fp32 [m, K]."""
    if all(plane.shape[0] == table.shape[0] for plane in table.planes.values()):
        planes = {name: plane[ids] for name, plane in table.planes.items()}
        rows = len(next(iter(planes.values())))
        return table.format.decode(planes, (rows, table.shape[1]))
    return table.decode()[ids]
