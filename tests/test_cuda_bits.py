"""Weights of less than a byte on CUDA.

Their layout, the kernels in Triton's interpreter, the inline assembly in NumPy, the machine code.
"""

import zlib

import numpy as np
import ptx_emulator
import pytest
import sass_ratchet
import torch
import triton
import triton.language as tl
from cuda_cases import amid_nan, aot_report, require_nan_around, run_interpreted
from ggml_encode import encode
from op_cases import OpRun, error

from clocher_kernels.cuda import codes, dots, prepack
from clocher_kernels.cuda.gemv_bits import _DOT16, _LESS16, gemv_bits, gemv_tile
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.moe import moe_down
from clocher_kernels.cuda.prepack import DeviceTensor, vectors_of
from clocher_kernels.cuda.scalar import Linear
from clocher_kernels.cuda.words import (
    _INT4_BF16,
    _INT4_PAIRS,
    _INT5_PAIRS,
    _INT6_PAIRS,
    _MXFP4_PAIRS,
)
from clocher_kernels.dtypes import E2M1_VALUES, from_f32
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.contract import EXACT, Case
from clocher_kernels.quant_tensor import QuantTensor

BLOCKS = ("q4_k", "q5_k", "q6_k", "q4_1", "q5_0", "q5_1")
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _normal(name: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.standard_normal(shape, dtype=np.float32)


def _weights(fmt: str, *shape: int) -> QuantTensor:
    return encode(_normal(f"{fmt}-{shape}", *shape), parse_format(fmt))


@triton.jit
def _decode(words, values, KIND: tl.constexpr, W: tl.constexpr, PER_WORD: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * 4
    w = tl.load(words + row * W + column + tl.arange(0, 4)[None, :])
    if KIND == "int4":
        v = codes.decode_words(w, "int4", tl.float16)
    elif KIND == "mxfp4":
        v = codes.decode_words(w, "mxfp4", tl.float32)
    else:
        v = codes.decode_words(w, "ternary", tl.int8)
    at = (row * W + column) * PER_WORD + tl.arange(0, 4 * PER_WORD)[None, :]
    tl.store(values + at, v.to(tl.float32))


def _unpacked(packed: DeviceTensor) -> np.ndarray:
    """Read prepacked words with the kernels' decoders: fp32 [..., N, K], not scaled."""
    held = vectors_of(packed)
    words = held.data.flatten(0, -2)
    rows, width = words.shape
    values = torch.full((rows, width * held.vector // 4), float("nan"))
    _decode[(rows, width // 4)](words, values, held.code, width, held.vector // 4)
    return values.numpy()[:, : packed.shape[-1]].reshape(packed.shape)


@pytest.mark.parametrize("piece", [prepack._PIECE, 24])
@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        ("int4_sym_g32_f16", (3, 64)),
        ("int4_asym_g34_f32", (5, 101)),
        ("int4_sym_row_bf16", (2, 3, 8)),
        ("mxfp4", (3, 2, 96)),
        ("ternary_inverse", (8, 100)),
        ("ternary_f32", (12, 128)),
    ],
)
def test_prepacking_keeps_every_code(
    fmt: str, shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepack, "_PIECE", piece)
    weight = _weights(fmt, *shape)
    before = {name: plane.copy() for name, plane in weight.planes.items()}
    got = _unpacked(prepack.prepack(weight, INTERPRETER))
    for name, plane in before.items():
        np.testing.assert_array_equal(weight.planes[name], plane, err_msg="the source changed")
    if fmt == "mxfp4":
        blocks = weight.planes["blocks"]
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(shape)
        expected = E2M1_VALUES[codes]
        np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))
    elif isinstance(weight.format, Ternary):
        expected = weight.format.codes(weight.planes, shape)
    else:
        codes = weight.planes["codes"]
        expected = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*shape[:-1], -1)
        expected = expected[..., : shape[-1]]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("kind", "columns", "bits"), [("q5_k", 512, 5.625), ("q6_k", 256, 6.5625)])
