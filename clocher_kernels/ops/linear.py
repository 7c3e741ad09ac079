"""Matrix products: y = x W^T with W in any format, and block-sparse rows."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from clocher_kernels.errors import ShapeError
from clocher_kernels.formats import known_formats, parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.contract import (
    EXACT,
    FP32,
    NO_CODES,
    Case,
    Cost,
    In,
    Matrix,
    OpSpec,
    Out,
    Real,
    Value,
    Vector,
    no_blocks,
)
from clocher_kernels.ops.elementwise import ACTIVATIONS, activate
from clocher_kernels.ops.quantize import GROUPS, dequantize, groups_of
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor, encode

Array = np.ndarray

Weight = Annotated[QuantTensor, Matrix("N K")]
Bias = Annotated[Array | None, Vector("N")]
Times = Annotated[Array | None, In("M F", narrow=True)]
Residual = Annotated[Array | None, In("M N")]
LoraX = Annotated[Array | None, In("M L")]
LoraB = Annotated[Array | None, Vector("N L")]
Sums = Annotated[Array, Out("M N", narrow=True)]

_COVERED = {
    "int4_sym_g32_f16": (32, 128),
    "int4_sym_g64_bf16": GROUPS,
    "int4_sym_g128_f32": (128,),
    "int4_sym_row_f32": (128,),
    "int4_asym_g32_f16": (0,),
    "int4_asym_g64_bf16": (32, 128),
    "int4_asym_g128_f16": (128,),
    "int4_asym_row_f16": (0,),
    "int8_tensor_f32": (128,),
    "int8_row_bf16": (0, 32),
    "int8_g32_f16": (32,),
    "int8_g128_f32": (0,),
    "mxfp4": (32, 128),
    "ternary": (0,),
    "ternary_f32": (0,),
    "ternary_inverse": (0,),
    "ternary_inverse_f32": (128,),
    "q4_k": (128, 0, 32),
    "q5_k": (128,),
    "q6_k": (32, 128),
    "q3_k": (0,),
    "q2_k": (128,),
    "q4_1": (128, 0),
    "q5_0": (128, 32),
    "q5_1": (32, 128),
    "iq4_nl": (128, 32),
    "iq4_xs": (128,),
    "iq3_s": (128,),
    "iq3_xxs": (0, 32),
    "tq1_0": (128,),
    "tcq3": (128, 0),
    "tcq4": (128,),
}
INTEGER_FORMATS = tuple(_COVERED)
"""Formats that are tried with int8 activations. Groups of weights must be multiples of 32."""


def sums_exactly(fmt: Format, group: int) -> bool:
    """Return whether int8 activations and weights of a format are summed in int32 over all K."""
    return isinstance(fmt, Ternary) and group == 0


def linear(
    *,
    x: Annotated[Array, In("M K", "f32 i8", narrow=True)],
    x_scale: Annotated[Array | None, In("M B")] = None,
    w: Weight,
    bias: Bias = None,
    times: Times = None,
    residual: Residual = None,
    lora_x: LoraX = None,
    lora_b: LoraB = None,
    y: Sums,
    activation: str = "none",
    cap: float = 1.0,
    group: int = 0,
) -> None:
    """Multiply by a stored weight: y = activation(x decode(w)^T + bias) * times + residual.

    LoRA adapters add lora_x lora_b^T to the sums, before the bias.

    int8 activations are x * x_scale. With ternary weights and one scale a token the sum is exact:
    that of the codes' products is an int32; then come fp32 roundings in this order: x_scale * the
    weight's factor, sum * that, + bias, the activation, * times, + residual.

    A gated MLP is two of them: the linear partner, and the gate with its activation times that.

    Args:
        x: [M, K]; int8 codes from `quantize` (never -128) if there are scales, else fp32.
        w: logical [N, K], any format; with int8 activations int8 or int4 with scales per row or per
            multiple of 32 columns, mxfp4, ternary, or one of ggml's types.
        y: [M, N] fp32, written; may be the own buffer of `times` or of the residual.
        x_scale: [M, B] fp32; B = ceil(K / group), or 1.
        times: [M, F] fp32, what the activated sums are multiplied by: F = N, or 1 for a factor of
            each token.
        lora_x: [M, L] fp32: x A^T of adapters, scaled; lora_b: [N, L], their B.
        activation: "none", "silu", "gelu", "gelu_tanh", "relu2", "sigmoid" or "tanh", as
            `activate` has them. It makes no number of what is not finite.
        cap: of "tanh", positive: cap * tanh(sum / cap).
        group: columns per activation scale; 0 for one scale per token.
    """
    total: Array
    if x_scale is not None and sums_exactly(w.format, group):
        assert isinstance(w.format, Ternary)
        codes = w.format.codes(w.planes, w.shape)
        total = (x.astype(np.float64) @ codes.astype(np.float64).T).astype(np.float32)
        total *= x_scale * w.format.multiplier(w.planes)
    else:
        wide = x.astype(np.float64) if x_scale is None else dequantize(x, x_scale, group)
        total = wide @ w.stored().astype(np.float64).T
    if lora_x is not None and lora_b is not None:
        total = total + lora_x.astype(np.float64) @ lora_b.T
    finish(total, y, bias, times, residual, activation, cap)


def finish(
    total: Array,
    y: Array,
    bias: Array | None,
    times: Array | None,
    residual: Array | None,
    activation: str,
    cap: float,
) -> None:
    """Write y = activation(total + bias) * times + residual; see `linear`."""
    if bias is not None:
        total += bias
    if activation != "none":
        total = activate(activation, total.astype(np.float64), cap)
    if times is not None:
        total = total * times
    if residual is not None:
        total = total + residual
    y[...] = total


def bsr_linear(
    *,
    x: Annotated[Array, In("M K", narrow=True)],
    w: Weight,
    bias: Bias = None,
    times: Times = None,
    residual: Residual = None,
    y: Sums,
    activation: str = "none",
    cap: float = 1.0,
) -> None:
    """Multiply by block-sparse rows, touching stored blocks only: `linear` of another format.

    Args:
        w: logical [N, K], a "bsr_RxC_..." format. Tail blocks are clipped by N and K.
        others: as `linear` has them.
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
    finish(total, y, bias, times, residual, activation, cap)


