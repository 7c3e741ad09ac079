"""Matrix products: y = x W^T with W in any format, the BitNet integer path, block-sparse rows."""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.formats import parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.contract import EXACT, FP32, Case, Cost, OpSpec, Param, Value
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor, encode

Array = np.ndarray

LINEAR_FORMATS = (
    "f32",
    "f16",
    "bf16",
    "int8_tensor_f32",
    "int8_row_bf16",
    "int8_g64_f16",
    "int4_sym_g32_f16",
    "int4_sym_g64_bf16",
    "int4_sym_g128_f32",
    "int4_sym_row_f32",
    "int4_asym_g64_f16",
    "int4_asym_g128_bf16",
    "int4_asym_row_f32",
    "fp8_e4m3_tensor_f32",
    "fp8_e4m3_row_f32",
    "fp8_e4m3_b128_f32",
    "fp8_e5m2_tensor_f32",
    "fp8_e5m2_row_bf16",
    "fp8_e5m2_b128_f32",
    "ternary",
    "ternary_inverse",
    "ternary_f32",
    "mxfp4",
)


def linear(
    *, x: Array, w: QuantTensor, y: Array, bias: Array | None = None, residual: Array | None = None
) -> None:
    """Multiply activations by a stored weight: y = x decode(w)^T + bias + residual.

    Args:
        x: [M, K] fp32.
        w: logical [N, K], any format.
        y: [M, N] fp32, written; may be the residual's own buffer.
        bias: [N] fp32.
        residual: [M, N] fp32.
    """
    total = x.astype(np.float64) @ w.decode().astype(np.float64).T
    if bias is not None:
        total += bias
    if residual is not None:
        total += residual
    y[...] = total


def quantize_act(*, x: Array, q: Array, scale: Array) -> None:
    """Quantise each token to int8: q = clamp(rint(x * 127 / absmax), -128, 127).

    Args:
        x: [M, K] fp32.
        q: [M, K] int8, written.
        scale: [M] fp32, written: absmax / 127, so that x is about q * scale; NaN, with any codes,
            for a token with NaN or infinity.

    Source: BitNet b1.58 (arXiv 2402.17764) as in transformers' ActQuant; absmax >= 1e-5.
    """
    finite = np.isfinite(x)
    x = np.where(finite, x, np.float32(0))
    absmax = np.maximum(np.abs(x).max(axis=1), np.float32(1e-5))
    inverse = np.float32(127) / absmax
    q[...] = np.clip(np.rint(x * inverse[:, None]), -128, 127)
    scale[...] = np.where(finite.all(axis=1), absmax / np.float32(127), np.float32(np.nan))


def linear_i8(
    *,
    q: Array,
    scale: Array,
    w: QuantTensor,
    y: Array,
    bias: Array | None = None,
    residual: Array | None = None,
) -> None:
    """Multiply int8 activations by ternary weights, exactly: y = (q codes^T) * (scale * factor).

    Args:
        q: [M, K] int8.
        scale: [M] fp32, from `quantize_act`.
        w: logical [N, K], "ternary" or "ternary_inverse"; `factor` is its fp32 multiplier.
        y: [M, N] fp32, written. The sum is an int32; then three fp32 roundings in this order:
            scale * factor, sum * that, + bias, + residual.
        bias: [N] fp32.
        residual: [M, N] fp32.
    """
    assert isinstance(w.format, Ternary)
    codes = w.format.codes(w.planes, w.shape)
    total = (q.astype(np.float64) @ codes.astype(np.float64).T).astype(np.float32)
    total *= (scale * w.format.multiplier(w.planes))[:, None]
    if bias is not None:
        total += bias
    if residual is not None:
        total += residual
    y[...] = total


