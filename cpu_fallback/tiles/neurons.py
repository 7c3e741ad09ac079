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
"""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Ternary
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.team.large_pages import allocate
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.layout import LINE

DIGITS = 256  # of a line
_CHUNK = 128

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
        shifts = (2 * (rows // packed)).astype(np.uint8)[:, None]
        digits = np.zeros((len(rows), DIGITS * each), np.uint8)
        digits[:, :k] = codes[rows % packed] >> shifts & 3
        places = np.moveaxis(digits.reshape(len(rows), each, 16, 4, 4), 3, 0)
        lines[rows] = _merged(places).reshape(len(rows), stride)

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
