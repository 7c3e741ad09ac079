"""Matrix products on integers: activations quantised to int8, weights as they are stored.

A group is a run of `group` columns of a token that share a scale: 32, 128, or, if `group` is 0, all
of them. One `quantize_blocks` serves every product that reads the same activations.
"""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.ops import linear, moe
from clocher_kernels.ops.contract import EXACT, FP32, Case, Cost, OpSpec, Param, Tolerance, Value
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor

Array = np.ndarray

GROUPS = (32, 128, 0)
"""Columns per activation scale; 0 for one scale per token."""

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
    "ternary_inverse_f32": (128,),
}
INTEGER_FORMATS = tuple(_COVERED)
"""Formats that the cases cover. Groups of weights must be multiples of 32."""


def groups_of(k: int, group: int) -> int:
    """Return the number of activation scales of a token with K columns."""
    return -(-k // group) if group else 1


def dequantize(q: Array, scale: Array, group: int) -> Array:
    """Return q * scale, fp64 [.., K], from q i8 [.., K] and scale fp32 [.., B]."""
    k = q.shape[-1]
    wide = np.repeat(scale.astype(np.float64), group or k, axis=-1)[..., :k]
    return np.asarray(q * wide)


def quantize_blocks(*, x: Array, q: Array, scale: Array, group: int) -> None:
    """Quantise each group of columns to int8: q = clamp(rint(x * 127 / absmax), -127, 127).

    Args:
        x: [M, K] fp32, or [M, A, I] in `quantize_experts`.
        q: [M, K] int8, written.
        scale: [M, B] fp32, written: absmax / 127; B = ceil(K / group). absmax is at least 1e-30. A
            group with NaN or infinity has the scale NaN, and any codes.
        group: columns per scale; 0 for all.
    """
    *lead, k = x.shape
    size = group or k
    cells = np.zeros((*lead, groups_of(k, group) * size), np.float32)
    cells[..., :k] = x
    cells = cells.reshape(*lead, -1, size)
    finite = np.isfinite(cells)
    cells[~finite] = 0
    absmax = np.maximum(np.abs(cells).max(axis=-1), np.float32(1e-30))
    inverse = np.float32(127) / absmax
    codes = np.clip(np.rint(cells * inverse[..., None]), -127, 127)
    q[...] = codes.reshape(*lead, -1)[..., :k]
    scale[...] = np.where(finite.all(axis=-1), absmax / np.float32(127), np.float32(np.nan))


def linear_q8(
    *,
    q: Array,
    scale: Array,
    w: QuantTensor,
    y: Array,
    group: int,
    bias: Array | None = None,
    residual: Array | None = None,
) -> None:
    """Multiply int8 activations by a stored integer weight: y = (q scale) decode(w)^T + ...

    Args:
        q: [M, K] int8, from `quantize_blocks`.
        scale: [M, B] fp32.
        w: logical [N, K]; int8 or int4 with scales per row or per multiple of 32 columns, mxfp4 or
            ternary.
        y: [M, N] fp32, written; may be the residual's own buffer.
        group: columns per activation scale; 0 for one scale per token.
        bias: [N] fp32.
        residual: [M, N] fp32.
    """
    linear.linear(x=dequantize(q, scale, group), w=w, y=y, bias=bias, residual=residual)


def moe_gate_up_q8(
    *,
    q: Array,
    scale: Array,
    ids: Array,
    w: QuantTensor,
    y: Array,
    limit: float,
    alpha: float,
    group: int,
    bias: Array | None = None,
) -> None:
    """Compute `moe_gate_up` of int8 activations.

    Args:
        q: [M, K] int8, from `quantize_blocks`.
        scale: [M, B] fp32.
        ids: [M, A] i32, chosen experts.
        w: logical [E, J, K], J = 2 I, a format that `linear_q8` takes.
        y: [M, A, I] fp32, written.
        limit: clamp.
        alpha: slope of the sigmoid.
        group: columns per activation scale; 0 for one scale per token.
        bias: [E, J] fp32.
    """
    x = dequantize(q, scale, group)
    moe.moe_gate_up(x=x, ids=ids, w=w, y=y, limit=limit, alpha=alpha, bias=bias)


def moe_down_q8(
    *,
    q: Array,
    scale: Array,
    ids: Array,
    weights: Array,
    w: QuantTensor,
    y: Array,
    group: int,
    bias: Array | None = None,
    residual: Array | None = None,
) -> None:
    """Compute `moe_down` of int8 activations.

    Args:
        q: [M, A, I] int8, from `quantize_experts`.
        scale: [M, A, B] fp32.
        ids: [M, A] i32.
        weights: [M, A] fp32.
        w: logical [E, N, I], a format that `linear_q8` takes.
        y: [M, N] fp32, written; may be the residual's own buffer.
        group: columns per activation scale; 0 for one scale per token and expert.
        bias: [E, N] fp32.
        residual: [M, N] fp32.
    """
    x = dequantize(q, scale, group)
    moe.moe_down(x=x, ids=ids, weights=weights, w=w, y=y, bias=bias, residual=residual)


def _quantized(values: dict[str, Value], group: int) -> dict[str, Value]:
    """Replace x by its codes and scales."""
    x = values.pop("x")
    assert isinstance(x, np.ndarray)
    q = np.empty(x.shape, np.int8)
    scale = np.empty((*x.shape[:-1], groups_of(x.shape[-1], group)), np.float32)
    quantize_blocks(x=x, q=q, scale=scale, group=group)
    return {"q": q, "scale": scale, **values}


def _make_quantize(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    x = rng.standard_normal([case.sizes[d] for d in case.options["dims"]], dtype=np.float32)
    x[-1] *= 1e-7
    x[..., : case.options.get("zeros", 0)] = 0
    return {"x": x}


def _make_product(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    """Make the inputs of the fp32 op, and quantise x."""
    values = _FP32_OPS[str(case.options["fp32"])].make(case, rng)
    return _quantized(values, int(case.attrs["group"]))


def _quantize_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    x = values["x"]
    assert isinstance(x, np.ndarray)
    rows = x.size // x.shape[-1]
    return Cost(x.nbytes + x.size + 4 * rows * groups_of(x.shape[-1], _group(attrs)), 3 * x.size)


def _linear_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    q, w = values["q"], values["w"]
    assert isinstance(q, np.ndarray) and isinstance(w, QuantTensor)
    moved = sum(v.nbytes for v in values.values())
    return Cost(moved + 4 * q.shape[0] * w.shape[0], 2 * q.shape[0] * w.shape[0] * q.shape[1])


def _experts_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    ids, w, q = values["ids"], values["w"], values["q"]
    assert isinstance(ids, np.ndarray) and isinstance(w, QuantTensor) and isinstance(q, np.ndarray)
    experts, n, k = w.shape
    touched = len(np.unique(ids)) * w.nbytes // experts
    return Cost(touched + q.nbytes + 4 * ids.size * n, 2 * ids.size * n * k)


def _group(attrs: Mapping[str, Attr]) -> int:
    return int(attrs["group"])


_FP32_OPS = {spec.name: spec for spec in (*linear.SPECS, *moe.SPECS)}

_QUANTIZE_CASES = tuple(
    Case(
        f"g{group}-m{m}-k{k}",
        {"M": m, "K": k, "B": groups_of(k, group)},
        {"group": group},
        options={"dims": "MK", "zeros": zeros},
    )
    for group in GROUPS
    for m, k, zeros in ((1, 256, 0), (5, 100, 40), (3, 37, 0), (2, 1041, 128))
)
_EXPERT_CASES = tuple(
    Case(
        f"g{group}-m{m}-a{a}-i{i}",
        {"M": m, "A": a, "I": i, "B": groups_of(i, group)},
        {"group": group},
        options={"dims": "MAI"},
    )
    for group in GROUPS
    for m, a, i in ((1, 2, 128), (5, 3, 37))
)


def _linear_cases() -> tuple[Case, ...]:
    cases = []
    for fmt, groups in _COVERED.items():
        for i, (name, m, n, k, options) in enumerate(
            (
                ("aligned-m1", 1, 64, 256, {}),
                ("aligned-m4", 4, 64, 256, {"bias": True, "residual": True}),
                ("wide-m37", 37, 48, 384, {"residual": True}),
                ("odd-m2", 2, 37, 100, {"bias": True}),
                ("ragged-m5", 5, 52, 352, {"bias": True}),
                ("odd-m1", 1, 37, 41, {}),
            )
        ):
            group = groups[i % len(groups)]
            if "ternary" in fmt and n % 4:
                n = 36
            if fmt == "mxfp4" and k % 32:
                k = 96
            sizes = {"M": m, "N": n, "K": k, "B": groups_of(k, group)}
            name = f"{fmt}-{name}-n{n}-k{k}-g{group}"
            chosen = {**options, "fp32": "linear"}
            cases.append(Case(name, sizes, {"group": group}, {"w": fmt}, chosen))
    return tuple(cases)


_EXPERT_FORMATS = ("mxfp4", "int4_asym_g64_bf16", "int8_row_f32")
_GATE_UP_CASES = tuple(
    Case(
        f"{fmt}-{name}-g{group}",
        {"M": m, "E": e, "A": a, "J": 2 * i, "I": i, "K": k, "B": groups_of(k, group)},
        {"limit": 7.0, "alpha": 1.702, "group": group},
        {"w": fmt},
        {"bias": bias, "fp32": "moe_gate_up"},
    )
    for fmt in _EXPERT_FORMATS
    for name, m, e, a, i, k, group, bias in (
        ("m1-e8-a2-i64-k256", 1, 8, 2, 64, 256, 32, True),
        ("m5-e4-a3-i37-k96", 5, 4, 3, 37, 96, 128, False),
        ("m40-e3-a2-i13-k160", 40, 3, 2, 13, 160, 32, True),
    )
)
_DOWN_CASES = tuple(
    Case(
        f"{fmt}-{name}-g{group}",
        {"M": m, "E": e, "A": a, "N": n, "I": i, "B": groups_of(i, group)},
        {"group": group},
        {"w": fmt},
        {"bias": bias, "fp32": "moe_down"},
    )
    for fmt in _EXPERT_FORMATS
    for name, m, e, a, n, i, group, bias in (
        ("m1-e8-a2-n256-i64", 1, 8, 2, 256, 64, 32, True),
        ("m5-e4-a3-n37-i96", 5, 4, 3, 37, 96, 128, False),
        ("m40-e3-a2-n21-i160", 40, 3, 2, 21, 160, 32, True),
    )
)

SPECS = (
    OpSpec(
        "quantize_blocks",
        "int8 codes and a scale per group of columns",
        (
            Param("x", "in", "M K"),
            Param("q", "out", "M K", "i8"),
            Param("scale", "out", "M B"),
        ),
        quantize_blocks,
        _make_quantize,
        _QUANTIZE_CASES,
        EXACT,
        _quantize_cost,
    ),
    OpSpec(
        "quantize_experts",
        "quantize_blocks of the experts' hidden layers",
        (
            Param("x", "in", "M A I"),
            Param("q", "out", "M A I", "i8"),
            Param("scale", "out", "M A B"),
        ),
        quantize_blocks,
        _make_quantize,
        _EXPERT_CASES,
        EXACT,
        _quantize_cost,
    ),
    OpSpec(
        "linear_q8",
        "int8 activations x integer weights, exact sums within blocks",
        (
            Param("q", "in", "M K", "i8"),
            Param("scale", "in", "M B"),
            Param("w", "matrix", "N K", ""),
            Param("bias", "vector", "N", optional=True),
            Param("residual", "in", "M N", optional=True),
            Param("y", "out", "M N"),
        ),
        linear_q8,
        _make_product,
        _linear_cases(),
        FP32,
        _linear_cost,
    ),
    OpSpec(
        "moe_gate_up_q8",
        "clamped SwiGLU of the chosen experts, int8 activations x integer weights",
        (
            Param("q", "in", "M K", "i8"),
            Param("scale", "in", "M B"),
            Param("ids", "in", "M A", "i32"),
            Param("w", "matrix", "E J K", ""),
            Param("bias", "vector", "E J", optional=True),
            Param("y", "out", "M A I"),
        ),
        moe_gate_up_q8,
        _make_product,
        _GATE_UP_CASES,
        Tolerance(5e-6, 5e-5),
        _experts_cost,
    ),
    OpSpec(
        "moe_down_q8",
        "weighted sum of the chosen experts' projections, int8 activations x integer weights",
        (
            Param("q", "in", "M A I", "i8"),
            Param("scale", "in", "M A B"),
            Param("ids", "in", "M A", "i32"),
            Param("weights", "in", "M A"),
            Param("w", "matrix", "E N I", ""),
            Param("bias", "vector", "E N", optional=True),
            Param("residual", "in", "M N", optional=True),
            Param("y", "out", "M N"),
        ),
        moe_down_q8,
        _make_product,
        _DOWN_CASES,
        Tolerance(5e-6, 5e-5),
        _experts_cost,
    ),
)
