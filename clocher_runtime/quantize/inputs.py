"""Calibration text, and arrays with a row for each of its tokens."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError

_HELD_OUT = 16


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


def make_text(sequences: Sequence[Sequence[int]], seed: int = 0, held_out: int = _HELD_OUT) -> Text:
    """Lay sequences out; hold out one in `held_out` (at least one). Raises UsageError."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if len(lengths) < 2 or min(lengths) < 1:
        raise UsageError(
            f"{len(lengths)} calibration sequences of {min(lengths, default=0)} or more tokens; "
            "expected at least 2, none empty: one is held out to judge the others' fit"
        )
    count = max(1, round(len(lengths) / held_out))
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

    def take(self, other: "RowStore") -> None:
        """Become a copy of another store of the same shape."""
        self._array[:] = other._array
        self.release()
        other.release()

    def release(self) -> None:
        """Let the kernel drop the resident pages; the data stays."""
        self._map.madvise(mmap.MADV_DONTNEED)
