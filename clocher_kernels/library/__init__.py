"""The kernels for NumPy arrays: `quantize` a matrix, multiply by it with `linear`."""

import re
import weakref

import numpy as np

from clocher_kernels.errors import FormatError, ShapeError, UsageError
from clocher_kernels.formats import Format, parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.library.host import Bound, bind, host
from clocher_kernels.ops import OPS
from clocher_kernels.quant_tensor import QuantTensor, encode

_SHORT = (
    (re.compile("int4"), "int4_sym_g64_f16"),
    (re.compile("int4_(g[0-9]+)"), r"int4_sym_\1_f16"),
    (re.compile("int8_(g[0-9]+)"), r"int8_\1_f16"),
    (re.compile("int8"), "int8_row_f32"),
    (re.compile("fp8"), "fp8_e4m3_row_f32"),
)
SHORT_NAMES = "int4, int4_g<G>, int8, int8_g<G>, fp8"
_FLOATS = "float16, float32 or float64"
_bound: "weakref.WeakKeyDictionary[QuantTensor, Bound]" = weakref.WeakKeyDictionary()


def format_of(name: str | Format) -> Format:
    """Return the format of a full or a short name; FormatError for an unknown one.

    Short names are int4 (64 columns per scale), int4_g<G>, int8 (a scale per row), int8_g<G> and
    fp8 (e4m3, a scale per row).
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        raise UsageError(f"format is {name!r}; expected a name, as 'int4_g128' or 'mxfp4'")
    for pattern, spelled in _SHORT:
        if found := pattern.fullmatch(name):
            return parse_format(found.expand(spelled))
    try:
        return parse_format(name)
    except FormatError as error:
        raise FormatError(f"{error}; or, for short, {SHORT_NAMES}") from None


def quantize(values: np.ndarray, fmt: str | Format) -> QuantTensor:
    """Return a float matrix [N, K], or experts [E, N, K], in a format, rounded to nearest.

    `fmt` may be a short name, see `format_of`. FormatError for an unknown one or a value that it
    cannot hold, ShapeError for a shape that it cannot hold.
    """
    if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
        got = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
        raise UsageError(
            f"values: got {got}, expected an array of {_FLOATS}, [N, K] or [E, N, K]; convert with "
            "values.astype(np.float32)"
        )
    fmt = format_of(fmt)
    values = np.ascontiguousarray(values, np.float32)
    if isinstance(fmt, Bsr):
        fmt = Bsr.for_values(values, fmt.block, fmt.inner)
    return encode(values, fmt)


def matrix_sizes(w: QuantTensor) -> tuple[int, int]:
    """Return N and K of a matrix; UsageError for what is none."""
    if not isinstance(w, QuantTensor) or len(w.shape) != 2:
        raise UsageError("w: expected a QuantTensor [N, K]; make one with clocher_kernels.quantize")
    return w.shape[0], w.shape[1]


def linear(
    x: np.ndarray,
    w: QuantTensor,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *,
    act_prec: str = "",
    threads: int | None = None,
) -> np.ndarray:
    """Return x W^T + bias + residual on the CPU, fp32 [..., N].

    x is float [..., K], residual float [..., N], bias fp32 [N], w logical [N, K] in any format. The
    first call packs w and compiles kernels if needed; both live as long as `w`, which must not
    change. Pass the same `bias` each time. `act_prec` "int8" or "" rounds the activations of
    integer weights to int8, a scale per 128 columns; "fp32" does not. Calls from several threads
    are serialised. ShapeError if arrays do not fit together, UnsupportedOp without a kernel for the
    format.
    """
    n, k = matrix_sizes(w)
    x = np.asarray(x)
    if x.dtype.kind != "f" or not x.ndim or x.shape[-1] != k:
        raise ShapeError(f"linear: x: got {x.dtype}{list(x.shape)}, expected {_FLOATS}, [..., {k}]")
    values: dict[str, np.ndarray | QuantTensor] = {
        "x": np.asarray(x, np.float32).reshape(-1, k),
        "w": w,
    }
    if bias is not None:
        values["bias"] = bias
    if residual is not None:
        if residual.shape != (*x.shape[:-1], n):
            raise ShapeError(
                f"linear: residual has shape {list(residual.shape)}; expected {[*x.shape[:-1], n]}"
            )
        values["residual"] = np.asarray(residual, np.float32).reshape(-1, n)
    op = OPS["bsr_linear" if isinstance(w.format, Bsr) else "linear"]
    bound = _bound.setdefault(w, {})
    made = bind(op, values, {}, bound, host(threads), act_prec=act_prec)
    y = made.run(values, values["x"].shape[0])["y"]
    return y.reshape(*x.shape[:-1], n)
