"""The CUDA matrix products in Triton's interpreter, and their machine code."""

import math
import zlib
from typing import Any

import numpy as np
import ptx_emulator
import pytest
import sass_ratchet
import torch
import triton
import triton.language as tl
from cuda_aot_wgmma import too_early
from cuda_cases import amid_nan, aot_report, meta, meta_device, meta_weight, require_nan_around
from op_cases import error

from clocher_kernels.cuda import codes
from clocher_kernels.cuda.launch import INTERPRETER, Device, Launch, execute
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.prepack import DeviceTensor, prepack
from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode

PACKED = ("int4", "mxfp4", "ternary")
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Product:
    """Operands of one product in the device's memory, in the middle of NaN, and the answer.

    Attributes:
        x: [M, K], what the kernel reads.
        y: [M, N], not a number anywhere.
        expected: [M, N] fp64, of the stored weights and activations.
    """

    def __init__(self, fmt: str, m: int, n: int, k: int, x_type: str = "f32") -> None:
        name = f"{fmt}-m{m}-n{n}-k{k}-{x_type}"
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        weight = rng.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)
        held = encode(weight, parse_format(fmt))
        packed = prepack(held, INTERPRETER)
        planes = {name: amid_nan(plane) for name, plane in packed.planes.items()}
        self.w = DeviceTensor(packed.shape, packed.format, planes)
        x = torch.from_numpy(rng.standard_normal((m, k), dtype=np.float32)).to(TYPES[x_type])
        self.x = amid_nan(x)
        self.bias = amid_nan(torch.from_numpy(rng.standard_normal(n, dtype=np.float32)))
        # The interpreter truncates where a GPU rounds to bf16.
        y_type = torch.float16 if x_type == "f16" else torch.float32
        self.y = amid_nan(torch.full((m, n), float("nan"), dtype=y_type))
        self.decoded = held.decode().astype(np.float64)
        self.expected = x.double().numpy() @ self.decoded.T + self.bias.double().numpy()

    def run(self) -> np.ndarray:
        """Multiply; return fp32 [M, N]."""
        call: dict[str, Any] = {"x": self.x, "w": self.w, "y": self.y, "bias": self.bias}
        execute(linear(**call, device=INTERPRETER))
        require_nan_around(self.y)
        return self.y.float().numpy()


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize(
    ("fmt", "m", "n", "k"),
    [
        pytest.param(*shape, id="-".join(map(str, shape)))
        for shape in [
            ("int8_row_f32", 2, 6, 2880),
            ("int8_g32_f16", 1, 5, 96),
            ("int8_g37_f16", 33, 5, 100),
            ("fp8_e4m3_b128_f32", 2, 3, 2880),
            ("fp8_e4m3_row_bf16", 1, 5, 113),
            ("fp8_e5m2_b128_f32", 3, 5, 272),
            ("f32", 1, 5, 101),
            ("f16", 5, 3, 1041),
            ("bf16", 33, 9, 100),
            ("int4_asym_g34_f32", 33, 5, 101),
            ("mxfp4", 33, 5, 96),
        ]
    ],
)
def test_activations(fmt: str, m: int, n: int, k: int, x_type: str) -> None:
    product = Product(fmt, m, n, k, x_type)
    rms, largest = error(product.run(), product.expected)
    limit = 1e-3 if x_type == "f16" else 2e-6
    assert rms <= limit and largest <= 10 * limit, (rms, largest)


FORMATS = (
    "f32",
    "f16",
    "bf16",
    "int8_row_f32",
    "int8_g40_f16",
    "int8_tensor_f32",
    "mxfp4",
    "ternary",
)
FORMATS += ("fp8_e4m3_row_f32", "fp8_e4m3_b128_f32", "fp8_e4m3_tensor_f32", "fp8_e5m2_row_f32")
FORMATS += ("int4_sym_g128_f16", "int4_sym_row_f16", "int4_asym_g32_f16", "int4_asym_g34_f32")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.one_in(3)
def test_a_token_is_the_same_among_one_to_eight(fmt: str) -> None:
    """What verifies guesses draws what would be drawn without them."""
    whole = Product(fmt, 8, 4, 288, "f16")
    together = whole.run()
    for m in (1, 2, 4, 7):
        part = Product(fmt, m, 4, 288, "f16")
        part.w, part.bias = whole.w, whole.bias
        part.x.copy_(whole.x[8 - m :])
        np.testing.assert_array_equal(part.run(), together[8 - m :])


