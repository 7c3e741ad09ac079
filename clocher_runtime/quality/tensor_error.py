"""Weight error of a quantised tensor, and the error to be expected."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from zlib import crc32

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Format, Int4, Int8, Ternary, parse_format, scaling
from clocher_kernels.quant_tensor import QuantTensor, encode

Tensor = QuantTensor | np.ndarray
"""A matrix as stored, or an fp32 vector."""

# A piece and what is made of it stay in the cache of a core.
_STEP = 1 << 15
_BYTES = 1 << 24
_SAMPLE = 1 << 19
# Half a step, and what the rounding of the scale can add to it at the end of the codes.
_CLIPPED = 0.56


@dataclass(frozen=True, slots=True)
class TensorError:
    """The error of one tensor."""

    name: str
    format: str  # name of the format that it is stored in now
    shape: tuple[int, ...]  # logical shape
    method: str  # how its codes were chosen: "rtn", "imx", "gptq",
    rms_rel: float  # root mean square error over the root mean square of the weights
    cosine: float  # cosine of the angle between the two, as vectors
    max_abs: float  # largest error
    # share of elements that are beyond the last code of their group by more than half a step; None
    # where the format has no steps or the method moves weights on purpose
    clipped_frac: float | None
    finite: bool = True  # no value is NaN or infinite
    # error of the layer's output on held-out tokens, over the output's mean square, as the
    # quantiser recorded it
    out_nmse: float | None = None
    out_nmse_rtn: float | None = None  # the same for plain rounding


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are stored alike, byte for byte."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        arrays = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return arrays and _equal(np.asarray(a), np.asarray(b))
    if a.format.name != b.format.name or a.shape != b.shape:
        return False
    return all(_equal(plane, b.planes[key]) for key, plane in a.planes.items())


def measure(name: str, reference: Tensor, tensor: Tensor, method: str = "rtn") -> TensorError:
    """Return a tensor's error, computed a few rows at a time."""
    dot = own = other = wrong = largest = 0.0
    clipped = 0
    finite = True
    steps = method != "gptq" and isinstance(_format(tensor), Int4 | Int8)
    for a, b in zip(_pieces(reference, tensor), _pieces(tensor, reference), strict=True):
        w = a.decode() if isinstance(a, QuantTensor) else a
        v = b.decode() if isinstance(b, QuantTensor) else b
        finite = finite and bool(np.isfinite(w).all() and np.isfinite(v).all())
        if not finite:
            break
        difference = v - w
        exact, stored, off = (x.astype(np.float64).reshape(-1) for x in (w, v, difference))
        dot += _dot(exact, stored)
        own += _dot(exact, exact)
        other += _dot(stored, stored)
        wrong += _dot(off, off)
        largest = max(largest, float(np.abs(difference).max(initial=0)))
        if steps and isinstance(b, QuantTensor):
            clipped += _clipped(difference, b)
    count = prod(tensor.shape)
    return TensorError(
        name,
        _format(tensor).name,
        tuple(tensor.shape),
        method,
        rms_rel=sqrt(wrong / max(own, 1e-60)),
        cosine=dot / sqrt(own * other) if own and other else float(own == other),
        max_abs=largest,
        clipped_frac=clipped / max(count, 1) if steps else None,
        finite=finite,
    )


def expected_rms(format_name: str, shape: tuple[int, ...]) -> float:
    """Return the relative RMS error of rounding about half a million samples of Student's t(5)."""
    columns = min(shape[-1] if shape else 1, _SAMPLE)
    rows = max(1, min(shape[-2] if len(shape) > 1 else 1, _SAMPLE // columns))
    return _sampled_rms(format_name, rows, columns)


@lru_cache(maxsize=256)
def _sampled_rms(format_name: str, rows: int, columns: int) -> float:
    random = np.random.default_rng(crc32(b"expected error"))
    count = max(1, _SAMPLE // (rows * columns))
    values = random.standard_t(5, (count, rows, columns)).astype(np.float32)
    fmt = parse_format(format_name)
    if isinstance(fmt, Ternary):  # one scale for all of a matrix, of a multiple of four rows
        values = values.reshape(-1)[: values.size // 4 * 4].reshape(4, -1)
    error = encode(values, fmt).decode() - values
    return sqrt(float(np.square(error, dtype=np.float64).mean() / np.square(values).mean()))


def _format(tensor: Tensor) -> Format:
    return tensor.format if isinstance(tensor, QuantTensor) else parse_format("f32")


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    # Not by BLAS, whose threads would wait for each other longer than they compute.
    return float(np.einsum("i,i->", a, b))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, two = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return all(
        np.array_equal(one[start : start + _BYTES], two[start : start + _BYTES])
        for start in range(0, len(one), _BYTES)
    )


def _pieces(tensor: Tensor, other: Tensor) -> Iterator[Tensor]:
    """Yield a few rows at a time, where both tensors can be cut."""
    if not (_has_rows(tensor) and _has_rows(other)):
        yield tensor
        return
    lead = len(tensor.shape) - 1
    rows = prod(tensor.shape[:-1])
    step = max(1, _STEP // max(1, tensor.shape[-1]))
    planes = tensor.planes if isinstance(tensor, QuantTensor) else {"values": tensor}
    flat = {key: plane.reshape(rows, *plane.shape[lead:]) for key, plane in planes.items()}
    for start in range(0, rows, step):
        piece = {key: plane[start : start + step] for key, plane in flat.items()}
        if isinstance(tensor, QuantTensor):
            shape = (min(step, rows - start), tensor.shape[-1])
            yield QuantTensor(shape, tensor.format, piece)
        else:
            yield piece["values"]


def _has_rows(tensor: Tensor) -> bool:
    """Return whether each row of a matrix or stack is a row of each plane."""
    if len(tensor.shape) < 2 or isinstance(tensor, np.ndarray):
        return len(tensor.shape) > 1
    lead = tensor.shape[:-1]
    return all(plane.shape[: len(lead)] == lead for plane in tensor.planes.values())


def _clipped(difference: np.ndarray, tensor: QuantTensor) -> int:
    fmt = tensor.format
    if not isinstance(fmt, Int4 | Int8):
        return 0
    step = np.abs(to_f32(tensor.planes["scales"], fmt.scale_dtype))[..., None]
    cells = np.abs(scaling.split(difference, fmt.group))
    return int(np.count_nonzero(cells > step * np.float32(_CLIPPED)))
