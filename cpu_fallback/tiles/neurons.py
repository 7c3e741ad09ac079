"""Ternary matrices as lines of neurons, of which any may be left out.

Tiles interleave 16 rows, so a line of them is needed as soon as one of the rows is. Here each
neuron has whole lines of 64 bytes of its own: a row of the up projection, or a column of the down
projection. A line has 256 digits of two bits, digit + 1:

    a row      line c, byte 4 l + i, bits 2p, 2p + 1: column 256 c + 16 l + 4 p + i
    a column   line c, byte 16 l + 4 v + d, bits 2p, 2p + 1: row 256 c + 64 v + 16 p + 4 l + d

l and v are 0 .. 15 and 0 .. 3 in turn, i, p and d 0 .. 3. So a row's line times four registers of
activations needs no shuffle, and the lines of four columns, interleaved byte by byte, are dwords of
four neurons of one row each, in an order in which sums are stored as they are. What lies behind the
last column or row is zero.

int4 weights by input channel, so that the channels which a token does not have are not read.

Output channels come in chunks of 128, chunks in panels. A panel is a run of records, one for each
block of columns that share a scale:

    scales  of the block, as stored, one for each output channel of the panel
    rows    one for each column: 64 bytes a chunk

In the 64 bytes of a chunk byte 16 q + 4 a + i holds in its low half the code of channel
16 a + 4 q + i, in its high half that of the channel 64 further. Four rows whose bytes are
interleaved within quarters are then operands of dot products, in the order of the channels.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Int4, Ternary
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import cgutils, i64, void
from cpu_fallback.lanes.simd import BYTES, I32, INT32, INT64, SHORTS, behind, constant, emit_at
from cpu_fallback.team.large_pages import allocate, give_back
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.byte_dots import bits, dots_of
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import plus

DIGITS = 256  # of a line
_CHUNK = 256

_packed: dict[tuple[int, bool], np.ndarray] = {}


def stride_of(digits: int) -> int:
    """Return the bytes of a neuron of so many digits."""
    return -(-digits // DIGITS) * LINE


def nbytes_of(shape: tuple[int, ...], columns: bool) -> int:
    """Return the bytes of the lines of a matrix [N, K], by its columns or its rows."""
    n, k = shape
    return k * stride_of(n) if columns else n * stride_of(k)


def lines_of(op_name: str, tensor: QuantTensor, columns: bool) -> np.ndarray:
    """Return the lines of a ternary matrix, by its columns or its rows: u8 [neurons, stride].

    They are packed when they are first asked for, and kept as long as the tensor's codes live.

    Raises:
        UnsupportedOp: it is not ternary.
    """
    if not isinstance(tensor.format, Ternary):
        raise UnsupportedOp(
            f"{op_name}: the format {tensor.format.name}; zeros are skipped of ternary weights only"
        )
    codes = tensor.planes["codes"]
    key = id(codes), columns
    if key not in _packed:
        refuse_in_window("pack weights by neuron")
        _packed[key] = pack(tensor, columns)
        weakref.finalize(codes, _packed.pop, key, None)
    return _packed[key]


def are_packed(tensor: QuantTensor, columns: bool) -> bool:
    """Return whether the lines of a tensor are in memory."""
    return (id(tensor.planes.get("codes")), columns) in _packed


def pack(tensor: QuantTensor, columns: bool) -> np.ndarray:
    """Pack a ternary matrix."""
    n, k = tensor.shape
    neurons, stride = (k, stride_of(n)) if columns else (n, stride_of(k))
    lines = allocate(neurons * stride).reshape(neurons, stride)
    codes = tensor.planes["codes"]
    packed, each = len(codes), stride // LINE

    def pack_rows(first: int) -> None:
        rows = np.arange(first, min(first + _CHUNK, n))
        padded = np.zeros((len(rows), DIGITS * each), np.uint8)
        padded[:, :k] = codes[rows % packed]
        shifts = (2 * (rows // packed)).astype(np.uint32)[:, None, None]
        digits = padded.view(np.uint32).reshape(len(rows), 16 * each, 4) >> shifts & 0x03030303
        lines[rows] = _merged(np.moveaxis(digits, 2, 0)).view(np.uint8)

    def pack_columns(first: int) -> None:
        some = codes[:, first : first + _CHUNK]
        count = some.shape[1]
        digits = np.zeros((DIGITS * each, count), np.uint8)
        digits[:n] = np.concatenate([some >> 2 * part & 3 for part in range(4)])
        places = np.moveaxis(digits.reshape(each, 4, 4, 4, 4, count), 2, 0)
        ordered = _merged(places).transpose(4, 0, 2, 1, 3)
        lines[first : first + count] = ordered.reshape(count, stride)

    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(pack_columns if columns else pack_rows, range(0, neurons, _CHUNK)))
    return lines


def _merged(places: np.ndarray) -> np.ndarray:
    """Return bytes of four digits each; the first axis is their place in a byte."""
    return places[0] | places[1] << 2 | places[2] << 4 | places[3] << 6


AT_ONCE = 8  # columns that `add_columns` takes
SHIFTED = 2 if CURRENT.vnni else 0
"""Sums of `add_columns` for rows 16 p .. 16 p + 15 of each 64 are 2^(p SHIFTED) times too large."""


@v.op(void, i64, i64)
def arrange(b, source, target):
    """Copy 256 activations to 4 registers, as a line of a row is multiplied by them."""
    dwords = v.emit_load(b, ir.VectorType(INT32, 64), source)
    for p in range(4):
        v.emit_store(b, v.pick(b, dwords, range(p, 64, 4)), behind(b, target, LINE * p))


@v.op(i64, i64, i64, i64)
def row_dot(b, row, x, lines):
    """Return the dot product of a row of so many lines and arranged activations."""
    dots = dots_of("ternary", 1)
    sums = dots.begin(b, constant(I32, 0), None)
    with cgutils.for_range(b, lines) as loop:
        line = v.emit_load(b, BYTES.llvm, emit_at(b, row, loop.index, LINE))
        own = emit_at(b, x, loop.index, 4 * LINE)
        operands = [dots.operand(b, lambda _: line, p) for p in range(4)]
        xs = [v.emit_load(b, BYTES.llvm, behind(b, own, LINE * p)) for p in range(4)]
        for slot in range(len(sums)):
            pairs = [(w, x) for (w, at), x in zip(operands, xs, strict=True) if at == slot]
            b.store(plus(b, b.load(sums[slot]), pairs), sums[slot])
    return b.sext(v.halve(b, dots.end(b, sums), b.add), INT64)


@v.op(void, i64, i64, i64, i64)
def add_columns(b, columns, codes, sums, lines):
    """Add the products of 8 columns to sums.

    Args:
        b: the builder.
        columns: address of their 8 addresses.
        codes: address of 8 activations, i8.
        sums: address of i32 [256 lines].
        lines: of a column.
    """
    starts = [v.emit_load(b, INT64, behind(b, columns, 8 * i)) for i in range(AT_ONCE)]
    fours = [v.emit_load(b, INT32, behind(b, codes, 4 * g)) for g in range(AT_ONCE // 4)]
    quads = [b.bitcast(v.spread(b, I32, four), BYTES.llvm) for four in fours]
    with cgutils.for_range(b, lines) as loop:
        stored = [v.emit_load(b, BYTES.llvm, emit_at(b, at, loop.index, LINE)) for at in starts]
        dwords = [interleaved(b, stored[4 * g : 4 * g + 4]) for g in range(len(quads))]
        own = emit_at(b, sums, loop.index, 16 * LINE)
        for part in range(4):
            for p in range(4):
                at = behind(b, own, LINE * (4 * part + p))
                pairs = [
                    (_digits(b, four[part], p), x) for four, x in zip(dwords, quads, strict=True)
                ]
                v.emit_store(b, plus(b, v.emit_load(b, I32.llvm, at), pairs), at)


def _digits(b: Any, dwords: Any, place: int) -> Any:
    if SHIFTED:
        return b.and_(dwords, constant(BYTES, 3 << 2 * place))
    return bits(b, dwords, 2 * place, 3)


def interleaved(b: Any, lines: list[Any]) -> list[Any]:
    """Emit dwords of a byte of each of four lines: the v-th are of bytes 16 l + 4 v + d."""
    pairs = [_zipped(b, *lines[i : i + 2], half) for half in (0, 8) for i in (0, 2)]
    shorts = [b.bitcast(pair, SHORTS) for pair in pairs]
    mixed = [_zipped(b, *shorts[i : i + 2], half) for i in (0, 2) for half in (0, 4)]
    return [b.bitcast(four, BYTES.llvm) for four in mixed]


def _zipped(b: Any, first: Any, second: Any, half: int) -> Any:
    """Emit the elements of two vectors in turn, of the first or second half of each 16 bytes."""
    count = first.type.count
    lane = count // 4
    starts = range(half, count, lane)
    places = [i for start in starts for i in range(start, start + lane // 2)]
    return v.shuffle(b, first, second, [i + other for i in places for other in (0, count)])


@v.op(i64, i64, i64)
def nonzero(b, first, second):
    """Return how many of 64 places hold a byte other than zero, at one address or the other."""
    both = b.or_(v.emit_load(b, BYTES.llvm, first), v.emit_load(b, BYTES.llvm, second))
    mask = b.bitcast(b.icmp_unsigned("!=", both, constant(BYTES, 0)), INT64)
    return v.call(b, "llvm.ctpop.i64", INT64, mask)


CHUNK = 128  # Output channels of a chunk
MOST_BLOCK = 128  # Most columns of a block
_MOST_CHUNKS = 16
_PART = 2048

_BYTE = np.arange(LINE)
_LOW = 16 * (_BYTE // 4 % 4) + 4 * (_BYTE // 16) + _BYTE % 4


@dataclass(frozen=True)
class Rows:
    """A packed matrix."""

    data: np.ndarray  # u8, the panels one after the other
    scale: str  # element type of the scales
    block: int  # columns that share a scale: 32, 64 or 128
    blocks: int  # of a row
    chunks: int  # of a panel
    panels: int  # how many
    record: int  # bytes of a block of a panel


_packed_rows: dict[int, Rows] = {}


def rows_are_packed(tensor: QuantTensor) -> bool:
    """Return whether the rows of a tensor are in memory."""
    return id(tensor.planes.get("codes")) in _packed_rows


def rows_nbytes(tensor: QuantTensor) -> int:
    """Return the bytes that a matrix takes by input channel."""
    fmt, (n, k) = tensor.format, tensor.shape
    assert isinstance(fmt, Int4) and isinstance(fmt.group, int)
    chunks = _chunks(n)
    record = _head(chunks, tensor) + fmt.group * chunks * LINE
    return -(-n // (chunks * CHUNK)) * -(-k // fmt.group) * record


def _chunks(n: int) -> int:
    """Return the chunks of a panel: two panels or more, but rows as long as may be."""
    return min(_MOST_CHUNKS, -(-n // (2 * CHUNK)))


def _head(chunks: int, tensor: QuantTensor) -> int:
    return chunks * CHUNK * tensor.planes["scales"].itemsize


def rows_of(tensor: QuantTensor) -> Rows:
    """Return a matrix by input channel, packed when it is first asked for, kept as long as it."""
    codes = tensor.planes["codes"]
    key = id(codes)
    if key not in _packed_rows:
        refuse_in_window("pack weights by input channel")
        _packed_rows[key] = _pack_rows(tensor)
        weakref.finalize(codes, _packed_rows.pop, key, None)
        for plane in tensor.planes.values():
            give_back(plane)
    return _packed_rows[key]


def _pack_rows(tensor: QuantTensor) -> Rows:
    """Pack a matrix [N, K] of symmetric int4 with a scale for 32, 64 or 128 columns."""
    fmt, (n, k) = tensor.format, tensor.shape
    assert isinstance(fmt, Int4) and isinstance(fmt.group, int)
    chunks, blocks = _chunks(n), -(-k // fmt.group)
    panels = -(-n // (chunks * CHUNK))
    scales = np.ascontiguousarray(tensor.planes["scales"]).reshape(n, blocks)
    head = _head(chunks, tensor)
    record = head + fmt.group * chunks * LINE
    data = allocate(rows_nbytes(tensor))
    cells = data.reshape(panels, blocks, record)
    at_once = max(1, _PART // fmt.group)

    def fill(place: tuple[int, int]) -> None:
        panel, first = place
        rows = slice(panel * chunks * CHUNK, min(n, (panel + 1) * chunks * CHUNK))
        last = min(blocks, first + at_once)
        count, columns = rows.stop - rows.start, min(k, last * fmt.group) - first * fmt.group
        start = first * fmt.group // 2
        pairs = tensor.planes["codes"][rows, start : start + -(-columns // 2)]
        codes = np.zeros(((last - first) * fmt.group, chunks * CHUNK), np.uint8)
        codes[0:columns:2, :count] = (pairs & 15).T
        codes[1:columns:2, :count] = (pairs >> 4).T[: columns // 2]
        codes = codes.reshape(len(codes), chunks, CHUNK)
        lines = codes[..., _LOW] | codes[..., _LOW + LINE] << 4
        part = cells[panel, first:last]
        part[:, head:] = lines.reshape(last - first, -1)
        stored = np.zeros((last - first, chunks * CHUNK), scales.dtype)
        stored[:, :count] = scales[rows, first:last].T
        part[:, :head] = stored.view(np.uint8)

    places = [(panel, first) for panel in range(panels) for first in range(0, blocks, at_once)]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(fill, places))
    return Rows(data, fmt.scale_dtype, fmt.group, blocks, chunks, panels, record)