def _make_bsr(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    n, k = (case.sizes[d] for d in "NK")
    height, width = case.options["block"]
    weight = rng.standard_normal((n, k), dtype=np.float32)
    keep = rng.random((-(-n // height), -(-k // width))) < case.options["density"]
    weight *= np.kron(keep, np.ones((height, width), np.float32))[:n, :k]
    inner = case.options.get("inner", "f32")
    return {"w": encode(weight, Bsr.for_values(weight, (height, width), inner))}


def _bsr_cost(values: Mapping[str, Any], attrs: Mapping[str, Attr]) -> Cost:
    fmt = values["w"].format
    stored = fmt.nnzb * fmt.block[0] * fmt.block[1]
    return Cost(sum(v.nbytes for v in values.values()), 2 * len(values["x"]) * stored)


def bent(options: Mapping[str, Any], turn: int = 0) -> dict[str, Attr]:
    """Return the attributes of a case's option "act": a name, or a place, to which `turn` is added.

    So formats take turns.
    """
    act = options.get("act", "none")
    if isinstance(act, int):
        act = ACTIVATIONS[(act + turn) % len(ACTIVATIONS)]
    return {"activation": act, "cap": 2.5} if act != "none" else {}


def wide(options: Mapping[str, Any], n: int) -> dict[str, int]:
    """Return the size F of `times`, which the option of that name says: "N" or "1"."""
    return {"F": {"N": n, "1": 1}[options["times"]]} if "times" in options else {}


_Shape = tuple[str, int, int, int, dict[str, Any]]
"""Name, M, N, K and options."""

_NO_LORA = {"cuda": "adapters are added there by calls of their own"}

_SHAPES: tuple[_Shape, ...] = (
    ("aligned-m1", 1, 64, 256, {}),
    ("aligned-m4", 4, 64, 256, {"bias": True, "residual": True}),
    ("wide-m37", 37, 48, 384, {"residual": True}),
    ("ragged-m3", 3, 52, 352, {"bias": True, "act": 0, "times": "N"}),
    ("odd-m2", 2, 37, 100, {"act": 3, "times": "1"}),
)
_SHAPES_OF_CODES = (
    *_SHAPES[:3],
    ("odd-m2", 2, 37, 100, {"bias": True}),
    ("ragged-m5", 5, 52, 352, {"bias": True, "act": 0, "times": "N"}),
    ("odd-m1", 1, 37, 41, {"act": 3, "residual": True}),
)
_ACTIVATED = ("bf16", "int4_sym_g32_f16", "mxfp4")
"""Formats whose product of one token is tried with every activation."""
# Sizes that cross the blocks of kernels: 64 tokens, 8 rows, 512 columns; odd groups.
_LARGE = (
    ("f32", 1100),
    ("bf16", 1041),
    ("int4_sym_g100_f16", 1100),
    ("int4_asym_g34_f32", 613),
    ("int8_g37_bf16", 600),
    ("int8_tensor_f32", 530),
    ("fp8_e4m3_b128_bf16", 1100),
    ("fp8_e4m3_g128_f32", 1100),
    ("mxfp4", 1088),
    ("ternary", 1041),
    ("q4_k", 1280),
    ("iq4_nl", 1056),
)


def _cases() -> Iterator[Case]:
    """Yield the cases with fp32 activations, then those with int8 ones."""
    for turn, fmt in enumerate(known_formats()):
        if fmt.startswith("bsr_"):
            continue
        missing = no_blocks(fmt)
        for name, m, n, k, options in _SHAPES:
            n, k = _possible(fmt, n, k)
            sizes = {"M": m, "N": n, "K": k, **wide(options, n)}
            case = f"{fmt}-{name}-n{n}-k{k}"
            yield Case(case, sizes, bent(options, turn), {"w": fmt}, options, missing=missing)
    for fmt, k in _LARGE:
        sizes = {"M": 70, "N": 148, "K": k}
        missing = no_blocks(fmt)
        case = f"large-{fmt}-m70-n148-k{k}"
        yield Case(case, sizes, {}, {"w": fmt}, {"bias": True}, missing=missing)
    for fmt in _ACTIVATED:
        for act in ACTIVATIONS:
            options = {"act": act, "bias": act in ("relu2", "tanh")}
            sizes = {"M": 1, "N": 100, "K": 160}
            yield Case(f"{act}-{fmt}-m1-n100-k160", sizes, bent(options), {"w": fmt}, options)
        options = {"act": "silu", "bias": True, "times": "N", "residual": True}
        sizes = {"M": 37, "N": 100, "K": 160, "F": 100}
        yield Case(f"silu-{fmt}-m37-n100-k160", sizes, bent(options), {"w": fmt}, options)
    for turn, (fmt, groups) in enumerate(_COVERED.items()):
        for i, (name, m, n, k, options) in enumerate(_SHAPES_OF_CODES):
            n, k = _possible(fmt, n, k)
            group = groups[i % len(groups)]
            yield _case_of_codes(f"{fmt}-{name}", fmt, m, n, k, group, options, turn)
    for m, n, rank in ((1, 37, 5), (37, 52, 16), (70, 64, 33)):
        more = {"bias": True, "act": "silu", "times": "N", "residual": True}
        more |= {"lora_x": True, "lora_b": True}
        sizes = {"M": m, "N": n, "K": 96, "L": rank, "F": n}
        case = f"lora-m{m}-n{n}-k96-l{rank}"
        yield Case(case, sizes, bent(more), {"w": "f32"}, more, missing=_NO_LORA)
        coded = _case_of_codes(case, "int8_row_bf16", m, n, 96, 0, more)
        yield replace(coded, sizes={**coded.sizes, "L": rank})
    for k in (64, 1041):
        yield _case_of_codes("large-ternary-m70", "ternary", 70, 20, k, 0, {"residual": True})


def _possible(fmt: str, n: int, k: int) -> tuple[int, int]:
    """Return sizes near N and K that a format can have: some pack 4 rows, 32 or 256 columns."""
    for shape in ((n, k), (n // 4 * 4, k), (n, k // 32 * 32), (n, -(-k // 256) * 256)):
        try:
            parse_format(fmt).planes(shape)
        except ShapeError:
            continue
        return shape
    raise ShapeError(
        f"{fmt}: no matrix of about {[n, k]}; its rows or columns are packed otherwise"
    )


def _case_of_codes(
    name: str,
    fmt: str,
    m: int,
    n: int,
    k: int,
    group: int,
    options: Mapping[str, Any],
    turn: int = 0,
) -> Case:
    exact = "ternary" in fmt and group == 0
    return Case(
        f"{name}-n{n}-k{k}-i8-g{group}",
        {"M": m, "N": n, "K": k, "B": groups_of(k, group), **wide(options, n)},
        {"group": group, **bent(options, turn)},
        {"w": fmt, "x": "i8"},
        {**options, "x_scale": True},
        EXACT if exact and "act" not in options else None,
        {} if exact else NO_CODES,
    )


_BSR_CASES: tuple[_Shape, ...] = (
    ("16x32-aligned", 2, 64, 128, {"block": (16, 32), "density": 0.3}),
    ("16x32-tails", 1, 70, 100, {"block": (16, 32), "density": 0.5}),
    ("4x4-odd", 3, 37, 41, {"block": (4, 4), "density": 0.2}),
    ("8x8-empty", 1, 24, 24, {"block": (8, 8), "density": 0.0}),
    ("16x16-bf16", 2, 48, 50, {"block": (16, 16), "density": 0.5, "inner": "bf16"}),
    *(
        (
            f"{height}x{width}-{inner}-m{m}",
            m,
            n,
            k,
            {"block": (height, width), "density": 0.4, "inner": inner, **tail},
        )
        for inner in ("f16", "bf16", "int8", "int4")
        for height, width, m, n, k, tail in (
            (32, 32, 1, 128, 192, {"bias": True}),
            (20, 24, 7, 75, 130, {"bias": True, "residual": True, "act": "gelu", "times": "N"}),
            (1, 33, 2, 9, 140, {"residual": True, "act": "silu", "times": "1"}),
            (20, 24, 1, 75, 130, {"bias": True, "act": "relu2", "times": "N"}),
        )
    ),
    ("large-20x600-m70-n50-k1300", 70, 50, 1300, {"block": (20, 600), "density": 0.7}),
)
_ONE = {"M": 1, "N": 4096, "K": 2880}
_MANY = {"M": 32, "N": 4096, "K": 2880}
_BITNET = {"N": 2560, "K": 6912}

SPECS = (
    OpSpec(
        linear,
        tuple(_cases()),
        FP32,
        (
            Real("*-aligned-m1-*-k256", _ONE),
            Real("bf16-wide-*", _MANY),
            Real("int4_sym_g32_f16-wide-*", _MANY),
            Real("mxfp4-wide-*", _MANY),
            Real("int*-aligned-m1-*-i8-*", _ONE),
            Real("mxfp4-aligned-m1-*-i8-*", _ONE),
            Real("ternary*-aligned-m1-*-i8-*", {"M": 1, **_BITNET}),
            Real("ternary-wide-*-i8-*", {"M": 32, **_BITNET}),
        ),
        rounds=True,
    ),
    OpSpec(
        bsr_linear,
        tuple(
            Case(name, {"M": m, "N": n, "K": k, **wide(options, n)}, bent(options), {}, options)
            for name, m, n, k, options in _BSR_CASES
        ),
        FP32,
        (Real("16x32-aligned", _ONE), Real("32x32-*-m1", _ONE)),
        rounds=True,
        make=_make_bsr,
        cost=_bsr_cost,
    ),
)
