"""Vector operations: narrow floats bit by bit, exp within its bound, tails, look-ups, sums."""

from collections.abc import Callable

import numpy as np
import pytest
from kernel_run import compiled, kernel_cache

from clocher_kernels.dtypes import E2M1_VALUES, STORAGE, from_f32, to_f32
from cpu_fallback.lanes import language, memory, simd

pytestmark = pytest.mark.usefixtures("kernel_cache")
__all__ = ["kernel_cache"]

load_f32, store_f32 = memory.load_f32, memory.store_f32
load_u8, load_u16, load_i8 = memory.load_u8, memory.load_u16, memory.load_i8
store_u8, store_u16, store_i32 = memory.store_u8, memory.store_u16, memory.store_i32


def _decoder(load: object, convert: object, size: int) -> Callable[..., None]:
    def decode(source, target, n):
        for i in range(0, n, 16):
            store_f32(target + 4 * i, convert(load(source + size * i)))

    return decode


def _encoder(convert: object, store: object, size: int) -> Callable[..., None]:
    def encode(source, target, n):
        for i in range(0, n, 16):
            store(target + size * i, convert(load_f32(source + 4 * i)))

    return encode


_NARROW = {
    "bf16": (load_u16, language.from_bf16, language.to_bf16, store_u16),
    "f16": (load_u16, language.from_f16, language.to_f16, store_u16),
    "f16-bits": (load_u16, language.from_f16_bits, language.to_f16_bits, store_u16),
    "e4m3": (load_u8, language.from_e4m3, language.to_e4m3, store_u8),
    "e5m2": (load_u8, language.from_e5m2, language.to_e5m2, store_u8),
}


@pytest.mark.parametrize("name", _NARROW)
def test_every_code_decodes_like_the_dtype(name: str) -> None:
    load, convert, _, _ = _NARROW[name]
    dtype = name.partition("-")[0]
    storage = STORAGE[dtype]
    bits = 8 * storage.itemsize
    codes = np.arange(1 << bits, dtype=f"u{storage.itemsize}")
    got = np.full(len(codes), np.nan, np.float32)
    compiled(_decoder(load, convert, storage.itemsize))(
        codes.ctypes.data, got.ctypes.data, len(codes)
    )
    expected = to_f32(codes.view(storage), dtype)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("name", _NARROW)
def test_values_encode_like_the_dtype(name: str) -> None:
    _, _, convert, store = _NARROW[name]
    dtype = name.partition("-")[0]
    storage = STORAGE[dtype]
    rng = np.random.default_rng(7)
    values = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint64).astype(np.uint32).view(np.float32)
    # Ties and their neighbours: halfway between codes, and one unit around.
    codes = np.arange(1 << (8 * storage.itemsize), dtype=f"u{storage.itemsize}").view(storage)
    exact = to_f32(codes, dtype)
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] / 2 + exact[:-1] / 2).astype(np.float32)
    middle = middle[rng.integers(0, len(middle), 4096)]
    up, down = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    special = [0.0, -0.0, np.inf, -np.inf, 65519.0, 65520.0, 448.0, 464.0, 57344.0, 61440.0]
    values = np.concatenate([values, middle, up, down, np.array(special, np.float32)])
    values = np.resize(values, -(-len(values) // 16) * 16)
    got = np.zeros(len(values), storage)
    compiled(_encoder(convert, store, storage.itemsize))(
        np.ascontiguousarray(values).ctypes.data, got.ctypes.data, len(values)
    )
    expected = from_f32(values, dtype)
    number = ~np.isnan(values)
    unsigned = f"u{storage.itemsize}"
    assert np.array_equal(got.view(unsigned)[number], expected.view(unsigned)[number])
    assert np.isnan(to_f32(got[~number], dtype)).all()


def _exp(source, target, n):
    for i in range(0, n, 16):
        simd_store(target + 4 * i, simd_exp(simd_load(source + 4 * i)))


simd_exp, simd_load, simd_store = language.exp, memory.load_f32, memory.store_f32


def test_exp_is_within_its_bound() -> None:
    x = np.concatenate([np.linspace(-88, 89, 1 << 18), np.linspace(-1, 1, 1 << 16)])
    x = x.astype(np.float32)
    got = np.empty_like(x)
    compiled(_exp)(x.ctypes.data, got.ctypes.data, len(x))
    expected = np.exp(x.astype(np.float64))
    normal = (x >= np.float32(-87.33)) & (x <= np.float32(88.72))
    ulp = np.spacing(expected[normal].astype(np.float32)).astype(np.float64)
    error = np.abs(got[normal] - expected[normal]) / ulp
    assert error.max() < (2 if language.CURRENT.fma else 3), error.max()
    assert (got[x < np.float32(-87.33)] == 0).all()
    assert np.isinf(got[x > np.float32(88.73)]).all()


def test_exp_of_special_values() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 88.72, -87.33, 1e-30] * 2, np.float32)
    got = np.empty_like(x)
    compiled(_exp)(x.ctypes.data, got.ctypes.data, 16)
    assert got[0] == got[1] == got[7] == 1
    assert np.isposinf(got[2]) and got[3] == 0 and np.isnan(got[4])
    assert np.isfinite(got[5]) and got[6] > 0


