"""Weight error of a quantised tensor, and the error to be expected."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt
from zlib import crc32

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Float, Ggml, Int4, Int8, Ternary, base, parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert.rounding import row_pieces
from clocher_runtime.disk.files import byte_pieces

Tensor = QuantTensor | np.ndarray
"""A matrix as stored, or an fp32 vector."""

# A piece and what is made of it stay in the cache of a core.
_STEP = 1 << 15
_SAMPLE = 1 << 19
# Half a step, and what the rounding of the scale can add to it at the end of the codes.
_CLIPPED = 0.56
# What rounding without a search loses in types of ggml, which are only read here.
_OF_GGML = {
    **{"q4_k": 0.0905, "q5_k": 0.0441, "q6_k": 0.0223, "q3_k": 0.1793, "q2_k": 0.3582},
    **{"q4_1": 0.0902, "q5_0": 0.0541, "q5_1": 0.0436, "iq4_nl": 0.0916, "iq4_xs": 0.0919},
    **{"iq3_s": 0.1534, "iq3_xxs": 0.2001, "tq1_0": 0.8518},
}


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


def same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are stored alike, byte for byte."""
    a, b = _stored(one), _stored(other)
    return (a.format.name, a.shape) == (b.format.name, b.shape) and all(
        bytes(mine) == bytes(theirs)
        for key, plane in a.planes.items()
        for mine, theirs in zip(byte_pieces(plane), byte_pieces(b.planes[key]), strict=True)
    )


def measure(name: str, reference: Tensor, tensor: Tensor, method: str = "rtn") -> TensorError:
    """Return a tensor's error, computed a few rows at a time."""
    dot = own = other = wrong = largest = 0.0
    clipped = 0
    finite = True
    reference, tensor = _stored(reference), _stored(tensor)
    steps = method != "gptq" and isinstance(tensor.format, Int4 | Int8)
    for a, b in row_pieces(reference, tensor, elements=_STEP):
        w, v = a.decode(), b.decode()
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
        clipped += _clipped(difference, b) if steps else 0
    return TensorError(
        name,
        tensor.format.name,
        tuple(tensor.shape),
        method,
        rms_rel=sqrt(wrong / max(own, 1e-60)),
        cosine=dot / sqrt(own * other) if own and other else float(own == other),
        max_abs=largest,
        clipped_frac=clipped / max(prod(tensor.shape), 1) if steps else None,
        finite=finite,
    )


@lru_cache(maxsize=256)
def expected_rms(format_name: str, shape: tuple[int, ...]) -> float | None:
    """Return the relative RMS error of rounding about half a million samples of Student's t(5).

    None for types of ggml where it is not known.
    """
    fmt = parse_format(format_name)
    if isinstance(fmt, Ggml):
        return _OF_GGML.get(fmt.kind)
    columns = min(shape[-1] if shape else 1, _SAMPLE)
    rows = max(1, min(shape[-2] if len(shape) > 1 else 1, _SAMPLE // columns))
    random = np.random.default_rng(crc32(b"expected error"))
    count = max(1, _SAMPLE // (rows * columns))
    values = random.standard_t(5, (count, rows, columns)).astype(np.float32)
    if isinstance(fmt, Ternary):  # one scale for all of a matrix, of a multiple of four rows
        values = values.reshape(-1)[: values.size // 4 * 4].reshape(4, -1)
    error = encode(values, fmt).decode() - values
    return sqrt(float(np.square(error, dtype=np.float64).mean() / np.square(values).mean()))


def _stored(tensor: Tensor) -> QuantTensor:
    if isinstance(tensor, QuantTensor):
        return tensor
    return QuantTensor(tensor.shape, Float("f32"), {"data": tensor})


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    # Not by BLAS, whose threads would wait for each other longer than they compute.
    return float(np.einsum("i,i->", a, b))


def _clipped(difference: np.ndarray, tensor: QuantTensor) -> int:
    fmt = tensor.format
    assert isinstance(fmt, Int4 | Int8)
    step = np.abs(to_f32(tensor.planes["scales"], fmt.scale_dtype))[..., None]
    cells = np.abs(base.split(difference, fmt.group))
    return int(np.count_nonzero(cells > step * np.float32(_CLIPPED)))