@pytest.mark.parametrize("fmt", ["int8_row_f32", "fp8_e4m3_b128_f32", "fp8_e5m2_row_f32", "bf16"])
@pytest.mark.one_in(2)
def test_long_rows_and_odd_ones_too(fmt: str) -> None:
    for k in (100, 1040):
        whole = Product(fmt, 8, 3, k, "f16")
        together = whole.run()
        for m in (1, 3):
            part = Product(fmt, m, 3, k, "f16")
            part.w, part.bias = whole.w, whole.bias
            part.x.copy_(whole.x[8 - m :])
            np.testing.assert_array_equal(part.run(), together[8 - m :])


@pytest.mark.parametrize("fmt", [*FORMATS, "tcq3"])
def test_nothing_that_orders_a_sum_follows_the_tokens(fmt: str) -> None:
    """The interpreter adds up in an order of its own: what a GPU does follows from these."""
    n, k = 4096, 4080 if fmt in ("int8_g40_f16", "int4_asym_g34_f32") else 4096
    w = meta_weight(fmt, n, k)
    found = set()
    for m in range(1, 9):
        x, y = meta((m, k), torch.float16), meta((m, n), torch.float16)
        (launch,) = linear(x=x, w=w, y=y, device=meta_device(90))
        tokens = ("M", "TOKENS", "BM", "R", "ROWS")
        given = {c: v for c, v in launch.constants.items() if c not in tokens}
        found.add((str(sorted(given.items())), launch.num_warps, launch.kernel.fn.__name__))
    assert len(found) == 1, found


@pytest.mark.parametrize("fmt", ["int8_g40_f16", "bf16", "int4_asym_g32_f16", "mxfp4", "ternary"])
def test_up_to_32_tokens_have_the_order_of_one(fmt: str) -> None:
    whole = Product(fmt, 32, 4, 96, "f16")
    together = whole.run()
    for first, m in ((31, 1), (16, 16), (3, 17)):
        part = Product(fmt, m, 4, 96, "f16")
        part.w, part.bias = whole.w, whole.bias
        part.x.copy_(whole.x[first : first + m])
        np.testing.assert_array_equal(part.run(), together[first : first + m])


@pytest.mark.parametrize("fmt", ["int4_asym_g32_f16", "bf16", "ternary"])
def test_programs_that_share_columns_add_up(fmt: str) -> None:
    """128 tokens are few tiles: the last one of each to end adds the sums of all, twice alike."""
    device = Device("cpu", 0, 64)
    whole = Product(fmt, 100, 68, 2080, "f16")  # 1024 columns are the least of a program
    (launch,) = linear(x=whole.x, w=whole.w, y=whole.y, bias=whole.bias, device=device)
    assert launch.constants["SPLITS"] == launch.grid[2] > 1
    execute([launch])
    first = whole.y.clone()
    errors = error(first.float().numpy(), whole.expected)
    assert errors[0] <= 1e-3 and errors[1] <= 1e-2, errors
    execute([launch])
    assert torch.equal(whole.y, first)


@pytest.mark.slow
def test_sums_are_laid_out_alike_for_one_to_eight_tokens() -> None:
    for fmt, found in aot_report("cuda_aot_orders.py")["code"].items():
        assert found["1"] and all(order == found["1"] for order in found.values()), (fmt, found)


LLAMA_8B = [("int4_sym_g128_f16", *s) for s in ((4096, 4096), (14336, 4096), (4096, 14336))]
GPT_OSS = [("bf16", 4096, 2880), ("bf16", 2880, 4096), ("bf16", 201088, 2880)]


@pytest.mark.parametrize(("fmt", "n", "k"), [*LLAMA_8B, ("bf16", 128256, 4096), *GPT_OSS])
def test_sixteen_tokens_keep_enough_bytes_in_flight(fmt: str, n: int, k: int) -> None:
    """3 TB/s at 0.7 us are 16 KB a multiprocessor; 40 leave room for what does not overlap.

    k and v of both models, and the router, have fewer bytes than that in all. Where lanes read a
    row in one turn there is no second one to load: as fast on an H200, within 1 %.
    """
    w = meta_weight(fmt, n, k)
    x_type = torch.bfloat16 if fmt == "bf16" and n != 128256 else torch.float16
    (launch,) = linear(
        x=meta((16, k), x_type), w=w, y=meta((16, n), x_type), device=meta_device(90)
    )
    constants = launch.constants
    once = "BV" in constants and constants["K"] <= constants["BV"] * constants["WEIGHTS"]
    assert bytes_in_flight(launch) >= (24 if once else 40) << 10, (launch.grid, launch.num_warps)


