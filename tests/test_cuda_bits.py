"""Weights of less than a byte on CUDA.

Their layout, the kernels in Triton's interpreter, the inline assembly in NumPy, the machine code.
"""

import zlib
from typing import Any

import numpy as np
import ptx_emulator
import pytest
import sass_ratchet
import torch
import triton
import triton.language as tl
from cuda_cases import aot_report, run_interpreted
from op_cases import ALL, OpRun, error, name_of

from clocher_kernels.cuda import dots, integer, prepack
from clocher_kernels.cuda.gemv_bits import gemv_bits
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tiles import gemv_tile
from clocher_kernels.cuda.vectors import vectors_of
from clocher_kernels.dtypes import E2M1_VALUES
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.contract import Case, OpSpec
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_kernels.reference import ReferenceExecutor

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
        v = dots.decode_int4(w, tl.float16)
    elif KIND == "mxfp4":
        v = dots.decode_mxfp4(w, tl.float32)
    else:
        v = dots.decode_ternary(w, tl.int8)
    at = (row * W + column) * PER_WORD + tl.arange(0, 4 * PER_WORD)[None, :]
    tl.store(values + at, v.to(tl.float32))


def _unpacked(packed: DeviceTensor) -> np.ndarray:
    """Read prepacked words with the kernels' decoders: fp32 [..., N, K], not scaled."""
    held = vectors_of(packed)
    words = held.words.flatten(0, -2)
    rows, width = words.shape
    values = torch.full((rows, width * held.weights // 4), float("nan"))
    _decode[(rows, width // 4)](words, values, held.kind, width, held.weights // 4)
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


def test_whole_rows_are_rearranged_in_place() -> None:
    weight = _weights("mxfp4", 4, 64)
    planes = {name: torch.from_numpy(plane.copy()) for name, plane in weight.planes.items()}
    packed = prepack.rearrange(weight.format, weight.shape, planes)
    assert packed.planes["blocks"].data_ptr() == planes["blocks"].data_ptr()
    assert packed.nbytes == weight.nbytes


# Large enough to take several turns and, in the last case, several programs.
_OWN = [
    (op, Case(f"{fmt}-m{m}-n{n}-k{k}", {"M": m, "N": n, "K": k}, {}, {"w": fmt}, options))
    for op, fmt, m, n, k, options in [
        ("linear", "int4_sym_g100_f16", 1, 5, 1100, {}),
        ("linear", "int4_asym_g34_f32", 2, 3, 613, {"bias": True}),
        ("linear", "int4_asym_g40_bf16", 3, 5, 333, {"residual": True}),
        ("linear", "int4_asym_row_bf16", 5, 5, 301, {"bias": True}),
        ("linear", "int4_sym_g64_f16", 8, 70, 2880, {"bias": True, "residual": True}),
        ("linear", "mxfp4", 7, 3, 2880, {"bias": True}),
        ("linear", "ternary", 2, 68, 1041, {"residual": True}),
        ("linear_i8", "ternary_f32", 9, 68, 1041, {"bias": True, "residual": True}),
        ("linear_i8", "ternary_inverse", 1, 4, 2560, {}),
    ]
]


def _cases() -> list[Any]:
    taken = []
    for spec, case in ALL:
        fmt = case.formats.get("w", "")
        bits = fmt.startswith(("int4", "mxfp4")) or fmt == "ternary_inverse"
        few = spec.name == "linear" and case.sizes["M"] == 2
        exact = spec.name == "linear_i8" and not case.id.startswith("large")
        if (bits and few) or exact or spec.name == "quantize_act":
            taken.append((spec, case))
    specs = {spec.name: spec for spec, _ in ALL}
    taken += [(specs[name], case) for name, case in _OWN]
    return [pytest.param(spec, case, id=name_of(spec, case)) for spec, case in taken]


@pytest.mark.parametrize(("spec", "case"), _cases())
def test_parity(spec: OpSpec, case: Case) -> None:
    op = OpRun(spec, case)
    got, expected = run_interpreted(op), op.run(ReferenceExecutor)
    for name in op.written:
        rms, largest = error(got[name], expected[name])
        assert rms <= spec.tolerance.rms and largest <= spec.tolerance.max, (name, rms, largest)


_MARGIN = 64


def _amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor between two margins of 0xff bytes, which is NaN in every float type."""
    memory = torch.full((tensor.nbytes + 2 * _MARGIN,), 0xFF, dtype=torch.uint8)
    inner = memory[_MARGIN : _MARGIN + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return inner.copy_(tensor)


def _multiply(weight: QuantTensor, x: torch.Tensor) -> np.ndarray:
    """Run `linear` with every array in the middle of NaN; return fp32 [M, N]."""
    packed = prepack.prepack(weight, INTERPRETER)
    planes = {name: _amid_nan(plane) for name, plane in packed.planes.items()}
    packed = DeviceTensor(packed.shape, packed.format, planes)
    # The interpreter cannot round to bf16.
    y_type = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    y = _amid_nan(torch.full((len(x), weight.shape[0]), float("nan"), dtype=y_type))
    execute(gemv_bits(x=_amid_nan(x), w=packed, y=y, device=INTERPRETER))
    memory = torch.empty(0, dtype=torch.uint8).set_(y.untyped_storage())
    assert (memory[:_MARGIN] == 0xFF).all() and (memory[-_MARGIN:] == 0xFF).all()
    return y.float().numpy()


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize(
    ("fmt", "k"),
    [
        ("int4_sym_g32_f16", 100),
        ("int4_asym_g34_f16", 101),
        ("mxfp4", 288),
        ("ternary", 70),
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
    return vectors_of(prepack.prepack(weight, INTERPRETER)).words.numpy().view(np.uint32)


def _halves(words: np.ndarray) -> np.ndarray:
    return np.stack(words, axis=-1).view(np.float16)


def _pairs(fmt: str, words: np.ndarray, zero: int = 8) -> list[np.ndarray]:
    """Run the inline assembly that turns words into pairs of fp16."""
    if fmt == "mxfp4":
        pairs = ptx_emulator.run(dots._MXFP4_PAIRS.value, 4, words)
        return [ptx_emulator.run(dots._TIMES_2_14.value, 1, p)[0] for p in pairs]
    low = np.uint32(zero * 0x00010001 + 0x64006400)
    high = np.uint32((zero * 0x00100010 - 0x2BFF2C00) % 2**32)
    return ptx_emulator.run(dots._INT4_PAIRS.value, 4, words, low, high)


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


@pytest.mark.parametrize("fmt", ["int4_sym_row_f32", "mxfp4"])
def test_packed_arithmetic_is_accurate(fmt: str) -> None:
    """The chains of the fp16 path: two words in fp16, everything beyond in fp32."""
    weight = _weights(fmt, 32, 2880)
    x = _normal("x", 2880).astype(np.float16)
    pairs = _pairs(fmt.split("_")[0], _words(weight))
    of_x = x.view(np.uint32).reshape(-1, 4).T
    sums = np.zeros((32, 180), np.uint32)
    for word in (0, 1):
        operands = [p[:, word::2] for p in pairs] + [v[word::2] for v in of_x] + [sums]
        (sums,) = ptx_emulator.run(dots._FMA_PAIRS.value, 1, *operands)
    (chains,) = ptx_emulator.run(dots._ADD_HALVES.value, 1, sums)
    if fmt == "mxfp4":
        scale = 2.0 ** (weight.planes["scales"].astype(np.float64) - 127)
        got = (chains.reshape(32, 90, 2) * scale[..., None]).sum(axis=(1, 2))
    else:
        got = chains.sum(axis=1, dtype=np.float64) * weight.planes["scales"]
    rms, largest = error(got, weight.decode().astype(np.float64) @ x.astype(np.float64))
    assert rms <= 5e-4 and largest <= 2e-3, (rms, largest)


def test_assembly_adds_ternary_products() -> None:
    weight = _weights("ternary", 4, 64)
    q = np.random.default_rng(1).integers(-128, 128, 64).astype(np.int8)
    words, total = _words(weight), np.zeros(4, np.uint32)
    for c in range(4):
        xs = list(q.view(np.uint32)[4 * c : 4 * c + 4])
        (total,) = ptx_emulator.run(integer._DOT16.value, 1, words[:, c], *xs, total)
        (total,) = ptx_emulator.run(integer._LESS16.value, 1, *xs, total)
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


def test_machine_code() -> None:
    report = aot_report("cuda_aot_bits.py")
    sass_ratchet.hold("bits", report["code"])
    for name, archs in report["code"].items():
        for arch, got in archs.items():
            assert got["wide_streaming_loads"] > 0, (name, arch)
            # Which experts are read is known only after the wait.
            early = arch == "sm_90" and "experts" not in name and sass_ratchet.HAS_PDL
            assert got["waits_after_first_load"] == early, (name, arch)
    assert all(report["ptx"].values()), report["ptx"]