def test_blocks_become_words_piece_by_piece(
    kind: str, columns: int, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weights(kind, 2, 5, columns)
    whole = prepack.prepack(weight, INTERPRETER)
    assert whole.nbytes == weight.decode().size * bits / 8
    monkeypatch.setattr(prepack, "_PIECE", columns // 4)
    for name, plane in prepack.prepack(weight, INTERPRETER).planes.items():
        assert plane.shape[:2] == (2, 5) and torch.equal(plane, whole.planes[name])


def test_whole_rows_are_rearranged_in_place() -> None:
    weight = _weights("mxfp4", 4, 64)
    planes = {name: torch.from_numpy(plane.copy()) for name, plane in weight.planes.items()}
    packed = prepack.rearrange(weight.format, weight.shape, planes)
    assert packed.planes["blocks"].data_ptr() == planes["blocks"].data_ptr()
    assert packed.nbytes == weight.nbytes


# Large enough to take several turns and, in the last case, several programs.
_OWN = [
    Case(f"{fmt}-m{m}-n{n}-k{k}", {"M": m, "N": n, "K": k}, {}, {"w": fmt}, options)
    for fmt, m, n, k, options in [
        ("int4_sym_g100_f16", 1, 5, 1100, {}),
        ("int4_asym_g34_f32", 2, 3, 613, {"bias": True}),
        ("int4_asym_g40_bf16", 3, 5, 333, {"residual": True}),
        ("int4_asym_row_bf16", 5, 5, 301, {"bias": True}),
        ("int4_sym_g64_f16", 8, 70, 2880, {"bias": True, "residual": True}),
        ("mxfp4", 7, 3, 2880, {"bias": True}),
        ("ternary", 2, 68, 1041, {"residual": True}),
    ]
]


_OWN_CODES = [
    Case(
        f"{fmt}-m{m}-n{n}-k{k}-i8",
        {"M": m, "N": n, "K": k},
        {"group": 0},
        {"w": fmt, "x": "i8"},
        {**options, "x_scale": True},
        EXACT,
    )
    for fmt, m, n, k, options in [
        ("ternary_f32", 9, 68, 1041, {"bias": True, "residual": True}),
        ("ternary_inverse", 1, 4, 2560, {}),
    ]
]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id) for c in (*_OWN, *_OWN_CODES)])
def test_several_turns_and_programs(case: Case) -> None:
    op = OpRun(OPS["linear"], case)
    limit = op.spec.allowed(case)
    rms, largest = error(run_interpreted(op)["y"], op.run(ReferenceExecutor)["y"])
    assert rms <= limit.rms and largest <= limit.max, (rms, largest)


def _multiply(weight: QuantTensor, x: torch.Tensor) -> np.ndarray:
    """Run `linear` with every array in the middle of NaN; return fp32 [M, N]."""
    packed = prepack.prepack(weight, INTERPRETER)
    planes = {name: amid_nan(plane) for name, plane in packed.planes.items()}
    packed = DeviceTensor(packed.shape, packed.format, planes)
    # The interpreter cannot round to bf16.
    y_type = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    y = amid_nan(torch.full((len(x), weight.shape[0]), float("nan"), dtype=y_type))
    execute(gemv_bits(Linear(amid_nan(x), packed, y, INTERPRETER)))
    require_nan_around(y)
    return y.float().numpy()


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize(
    ("fmt", "k"),
    [
        ("int4_sym_g32_f16", 100),
        ("int4_asym_g34_f16", 101),
        ("mxfp4", 288),
        ("ternary", 70),
        ("q4_k", 512),
        ("q6_k", 256),
        ("q5_0", 96),
        ("q4_1", 32),
    ],
)
def test_activation_types(fmt: str, k: int, x_type: str) -> None:
    weight = _weights(fmt, 4, k)
    x = torch.from_numpy(_normal(f"{fmt}-{x_type}", 2, k)).to(TYPES[x_type])
    rms, largest = error(_multiply(weight, x), x.double().numpy() @ weight.decode().T)
    limit = 1e-3 if x_type == "f16" else 2e-6
    assert rms <= limit and largest <= 10 * limit, (rms, largest)


