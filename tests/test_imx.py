"""The importance-weighted search: format errors, never worse than rounding, refusals."""

import numpy as np
import pytest
from weight_files import rng as rng_of

from clocher_kernels.dtypes import LARGEST, to_f32
from clocher_kernels.errors import FormatError, ShapeError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert.imx import search

# Relative RMS error of N(0, 1) and of Student's t with 5 degrees of freedom, rows of 4096.
ROUNDING = {
    "int8_row_f32": (0.0087, 0.0201),
    "int8_g32_f16": (0.0053, 0.0068),
    "int4_sym_g128_f16": (0.1031, 0.1513),
    "int4_sym_g32_f16": (0.0858, 0.1078),
    "int4_asym_g128_f16": (0.1005, 0.1335),
    "int4_asym_g32_f16": (0.0807, 0.0929),
    "fp8_e4m3_row_f32": (0.0265, 0.0263),
    "mxfp4": (0.1115, 0.1225),
    "ternary": (0.513, 0.604),
}
SEARCH = {
    "int4_sym_g32_f16": (0.0812, 0.1033),
    "int4_asym_g128_f16": (0.0949, 0.1268),
    "int4_asym_g32_f16": (0.0780, 0.0904),
}
FORMATS = (
    "int4_sym_g32_f16",
    "int4_asym_g32_f16",
    "int4_sym_g128_bf16",
    "int4_asym_g64_bf16",
    "int4_sym_row_f32",
    "int4_asym_row_f32",
    "int8_g32_f16",
    "int8_row_f32",
)
FLOATING = ("fp8_e4m3_row_f32", "fp8_e4m3_b128_f32", "fp8_e5m2_row_f16", "mxfp4")


def relative_rms(values: np.ndarray, tensor: QuantTensor) -> float:
    wrong = tensor.decode() - values
    return float(np.sqrt((wrong**2).sum(dtype=np.float64) / (values**2).sum(dtype=np.float64)))


def weighted(values: np.ndarray, tensor: QuantTensor, importance: np.ndarray) -> float:
    return float((np.square(tensor.decode() - values, dtype=np.float64) * importance).sum())


def draw(kind: str, shape: tuple[int, int]) -> np.ndarray:
    rng = rng_of(f"{kind}{shape}")
    if kind == "gauss":
        return rng.standard_normal(shape, dtype=np.float32)
    return rng.standard_t(5, shape).astype(np.float32)


@pytest.mark.parametrize("kind", ["gauss", "t5"])
@pytest.mark.parametrize("name", ROUNDING)
def test_rounding_has_the_error_of_its_format(name, kind):
    values = draw(kind, (1024, 4096) if name == "int8_row_f32" else (256, 4096))
    error = relative_rms(values, encode(values, parse_format(name)))
    # One scale per long heavy-tailed row follows the extremes that the seed draws.
    slack = 0.07 if (name, kind) == ("int8_row_f32", "t5") else 0.02
    assert error == pytest.approx(ROUNDING[name][kind == "t5"], rel=slack)


@pytest.mark.parametrize("kind", ["gauss", "t5"])
@pytest.mark.parametrize("name", SEARCH)
def test_search_without_importance_reaches_the_least_squares_error(name, kind):
    values = draw(kind, (256, 4096))
    error = relative_rms(values, search(values, parse_format(name)))
    assert error <= 1.02 * SEARCH[name][kind == "t5"]


@pytest.mark.parametrize("shape", [(5, 256), (37, 100), (3, 33)], ids=lambda s: f"n{s[0]}-k{s[1]}")
@pytest.mark.parametrize("name", FORMATS)
def test_search_is_never_worse_than_rounding(name, shape):
    fmt, rng = parse_format(name), rng_of(f"{name}{shape}")
    values = rng.standard_normal(shape, dtype=np.float32)
    values[0] = 0
    values[1, ::3] *= 20
    importance = rng.lognormal(0, 2, shape[1])
    found = search(values, fmt, importance)
    found.check()
    rounded = encode(values, fmt)
    assert weighted(values, found, importance) <= weighted(values, rounded, importance) * 1.00001
    assert weighted(values, found, importance) < weighted(values, rounded, importance)
    assert not found.decode()[0].any()


