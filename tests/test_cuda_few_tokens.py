"""The tensor-core kernel for few tokens: its results, the order of its sums, its machine code."""

from dataclasses import replace
from typing import Any

import numpy as np
import ptx_emulator
import pytest
import sass_ratchet
import torch
import triton
import triton.language as tl
from cuda_cases import aot_report, meta, meta_device, meta_weight
from op_cases import error
from test_cuda_linear import Product
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import min_dot_size

from clocher_kernels.cuda.elementwise import quantize
from clocher_kernels.cuda.few_tokens import as_words, few_tile, few_tokens, tokens_of
from clocher_kernels.cuda.fragments import decoded
from clocher_kernels.cuda.launch import INTERPRETER, Device, execute
from clocher_kernels.cuda.prepack import DeviceTensor, prepack
from clocher_kernels.cuda.scalar import Linear, Tail
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode

FORMATS = (
    "int4_sym_g128_f16",
    "int4_asym_g128_f16",
    "int4_asym_g64_f16",
    "int4_asym_row_f16",
    "bf16",
    "f16",
    "mxfp4",
)
FORMATS += ("int8_row_f32", "int8_tensor_f32", "int8_g64_f16", "fp8_e4m3_row_f32")
FORMATS += ("fp8_e4m3_b128_f32", "fp8_e5m2_row_f32")


def _run(product: Product, **change: int) -> np.ndarray:
    """Multiply with the tile for few tokens, or a changed one; return fp32 [M, N]."""
    held = as_words(product.w)
    assert held is not None
    tile = few_tile(held, *product.w.shape, len(product.x), INTERPRETER)
    assert tile is not None
    tail, device = Tail(bias=product.bias), INTERPRETER
    given: dict[str, Any] = {"x": product.x, "w": product.w, "y": product.y, "tail": tail}
    execute(few_tokens(Linear(**given, device=device), replace(tile, **change)))
    return product.y.float().numpy()


@pytest.mark.parametrize("x_type", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, x_type: str) -> None:
    if fmt == "f16" and x_type != "f16":
        product = Product(fmt, 2, 5, 64, x_type)
        given: dict[str, Any] = {"x": product.x, "w": product.w, "y": product.y}
        assert few_tokens(Linear(**given, device=INTERPRETER)) == []
        return
    rows = 40 if fmt.startswith("int4") else 35
    product = Product(fmt, 3, rows, 1152 if fmt == "int8_row_f32" else 640, x_type)
    assert as_words(product.w).bricks == (fmt.startswith("int4") and "g64" not in fmt)
    rms, largest = error(_run(product, parts=2, turns=1), product.expected)
    limit = 1e-3 if x_type == "f16" else 2e-6
    assert rms <= limit and largest <= 10 * limit, (rms, largest)


@pytest.mark.parametrize("fmt", ["int4_sym_g128_f16", "bf16", "int4_asym_g64_f16", "mxfp4"])
def test_up_to_32_tokens_have_the_bits_of_one(fmt: str) -> None:
    whole = Product(fmt, 32, 24, 1152, "f16")
    together = _run(whole, parts=2)
    for first, m in ((31, 1), (3, 8), (5, 17)):
        part = Product(fmt, m, 24, 1152, "f16")
        part.w, part.bias = whole.w, whole.bias
        part.x.copy_(whole.x[first : first + m])
        np.testing.assert_array_equal(_run(part, parts=2), together[first : first + m])


@pytest.mark.parametrize("fmt", [*FORMATS, "ternary"])
def test_nothing_that_orders_a_sum_follows_the_tokens(fmt: str) -> None:
    """The interpreter adds up in an order of its own: what a GPU does follows from these."""
    found = set()
    codes = fmt == "ternary"
    for n, k in ((4096, 4096), (2560, 6912), (28672, 4096)):
        w = meta_weight(fmt, n, k)
        for m in range(1, 33):
            x = meta((m, k), torch.int8 if codes else torch.float16)
            given: dict[str, Any] = {"x_scale": meta((m,), torch.float32)} if codes else {}
            y, device = meta((m, n), torch.float16), meta_device(90)
            (launch,) = few_tokens(Linear(x, w, y, device, **given))
            tokens = ("M", "BM", "BN", "TURNS", "NEAR", "EARLY")
            constants = {c: v for c, v in launch.constants.items() if c not in tokens}
            found.add((str(sorted(constants.items())), launch.num_warps, launch.grid[1]))
    assert len(found) == 3, found


def _codes(n: int, k: int) -> tuple[DeviceTensor, torch.Tensor, torch.Tensor]:
    """Return ternary weights, their digits, and activations that norm to varied codes."""
    rng = np.random.default_rng(n + k)
    weights = encode(rng.standard_normal((n, k), dtype=np.float32), parse_format("ternary"))
    h = torch.from_numpy(rng.standard_normal((3, k), dtype=np.float32))
    return prepack(weights, INTERPRETER), torch.from_numpy(weights.decode()), h


