"""The inputs of a step, written from one flat record for each request of it.

The record has the numbers of `RECORD`, in that order; the ids of the request's tokens in the step,
those of its draft, and the parents of the draft's nodes stand one after the other in an i32 array.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel

TOKENS = {"ids": "i4", "slots": "i4", "positions": "i4", "ends": "i4", "ancestors": "u8"}
"""Array -> type, of those with an element for each token."""
ROWS = {
    "rows": "i4",
    "masked": "i4",
    "temperature": "f4",
    "top_k": "i4",
    "top_p": "f4",
    "seeds": "u8",
    "draws": "i4",
}
"""Those with an element for each output row."""
(_IDS, _SLOTS, _POSITIONS, _ENDS, _ANCESTORS) = range(0, 40, 8)
(_OUT, _MASKED, _TEMPERATURE, _TOP_K, _TOP_P, _SEEDS, _DRAWS) = range(40, 96, 8)

RECORD = struct.Struct("=10qQ2f")
(_START, _COUNT, _DRAFTED, _ROW, _ROW_COUNT, _SLOT, _CELLS, _MADE, _MASK, _SETTING_K, _SEED) = (
    range(0, 88, 8)
)
_SETTING_T, _SETTING_P = 88, 92
_FEW = 256


def _write(tables, record, ids):  # type: ignore[no-untyped-def]
    """Write the tokens and the output rows of a request.

    Args:
        tables: addresses of the arrays, i64.
        record: address of its record.
        ids: address of its ids, those of its draft, and the parents.
    """
    start, count, drafted = (
        v.read_i64(record + _START),
        v.read_i64(record + _COUNT),
        v.read_i64(record + _DRAFTED),
    )
    cells, slot = v.read_i64(record + _CELLS), v.read_i64(record + _SLOT)
    parents = ids + 4 * (count + drafted)
    is_chain = True
    for node in range(drafted):
        if v.read_i32(parents + 4 * node) != node - 1:
            is_chain = False
    for i in range(count + drafted):
        at = start + i
        position, ancestors = cells + i, 0
        end = position + 1
        if i >= count and not is_chain:
            node = i - count
            parent = min(v.read_i32(parents + 4 * node), node - 1)
            position, end, ancestors = cells + count, cells + count, 1 << node
            if parent >= 0:
                other = start + count + parent
                position = v.read_i32(v.read_i64(tables + _POSITIONS) + 4 * other) + 1
                ancestors |= v.read_i64(v.read_i64(tables + _ANCESTORS) + 8 * other)
        v.write_i32(v.read_i64(tables + _IDS) + 4 * at, v.read_i32(ids + 4 * i))
        v.write_i32(v.read_i64(tables + _SLOTS) + 4 * at, slot)
        v.write_i32(v.read_i64(tables + _POSITIONS) + 4 * at, position)
        v.write_i32(v.read_i64(tables + _ENDS) + 4 * at, end)
        v.write_i64(v.read_i64(tables + _ANCESTORS) + 8 * at, ancestors)
    rows, mask = v.read_i64(record + _ROW_COUNT), v.read_i64(record + _MASK)
    first = start + count + drafted - rows
    text_end = cells + count - 1
    for i in range(rows):
        at = v.read_i64(record + _ROW) + i
        draws = v.read_i64(record + _MADE)
        if drafted:
            draws += v.read_i32(v.read_i64(tables + _POSITIONS) + 4 * (first + i)) - text_end
        v.write_i32(v.read_i64(tables + _OUT) + 4 * at, first + i)
        v.write_i32(v.read_i64(tables + _MASKED) + 4 * at, mask + i if mask else 0)
        v.write_i32(v.read_i64(tables + _TEMPERATURE) + 4 * at, v.read_i32(record + _SETTING_T))
        v.write_i32(v.read_i64(tables + _TOP_K) + 4 * at, v.read_i64(record + _SETTING_K))
        v.write_i32(v.read_i64(tables + _TOP_P) + 4 * at, v.read_i32(record + _SETTING_P))
        v.write_i64(v.read_i64(tables + _SEEDS) + 8 * at, v.read_i64(record + _SEED))
        v.write_i32(v.read_i64(tables + _DRAWS) + 4 * at, draws)


write = Kernel(_write)


class Stager:
    """Writes the inputs of a step to arrays of `TOKENS` and `ROWS`.

    Raises:
        ShapeError: an array is of another type or size, or not contiguous.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._rows = len(arrays["ids"]), len(arrays["rows"])
        for names, size in ((TOKENS, self._tokens), (ROWS, self._rows)):
            for name, kind in names.items():
                array = arrays[name]
                if array.dtype != kind or array.shape != (size,) or not array.flags.c_contiguous:
                    raise ShapeError(
                        f"input {name}: {array.dtype} {array.shape}; expected {kind} ({size},)"
                    )
        self._arrays = [arrays[name] for name in (*TOKENS, *ROWS)]
        self._tables = np.array([array.ctypes.data for array in self._arrays], np.int64)
        self._record = ctypes.create_string_buffer(RECORD.size)
        self._few = (ctypes.c_int32 * _FEW)()
        self._addresses = (self._tables.ctypes.data, ctypes.addressof(self._record))
        self._few_at = ctypes.addressof(self._few)
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(write.address)

    def write(self, ids: Sequence[int], parents: Sequence[int], *record: float) -> None:
        """Write the tokens and the output rows of a request.

        Args:
            ids: of its tokens, and of its draft's.
            parents: of the nodes of the draft, before each; -1 for none.
            record: the place of its first token in the step, tokens before the draft, tokens of the
                draft, the place of its first output row, output rows, slot, cells in the cache,
                tokens made so far, number of its first mask or 0, top_k, seed, temperature, top_p.

        Raises:
            ShapeError: the step has no room for it.
        """
        start, count, drafted, row, rows = record[:5]
        total = count + drafted
        fits = 0 <= start <= self._tokens - total and 0 <= row <= self._rows - rows
        if not fits or rows > total or len(ids) != total or len(parents) != drafted:
            raise ShapeError(
                f"tokens {start} .. {start + total} and rows {row} .. {row + rows} of {len(ids)} "
                f"ids and {len(parents)} parents; the step has room for {self._tokens} and "
                f"{self._rows}"
            )
        RECORD.pack_into(self._record, 0, *record)
        numbers = [*ids, *parents]
        if len(numbers) <= _FEW:
            self._few[: len(numbers)] = numbers
            self._call(*self._addresses, self._few_at)
        else:
            many = np.array(numbers, np.int32)
            self._call(*self._addresses, many.ctypes.data)