def bytes_in_flight(launch: Launch, sms: int = 132) -> float:
    """Return the bytes of weights that a multiprocessor waits for while a launch streams.

    A thread reads 16 bytes of each of its rows for this turn and for the next one, if there is one.
    """
    constants, registers = launch.constants, REGISTERS
    if "OWN" in constants:  # the kernel for few tokens, whose lanes have BN / 8 rows
        columns = constants["OWN"] * 4 * constants["WARPS"] * constants["PARTS"]
        rows, turns = constants["BN"] // 8 * constants["TURNS"], constants["TURNS"] * columns
        turns, registers = -(-constants["K"] // turns), 255 if rows > 4 else REGISTERS
    elif "ROWS" in constants:
        rows, turns = constants["ROWS"], -(-constants["K"] // constants["BLOCK"])
    else:
        vectors = -(-constants["K"] // constants["WEIGHTS"])
        rows, turns = constants["R"], -(-vectors // constants["BV"])
    most = (1 << 16) // (registers * 32 * launch.num_warps)
    programs = min(most, math.prod(launch.grid) / sms)
    return programs * launch.num_warps * 32 * 16 * rows * min(turns, 2)


REGISTERS = 168
"""Most registers of a thread of `_gemv` and `_gemv_bits` for eight tokens, and of small `_few`."""


@triton.jit
def _to_f16(q, y, CODE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(y + at, codes.to_f16(tl.load(q + at), CODE, True))


@pytest.mark.parametrize("code", ["int8", "e4m3", "e5m2"])
def test_inline_assembly_decodes_every_code(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator also refuses what the constraints let a compiler break."""
    ptx_emulator.emulate_assembly(monkeypatch)
    every = np.arange(256, dtype=np.uint8)
    stored = every.view(np.int8) if code == "int8" else every
    values = stored.astype(np.float32) if code == "int8" else to_f32(every, code)
    decoded = torch.empty(256, dtype=torch.float16)
    _to_f16[(1,)](torch.from_numpy(stored), decoded, code)
    got = decoded.float().numpy()
    # fp8's NaN and infinity are refused when a file is read.
    finite = np.isfinite(values)
    np.testing.assert_array_equal(got[finite] * codes.unit(code, "pairs"), values[finite])


@pytest.mark.slow
def test_machine_code_keeps_its_budgets() -> None:
    report = aot_report("cuda_aot_linear.py")
    sass_ratchet.hold("linear", report["code"])
    most = report["code"]["gemv-bf16-bf16-m8-n4096-k2880"]["sm_90"]["registers"]
    assert most <= REGISTERS, "what test_sixteen_tokens counts on"
    for name, architectures in report["code"].items():
        for arch, got in architectures.items():
            if not name.startswith("norm") and "gemm" not in name:
                assert got["wide_streaming_loads"] > 0, (name, arch)
            if not name.startswith("norm") and "gemm" not in name and "bsr" not in name:
                early = arch == "sm_90" and sass_ratchet.HAS_PDL
                assert got["waits_after_first_load"] is early, (name, arch)
    assert all(report["ptx"].values())


LOOP = """
/*0010*/ {free} ;
/*0020*/ HGMMA.64x64x16.F32 R56, R136, gdesc[UR16], R56, gsb0 ;
/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
/*0040*/ @!P0 BRA 0x10 ;
"""


@pytest.mark.parametrize(
    ("free", "left", "wrong"),
    [
        ("IMAD.MOV.U32 R138, RZ, RZ, 0x59", 1, 1),
        ("IMAD.MOV.U32 R138, RZ, RZ, 0x59", 0, 0),
        ("IMAD.MOV.U32 R140, RZ, RZ, 0x59", 1, 0),
    ],
)
def test_a_register_written_under_a_product_is_found(free: str, left: int, wrong: int) -> None:
    assert too_early(LOOP.format(free=free, left=left)) == (1, wrong)


@pytest.mark.slow
def test_products_in_flight_keep_their_registers() -> None:
    found = aot_report("cuda_aot_wgmma.py")
    assert all(products and not wrong for products, wrong in found.values()), found