def test_one_scale_of_a_tensor_of_fp8_is_that_of_rounding() -> None:
    values, fmt = draw("gauss", (16, 64)), parse_format("fp8_e4m3_tensor_f32")
    assert (search(values, fmt).decode() == encode(values, fmt).decode()).all()


@pytest.mark.parametrize("name", FLOATING)
def test_search_of_floating_codes_is_better_than_rounding(name):
    fmt, rng = parse_format(name), rng_of(name)
    values = rng.standard_normal((137, 288), dtype=np.float32)
    values[0] = 0
    values[1, ::3] *= 20
    importance = rng.lognormal(0, 2, 288)
    found, rounded = search(values, fmt, importance), encode(values, fmt)
    found.check()
    assert weighted(values, found, importance) < 0.98 * weighted(values, rounded, importance)
    assert not found.decode()[0].any()


def test_a_search_of_fp8_keeps_scales_within_their_type():
    values = np.full((2, 32), LARGEST["f16"] * LARGEST["e4m3"], np.float32)
    values[:, 1::2] *= rng_of("fp8 ends").random((2, 16), dtype=np.float32)
    found = search(values, parse_format("fp8_e4m3_row_f16"))
    assert found.decode()[0, 0] == values[0, 0]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_nearest_of_their_stored_grid(name):
    fmt, rng = parse_format(name), rng_of(name)
    values = rng.standard_normal((16, 256), dtype=np.float32)
    found = search(values, fmt, rng.lognormal(0, 1, 256))
    step = np.abs(to_f32(found.planes["scales"], fmt.scale_dtype)).reshape(16, -1)
    step = step.repeat(256 // step.shape[1], axis=1)
    wrong = np.abs(found.decode() - values) / step
    inside = wrong <= 0.501
    assert inside.mean() > 0.9
    # What is farther away than half a step was clipped: it lies beyond the largest code.
    limit = found.decode()
    clipped = np.sign(values - limit) * np.sign(values)
    assert (clipped[~inside] >= 0).all()


@pytest.mark.parametrize("name", (*FORMATS, *FLOATING))
def test_the_result_does_not_depend_on_threads(name):
    rng = rng_of(name)
    values = rng.standard_normal((700, 96), dtype=np.float32)
    importance = rng.lognormal(0, 1, 96)
    one, three = (search(values, parse_format(name), importance, threads=t) for t in (1, 3))
    for key, plane in one.planes.items():
        assert np.array_equal(plane, three.planes[key])


def test_importance_moves_the_error_away_from_important_columns():
    rng = rng_of("move")
    values = rng.standard_normal((256, 128), dtype=np.float32)
    importance = np.full(128, 1e-3)
    importance[:16] = 1
    plain, aware = (
        search(values, parse_format("int4_sym_g128_f16"), h) for h in (None, importance)
    )
    important = slice(0, 16)
    before, after = (np.square(q.decode() - values)[:, important].mean() for q in (plain, aware))
    assert after < 0.7 * before


def test_columns_that_were_never_active_are_quantised_all_the_same():
    values = rng_of("dead").standard_normal((8, 64), dtype=np.float32)
    importance = np.ones(64)
    importance[32:] = 0
    found = search(values, parse_format("int4_asym_g32_f16"), importance)
    assert relative_rms(values, found) < 0.12
    everything = search(values, parse_format("int4_asym_g32_f16"), np.zeros(64))
    assert relative_rms(values, everything) < 0.12


def test_an_extreme_scale_stays_within_its_type():
    values = np.zeros((2, 32), np.float32)
    values[0, 0], values[1, 0] = -65000 * 8, 1e-8
    found = search(values, parse_format("int4_sym_g32_f16"))
    assert np.isfinite(found.decode()).all()
    assert found.decode()[0, 0] == pytest.approx(-65000 * 8, rel=0.01)
    with pytest.raises(FormatError, match="choose the same format with f32 or bf16 scales"):
        search(values * 10, parse_format("int4_sym_g32_f16"))


def test_refusals_say_what_is_wrong():
    values = np.ones((2, 32), np.float32)
    with pytest.raises(UsageError, match="ternary has no scales to search"):
        search(values, parse_format("ternary"))
    with pytest.raises(ShapeError, match="expected \\[32\\]"):
        search(values, parse_format("int4_sym_g32_f16"), np.ones(31))
    values[1, 3] = np.nan
    with pytest.raises(FormatError, match="cannot hold nan"):
        search(values, parse_format("int4_sym_g32_f16"))
