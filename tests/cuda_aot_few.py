"""Compile the tensor-core kernel for few tokens and print what its machine code costs, as JSON."""

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import compile_code, compile_ptx
from cuda_cases import meta, meta_device, meta_weight

from clocher_kernels.cuda.few_tokens import few_tokens
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.scalar import Linear

FORMATS = ("int4_sym_g128_f16", "int4_asym_g64_f16", "bf16", "int8_row_f32", "fp8_e4m3_row_f32")
FORMATS += ("mxfp4", "ternary")
ALONE = ((28672, 4096), (4096, 4096), (4096, 14336), (6144, 4096))
"""Rows and columns of Llama 8B's matrices."""
HEAD = (128256, 4096)


def product(
    fmt: str, m: int, capability: int, n: int = 28672, k: int = 14336, codes: bool | None = None
) -> Launch:
    """Return the launch for a matrix of so many rows that no programs share them."""
    codes = fmt == "ternary" if codes is None else codes
    given = {"x_scale": meta((m,), torch.float32)} if codes else {}
    (launch,) = few_tokens(
        Linear(
            meta((m, k), torch.int8 if codes else torch.float16),
            meta_weight(fmt, n, k),
            meta((m, n), torch.float16),
            meta_device(capability),
            **given,
        )
    )
    return launch


_LINE = re.compile(r"(ld\.global\S*v4\.b32|mov\.b32|mma\.sync\S*)\s+(.*);")


def neighbours(ptx: str) -> bool:
    """Return whether each `mma` meets tokens of two registers that a load has put side by side.

    Then columns are added up in an order that no tile, and no version of Triton, has a part in.
    """
    made: dict[str, Any] = {}

    def source(name: str) -> Any:
        first = made.get(name)
        if isinstance(first, list):  # two halves made one again
            low, high = (made.get(part) for part in first)
            return source(low[1]) if low == ("low", low[1]) and high == ("high", low[1]) else None
        return first

    found = []
    for kind, text in _LINE.findall(ptx):
        groups = [g.split(", ") for g in re.findall(r"\{ ?(.*?) ?\}", text)]
        if kind.startswith("mma"):
            found.append([source(name) for name in groups[2]])
        elif kind.startswith("ld"):
            made |= {name: (len(made), i) for i, name in enumerate(groups[0])}
        elif text.startswith("{"):
            own = text.split(", ")[-1]
            made |= {
                name: (half, own) for name, half in zip(groups[0], ("low", "high"), strict=True)
            }
        elif groups:
            made[text.split(", ")[0]] = groups[0]
    return bool(found) and all(
        a and b and a[0] == b[0] and a[1] % 2 == 0 and b[1] == a[1] + 1 for a, b in found
    )


def main() -> None:
    """Print, for each format, architecture and number of tokens, what the kernel costs."""
    report = {}
    int4, large = "int4_sym_g128_f16", (28672, 14336)
    cases = [(fmt, 8, 90, large) for fmt in FORMATS]
    cases += [(int4, 8, 80, large), (int4, 32, 90, large), ("bf16", 32, 90, large)]
    cases += [(int4, 1, 90, shape) for shape in ALONE] + [(int4, 16, 90, ALONE[1])]
    cases += [("int4_asym_g128_f16", m, 90, ALONE[1]) for m in (1, 16)]
    cases += [("bf16", m, 90, HEAD) for m in (1, 16, 32)]
    for fmt, m, capability, shape in cases:
        launch = product(fmt, m, capability, *shape)
        code = compile_code(launch, capability)
        every, loop = code.instructions, code.loop or code.instructions
        name = f"{fmt}-m{m}-{shape[0]}x{shape[1]}-sm_{capability}"
        report[name] = {
            "per_weight": round(sum(loop.values()) / launch.weights, 2),
            "registers": code.registers,
            "local": code.local_bytes,
            "once": not code.loop,
            "moved": sum(n for op, n in loop.items() if op.startswith(("SHFL", "LDS", "STS"))),
            "tensor_cores": sum(n for op, n in loop.items() if "MMA" in op.split(".")[0]),
            "streaming_loads": sum(n for op, n in every.items() if op.startswith("LDG.E.EF")),
            "neighbours": "int4" not in fmt or neighbours(code.ptx),
        }
    assert ".entry" in compile_ptx(product("ternary", 8, 90, codes=False), 90)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
