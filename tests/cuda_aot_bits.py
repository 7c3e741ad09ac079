"""Compile the kernels of sub-byte weights ahead of time and print what they cost, as JSON.

With --record it writes data/sass_budgets/bits.json, see sass_ratchet.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import ARCHITECTURES, PTX_ONLY, compile_code, compile_ptx
from cuda_cases import meta, meta_device, meta_weight
from sass_ratchet import figures, print_or_record

from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.gemv_bits import gemv_bits
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.prepack import TORCH_DTYPES
from clocher_kernels.cuda.scalar import Linear, Tail
from clocher_kernels.ops import OPS

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16

EXPERTS, CHOSEN, WIDTH = 32, 4, 2880


def product(
    fmt: str, m: int, n: int, k: int, capability: int, x_type: torch.dtype = FP16
) -> Launch:
    """Return the launch of `linear`."""
    (launch,) = gemv_bits(
        Linear(
            meta((m, k), x_type),
            meta_weight(fmt, n, k),
            meta((m, n), x_type),
            meta_device(capability),
            tail=Tail(meta((n,), FP32), residual=meta((m, n), FP32)),
        )
    )
    return launch


def exact(m: int, n: int, k: int, capability: int) -> Launch:
    """Return the launch of `linear` for int8 activations."""
    (launch,) = linear(
        x=meta((m, k), torch.int8),
        x_scale=meta((m, 1), FP32),
        w=meta_weight("ternary", n, k),
        y=meta((m, n), FP16),
        residual=meta((m, n), FP32),
        device=meta_device(capability),
    )
    return launch


def experts(stem: str, fmt: str, capability: int, x_type: torch.dtype = FP16) -> Launch:
    """Return the launch of an experts' op, `moe_<stem>`, for a token of gpt-oss-20b."""
    spec = OPS[f"moe_{stem}"]
    sizes = {"M": 1, "A": CHOSEN, "E": EXPERTS, "J": 2 * WIDTH}
    sizes |= dict.fromkeys("NIK", WIDTH)
    args: dict[str, Any] = {}
    for param in spec.params:
        if param.kind == "matrix":
            args[param.name] = meta_weight(fmt, *param.shape(sizes))
        elif param.name not in ("x_scale", "factors"):
            # What is the residual stream too is not narrow.
            narrow = param.narrow and param.dims != "M N"
            dtype = x_type if narrow else TORCH_DTYPES[param.dtypes[0]]
            args[param.name] = meta(param.shape(sizes), dtype)
    attrs = spec.cases[0].attrs
    (launch,) = LOWER[spec.name](**args, **attrs, device=meta_device(capability))
    return launch


def launches() -> Iterator[tuple[str, int, Launch]]:
    """Yield (id, capability, launch)."""
    for cc in ARCHITECTURES:
        for fmt in ("int4_sym_g64_f16", "mxfp4"):
            yield f"budget-{fmt}-m1-n14336-k4096", cc, product(fmt, 1, 14336, 4096, cc)
        yield "budget-ternary_i8-m1-n13824-k2560", cc, exact(1, 13824, 2560, cc)
        yield "budget-mxfp4-experts-gate_up-m1", cc, experts("gate_up", "mxfp4", cc)
    for cc in (86, 90):
        yield "budget-mxfp4-experts-down-m1", cc, experts("down", "mxfp4", cc)
    for fmt, cc in (("int4_sym_g32_f16", 80), ("int4_asym_g64_f16", 89)):
        yield f"budget-{fmt}-m1-n14336-k4096", cc, product(fmt, 1, 14336, 4096, cc)
    yield (
        "budget-int4_sym_g64_f16-m1-n4096-k14336",
        90,
        product("int4_sym_g64_f16", 1, 4096, 14336, 90),
    )
    yield "int4_asym_g34_f16-m1-n4096-k4096", 86, product("int4_asym_g34_f16", 1, 4096, 4096, 86)
    for m in (4, 8):
        yield (
            f"int4_sym_g64_f16-m{m}-n14336-k4096",
            90,
            product("int4_sym_g64_f16", m, 14336, 4096, 90),
        )
    for fmt, m in (("q4_k", 1), ("q5_k", 2), ("q6_k", 1), ("q6_k", 8)):
        yield f"{fmt}-m{m}-n14336-k4096", 90, product(fmt, m, 14336, 4096, 90)
    for fmt, m, n, k, cc in (
        ("tcq3", 1, 8960, 1536, 90),
        ("tcq3", 1, 1536, 8960, 90),
        ("tcq3", 8, 8960, 1536, 90),
        ("tcq2", 2, 8960, 1536, 86),
        ("tcq5", 8, 8960, 1536, 80),
    ):
        yield f"{fmt}-m{m}-n{n}-k{k}", cc, product(fmt, m, n, k, cc)
    yield "tcq4-bf16-m1-n8960-k1536", 80, product("tcq4", 1, 8960, 1536, 80, BF16)
    yield "tcq4-experts-gate_up-m1", 90, experts("gate_up", "tcq4", 90)
    yield "mxfp4-m8-n14336-k4096", 80, product("mxfp4", 8, 14336, 4096, 80)
    yield "mxfp4-bf16-m1-n14336-k4096", 90, product("mxfp4", 1, 14336, 4096, 90, BF16)
    yield "ternary_i8-m8-n13824-k2560", 86, exact(8, 13824, 2560, 86)
    yield "bf16-experts-gate_up-m1", 90, experts("gate_up", "bf16", 90, BF16)


def main() -> None:
    report: dict[str, dict[str, Any]] = {}
    for name, capability, launch in launches():
        code = compile_code(launch, capability)
        report.setdefault(name, {})[f"sm_{capability}"] = figures(code, launch)
    ptx = {}
    for cc in PTX_ONLY:
        for name, launch in (
            ("int4", product("int4_sym_g64_f16", 1, 4096, 4096, cc)),
            ("mxfp4", experts("gate_up", "mxfp4", cc)),
            ("ternary", exact(1, 2560, 2560, cc)),
        ):
            ptx[f"{name}-sm_{cc}"] = "evict_first" in compile_ptx(launch, cc)
    print_or_record("bits", report, ptx=ptx)


main()