def _tanh(source, target, n):
    for i in range(0, n, 16):
        simd_store(target + 4 * i, simd_tanh(simd_load(source + 4 * i)))


simd_tanh = language.tanh


def test_tanh_is_within_its_bound_and_clamped() -> None:
    """Over every 509th float of all there are: both signs, subnormal ones, infinities, NaN."""
    bits = np.arange(0, 1 << 32, 509, dtype=np.uint32)
    x = bits[: len(bits) // 16 * 16].view(np.float32)
    got = np.empty_like(x)
    compiled(_tanh)(x.ctypes.data, got.ctypes.data, len(x))
    number = ~np.isnan(x)
    assert np.array_equal(np.isnan(got), ~number)
    exact = np.tanh(x[number].astype(np.float64))
    error = np.abs(got[number] - exact)
    bound = 5.2 if language.CURRENT.fma else 6.2
    assert (error <= bound * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert np.array_equal(np.signbit(got[number]), np.signbit(x[number]))
    assert np.abs(got[number]).max() == 1
    beyond = number & (np.abs(x) >= 8.02)
    assert np.array_equal(got[beyond], np.sign(x[beyond]))
    tiny = number & (np.abs(x) < 1e-5)
    assert np.array_equal(got[tiny], x[tiny])


def test_tanh_of_special_values() -> None:
    subnormal = np.float32(1e-45)
    x = np.array([0, -0.0, subnormal, -subnormal, np.inf, -np.inf, np.nan, 9] * 2, np.float32)
    got = np.empty_like(x)
    compiled(_tanh)(x.ctypes.data, got.ctypes.data, 16)
    expected = np.array([0, -0.0, subnormal, -subnormal, 1, -1, np.nan, 1] * 2, np.float32)
    np.testing.assert_array_equal(got, expected)
    assert np.array_equal(np.signbit(got[:6]), np.signbit(x[:6]))


def _lookup(source, target, n):
    for i in range(0, n, 16):
        simd_store(target + 4 * i, fp4_load(source + i // 2))


fp4_load, _ = language.loads_of("e2m1")


def test_lookup_gives_every_fp4_code() -> None:
    codes = np.random.default_rng(3).permutation(np.repeat(np.arange(16, dtype=np.uint8), 16))
    packed = codes[0::2] | codes[1::2] << 4
    got = np.empty(256, np.float32)
    compiled(_lookup)(packed.ctypes.data, got.ctypes.data, 256)
    assert np.array_equal(got.view(np.uint32), E2M1_VALUES[codes].view(np.uint32))


def _tails(source, target):
    for n in range(17):
        row = target + 256 * n
        tail_store_f32(row, tail_load_f32(source, n), n)
        tail_store_u8(row + 64, tail_load_u8(source, n), n)
        tail_store_u16(row + 80, tail_load_u16(source, n), n)
        tail_store_f32(row + 112, tail_load_i4(source, n), 16)
        tail_store_i32(row + 176, tail_load_i8(source, n))


tail_load_f32, tail_store_f32 = memory.load_f32_n, memory.store_f32_n
tail_load_u8, tail_store_u8 = memory.load_u8_n, memory.store_u8_n
tail_load_u16, tail_store_u16 = memory.load_u16_n, memory.store_u16_n
tail_load_i8, tail_store_i32 = memory.load_i8_n, memory.store_i32
_, tail_load_i4 = language.loads_of("i4")


def test_tails_touch_what_they_name() -> None:
    source = np.random.default_rng(5).integers(0, 256, 64).astype(np.uint8)
    source[3::4] &= 0x7F
    target = np.full((17, 256), 0xEE, np.uint8)
    compiled(_tails)(source.ctypes.data, target.ctypes.data)
    nibbles = np.stack([source & 15, source >> 4], 1).reshape(-1)
    for n, row in enumerate(target):
        assert np.array_equal(row[: 4 * n], source[: 4 * n]) and (row[4 * n : 64] == 0xEE).all()
        assert np.array_equal(row[64 : 64 + n], source[:n]) and (row[64 + n : 80] == 0xEE).all()
        assert np.array_equal(row[80 : 80 + 2 * n], source[: 2 * n])
        assert (row[80 + 2 * n : 112] == 0xEE).all()
        whole = n + n % 2
        expected = np.where(np.arange(16) < whole, nibbles[:16], 0).astype(np.float32) - 8
        assert np.array_equal(row[112:176].view(np.float32), expected)
        signed = np.where(np.arange(16) < n, source[:16].view(np.int8), 0)
        assert np.array_equal(row[176:240].view(np.int32), signed)


def _sums(source, target):
    sum_write(target, sum_tree(sum_load(source)))
    sum_write(target + 4, sum_max(sum_load(source)))


sum_tree, sum_max, sum_load, sum_write = simd.hsum, simd.hmax, memory.load_f32, memory.write_f32


def test_sum_is_the_stated_tree() -> None:
    x = np.random.default_rng(11).standard_normal(16).astype(np.float32) * np.float32(1e6)
    got = np.empty(2, np.float32)
    compiled(_sums)(x.ctypes.data, got.ctypes.data)
    tree = x.copy()
    while len(tree) > 1:
        half = len(tree) // 2
        tree = tree[:half] + tree[half:]
    assert got[0] == tree[0] and got[1] == x.max()
