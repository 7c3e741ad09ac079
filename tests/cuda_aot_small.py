"""Print what one kernel of each family costs in machine code for sm_90: the default run's check."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from aot import compile_code
from cuda_aot_attention import GPT_OSS, attention
from cuda_aot_elementwise import FP16, FP32, I32
from cuda_cases import meta, meta_device
from cuda_cases import meta_weight as weight

from clocher_kernels.cuda.executor import LOWER, LOWER_GREEDY

CAPABILITY = 90


def launches() -> Iterator[tuple[str, Any]]:
    """Yield (name, launch)."""
    device = meta_device(CAPABILITY)
    for fmt in ("int4_sym_g128_f16", "int8_row_f32"):
        given = {"x": meta((1, 2048), FP16), "w": weight(fmt, 512, 2048), "y": meta((1, 512), FP16)}
        yield fmt, LOWER["linear"](**given, device=device)
    given = {"x": meta((1, 2048), torch.int8), "x_scale": meta((1, 1), FP32)}
    given |= {"w": weight("ternary", 512, 2048), "y": meta((1, 512), FP16)}
    yield "ternary", LOWER["linear"](**given, device=device)
    yield "attention", attention(device, 1, GPT_OSS, "bf16")
    rows = {"temperature": FP32, "top_k": I32, "top_p": FP32, "seeds": torch.int64}
    rows |= {"draws": torch.int64, "ids": I32, "masked": I32, "min_p": FP32}
    rows |= {"edit_begin": I32, "edit_end": I32}
    masks = {"logits": meta((1, 4096), FP32), "allowed": meta((1, 128), I32)}
    masks |= {"edit_ids": meta((512,), I32), "edits": meta((512, 3), FP32)}
    made = {name: meta((1,), dtype) for name, dtype in rows.items()}
    yield "sample", LOWER_GREEDY["sample"](**masks, **made, device=device)


def main() -> None:
    """Compile each launch."""
    report = {}
    for name, (launch,) in launches():
        code = compile_code(launch, CAPABILITY)
        report[name] = {"local": code.local_bytes, "loads": code.instructions["LDG.E.EF.128"]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
