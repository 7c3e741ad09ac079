"""Compile the tensor-core kernel for few tokens and print what its machine code costs, as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import compile_code, compile_ptx
from cuda_cases import meta, meta_device

from clocher_kernels.cuda.few_tokens import few_tokens
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.prepack import TORCH_DTYPES, rearrange
from clocher_kernels.formats import parse_format

FORMATS = ("int4_sym_g128_f16", "int4_asym_g64_f16", "bf16", "int8_row_f32", "fp8_e4m3_row_f32")
FORMATS += ("mxfp4", "ternary")


def product(
    fmt: str, m: int, capability: int, n: int = 28672, k: int = 14336, codes: bool | None = None
) -> Launch:
    """Return the launch for a matrix of so many rows that no programs share them."""
    held = parse_format(fmt)
    codes = fmt == "ternary" if codes is None else codes
    planes = {p: meta(a.shape, TORCH_DTYPES[a.dtype]) for p, a in held.planes((n, k)).items()}
    given = {"x_scale": meta((m,), torch.float32)} if codes else {}
    (launch,) = few_tokens(
        x=meta((m, k), torch.int8 if codes else torch.float16),
        w=rearrange(held, (n, k), planes),
        y=meta((m, n), torch.float16),
        device=meta_device(capability),
        **given,
    )
    return launch


def main() -> None:
    """Print, for each format, architecture and number of tokens, what the kernel costs."""
    report = {}
    cases = [(fmt, 8, 90) for fmt in FORMATS]
    cases += [("int4_sym_g128_f16", 8, 80), ("int4_sym_g128_f16", 32, 90), ("bf16", 32, 90)]
    for fmt, m, capability in cases:
        launch = product(fmt, m, capability)
        code = compile_code(launch, capability)
        every, loop = code.instructions, code.loop or code.instructions
        report[f"{fmt}-m{m}-sm_{capability}"] = {
            "per_weight": round(code.per_weight(launch), 2),
            "registers": code.registers,
            "local": code.local_bytes,
            "moved": sum(n for op, n in loop.items() if op.startswith(("SHFL", "LDS", "STS"))),
            "tensor_cores": sum(n for op, n in loop.items() if "MMA" in op.split(".")[0]),
            "streaming_loads": sum(n for op, n in every.items() if op.startswith("LDG.E.EF")),
        }
    assert ".entry" in compile_ptx(product("ternary", 8, 90, codes=False), 90)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