def test_ternary_sums_are_exact() -> None:
    n, k = 20, 1100
    w, dense, h = _codes(n, k)
    x, scale = torch.empty((3, k), dtype=torch.int8), torch.empty(3)
    limits: dict[str, Any] = {"floor": 1e-5, "lowest": -128, "device": INTERPRETER}
    execute(quantize(x=h, q=x, scale=scale, group=0, **limits))
    step = w.planes["scale"][0]
    want = (x.double() @ (dense / step).round().double().T).float() * (scale[:, None] * step)
    for parts in (1, 2):
        y = torch.full((3, n), float("nan"))
        held = as_words(w)
        assert held is not None
        tile = few_tile(held, n, k, 3, INTERPRETER)
        assert tile is not None
        tile = replace(tile, parts=parts)
        execute(few_tokens(Linear(x, w, y, INTERPRETER, scale), tile))
        torch.testing.assert_close(y, want, rtol=0, atol=0)


@triton.jit
def _decode(words, zero, values, WEIGHTS: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    OPERAND: tl.constexpr = tl.int8 if CODE == "ternary" else tl.float16
    held = decoded(tl.load(words + at), tl.load(zero), WEIGHTS, CODE, OPERAND, ASM)
    to = tl.arange(0, 64)[:, None] * 4 * WEIGHTS + tl.arange(0, 4 * WEIGHTS)[None, :]
    tl.store(values + to, held.to(tl.float32))


@pytest.mark.parametrize(
    ("code", "weights", "unit"),
    [("int4", 8, 1), ("mxfp4", 8, 2**14), ("int8", 4, 128), ("e4m3", 4, 256), ("ternary", 16, 1)],
)
def test_inline_assembly_decodes_what_plain_triton_does(
    code: str, weights: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator also refuses what the constraints let a compiler break."""
    ptx_emulator.emulate_assembly(monkeypatch)
    rng = np.random.default_rng(5)
    words = rng.integers(-(2**31), 2**31, 256).astype(np.int32)
    if code == "ternary":
        words &= 0x55555555  # codes 0 and 1
        words[::2] <<= 1  # and 0 and 2
    if code == "e4m3":
        words &= ~0x01010101  # no NaN
    both = [torch.empty(256 * weights) for _ in range(2)]
    for asm, values in enumerate(both):
        zero = torch.tensor([5], dtype=torch.int32)
        _decode[(1,)](torch.from_numpy(words), zero, values, weights, code, bool(asm))
    np.testing.assert_array_equal(both[1].numpy() * unit, both[0].numpy())


@pytest.mark.parametrize("x_type", [torch.float16, torch.float32])
def test_weights_that_fit_no_tile_are_left_to_others(x_type: torch.dtype) -> None:
    for fmt, k in (("f32", 64), ("int8_g40_f16", 80), ("int4_asym_g34_f32", 68), ("bf16", 101)):
        w = prepack(encode(np.ones((4, k), np.float32), parse_format(fmt)), INTERPRETER)
        x, y = torch.zeros((1, k), dtype=x_type), torch.zeros((1, 4))
        assert few_tokens(Linear(x, w, y, INTERPRETER)) == []


def test_few_rows_are_shared_by_programs() -> None:
    """At least 40 KB of weights are on their way to a multiprocessor."""
    device = Device("meta", 90, 132)
    for fmt, n, k in (("int4_sym_g128_f16", 4096, 4096), ("bf16", 2880, 4096)):
        w = meta_weight(fmt, n, k)
        x, y = meta((1, k), torch.float16), meta((1, n), torch.float16)
        (launch,) = few_tokens(Linear(x, w, y, device))
        lanes = launch.grid[0] * launch.grid[1] * 32 * launch.num_warps
        vectors = launch.constants["BN"] // 8 * launch.constants["TURNS"]
        assert lanes * vectors * 16 >= (40 << 10) * device.sms, launch.constants


@pytest.mark.slow
def test_machine_code_keeps_its_budgets() -> None:
    limits = {"int4_sym_g128_f16": 1.75, "bf16": 2.2, "ternary": 1.4, "int8_row_f32": 2.0}
    # Instructions of a whole kernel that reads its rows at once are counted, not of a loop.
    limits |= {"4096x4096": 2.4, "6144x4096": 2.15, "4096x14336": 1.95, "128256x4096": 2.6}
    for name, got in aot_report("cuda_aot_few.py").items():
        fmt, m, shape, _ = name.split("-")
        # 64 rows by two warps are fastest on an H200, though they take every register.
        small = fmt.startswith(("int4", "mxfp4", "ternary"))
        most = 255 if small else 140 if m == "m8" else 192
        assert got["registers"] <= most, (name, got)
        assert got["local"] <= sass_ratchet.LOCAL.get((sass_ratchet.VERSION, name), 0), (name, got)
        assert got["tensor_cores"] > 0 and got["streaming_loads"] > 0, (name, got)
        # Sums of warps are added up through shared memory, at the end.
        assert got["moved"] <= (32 if got["once"] else 0), f"columns change lanes: {name} {got}"
        assert got["neighbours"], f"sums follow the tile: {name}"
        if m in ("m1", "m8"):
            limit = limits.get(shape, limits.get(fmt, 3.4))
            assert 0 < got["per_weight"] <= limit, (name, got)


def test_a_tile_has_as_many_tokens_as_triton_multiplies() -> None:
    """Triton 3.4 wants 16, later releases one."""
    least = min_dot_size(GPUTarget("cuda", 90, 32))(tl.float16, tl.float16)[1]
    assert tokens_of(1) >= least
