"""Inputs of linears: the text, hidden states in an unnamed file, and statistics."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError, UsageError

_HELD_OUT = 16
HELD_ROWS = 512  # held-out inputs kept per linear or expert


class Text(NamedTuple):
    """Concatenated token sequences."""

    ids: np.ndarray  # all tokens, [T] i32
    positions: np.ndarray  # of each token in its sequence, [T] i32
    lengths: tuple[int, ...]  # tokens of each sequence
    held: np.ndarray  # whether a token's sequence is held out from fitting, [T] bool

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


def make_text(sequences: Sequence[Sequence[int]], seed: int = 0) -> Text:
    """Lay sequences out; hold out one in 16 (at least one). Raises UsageError."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if len(lengths) < 2 or min(lengths) < 1:
        raise UsageError(
            f"{len(lengths)} calibration sequences of {min(lengths, default=0)} or more tokens; "
            "expected at least 2, none empty: one is held out to judge the others' fit"
        )
    count = max(1, round(len(lengths) / _HELD_OUT))
    chosen = np.zeros(len(lengths), bool)
    chosen[np.random.default_rng(seed).choice(len(lengths), count, replace=False)] = True
    return Text(
        np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences]),
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        lengths,
        np.repeat(chosen, lengths),
    )


class RowStore:
    """An fp32 array [rows, columns] in an unnamed temporary file."""

    def __init__(self, rows: int, columns: int) -> None:
        nbytes = max(1, rows * columns * 4)
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self._map = mmap.mmap(file.fileno(), nbytes)
        self._array = np.frombuffer(self._map, np.float32).reshape(rows, columns)

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


class InputStats:
    """Statistics of inputs x_t, weighted by p_t (the router's weight, else 1)."""

    def __init__(self, columns: int, *, hessian: bool = False) -> None:
        self.tokens = 0
        self._second = np.zeros(columns)
        self._hessian = np.zeros((columns, columns), np.float32) if hessian else None
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
        if self._hessian is not None and len(fit):
            self._hessian += fit.T @ fit

    @property
    def importance(self) -> np.ndarray:
        """E[p^2 x^2] of each column, [K]; zeros without tokens."""
        return self._second / max(1, self.tokens)

    @property
    def hessian(self) -> np.ndarray:
        """H = 2/n sum p^2 x x^T, [K, K]; zeros without tokens."""
        assert self._hessian is not None, "made without hessian=True"
        return self._hessian * np.float32(2 / max(1, self.tokens))

    @property
    def held(self) -> np.ndarray:
        """Held-out inputs, times p, [at most HELD_ROWS, K]."""
        return np.concatenate([np.zeros((0, len(self._second)), np.float32), *self._held])


ExpertInputs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Inputs x [m, K] and gated [m, I] of an expert's two matmuls, and the router's weights [m]."""
Hidden = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Tokens [m] of a layer -> an expert's input x [m, K] and gated hidden layer [m, I]."""


class Observer:
    """Receives the inputs while a layer is computed; `rows` are tokens."""

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the linears with these weights."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        """Take the inputs of an expert's two matmuls for the next tokens that are routed to it."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: Hidden) -> None:
        """Note that an expert has received all its tokens."""
