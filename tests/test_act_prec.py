"""Precision of activations: each acts on every weight format, and the reference says how."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ggml_encode import encode

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS, ReferenceExecutor, rewrite
from clocher_kernels.ops.contract import FP32
from clocher_kernels.ops.quantize import BITNET, fake_quantize
from clocher_kernels.ops.rewrite import (
    ROUNDED,
    quantize_activations,
    quantize_for_ternary,
    round_activations,
)
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.executor import CpuExecutor

M, N, K = 3, 24, 256
FORMATS = (
    "f32",
    "bf16",
    "f16",
    "fp8_e4m3_row_f32",
    "fp8_e5m2_b128_f32",
    "int8_row_f32",
    "int8_g32_f16",
    "int4_sym_g32_f16",
    "int4_asym_g64_bf16",
    "mxfp4",
    "ternary",
    "q4_k",
    "bsr_8x8_bf16",
)


@cache
def weight(name: str) -> QuantTensor:
    values = np.random.default_rng(0).standard_normal((N, K), dtype=np.float32)
    if not name.startswith("bsr"):
        return encode(values, parse_format(name))
    from clocher_kernels.formats.bsr import Bsr

    return encode(values, Bsr.for_values(values, (8, 8), "bf16"))


def plan_of(name: str, precision: str) -> Plan:
    """Return one product of a Plan as a session rewrites it."""
    buffers = {
        "x": Buffer((M, K), "f32", "M", "input"),
        "y": Buffer((M, N), "f32", "M", "output"),
    }
    op = "bsr_linear" if name.startswith("bsr") else "linear"
    calls = (Call(op, {"x": "x", "w": "w", "y": "y"}),)
    plan, formats = Plan(M, 1, buffers, {}, ("w",), calls), {"w": weight(name).format}
    plan = quantize_for_ternary(plan, formats)
    if precision == "int8":
        plan = quantize_activations(plan, formats)
    return round_activations(plan, precision)


def product(executor, plan: Plan, x: np.ndarray) -> np.ndarray:
    executor.array("x")[...] = x
    executor.step(M, 1)
    return executor.fetch("y", M).copy()


@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_precision(name: str, precision: str) -> None:
    x = np.random.default_rng(1).standard_normal((M, K), dtype=np.float32)
    plan, weights = plan_of(name, precision), {"w": weight(name)}
    executor = CpuExecutor(plan, weights, threads=1)
    try:
        got = product(executor, plan, x)
    finally:
        executor.close()
    expected = product(ReferenceExecutor(plan, weights), plan, x)
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error <= FP32.rms
    # It acts: what was rounded differs from what was not, by as much as the type allows.
    wide = x.astype(np.float64) @ weight(name).decode().T.astype(np.float64)
    moved = np.sqrt(np.mean((expected - wide) ** 2) / np.mean(wide**2))
    least, most = {"fp16": (2e-5, 1e-3), "bf16": (2e-4, 5e-3)}.get(precision, (1e-3, 5e-2))
    assert moved < (5e-2 if name == "ternary" else most)
    assert moved > least


def test_values_are_those_of_the_type() -> None:
    x = np.random.default_rng(2).standard_normal((4, 300), dtype=np.float32)
    made = {}
    for precision, attrs in ROUNDED.items():
        y = np.empty_like(x)
        fake_quantize(x=x, y=y, **attrs)
        made[precision] = y
    assert np.array_equal(made["bf16"], to_f32(from_f32(x, "bf16"), "bf16"))
    assert np.array_equal(made["fp16"], x.astype(np.float16).astype(np.float32))
    top = np.abs(x).max(axis=1, keepdims=True)
    steps = made["fp8"] / (top / np.float32(448))
    assert np.abs(steps - to_f32(from_f32(steps, "e4m3"), "e4m3")).max() < 1e-4
    assert np.abs(made["int8"] - x).max() <= top.max() / 254 * 1.001


def test_values_whose_step_is_no_number_stay_within_codes() -> None:
    x = np.full((1, 32), np.float32(1e-37))  # 127 / absmax is infinite
    y = np.empty_like(x)
    with np.errstate(over="ignore"):
        fake_quantize(x=x, y=y, dtype="i8", group=0)
    np.testing.assert_allclose(y, x, rtol=1e-3)


def test_what_is_not_finite_stays_so_and_the_rest_saturates() -> None:
    x = np.array([[1e38, -3.4e38, 1.0], [np.inf, 1.0, 2.0], [np.nan, 1.0, 2.0]], np.float32)
    for attrs in ROUNDED.values():
        plan = Plan(
            3,
            1,
            {"x": Buffer((3, 3), "f32", "M", "input"), "y": Buffer((3, 3), "f32", "M", "output")},
            {},
            (),
            (Call("fake_quantize", {"x": "x", "y": "y"}, attrs),),
        )
        found = []
        for make in (ReferenceExecutor, lambda p, w: CpuExecutor(p, w, threads=1)):
            executor = make(plan, {})
            executor.array("x")[...] = x
            executor.step(3, 1)
            found.append(executor.fetch("y", 3).copy())
        np.testing.assert_array_equal(found[0], found[1])
        assert np.isfinite(found[0][0]).all() and np.isnan(found[0][1:, 0]).all()


def test_one_rounding_serves_all_that_read_it_and_bitnet_quantises_what_was_rounded() -> None:
    buffers = {"x": Buffer((M, K), "f32", "M")} | {n: Buffer((M, N), "f32", "M") for n in "ab"}
    calls = tuple(Call("linear", {"x": "x", "w": f"w{n}", "y": n}) for n in "ab")
    plan = Plan(M, 1, buffers, {}, ("wa", "wb"), calls)
    rounded = round_activations(plan, "bf16")
    assert [c.op for c in rounded.calls] == ["fake_quantize", "linear", "linear"]
    ternary = quantize_for_ternary(plan, {f"w{n}": weight("ternary").format for n in "ab"})
    ops = ["fake_quantize", "quantize", "linear", "linear"]
    assert [c.op for c in round_activations(ternary, "fp8").calls] == ops
    assert round_activations(ternary, "int8") == ternary
    assert ternary.calls[0].attrs == {"group": 0, **BITNET}
    assert "fake_quantize" in OPS


def test_a_scale_is_for_32_columns_where_the_weight_has_one_for_32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers = {"x": Buffer((M, K), "f32", "M")} | {n: Buffer((M, N), "f32", "M") for n in "abc"}
    calls = tuple(Call("linear", {"x": "x", "w": f"w{n}", "y": n}) for n in "abc")
    plan = Plan(M, 1, buffers, {}, ("wa", "wb", "wc"), calls)
    names = {"wa": "q4_k", "wb": "int8_g32_f16", "wc": "q4_k"}
    formats = {name: parse_format(fmt) for name, fmt in names.items()}
    made = quantize_activations(plan, formats)
    assert [call.op for call in made.calls] == [
        "quantize",
        "linear",
        "quantize",
        "linear",
        "linear",
    ]
    assert [call.attrs["group"] for call in made.calls] == [128, 128, 32, 32, 128]
    assert made.calls[4].args["x"] == made.calls[1].args["x"] != made.calls[3].args["x"]
    assert made.buffers[made.calls[2].args["scale"]].shape == (M, K // 32)
    # What an outlier costs its neighbours: 31 columns, not 127.
    x = np.random.default_rng(3).standard_normal((M, K), dtype=np.float32)
    x[:, 5] = 300
    w = {"w": weight("int8_g32_f16")}
    wide = x.astype(np.float64) @ w["w"].decode().T.astype(np.float64)
    errors = []
    for group in (32, 128):
        one = Plan(M, 1, {"x": buffers["x"], "a": buffers["a"]}, {}, ("w",), calls[:1])
        one = replace(one, calls=(Call("linear", {"x": "x", "w": "w", "y": "a"}),))
        monkeypatch.setattr(rewrite, "act_group", lambda _, group=group: group)
        one = quantize_activations(one, {"w": w["w"].format})
        found = ReferenceExecutor(one, w)
        found.array("x")[...] = x
        found.step(M, 1)
        errors.append(float(np.square(found.fetch("a", M) - wide).mean()))
    assert errors[0] < 0.5 * errors[1]