def bsr_linear(
    *, x: Array, w: QuantTensor, y: Array, bias: Array | None = None, residual: Array | None = None
) -> None:
    """Multiply activations by block-sparse rows, touching stored blocks only.

    Args:
        x: [M, K] fp32.
        w: logical [N, K], a "bsr_RxC_..." format. Tail blocks are clipped by N and K.
        y: [M, N] fp32, written; may be the residual's own buffer.
        bias: [N] fp32.
        residual: [M, N] fp32.
    """
    assert isinstance(w.format, Bsr)
    rows, cols = w.shape
    height, width = w.format.block
    blocks = w.format.block_values(w.planes)
    total = np.zeros((x.shape[0], rows))
    for block_row in range(len(w.planes["row_ptr"]) - 1):
        start, stop = w.planes["row_ptr"][block_row : block_row + 2]
        n = min(height, rows - block_row * height)
        for index in range(start, stop):
            k0 = int(w.planes["col_idx"][index]) * width
            k = min(width, cols - k0)
            part = x[:, k0 : k0 + k].astype(np.float64) @ blocks[index, :n, :k].T
            total[:, block_row * height : block_row * height + n] += part
    if bias is not None:
        total += bias
    if residual is not None:
        total += residual
    y[...] = total


def _make_linear(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    m, n, k = (case.sizes[d] for d in "MNK")
    weight = rng.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)
    values: dict[str, Value] = {
        "x": rng.standard_normal((m, k), dtype=np.float32),
        "w": encode(weight, parse_format(case.formats["w"])),
    }
    if case.options.get("bias", False):
        values["bias"] = rng.standard_normal(n, dtype=np.float32)
    if case.options.get("residual", False):
        values["residual"] = rng.standard_normal((m, n), dtype=np.float32)
    return values


