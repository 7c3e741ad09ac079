"""The inputs of a step, written from one flat record for each request of it.

The record is a `Record`; the ids of the request's tokens in the step, those of its draft, and the
parents of the draft's nodes stand one after the other in an i32 array.
"""

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError
from clocher_kernels.plan import ROW_INPUTS, TOKEN_INPUTS
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.record import reader

_FEW = 256

Tables = NamedTuple(
    "Tables", [*((name, int) for name in (*TOKEN_INPUTS, *ROW_INPUTS))]
)  # addresses


class Record(NamedTuple):
    """What is written of a request."""

    start: int  # the place of its first token in the step
    count: int  # tokens before the draft
    drafted: int  # tokens of the draft
    row: int  # the place of its first output row
    rows: int
    slot: int
    cells: int  # in the cache
    made: int  # tokens made so far
    mask: int  # number of its first mask, or 0
    top_k: int
    seed: int
    temperature: float
    top_p: float


RECORD = struct.Struct("=10qQf4xf4x")
_tables_at, _record_at = reader(Tables), reader(Record)


def _write(tables, record, ids):  # type: ignore[no-untyped-def]
    """Write the tokens and the output rows of a request, from the addresses of three arrays."""
    to, r = _tables_at(tables), _record_at(record)
    total = r.count + r.drafted
    parents = ids + 4 * total
    is_chain = True
    for node in range(r.drafted):
        if v.read_i32(parents + 4 * node) != node - 1:
            is_chain = False
    for i in range(total):
        at = r.start + i
        position, ancestors = r.cells + i, 0
        end = position + 1
        if i >= r.count and not is_chain:
            node = i - r.count
            parent = min(v.read_i32(parents + 4 * node), node - 1)
            position, end, ancestors = r.cells + r.count, r.cells + r.count, 1 << node
            if parent >= 0:
                other = r.start + r.count + parent
                position = v.read_i32(to.positions + 4 * other) + 1
                ancestors |= v.read_i64(to.ancestors + 8 * other)
        v.write_i32(to.ids + 4 * at, v.read_i32(ids + 4 * i))
        v.write_i32(to.slots + 4 * at, r.slot)
        v.write_i32(to.positions + 4 * at, position)
        v.write_i32(to.ends + 4 * at, end)
        v.write_i64(to.ancestors + 8 * at, ancestors)
    first = r.start + total - r.rows
    for i in range(r.rows):
        at, draws = r.row + i, r.made
        if r.drafted:
            draws += v.read_i32(to.positions + 4 * (first + i)) - (r.cells + r.count - 1)
        v.write_i32(to.rows + 4 * at, first + i)
        v.write_i32(to.masked + 4 * at, r.mask + i if r.mask else 0)
        v.write_f32(to.temperature + 4 * at, r.temperature)
        v.write_i32(to.top_k + 4 * at, r.top_k)
        v.write_f32(to.top_p + 4 * at, r.top_p)
        v.write_i64(to.seeds + 8 * at, r.seed)
        v.write_i32(to.draws + 4 * at, draws)


write = Kernel(_write)


class Stager:
    """Writes the inputs of a step to arrays of `TOKEN_INPUTS` and `ROW_INPUTS`.

    Raises ShapeError for one of another type or size, or not contiguous.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._rows = len(arrays["ids"]), len(arrays["rows"])
        for names, size in ((TOKEN_INPUTS, self._tokens), (ROW_INPUTS, self._rows)):
            for name, dtype in names.items():
                array, kind = arrays[name], STORAGE[dtype]
                if array.dtype != kind or array.shape != (size,) or not array.flags.c_contiguous:
                    raise ShapeError(
                        f"input {name}: {array.dtype} {array.shape}; expected {kind} ({size},)"
                    )
        self._arrays = [arrays[name] for name in (*TOKEN_INPUTS, *ROW_INPUTS)]
        self._tables = np.array([array.ctypes.data for array in self._arrays], np.int64)
        self._record = ctypes.create_string_buffer(RECORD.size)
        self._few = (ctypes.c_int32 * _FEW)()
        self._addresses = (self._tables.ctypes.data, ctypes.addressof(self._record))
        self._few_at = ctypes.addressof(self._few)
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(write.address)

    def write(self, ids: Sequence[int], parents: Sequence[int], *record: float) -> None:
        """Write the tokens and the output rows of a request. Raises ShapeError without room.

        `ids`: of its tokens, and of its draft's; `parents`: of the nodes of the draft, before each,
        -1 for none; `record`: the values of `Record`.
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
