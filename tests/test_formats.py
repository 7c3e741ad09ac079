"""Every format: names, planes, round trips, error bounds, refusals; two against transformers."""

import re
import tracemalloc
from pathlib import Path
from zlib import crc32

import gguf.quants
import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from ggml_encode import encode
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import clocher_runtime
from clocher_kernels.dtypes import LARGEST, SMALLEST, to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import (
    FAMILIES,
    Float,
    Format,
    Fp8,
    Ggml,
    Int4,
    Int8,
    Mxfp4,
    Tcq,
    Ternary,
    known_formats,
    parse_format,
)
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.ggml import GGML_KINDS, TRIED_KINDS
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_kernels.quant_tensor import QuantTensor

NAMES = known_formats()
MATRIX_NAMES = tuple(name for name in NAMES if not isinstance(parse_format(name), Float))
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding to a float type."""

GAUSSIAN_RMS = {
    "f16": 0.00021,
    "bf16": 0.00166,
    "int8_tensor_f32": 0.0116,  # follows the largest of a million values, so the seed
    "int8_row_f32": 0.0087,
    "int8_row_bf16": 0.0087,
    "int8_g32_f16": 0.0053,
    "int8_g128_bf16": 0.0065,
    "int4_sym_g32_f16": 0.0858,
    "int4_sym_g64_f16": 0.0950,
    "int4_sym_g128_bf16": 0.1031,
    "int4_sym_row_f32": 0.138,
    "int4_asym_g32_f16": 0.0807,
    "int4_asym_g64_f16": 0.0912,
    "int4_asym_g128_bf16": 0.1005,
    "int4_asym_row_f32": 0.140,
    "fp8_e4m3_tensor_f32": 0.0265,
    "fp8_e4m3_row_f32": 0.0265,
    "fp8_e4m3_row_bf16": 0.0265,
    "fp8_e4m3_g128_f32": 0.0257,
    "fp8_e4m3_b128_f32": 0.0265,
    "fp8_e4m3_b128_bf16": 0.0265,
    "fp8_e5m2_tensor_f32": 0.0527,
    "fp8_e5m2_row_f32": 0.0527,
    "fp8_e5m2_b128_f32": 0.0527,
    "ternary": 0.513,
    "ternary_inverse": 0.513,
    "ternary_f32": 0.513,
    "ternary_inverse_f32": 0.513,
    "mxfp4": 0.1115,
    "tcq2": 0.293,
    "tcq3": 0.153,
    "tcq4": 0.0822,
    "tcq5": 0.0494,
    "q4_k": 0.0782,
    "q5_k": 0.0381,
    "q6_k": 0.01875,
    "q3_k": 0.1544,
    "q2_k": 0.3286,
    "q4_1": 0.0781,
    "q5_0": 0.0426,
    "q5_1": 0.0378,
    "iq4_nl": 0.0796,
    "iq4_xs": 0.0798,
    "iq3_s": 0.1371,
    "iq3_xxs": 0.1877,
    "tq1_0": 0.805,
    "bsr_8x8_bf16": 0.00166,
    "bsr_1x16_f16": 0.00021,
    "bsr_16x32_int8": 0.0053,
    "bsr_16x32_int4": 0.0858,
}
"""RMS error of N(0, 1) values, [256, 4096]: the information that each format keeps."""


def generator(text: str) -> np.random.Generator:
    return np.random.default_rng(crc32(text.encode()))


def format_for(name: str, values: np.ndarray) -> Format:
    fmt = parse_format(name)
    return Bsr.for_values(values, fmt.block, fmt.inner) if isinstance(fmt, Bsr) else fmt


def encoded(name: str, values: np.ndarray) -> QuantTensor:
    return encode(values, format_for(name, values))


def spread(plane: np.ndarray, shape: tuple[int, ...], group: int | str) -> np.ndarray:
    """Repeat one number per cell over the cells, the obvious way."""
    n, k = shape[-2:]
    if group in ("tensor", "row"):
        plane = plane[..., None]
    elif group == "b128":
        plane = plane.repeat(128, -2)[..., :n, :].repeat(128, -1)[..., :k]
    else:
        plane = plane.repeat(128 if group == "g128" else group, -1)[..., :k]
    return np.broadcast_to(plane, shape)


def largest_error(tensor: QuantTensor, values: np.ndarray) -> np.ndarray:
    """Return the stated bound of the error of each element."""
    fmt = tensor.format
    magnitude = np.abs(values)
    if isinstance(fmt, Float):
        return magnitude * ROUNDING[fmt.name] + 2.0**-25
    if isinstance(fmt, Bsr):
        if fmt.inner in ROUNDING:
            return magnitude * ROUNDING[fmt.inner] + 2.0**-25
        # A step of a row of a block: the magnitude of the row's largest element is 127 or 8 of it.
        n, k = values.shape
        width = fmt.block[1]
        whole = np.zeros((n, -(-k // width) * width), np.float32)
        whole[:, :k] = magnitude
        largest = whole.reshape(n, -1, width).max(axis=2).repeat(width, 1)[:, :k]
        return largest * (1 / 250 if fmt.inner == "int8" else 0.131)
    if isinstance(fmt, Ternary):
        mean = max(float(magnitude.mean(dtype=np.float64)), 1e-5)
        return np.maximum(mean / 2, magnitude - mean) + mean * 2**-7
    if isinstance(fmt, Mxfp4):
        return 3 * spread(to_f32(tensor.planes["scales"], "e8m0"), values.shape, 32)
    if isinstance(fmt, Ggml):
        return largest_ggml_error(tensor, values)
    if isinstance(fmt, Tcq):  # at worst it is of no use to 64 columns
        cells = values.reshape(*values.shape[:-1], -1, 64)
        norm = np.linalg.norm(cells, axis=-1) * np.float32(1.001) + np.float32(1e-30)
        return norm.repeat(64, -1)
    assert isinstance(fmt, Int8 | Int4 | Fp8)
    group = fmt.scope if isinstance(fmt, Fp8) else fmt.group
    scales = to_f32(tensor.planes["scales"], fmt.scale_dtype)
    step = np.abs(spread(scales, values.shape, group))
    slack = step * 1e-4
    if isinstance(fmt, Int8):
        return step / 2 + slack
    if isinstance(fmt, Fp8):
        relative, absolute = (2**-4, 2**-10) if fmt.code_dtype == "e4m3" else (2**-3, 2**-17)
        return np.maximum(magnitude * relative, step * absolute) + magnitude * 1e-6
    if fmt.symmetric:
        clipped = values / spread(scales, values.shape, group) > 7.5
        return np.where(clipped, 1.04 * step, step / 2) + slack
    return 0.56 * step + slack


TOP_CODES = {"q4_k": 15, "q5_k": 31, "q2_k": 3, "q6_k": 32, "q3_k": 4}


def largest_ggml_error(tensor: QuantTensor, values: np.ndarray) -> np.ndarray:
    """Return the bounds of the docstring of `ggml_encode`, with what the rounding of f16 adds."""
    fmt = tensor.format
    assert isinstance(fmt, Ggml)
    kind = KINDS[fmt.kind]
    blocks = tensor.planes["blocks"].reshape(-1, fmt.block_bytes).view(kind.fields)[:, 0]
    scales, codes, _ = kind.unpack(blocks)
    cells = values.reshape(codes.shape)
    step, d = np.abs(scales)[..., None], np.abs(to_f32(blocks["d"], "f16"))[:, None, None]
    bound = {
        "iq4_nl": 14 * d,
        "iq4_xs": 14 * step + 127 * d,
        "q5_0": step,
        "q6_k": step + 32 * d,
        "q3_k": step + 4 * d,
        # These have no zero, and iq3_xxs gives the least of eight the wrong sign.
        "iq3_s": np.abs(cells).max(axis=2, keepdims=True) + 2 * d,
        "iq3_xxs": 1.4 * np.abs(cells).max(axis=2, keepdims=True) + 2 * d,
    }.get(fmt.kind, step / 2)
    names = kind.fields.names or ()
    if "dmin" in names:
        bound = (
            bound + TOP_CODES[fmt.kind] * d / 2 + to_f32(blocks["dmin"], "f16")[:, None, None] / 2
        )
    # Rounded scales move the ends of the range.
    slack = np.abs(cells).max(axis=(1, 2), keepdims=True) * 2.0**-9 + 2.0**-20
    return np.broadcast_to(bound + slack, codes.shape).reshape(values.shape)


# Magnitudes whose scales are normal numbers in every scale type, and zero.
MAGNITUDES = st.floats(2**-6, 2.0**13, width=32)
NUMBERS = st.one_of(st.just(0.0), MAGNITUDES, MAGNITUDES.map(lambda v: -v))


@st.composite
def matrices(draw: st.DrawFn, name: str) -> np.ndarray:
    fmt = parse_format(name)
    n, k = draw(st.integers(1, 9)), draw(st.integers(1, 70))
    if isinstance(fmt, Ternary):
        n *= 4
    if isinstance(fmt, Mxfp4):
        k = -(-k // 32) * 32
    if isinstance(fmt, Ggml):
        n, k = -(-n // 3), -(-k * 4 // fmt.block) * fmt.block
    if isinstance(fmt, Tcq):
        n, k = 3 * n, -(-k // 64) * 64
    if isinstance(fmt, Fp8) and fmt.scope == "b128" and draw(st.booleans()):
        n, k = n + 126, k + 100
    lead = () if isinstance(fmt, Ternary | Bsr) else draw(st.sampled_from([(), (1,), (3,)]))
    # A fill keeps large arrays cheap to draw, and makes zero groups and blocks likely.
    fill = draw(st.sampled_from([0.0, -0.75, 3.0]))
    return draw(hnp.arrays(np.float32, (*lead, n, k), elements=NUMBERS, fill=st.just(fill)))


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str) -> None:
    # A trellis is slow to encode in NumPy.
    @settings(max_examples=5 if name.startswith("tcq") else 25)
    @given(matrices(name))
    def check(values: np.ndarray) -> None:
        original = values.copy()
        values.flags.writeable = False
        tensor = encoded(name, values)
        tensor.check()
        for plane in tensor.planes.values():
            plane.flags.writeable = False
        once = tensor.decode()
        np.testing.assert_array_equal(values, original)
        assert once.dtype == np.float32 and once.shape == values.shape
        assert tensor.nbytes == tensor.format.nbytes(values.shape)
        assert (np.abs(once - values) <= largest_error(tensor, values)).all()
        if not isinstance(tensor.format, Ternary | Ggml | Tcq):
            np.testing.assert_array_equal(once[values == 0], 0)
        again = encode(once, tensor.format)
        assert_same_again(tensor, again)

    check()


def assert_same_again(first: QuantTensor, second: QuantTensor) -> None:
    """Encoding what was decoded changes nothing, where that can be so."""
    fmt = first.format
    if isinstance(fmt, Ternary):
        # The mean of digits is not the mean of values; the digits stay.
        np.testing.assert_array_equal(first.planes["codes"], second.planes["codes"])
    elif isinstance(fmt, Tcq) or (isinstance(fmt, Int4) and not fmt.symmetric):
        # A range that rounding narrowed to 14 steps gets new steps, and so does another spread.
        assert set(first.planes) == set(second.planes)
    elif isinstance(fmt, Ggml):
        # Where a run's end has moved, so do its steps.
        once = first.decode()
        assert (np.abs(second.decode() - once) <= largest_error(second, once)).all()
    elif isinstance(fmt, Int8 | Fp8) and fmt.scale_dtype == "f32":
        # 127 * scale / 127 and 448 * scale / 448 are rounded in fp32.
        np.testing.assert_array_equal(first.planes["codes"], second.planes["codes"])
        np.testing.assert_allclose(second.planes["scales"], first.planes["scales"], rtol=3e-7)
    else:
        for name, plane in first.planes.items():
            np.testing.assert_array_equal(plane, second.planes[name])


@pytest.mark.parametrize("name", NAMES)
def test_gaussian_error_is_the_expected_one(name: str) -> None:
    rows = 64 if name.startswith("tcq") else 256  # a trellis is slow to encode
    values = generator(name).standard_normal((rows, 4096), dtype=np.float32)
    tensor = encoded(name, values)
    error = tensor.decode() - values
    rms = float(np.sqrt(np.square(error, dtype=np.float64).mean()))
    if name in GAUSSIAN_RMS:
        assert rms == pytest.approx(GAUSSIAN_RMS[name], rel=0.025)
    else:
        assert rms == 0
    assert (np.abs(error) <= largest_error(tensor, values)).all()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("tcq3", "tcq4"))) for n in NAMES],
)
def test_memory_stays_modest(name: str) -> None:
    values = generator(name).standard_normal((512, 1024), dtype=np.float32)
    fmt = format_for(name, values)
    tracemalloc.start()
    try:
        planes = encode(values, fmt).planes
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        fmt.decode(planes, values.shape)
        decoding = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # The pieces in which small floats are converted count for up to 2 MB.
    assert encoding <= 3 * values.nbytes + 2**21 or isinstance(fmt, Ggml)  # made by tests alone
    assert decoding <= 2.5 * values.nbytes + 2**21


@pytest.mark.parametrize("name", NAMES)
def test_name_round_trip(name: str) -> None:
    fmt = parse_format(name)
    assert fmt.name == name
    assert parse_format(fmt.name) == fmt
    assert repr(fmt) == f"<format {name}>"


def test_every_family_has_examples() -> None:
    for family in FAMILIES:
        assert family.examples
        assert all(re.fullmatch(family.pattern, name) for name in family.examples)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "f64",
        "F32",
        "f32 ",
        "int8",
        "int8_g032_f32",
        "int8_g0_f32",
        "int8_g9999999_f32",
        "int8_row_e8m0",
        "int4_sym_tensor_f16",
        "int4_sym_g32",
        "fp8_e4m3_g32_f32",
        "ternary_i8",
        "mxfp4\n",
        "q4_k_m",
        "Q4_K",
        "iq1_m",
        "bsr_16_f32",
        "bsr_0x8_f32",
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(FormatError, match=re.escape(repr(name))) as error:
        parse_format(name)
    assert all(family.spelling in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int4_sym_g33_f16", "group 33; expected an even number"),
        ("bsr_16x2048_f32", "expected 1 to 1024"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse_format(name)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("int8_g999999_f32", 2**18), ("int4_asym_g999998_f16", 2**18), ("bsr_1024x1024_f32", 2**25)],
)
def test_absurd_settings_cost_little_memory(name: str, limit: int) -> None:
    values = np.array([[1, -2, 3]], np.float32)
    tracemalloc.start()
    try:
        decoded = encoded(name, values).decode()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_allclose(decoded, values, atol=0.2)
    assert peak < limit


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", [n for n in MATRIX_NAMES if not n.startswith("bsr")])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    values = np.ones((4, 256), np.float32)
    values[2, 5] = bad
    with pytest.raises(FormatError, match=rf"{name} cannot hold {bad} \(element \[2, 5\]\)"):
        encode(values, parse_format(name))


@pytest.mark.parametrize("name", ["f16", "bf16", "bsr_2x2_f16"])
def test_floats_keep_nan_and_infinity_but_never_make_one(name: str) -> None:
    values = np.array([[np.nan, np.inf], [-np.inf, 1]], np.float32)
    np.testing.assert_array_equal(encoded(name, values).decode(), values)
    values[1, 1] = np.finfo(np.float32).max
    with pytest.raises(FormatError, match=r"3\.40282e\+38 is beyond b?f16"):
        encoded(name, values)


@pytest.mark.parametrize("name", MATRIX_NAMES)
@pytest.mark.parametrize("shape", [(), (32,), (0, 32), (4, 0)], ids=str)
def test_shapes_that_are_no_matrix_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="holds matrices"):
        parse_format(name).planes(shape)
    with pytest.raises(ShapeError, match="holds matrices"):
        encode(np.zeros(shape, np.float32), parse_format(name))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mxfp4", (4, 48), "K = 48"),
        ("q4_k", (4, 384), "K = 384 .* multiple of 256"),
        ("iq4_nl", (2, 4, 48), "K = 48 .* multiple of 32"),
        ("ternary", (6, 8), "N a multiple of 4"),
        ("ternary", (2, 8, 8), "N a multiple of 4"),
        ("bsr_2x2_f32", (2, 8, 8), r"expected \[N, K\]"),
        ("f32", (3, 0), "at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        parse_format(name).planes(shape)


@pytest.mark.parametrize("scale", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["int8_row", "int4_sym_row", "int4_asym_row", "fp8_e4m3_row"])
def test_scales_that_round_to_zero_become_the_smallest(kind: str, scale: str) -> None:
    largest = SMALLEST[scale] * 1.75
    values = np.array([[1, 0.5, -0.25, 0], [0, 0, 0, 0]], np.float32) * np.float32(largest)
    tensor = encode(values, parse_format(f"{kind}_{scale}"))
    tensor.check()
    np.testing.assert_array_equal(to_f32(tensor.planes["scales"], scale), [SMALLEST[scale], 1])
    decoded = tensor.decode()
    assert (decoded[1] == 0).all()
    assert np.abs(decoded[0] - values[0]).max() <= SMALLEST[scale] / 2


def test_scales_that_are_zero_in_fp32_become_one() -> None:
    tensor = encode(np.full((1, 2), 2.0**-149, np.float32), parse_format("int8_row_f32"))
    assert tensor.planes["scales"].tolist() == [1]
    assert tensor.planes["codes"].tolist() == [[0, 0]]


def test_codes_clip_where_a_subnormal_scale_rounds_far_down() -> None:
    largest = 127 * 1.4 * 2.0**-24  # the scale rounds to 2^-24, which is 178 steps
    values = np.array([[largest, -largest, 2.0**-24]], np.float32)
    tensor = encode(values, parse_format("int8_row_f16"))
    assert tensor.planes["codes"].tolist() == [[127, -127, 1]]


def test_mxfp4_scales_end_at_the_smallest() -> None:
    values = np.zeros((1, 64), np.float32)
    values[0, :3] = 2.0**-126, -(2.0**-128), 2.0**-149
    values[0, 32] = 2.0**-149
    tensor = encode(values, Mxfp4())
    assert tensor.planes["scales"].tolist() == [[0, 0]]
    assert tensor.planes["blocks"][0, :, :2].tolist() == [[0x94, 0], [0, 0]]
    assert tensor.decode()[0, :3].tolist() == [2.0**-126, -(2.0**-128), 0]


@pytest.mark.parametrize("name", ["int8_row_f16", "int4_sym_row_f16", "int4_asym_row_f16"])
def test_scales_too_large_for_their_type_are_refused(name: str) -> None:
    values = np.full((1, 4), 127 * LARGEST["f16"] * 1.01, np.float32)
    with pytest.raises(FormatError, match=r"beyond f16 \(at most 65504\).*f32 or bf16"):
        encode(values, parse_format(name))


@pytest.mark.parametrize("name", MATRIX_NAMES)
def test_the_largest_fp32_values(name: str) -> None:
    fmt = parse_format(name)
    values = np.full((4, 256), 3e38, np.float32)
    values[1] *= -1
    if "f16" in name.split("_") or isinstance(fmt, Ggml | Tcq):
        with pytest.raises(FormatError, match=r"beyond f16|cannot hold inf"):
            encoded(name, values)
        return
    decoded = encoded(name, values).decode()
    assert np.isfinite(decoded).all()
    tolerance = 0.3 if isinstance(fmt, Mxfp4) else 0.2
    np.testing.assert_allclose(decoded, values, rtol=tolerance)


def damage(name: str, plane: str, index: tuple[int, ...], code: int) -> QuantTensor:
    tensor = encode(np.ones((4, 256), np.float32), parse_format(name))
    tensor.planes[plane][index] = code
    return tensor


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (damage("ternary", "codes", (0, 255), 0b11_00_00_00), "code 3"),
        (damage("ternary", "codes", (0, 0), 0b10_01_11_01), "code 3"),
        (damage("ternary", "codes", (0, 0), 0b01_10_00_11), "code 3"),
        (damage("ternary", "scale", (0,), 0x7F80), "scale of inf"),
        (damage("ternary_inverse", "scale", (0,), 0), "scale of 0.0; .* other than zero"),
        (damage("mxfp4", "scales", (3, 0), 255), "255"),
        (damage("int4_asym_g32_f16", "zeros", (0, 0), 16), "zero point of 16"),
        (damage("int4_sym_g32_f16", "scales", (0, 0), np.nan), "cannot hold nan"),
        (damage("int8_row_bf16", "scales", (2,), 0xFF80), r"cannot hold -inf \(element \[2\]\)"),
        (damage("fp8_e4m3_row_f32", "scales", (0,), np.inf), "cannot hold inf"),
        (damage("fp8_e4m3_row_f32", "codes", (0, 0), 0xFF), "not a finite number"),
        (damage("fp8_e5m2_row_f32", "codes", (0, 0), 0x7C), "not a finite number"),
        (damage("q4_k", "blocks", (1, 1), 0x7C), r"q4_k d scales cannot hold nan \(element \[1\]"),
        (damage("q4_k", "blocks", (3, 3), 0xFE), r"q4_k dmin scales cannot hold nan"),
        (damage("q6_k", "blocks", (2, 209), 0x7C), "q6_k d scales cannot hold"),
        (damage("q4_1", "blocks", (0, 23), 0xFC), r"q4_1 m scales cannot hold .*element \[1\]"),
        (damage("tq1_0", "blocks", (0, 53), 0xFE), "tq1_0 d scales cannot hold"),
    ],
)
def test_forbidden_codes_are_found(tensor: QuantTensor, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        tensor.check()


def test_ternary_accepts_all_codes_but_three() -> None:
    codes = np.array([c for c in range(256) if 3 not in {c >> i & 3 for i in (0, 2, 4, 6)}])
    planes = {"codes": codes.astype(np.uint8)[None], "scale": np.array([0x3F80], np.uint16)}
    assert codes.size == 81
    QuantTensor((4, 81), Ternary(), planes).check()


def bsr_sample() -> QuantTensor:
    values = np.zeros((5, 7), np.float32)
    values[0, [0, 6]] = 1, 2
    values[4, [2, 6]] = 3, 4
    return encoded("bsr_2x3_f32", values)


@pytest.mark.parametrize(
    ("plane", "index", "value", "message"),
    [
        ("row_ptr", 0, 1, "row_ptr"),
        ("row_ptr", 1, 5, "row_ptr"),
        ("row_ptr", 1, -1, "row_ptr"),
        ("row_ptr", 3, 3, "row_ptr"),
        ("col_idx", 1, 3, "block columns 0 .. 3; expected 0 .. 2"),
        ("col_idx", 0, -1, "block columns -1"),
        ("col_idx", 1, 0, "do not rise"),
        ("col_idx", 2, 2, "do not rise"),
        ("values", (1, 0, 1), 9, "beyond the edge"),
        ("values", (2, 1, 0), np.nan, "beyond the edge"),
    ],
)
def test_damaged_bsr_is_found(plane: str, index: object, value: float, message: str) -> None:
    tensor = bsr_sample()
    tensor.check()
    tensor.planes[plane][index] = value
    with pytest.raises(FormatError, match=message):
        tensor.check()


def test_bsr_keeps_only_blocks_that_are_not_zero() -> None:
    tensor = bsr_sample()
    assert tensor.planes["row_ptr"].tolist() == [0, 2, 2, 4]
    assert tensor.planes["col_idx"].tolist() == [0, 2, 0, 2]
    assert isinstance(tensor.format, Bsr)
    assert tensor.format.nnzb == 4 and tensor.format.block == (2, 3)
    assert tensor.format.block_values(tensor.planes).shape == (4, 2, 3)
    # 1e-9 is zero in f16, and -0.0 is zero: neither is worth a block.
    values = np.array([[1e-9, -0.0, 1, 0]], np.float32)
    assert encoded("bsr_1x1_f16", values).planes["col_idx"].tolist() == [2]
    assert encoded("bsr_1x1_bf16", values).planes["col_idx"].tolist() == [0, 2]
    nothing = encoded("bsr_4x4_f16", np.zeros((3, 9), np.float32))
    nothing.check()
    assert nothing.planes["values"].shape == (0, 4, 4)
    np.testing.assert_array_equal(nothing.decode(), 0)


def test_bsr_refuses_another_number_of_blocks() -> None:
    values = np.ones((4, 4), np.float32)
    with pytest.raises(ShapeError, match=r"4 non-zero blocks, the format is for 0; .*for_values"):
        encode(values, parse_format("bsr_2x2_f32"))
    with pytest.raises(ShapeError, match=r"5 blocks in a .* room for 4"):
        Bsr((2, 2), "f32", 5).planes((4, 4))


@pytest.mark.parametrize("name", ["ternary", "ternary_inverse"])
def test_ternary_equals_transformers(name: str) -> None:
    from transformers.integrations import bitnet

    values = generator(name).standard_normal((24, 37), dtype=np.float32)
    tensor = encode(values, parse_format(name))
    fmt = tensor.format
    assert isinstance(fmt, Ternary)
    digits = fmt.codes(tensor.planes, tensor.shape)
    packed = bitnet.pack_weights(torch.from_numpy(digits.copy()))
    np.testing.assert_array_equal(tensor.planes["codes"], packed.numpy())
    with torch.compiler.set_stance("force_eager"):
        unpacked = bitnet.unpack_weights(torch.from_numpy(tensor.planes["codes"]), torch.float32)
        online = bitnet.WeightQuant.apply(torch.from_numpy(values).bfloat16()).float().numpy()
    np.testing.assert_array_equal(digits, unpacked.numpy())
    np.testing.assert_array_equal(tensor.decode(), digits * fmt.multiplier(tensor.planes))
    if name == "ternary":
        # transformers quantises online bf16 weights like this; so do we, to the bit.
        half = to_f32(parse_format("bf16").encode(values)["data"], "bf16")
        np.testing.assert_array_equal(encode(half, fmt).decode(), online)


def test_ternary_inverse_divides_in_fp32() -> None:
    planes = {"codes": np.array([[0b10]], np.uint8), "scale": np.array([0x4040], np.uint16)}
    assert Ternary().multiplier(planes) == 3
    assert Ternary(inverse=True).multiplier(planes) == np.float32(1) / np.float32(3)


@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
def test_mxfp4_equals_transformers_on_the_embedded_model(projection: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    assets = Path(next(iter(clocher_runtime.__path__))) / "assets" / "clocher-tiny-gptoss"
    with safe_open(assets / "model.safetensors", "np") as file:
        prefix = f"model.layers.1.mlp.experts.{projection}"
        planes = {
            "blocks": file.get_tensor(f"{prefix}_blocks"),
            "scales": file.get_tensor(f"{prefix}_scales"),
        }
    experts, rows, groups, _ = planes["blocks"].shape
    tensor = QuantTensor((experts, rows, groups * 32), Mxfp4(), planes)
    tensor.check()
    blocks, scales = (torch.from_numpy(planes[name]) for name in ("blocks", "scales"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    # transformers gives [E, K, N].
    np.testing.assert_array_equal(tensor.decode(), theirs.numpy().swapaxes(1, 2))
    again = encode(tensor.decode(), Mxfp4())
    np.testing.assert_array_equal(again.decode(), tensor.decode())


GGML_TYPES = {name: GGMLQuantizationType[name.upper()] for name in GGML_KINDS}


@pytest.mark.parametrize("name", GGML_KINDS)
def test_ggml_blocks_decode_as_gguf_does(name: str) -> None:
    fmt = parse_format(name)
    assert isinstance(fmt, Ggml)
    assert GGML_QUANT_SIZES[GGML_TYPES[name]] == (fmt.block, fmt.block_bytes)
    shape = (3, 16, 1024)
    blocks = generator(name).integers(0, 256, fmt.planes(shape)["blocks"].shape, np.uint8)
    rows = blocks.reshape(-1, fmt.block_bytes).view(KINDS[fmt.kind].fields)[:, 0]
    for field in ("d", "dmin", "m"):
        if field in (rows.dtype.names or ()):
            rows[field] = generator(field).standard_normal(len(rows))
    tensor = QuantTensor(shape, fmt, {"blocks": blocks})
    tensor.check()
    expected = gguf.quants.dequantize(blocks, GGML_TYPES[name])
    np.testing.assert_array_equal(tensor.decode().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["q4_1", "q5_0", "q5_1", "tq1_0"])
def test_ggml_encoders_are_as_good_as_those_of_gguf(name: str) -> None:
    values = generator(name).standard_normal((64, 1024), dtype=np.float32)
    theirs = gguf.quants.dequantize(
        gguf.quants.quantize(values, GGML_TYPES[name]), GGML_TYPES[name]
    )
    ours = encoded(name, values).decode()
    assert np.square(ours - values).sum() <= 1.001 * np.square(theirs - values).sum()


@pytest.mark.parametrize("name", TRIED_KINDS)
def test_ggml_encoders_keep_what_the_type_can_hold(name: str) -> None:
    values = encoded(name, generator(name).standard_normal((64, 1024), dtype=np.float32)).decode()
    again = encoded(name, values).decode()
    # A run that does not reach the last point of a grid gets other steps.
    assert (again == values).mean() > (0.75 if name.startswith("iq3") else 0.98)


def test_fp8_blocks_multiply_their_scale() -> None:
    rng = generator("fp8 blocks")
    codes = rng.integers(0, 0x7F, (130, 257), dtype=np.uint8)
    scales = rng.random((2, 3), dtype=np.float32)
    decoded = QuantTensor(
        (130, 257), parse_format("fp8_e4m3_b128_f32"), {"codes": codes, "scales": scales}
    ).decode()
    for n, k in [(0, 0), (127, 127), (128, 127), (127, 128), (129, 255), (129, 256)]:
        value = to_f32(codes[n : n + 1, k], "e4m3")[0]
        assert decoded[n, k] == value * scales[n // 128, k // 128]