@pytest.mark.parametrize("fmt", ["int4_asym_g32_f16", "int4_sym_row_f32", "mxfp4"])
def test_a_token_is_the_same_in_any_batch(fmt: str) -> None:
    weight = _weights(fmt, 3, 288)
    x = torch.from_numpy(_normal(fmt, 8, 288))
    together = _multiply(weight, x)
    for m in (1, 2, 3, 5, 7):
        np.testing.assert_array_equal(_multiply(weight, x[8 - m :]), together[8 - m :])


def test_smallest_and_largest_scales_of_mxfp4() -> None:
    blocks = np.full((2, 1, 16), 0x21, np.uint8)  # 0.5 and 1
    scales = np.array([[0], [250]], np.uint8)
    weight = QuantTensor((2, 32), parse_format("mxfp4"), {"blocks": blocks, "scales": scales})
    x = torch.full((1, 32), 0.25)
    np.testing.assert_array_equal(_multiply(weight, x), [[6 * 2.0**-127, 6 * 2.0**123]])


@pytest.mark.parametrize("fmt", ["int8_g33_f32", "fp8_e4m3_row_f32", "bf16"])
def test_what_cannot_be_streamed_is_refused(fmt: str) -> None:
    shape = (2, 3, 100)
    packed = prepack.prepack(_weights(fmt, *shape), INTERPRETER)
    with pytest.raises((UnsupportedOp, ShapeError), match="experts"):
        vectors_of(packed)


def _words(weight: QuantTensor) -> np.ndarray:
    return vectors_of(prepack.prepack(weight, INTERPRETER)).data.numpy().view(np.uint32)


def _halves(words: np.ndarray) -> np.ndarray:
    return np.stack(words, axis=-1).view(np.float16)


def _pairs(fmt: str, words: np.ndarray, zero: int = 8) -> list[np.ndarray]:
    """Run the inline assembly that turns words into pairs of fp16."""
    if fmt == "mxfp4":
        pairs = ptx_emulator.run(_MXFP4_PAIRS.value, 4, words)
        up = "mul.f16x2 $0, $1, $2;"
        return [ptx_emulator.run(up, 1, p, np.uint32(0x74007400))[0] for p in pairs]
    low = np.uint32(zero * 0x00010001 + 0x64006400)
    high = np.uint32((zero * 0x00100010 - 0x2BFF2C00) % 2**32)
    return ptx_emulator.run(_INT4_PAIRS.value, 4, words, low, high)


@pytest.mark.parametrize("bits", [1, 2])
def test_assembly_decodes_five_and_six_bits(bits: int) -> None:
    codes = np.random.default_rng(bits).permutation(np.arange(512) % (16 << bits)).astype(np.uint8)
    low, high = (prepack._words(torch.from_numpy(part[None])) for part in (codes & 15, codes >> 4))
    assembly = (_INT5_PAIRS, _INT6_PAIRS)[bits - 1].value
    both = (part.numpy().view(np.uint32) for part in (low, high))
    got = _halves(ptx_emulator.run(assembly, 4, *both)).reshape(-1)
    np.testing.assert_array_equal(got * (1 << bits), codes.astype(int) - (8 << bits))


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_assembly_decodes_int4(zero: int) -> None:
    codes = np.arange(16).repeat(2).reshape(1, -1)
    planes = {
        "codes": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "scales": np.ones(1, np.float32),
    }
    words = _words(QuantTensor((1, 32), parse_format("int4_sym_row_f32"), planes))
    got = _halves(_pairs("int4", words, zero))
    np.testing.assert_array_equal(got.reshape(-1), codes[0] - zero)


def test_assembly_decodes_mxfp4() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    planes = {"blocks": blocks, "scales": np.zeros((1, 16), np.uint8)}
    words = _words(QuantTensor((1, 512), parse_format("mxfp4"), planes))
    got = _halves(_pairs("mxfp4", words)).reshape(-1)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(-1)
    np.testing.assert_array_equal(got, E2M1_VALUES[codes])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(E2M1_VALUES[codes]))
    unpacked = ptx_emulator.run(dots._UNPACK.value, 2, _pairs("mxfp4", words)[0])
    np.testing.assert_array_equal(unpacked[0][0], E2M1_VALUES[codes[0::8]])


