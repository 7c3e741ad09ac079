"""Random normal weights in any format, drawn from 65 536 encoded cells by seed and tensor name."""

import zlib
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


def normal_vector(
    name: str, shape: Shape, seed: int, mean: float, std: float, fmt: Format
) -> QuantTensor:
    """Return a normally distributed float tensor."""
    values = np.float32(mean) + np.float32(std) * _normal(_stream(name, seed), prod(shape))
    return QuantTensor(shape, fmt, fmt.encode(values.reshape(shape)))


def normal_matrix(name: str, shape: Shape, seed: int, std: float, fmt: Format) -> QuantTensor:
    """Return a matrix [N, K] or stack [E, N, K] of values with mean 0; FormatError, ShapeError."""
    planes = fmt.planes(shape)
    cells, shared, elements = _pool(fmt, std, seed)
    rows = prod(shape[:-1]) // (4 if isinstance(fmt, Ternary) else 1)
    count = rows * -(-shape[-1] // elements)
    drawn = {key: np.empty((count, *cell.shape[1:]), cell.dtype) for key, cell in cells.items()}
    stream = _stream(name, seed)
    for start in range(0, count, _PIECE):
        index = _draws(stream, min(_PIECE, count - start))
        for key, cell in cells.items():
            np.take(cell, index, axis=0, out=drawn[key][start : start + len(index)], mode="clip")
    whole = {}
    for key, plane in planes.items():
        if key in shared:
            whole[key] = _spread(shared[key], plane.dtype, plane.shape, stream)
            continue
        # Where K is no multiple of the cell, a row ends inside one.
        width = prod(plane.shape[len(shape) - 1 :])
        full = drawn[key].reshape(rows, -1)
        whole[key] = np.ascontiguousarray(full[:, :width]).reshape(plane.shape)
    return QuantTensor(shape, fmt, whole)


@lru_cache(maxsize=4)
def _pool(
    fmt: Format, std: float, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Return 65536 encoded cells by plane, the constant planes, and the cell width."""
    elements, rows, columns = 1, 1, _CELLS
    if isinstance(fmt, Mxfp4 | Ggml) or (
        isinstance(fmt, Int4 | Int8) and isinstance(fmt.group, int)
    ):
        elements = fmt.block if isinstance(fmt, Ggml) else getattr(fmt, "group", 32)
        rows, columns = _CELLS, elements
    elif isinstance(fmt, Int4 | Int8):
        elements, columns = _ROW_CELL, _CELLS * _ROW_CELL
    elif isinstance(fmt, Ternary):
        rows = 4
    elif not isinstance(fmt, Float):
        raise FormatError(
            f"{fmt.name}: no random weights of this format; choose float, int8, int4, ternary, "
            "mxfp4 or ggml's"
        )
    values = np.float32(std) * _normal(_stream(f"{fmt.name} {std}", seed), rows * columns)
    cells, shared = {}, {}
    for key, plane in fmt.encode(values.reshape(rows, columns)).items():
        if plane.size < _CELLS:
            shared[key] = plane.reshape(-1)[:1]
        else:
            cells[key] = plane.reshape(_CELLS, -1)
    return cells, shared, elements


def _spread(value: np.ndarray, dtype: str, shape: Shape, stream: np.random.SFC64) -> np.ndarray:
    """Return scales: one as it is, several within 10 % of it."""
    count = prod(shape)
    if count == 1:
        return value.reshape(shape).copy()
    factor = 0.9 + 0.2 * _draws(stream, count).astype(np.float32) / 65536
    return from_f32(to_f32(value, dtype) * factor.astype(np.float32), dtype).reshape(shape)


def _stream(name: str, seed: int) -> np.random.SFC64:
    return np.random.SFC64([seed, zlib.crc32(name.encode())])


def _draws(stream: np.random.SFC64, count: int) -> np.ndarray:
    raw = np.asarray(stream.random_raw(-(-count // 4)), "<u8")
    return raw.view("<u2")[:count]


def _normal(stream: np.random.SFC64, count: int) -> np.ndarray:
    return np.asarray(_quantiles()[_draws(stream, count)])


@lru_cache(maxsize=1)
def _quantiles() -> np.ndarray:
    """Return the standard normal quantiles at (i + 1/2) / 65536, fp32."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / _CELLS) for i in range(_CELLS)], np.float32)