def _make_quantize(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    x = rng.standard_normal((case.sizes["M"], case.sizes["K"]), dtype=np.float32)
    x[-1] *= 1e-7 if case.options.get("tiny") else 1
    return {"x": x}


def _make_linear_i8(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    values = _make_linear(case, rng)
    x = values.pop("x")
    assert isinstance(x, np.ndarray)
    q, scale = np.empty(x.shape, np.int8), np.empty(len(x), np.float32)
    quantize_act(x=x, q=q, scale=scale)
    return {"q": q, "scale": scale, **values}


def _make_bsr(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    m, n, k = (case.sizes[d] for d in "MNK")
    height, width = case.options["block"]
    weight = rng.standard_normal((n, k), dtype=np.float32)
    keep = rng.random((-(-n // height), -(-k // width))) < case.options["density"]
    weight *= np.kron(keep, np.ones((height, width), np.float32))[:n, :k]
    fmt = Bsr.for_values(weight, (height, width), case.options.get("inner", "f32"))
    values: dict[str, Value] = {
        "x": rng.standard_normal((m, k), dtype=np.float32),
        "w": encode(weight, fmt),
    }
    if case.options.get("bias", False):
        values["bias"] = rng.standard_normal(n, dtype=np.float32)
    if case.options.get("residual", False):
        values["residual"] = rng.standard_normal((m, n), dtype=np.float32)
    return values


def _bytes(values: Mapping[str, Value]) -> int:
    return sum(v.nbytes for v in values.values())


def _linear_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    x, w = values.get("x", values.get("q")), values["w"]
    assert isinstance(x, np.ndarray) and isinstance(w, QuantTensor)
    return Cost(
        _bytes(values) + 4 * x.shape[0] * w.shape[0], 2 * x.shape[0] * w.shape[0] * x.shape[1]
    )


def _bsr_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    x, w = values["x"], values["w"]
    assert isinstance(x, np.ndarray) and isinstance(w, QuantTensor)
    assert isinstance(w.format, Bsr)
    stored = w.format.nnzb * w.format.block[0] * w.format.block[1]
    return Cost(_bytes(values) + 4 * x.shape[0] * w.shape[0], 2 * x.shape[0] * stored)


def _quantize_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    x = values["x"]
    assert isinstance(x, np.ndarray)
    return Cost(x.nbytes + x.size + 4 * len(x), 3 * x.size)


def _linear_cases(formats: tuple[str, ...]) -> tuple[Case, ...]:
    cases = []
    for fmt in formats:
        for name, m, n, k, options in (
            ("aligned-m1", 1, 64, 256, {}),
            ("aligned-m4", 4, 64, 256, {"bias": True, "residual": True}),
            ("wide-m37", 37, 48, 384, {"residual": True}),
            ("ragged-m3", 3, 52, 352, {"bias": True}),
            ("odd-m2", 2, 37, 100, {"bias": True}),
        ):
            if "ternary" in fmt and n % 4:
                n = 36
            if fmt == "mxfp4" and k % 32:
                k = 96
            sizes = {"M": m, "N": n, "K": k}
            cases.append(Case(f"{fmt}-{name}-n{n}-k{k}", sizes, {}, {"w": fmt}, options))
    return tuple(cases)


_X = Param("x", "in", "M K")
_TAIL = (
    Param("bias", "vector", "N", optional=True),
    Param("residual", "in", "M N", optional=True),
    Param("y", "out", "M N"),
)

SPECS = (
    OpSpec(
        "linear",
        "y = x W^T + bias + residual, W in any format",
        (_X, Param("w", "matrix", "N K", ""), *_TAIL),
        linear,
        _make_linear,
        _linear_cases(LINEAR_FORMATS),
        FP32,
        _linear_cost,
    ),
    OpSpec(
        "quantize_act",
        "int8 codes and one scale per token",
        (_X, Param("q", "out", "M K", "i8"), Param("scale", "out", "M")),
        quantize_act,
        _make_quantize,
        (
            Case("m1-k256", {"M": 1, "K": 256}),
            Case("m5-k100", {"M": 5, "K": 100}, options={"tiny": True}),
            Case("m2-k37", {"M": 2, "K": 37}),
        ),
        EXACT,
        _quantize_cost,
    ),
    OpSpec(
        "linear_i8",
        "int8 activations x ternary weights, exact integer sums",
        (
            Param("q", "in", "M K", "i8"),
            Param("scale", "in", "M"),
            Param("w", "matrix", "N K", ""),
            *_TAIL,
        ),
        linear_i8,
        _make_linear_i8,
        _linear_cases(("ternary", "ternary_inverse", "ternary_f32")),
        EXACT,
        _linear_cost,
    ),
    OpSpec(
        "bsr_linear",
        "y = x W^T over the stored blocks of block-sparse rows",
        (_X, Param("w", "matrix", "N K", ""), *_TAIL),
        bsr_linear,
        _make_bsr,
        (
            Case(
                "16x32-aligned",
                {"M": 2, "N": 64, "K": 128},
                options={"block": (16, 32), "density": 0.3},
            ),
            Case(
                "16x32-tails",
                {"M": 1, "N": 70, "K": 100},
                options={"block": (16, 32), "density": 0.5},
            ),
            Case("4x4-odd", {"M": 3, "N": 37, "K": 41}, options={"block": (4, 4), "density": 0.2}),
            Case(
                "8x8-empty", {"M": 1, "N": 24, "K": 24}, options={"block": (8, 8), "density": 0.0}
            ),
            Case(
                "16x16-bf16",
                {"M": 2, "N": 48, "K": 50},
                options={"block": (16, 16), "density": 0.5, "inner": "bf16"},
            ),
            *(
                Case(
                    f"{height}x{width}-{inner}-m{m}",
                    {"M": m, "N": n, "K": k},
                    options={"block": (height, width), "density": 0.4, "inner": inner, **tail},
                )
                for inner in ("f16", "bf16", "int8", "int4")
                for height, width, m, n, k, tail in (
                    (32, 32, 1, 128, 192, {"bias": True}),
                    (20, 24, 7, 75, 130, {"bias": True, "residual": True}),
                    (1, 33, 2, 9, 140, {"residual": True}),
                )
            ),
        ),
        FP32,
        _bsr_cost,
    ),
)
