"""Compile the matrix products ahead of time and print what their machine code costs, as JSON.

With --record it writes data/sass_budgets/linear.json, see sass_ratchet.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import ARCHITECTURES, PTX_ONLY, compile_code, compile_ptx
from cuda_cases import meta, meta_device
from sass_ratchet import figures, print_or_record

from clocher_kernels.cuda.bsr import bsr_linear
from clocher_kernels.cuda.elementwise import rms_norm
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.prepack import TORCH_DTYPES, DeviceTensor, rearrange
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.bsr import Bsr

N, K = 4096, 14336

FP16, BF16 = torch.float16, torch.bfloat16


def weights(fmt: Format, shape: tuple[int, ...]) -> DeviceTensor:
    """Return a prepacked matrix without memory."""
    planes = fmt.planes(shape)
    return rearrange(
        fmt, shape, {name: meta(p.shape, TORCH_DTYPES[p.dtype]) for name, p in planes.items()}
    )


def product(
    fmt: str, m: int, capability: int, x_type: torch.dtype = FP16, n: int = N, k: int = K
) -> Launch:
    """Return the launch of `linear`."""
    (launch,) = linear(
        x=meta((m, k), x_type),
        w=weights(parse_format(fmt), (n, k)),
        y=meta((m, n), x_type),
        bias=meta((n,), torch.float32),
        residual=meta((m, n), torch.float32),
        device=meta_device(capability),
    )
    return launch


def bsr(block: tuple[int, int], inner: str, m: int, capability: int) -> Launch:
    """Return the launch of `bsr_linear`."""
    (launch,) = bsr_linear(
        x=meta((m, K), FP16),
        w=weights(Bsr(block, inner, 1000), (N, K)),
        y=meta((m, N), FP16),
        device=meta_device(capability),
    )
    return launch


def norm(size: int, capability: int) -> Launch:
    """Return the launch of `rms_norm`; no product, but rows this long fill the registers, too."""
    (launch,) = rms_norm(
        x=meta((1, size), torch.float32),
        weight=meta((size,), torch.float32),
        y=meta((1, size), FP16),
        eps=1e-5,
        device=meta_device(capability),
    )
    return launch


def launches() -> Iterator[tuple[str, int, Launch]]:
    """Yield (id, capability, launch)."""
    for cc in ARCHITECTURES:
        for fmt in ("int8_row_f32", "fp8_e4m3_row_f32"):
            yield f"budget-{fmt}-f16-m1-n{N}-k{K}", cc, product(fmt, 1, cc)
    for fmt, x_type, m, n, k, cc in (
        ("int8_g128_f16", FP16, 1, N, K, 80),
        ("fp8_e4m3_b128_f32", FP16, 1, N, K, 80),
        ("fp8_e5m2_row_f32", FP16, 1, N, K, 90),
        ("int8_row_f32", BF16, 1, N, K, 90),
    ):
        # The limits are those of packed arithmetic, which is for fp16.
        name = f"gemv-{fmt}-bf16" if x_type == BF16 else f"budget-{fmt}-f16"
        yield f"{name}-m{m}-n{n}-k{k}", cc, product(fmt, m, cc, x_type, n, k)
    yield "gemv-bf16-bf16-m1-n5120-k2880", 90, product("bf16", 1, 90, BF16, 5120, 2880)
    yield "gemv-bf16-bf16-m8-n4096-k2880", 90, product("bf16", 8, 90, BF16, 4096, 2880)
    yield f"gemv8-int8_row_f32-f16-m8-n{N}-k{K}", 90, product("int8_row_f32", 8, 90)
    yield "bsr-gemv-16x16_f16-m1", 90, bsr((16, 16), "f16", 1, 90)
    for inner in ("int8", "int4"):
        yield f"budget-{inner}-bsr-32x64-m1", 80, bsr((32, 64), inner, 1, 80)
        yield f"bsr-gemv-32x64_{inner}-m8", 90, bsr((32, 64), inner, 8, 90)
    yield "bsr-gemm-32x32_f16-m64", 86, bsr((32, 32), "f16", 64, 86)
    yield "bsr-gemm-32x64_int8-m64", 90, bsr((32, 64), "int8", 64, 90)
    yield "bsr-gemm-32x64_int4-m64", 80, bsr((32, 64), "int4", 64, 80)
    for fmt, m, cc in (
        ("int8_row_f32", 48, 86),
        ("int4_asym_g128_f16", 512, 89),
        ("mxfp4", 64, 90),
        ("ternary", 128, 80),
        ("int4_sym_g128_f16", 128, 90),
        ("int4_sym_g128_f16", 2048, 90),
        ("q4_k", 2048, 90),
        ("q6_k", 64, 90),
        ("tcq3", 64, 86),
        ("tcq4", 2048, 90),
        ("f16", 2048, 90),
    ):
        yield f"gemm-{fmt}-f16-m{m}-n{N}-k{K}", cc, product(fmt, m, cc)
    yield f"gemm-f32-f32-m64-n{N}-k{K}", 80, product("f32", 64, 80, torch.float32)
    yield "norm-8192", 90, norm(8192, 90)


def main() -> None:
    report: dict[str, dict[str, Any]] = {}
    for name, capability, launch in launches():
        code = compile_code(launch, capability)
        report.setdefault(name, {})[f"sm_{capability}"] = figures(code, launch)
    ptx = {}
    for cc in PTX_ONLY:
        for fmt, m in (("fp8_e4m3_row_f32", 1), ("int8_g128_f16", 64)):
            ptx[f"{fmt}-m{m}-sm_{cc}"] = "ld.global" in compile_ptx(product(fmt, m, cc), cc)
    print_or_record("linear", report, ptx=ptx)


main()