ASSEMBLY = Device("cpu", 80, 4)
"""The interpreter, with inline assembly that `ptx_emulator` runs."""


@pytest.fixture
def assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx_emulator.emulate_assembly(monkeypatch)


def _experts(x: np.ndarray, weight: QuantTensor, device: Device) -> np.ndarray:
    """Multiply each token by the second of two experts; return fp32 [M, N]."""
    packed = prepack.prepack(weight, device)
    y = torch.full((len(x), weight.shape[1]), float("nan"))
    launches = moe_down(
        x=torch.from_numpy(x)[:, None],
        ids=torch.ones((len(x), 1), dtype=torch.int32),
        weights=torch.ones((len(x), 1)),
        w=packed,
        y=y,
        device=device,
    )
    assert launches[0].constants["PAIRS"] == "blocks"
    execute(launches)
    return y.numpy()


@pytest.mark.usefixtures("assembly")
@pytest.mark.parametrize(
    ("middle", "outliers"),
    [(1e-4, ()), (1e-3, ()), (1.0, ()), (1e-3, (3.0,)), (0.3, (2.0, -60000.0)), (1e4, (65504.0,))],
)
def test_packed_experts_take_activations_of_any_size(
    middle: float, outliers: tuple[float, ...]
) -> None:
    """Neither the largest fp16 number overflows, nor do small ones lose their precision."""
    weight = _weights("mxfp4", 2, 16, 96)
    x = (_normal("any size", 3, 96) * middle).astype(np.float16)
    x[:, 37 : 37 + len(outliers)] = outliers
    got = _experts(x, weight, ASSEMBLY)
    assert np.isfinite(got).all()
    rms, largest = error(got, x.astype(np.float64) @ weight.decode()[1].astype(np.float64).T)
    assert rms <= 1e-3 and largest <= 4e-3, (rms, largest)


@pytest.mark.usefixtures("assembly")
def test_packed_experts_take_the_same_number_everywhere() -> None:
    """32 times the largest activation and weight, with a large and the smallest scale."""
    blocks = np.full((2, 2, 1, 16), 0x77, np.uint8)
    scales = np.full((2, 2, 1), 127, np.uint8)
    scales[1] = [[0], [230]]
    weight = QuantTensor((2, 2, 32), parse_format("mxfp4"), {"blocks": blocks, "scales": scales})
    got = _experts(np.full((1, 32), 65504, np.float16), weight, ASSEMBLY)
    expected = 32 * 6 * 65504 * np.array([[2.0**-127, 2.0**103]])
    np.testing.assert_allclose(got, expected, rtol=1e-3)
    smallest = np.full((1, 32), 2.0**-24, np.float16)
    got = _experts(smallest, weight, ASSEMBLY)
    np.testing.assert_allclose(got[:, 1], [32 * 6 * 2.0**-24 * 2.0**103], rtol=1e-3)


@pytest.mark.usefixtures("assembly")
@pytest.mark.parametrize("size", [1e-3, 1.0, 200.0])
@pytest.mark.parametrize("fmt", ["int4_asym_g32_f16", "int4_sym_row_f32", "mxfp4", *BLOCKS])
@pytest.mark.one_in(2)
def test_packed_products_are_the_same_in_any_batch(fmt: str, size: float) -> None:
    """With the inline assembly that a GPU runs, up to 32 tokens: slices of eight."""
    k = 512 if fmt.endswith("_k") else 288
    weight = _weights(fmt, 3, k)
    x = torch.from_numpy((_normal(fmt, 32, k) * size).astype(np.float16))
    w = prepack.prepack(weight, ASSEMBLY)

    def multiply(first: int, count: int) -> np.ndarray:
        y = torch.full((count, 3), float("nan"))
        launches = linear(x=x[first : first + count], w=w, y=y, device=ASSEMBLY)
        assert all(launch.constants["PAIRS"] == "words" for launch in launches)
        execute(launches)
        return y.numpy()

    together = multiply(0, 32)
    rms, largest = error(together, x.double().numpy() @ weight.decode().astype(np.float64).T)
    assert rms <= 1e-3 and largest <= 4e-3, (rms, largest)
    for first, count in ((31, 1), (7, 2), (3, 17)):
        np.testing.assert_array_equal(multiply(first, count), together[first : first + count])


