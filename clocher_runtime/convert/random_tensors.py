"""Random weights, stored: normally distributed values in any format, without encoding them all.

A pool of 65 536 cells is encoded once by the format itself, a cell being the elements that share a
scale. A tensor is then drawn from the pool, two random bytes a cell. So codes and scales belong
together as in a real tensor, and bytes come at the speed of memory.

The draws are raw output of a bit generator, the part of NumPy's random numbers that is promised to
stay the same, and each tensor has a stream of its own: seed and name decide its bytes.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from statistics import NormalDist

import numpy as np

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Format, Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Shape
from clocher_kernels.quant_tensor import QuantTensor

_CELLS = 1 << 16
_PIECE = 1 << 20
_ROW_CELL = 32


@dataclass(frozen=True, slots=True)
class _Pool:
    """Encoded cells.

    Attributes:
        cells: planes that have a part for each cell, [65536, elements of the plane a cell].
        shared: planes that have one element for many cells: its value.
        elements: weights a cell covers along K.
    """

    cells: dict[str, np.ndarray]
    shared: dict[str, np.ndarray]
    elements: int


def normal_vector(
    name: str, shape: Shape, seed: int, mean: float, std: float, fmt: Format
) -> QuantTensor:
    """Return a float tensor of normally distributed values."""
    count = prod(shape)
    values = np.float32(mean) + np.float32(std) * _normal(_stream(name, seed), count)
    return QuantTensor(shape, fmt, fmt.encode(values.reshape(shape)))


def normal_matrix(name: str, shape: Shape, seed: int, std: float, fmt: Format) -> QuantTensor:
    """Return a matrix, or a stack of them, of normally distributed values with mean 0.

    Args:
        name: of the tensor; it chooses the random stream.
        shape: [N, K] or [E, N, K].
        seed: of the model.
        std: standard deviation of the values before they are encoded.
        fmt: float, int8, int4, ternary, mxfp4 or ggml's.

    Raises:
        FormatError: weights of this format cannot be drawn.
        ShapeError: the format cannot hold the shape.
    """
    planes = fmt.planes(shape)
    pool = _pool(fmt, std, seed)
    rows = prod(shape[:-1])
    if isinstance(fmt, Ternary):
        rows //= 4
    across = -(-shape[-1] // pool.elements)
    drawn = {
        key: np.empty((rows * across, *cell.shape[1:]), cell.dtype)
        for key, cell in pool.cells.items()
    }
    stream = _stream(name, seed)
    for start in range(0, rows * across, _PIECE):
        index = _draws(stream, min(_PIECE, rows * across - start))
        for key, cell in pool.cells.items():
            piece = drawn[key][start : start + len(index)]
            np.take(cell, index, axis=0, out=piece, mode="clip")
    whole = {}
    for key, plane in planes.items():
        if key in pool.shared:
            whole[key] = _spread(pool.shared[key], plane.dtype, plane.shape, stream)
            continue
        width = prod(plane.shape[len(shape) - 1 :])
        # Where K is no multiple of the cell, a row ends inside one.
        full = drawn[key].reshape(rows, -1)
        whole[key] = np.ascontiguousarray(full[:, :width]).reshape(plane.shape)
    return QuantTensor(shape, fmt, whole)


@lru_cache(maxsize=4)
def _pool(fmt: Format, std: float, seed: int) -> _Pool:
    """Encode the cells of a format for values of this standard deviation."""
    elements, rows, columns = 1, 1, _CELLS
    if isinstance(fmt, Mxfp4):
        elements, rows, columns = 32, _CELLS, 32
    elif isinstance(fmt, Ggml):
        elements, rows, columns = fmt.block, _CELLS, fmt.block
    elif isinstance(fmt, Int4 | Int8) and isinstance(fmt.group, int):
        elements, rows, columns = fmt.group, _CELLS, fmt.group
    elif isinstance(fmt, Int4 | Int8):
        elements, columns = _ROW_CELL, _CELLS * _ROW_CELL
    elif isinstance(fmt, Ternary):
        rows = 4
    elif not isinstance(fmt, Float):
        raise FormatError(
            f"{fmt.name}: no random weights of this format; choose float, int8, int4, ternary, "
            "mxfp4 or ggml's"
        )
    stream = _stream(f"{fmt.name} {std}", seed)
    values = np.float32(std) * _normal(stream, rows * columns).reshape(rows, columns)
    cells, shared = {}, {}
    for key, plane in fmt.encode(values).items():
        if plane.size < _CELLS:
            shared[key] = plane.reshape(-1)[:1]
        else:
            cells[key] = plane.reshape(_CELLS, -1)
    return _Pool(cells, shared, elements)


def _spread(value: np.ndarray, dtype: str, shape: Shape, stream: np.random.SFC64) -> np.ndarray:
    """Return scales for a shape: one as it is, several within 10 % of it."""
    count = prod(shape)
    if count == 1:
        return value.reshape(shape).copy()
    factor = 0.9 + 0.2 * _draws(stream, count).astype(np.float32) / 65536
    return from_f32(to_f32(value, dtype) * factor.astype(np.float32), dtype).reshape(shape)


def _stream(name: str, seed: int) -> np.random.SFC64:
    return np.random.SFC64([seed, zlib.crc32(name.encode())])


def _draws(stream: np.random.SFC64, count: int) -> np.ndarray:
    """Return u16 [count]."""
    raw = np.asarray(stream.random_raw(-(-count // 4)), "<u8")
    return raw.view("<u2")[:count]


def _normal(stream: np.random.SFC64, count: int) -> np.ndarray:
    """Return standard normal values, fp32 [count]."""
    return np.asarray(_quantiles()[_draws(stream, count)])


@lru_cache(maxsize=1)
def _quantiles() -> np.ndarray:
    """Return the standard normal quantiles at (i + 1/2) / 65536, fp32."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / _CELLS) for i in range(_CELLS)], np.float32)
