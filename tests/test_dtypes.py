"""Element types against torch's conversions, exhaustively where 16 bits allow it."""

import numpy as np
import pytest
import torch

from clocher_kernels.dtypes import (
    E2M1_VALUES,
    LARGEST,
    SMALLEST,
    STORAGE,
    encode_e2m1,
    from_f32,
    look_up,
    to_f32,
)
from clocher_kernels.errors import FormatError

TORCH = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
MADE = ["f16", "bf16", "e4m3", "e5m2"]
ALL_F16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def every_code(dtype: str) -> np.ndarray:
    storage = STORAGE[dtype]
    unsigned = np.dtype(f"u{storage.itemsize}")
    return np.arange(1 << 8 * storage.itemsize).astype(unsigned).view(storage)


def random_floats(count: int = 500_000) -> np.ndarray:
    """Every exponent, sign and kind of fp32, NaN with payloads and infinities included."""
    bits = np.random.default_rng(7).integers(0, 1 << 32, count, dtype=np.uint32)
    return bits.view(np.float32)


def torch_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    converted = torch.from_numpy(values.copy()).to(TORCH[dtype])
    integer = {1: torch.uint8, 2: torch.uint16}[converted.element_size()]
    return converted.view(integer).numpy().view(STORAGE[dtype])


@pytest.mark.parametrize("dtype", TORCH)
def test_decode_of_every_code_equals_torch(dtype: str) -> None:
    codes = every_code(dtype)
    expected = torch.from_numpy(codes).view(TORCH[dtype]).float().numpy()
    got = to_f32(codes, dtype)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("dtype", MADE)
def test_every_number_survives_the_round_trip(dtype: str) -> None:
    codes = every_code(dtype)
    values = to_f32(codes, dtype)
    kept = ~np.isnan(values) & (np.abs(values) <= LARGEST[dtype])
    np.testing.assert_array_equal(from_f32(values, dtype)[kept], codes[kept])


@pytest.mark.parametrize("dtype", MADE)
def test_the_limits_are_those_of_the_codes(dtype: str) -> None:
    values = to_f32(every_code(dtype), dtype)
    finite = values[np.isfinite(values)]
    assert finite.max() == LARGEST[dtype]
    assert finite[finite > 0].min() == SMALLEST[dtype]


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["every-f16", "random-f32"])
def test_fp8_equals_torch_in_range(dtype: str, source: str) -> None:
    values = ALL_F16 if source == "every-f16" else random_floats()
    values = values[np.abs(values) <= LARGEST[dtype]]
    assert values.size > 10_000
    np.testing.assert_array_equal(from_f32(values, dtype), torch_bits(values, dtype))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_fp8_saturates_and_keeps_nan_and_sign(dtype: str) -> None:
    top = np.float32(LARGEST[dtype])
    values = np.array([top * 1.01, 1e30, np.inf, -1e30, -np.inf, -0.0, np.nan], np.float32)
    decoded = to_f32(from_f32(values, dtype), dtype)
    np.testing.assert_array_equal(decoded, [top, top, top, -top, -top, -0.0, np.nan])
    assert np.signbit(decoded[5])
    noise = random_floats()
    decoded = to_f32(from_f32(noise, dtype), dtype)
    np.testing.assert_array_equal(np.isnan(decoded), np.isnan(noise))
    assert np.nanmax(np.abs(decoded)) == top


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_floats_equal_torch(dtype: str) -> None:
    values = random_floats()
    number = ~np.isnan(values)
    got = from_f32(values, dtype)
    np.testing.assert_array_equal(got[number], torch_bits(values, dtype)[number])
    assert np.isnan(to_f32(got, dtype)[~number]).all()


def test_bf16_ties_overflow_and_nan_payload() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0xFF7FFFFF, 0x7F800001, 0xFFFFFFFF],
        np.uint32,
    )
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF]
    np.testing.assert_array_equal(from_f32(bits.view(np.float32), "bf16"), expected)


def test_e2m1_takes_the_nearest_and_the_even_of_two() -> None:
    assert E2M1_VALUES[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1_VALUES[8:].tolist() == [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = np.arange(0, 8 * 64 + 1, dtype=np.float32) / 64
    got = encode_e2m1(values)
    for value, code in zip(values, got, strict=True):
        distance = np.abs(E2M1_VALUES[:8] - value)
        nearest = np.flatnonzero(distance == distance.min())
        expected = nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0]
        assert code == expected, value
    np.testing.assert_array_equal(encode_e2m1(-values), got | 8)


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 0), (3, 1 << 17)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", *MADE])
def test_shapes_survive(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.full(shape, 2, np.float32)
    stored = from_f32(values, dtype)
    assert stored.shape == shape and stored.dtype == STORAGE[dtype]
    decoded = to_f32(stored, dtype)
    assert decoded.shape == shape and decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize("dtype", MADE)
def test_strided_arrays_are_read_in_order(dtype: str) -> None:
    values = np.exp2(np.arange(-6, 6)).astype(np.float32).reshape(3, 4)
    stored = from_f32(values.T, dtype)
    np.testing.assert_array_equal(stored, from_f32(values.T.copy(), dtype))
    np.testing.assert_array_equal(
        to_f32(from_f32(values, dtype)[::2, ::-1], dtype), values[::2, ::-1]
    )


def test_f32_is_not_copied_and_integers_are_cast() -> None:
    values = np.arange(4, dtype=np.float32)
    assert to_f32(values, "f32") is values
    assert from_f32(values, "f32") is values
    np.testing.assert_array_equal(to_f32(np.array([-128, 127], np.int8), "i8"), [-128, 127])


def test_look_up_returns_rows() -> None:
    table = np.arange(512, dtype=np.float32).reshape(256, 2)
    got = look_up(table, np.array([[0, 255], [1, 2]], np.uint8))
    np.testing.assert_array_equal(got, [[[0, 1], [510, 511]], [[2, 3], [4, 5]]])


def test_errors_name_what_is_known() -> None:
    with pytest.raises(FormatError, match=r"'f64'.*f32, f16, bf16"):
        to_f32(np.zeros(1), "f64")
    with pytest.raises(FormatError, match="bf16 array is held as uint16, got float32"):
        to_f32(np.zeros(1, np.float32), "bf16")
    with pytest.raises(FormatError, match=r"'i8'; expected one of bf16, e4m3"):
        from_f32(np.zeros(1), "i8")