@pytest.mark.usefixtures("assembly")
@pytest.mark.parametrize(
    "fmt",
    [
        *("int4_asym_g32_f16", "int4_sym_g128_f16", "int4_asym_row_f16", "int4_asym_g34_f32"),
        *("mxfp4", *BLOCKS),
    ],
)
def test_tiles_with_the_inline_assembly_that_a_gpu_runs(fmt: str) -> None:
    k = 512 if fmt.endswith("_k") else 288
    weight = _weights(fmt, 70, k)
    x = torch.from_numpy(_normal(fmt, 40, k).astype(np.float16))
    y = torch.full((40, 70), float("nan"))
    execute(linear(x=x, w=prepack.prepack(weight, ASSEMBLY), y=y, device=ASSEMBLY))
    rms, largest = error(y.numpy(), x.double().numpy() @ weight.decode().astype(np.float64).T)
    assert rms <= 5e-4 and largest <= 3e-3, (rms, largest)


@pytest.mark.parametrize("zero", [0, 8, 15])
def test_assembly_decodes_and_scales_int4_in_bf16(zero: int) -> None:
    codes = np.arange(16).repeat(2).reshape(1, -1)
    planes = {
        "codes": (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "scales": np.ones(1, np.float32),
    }
    words = _words(QuantTensor((1, 32), parse_format("int4_sym_row_f32"), planes))
    less, scale = from_f32(np.float32([-128 - zero, 0.0625]), "bf16").astype(np.uint32) * 0x10001
    pairs = ptx_emulator.run(_INT4_BF16.value, 4, words, less, scale)
    got = np.stack([half for p in pairs for half in ptx_emulator.bf16_halves(p)], -1)
    np.testing.assert_array_equal(got.reshape(-1), (codes[0] - zero) / 16)


def test_assembly_adds_ternary_products() -> None:
    weight = _weights("ternary", 4, 64)
    q = np.random.default_rng(1).integers(-128, 128, 64).astype(np.int8)
    words, total = _words(weight), np.zeros(4, np.uint32)
    for c in range(4):
        xs = list(q.view(np.uint32)[4 * c : 4 * c + 4])
        (total,) = ptx_emulator.run(_DOT16.value, 1, words[:, c], *xs, total)
        (total,) = ptx_emulator.run(_LESS16.value, 1, *xs, total)
    codes = weight.format.codes(weight.planes, weight.shape)
    np.testing.assert_array_equal(total.view(np.int32), codes.astype(np.int32) @ q)


@pytest.mark.parametrize("capability", [80, 90])
def test_order_of_summation_does_not_depend_on_tokens(capability: int) -> None:
    device = Device("meta", capability, 132)
    for rows, vectors in ((4096, 128), (14336, 128), (2880, 90), (512, 90), (13824, 40), (8, 2)):
        cut = {"rows": rows, "vectors": vectors, "copies": 1, "device": device}
        tiles = [gemv_tile(**cut, tokens=tokens) for tokens in range(1, 9)]
        assert len({tile.vectors for tile in tiles}) == 1
        assert all(tile.tokens >= tokens for tokens, tile in enumerate(tiles, 1))
        assert all(32 * tile.warps % tile.vectors == 0 for tile in tiles)


@pytest.mark.slow
def test_machine_code() -> None:
    report = aot_report("cuda_aot_bits.py")
    sass_ratchet.hold("bits", report["code"])
    for name, archs in report["code"].items():
        for arch, got in archs.items():
            # Lanes read trellises in eight bytes.
            assert got["wide_streaming_loads"] > 0 or name.startswith("tcq"), (name, arch)
            # Which experts a first product reads is known only after the wait.
            early = arch == "sm_90" and "gate_up" not in name and sass_ratchet.HAS_PDL
            assert got["waits_after_first_load"] == early, (name, arch)
    assert all(report["ptx"].values()), report["ptx"]
