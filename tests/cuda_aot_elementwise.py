"""Compile what moves and bends values ahead of time and print what it costs, as JSON."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from aot import compile_code
from cuda_cases import meta, meta_device
from cuda_cases import meta_weight as weight

from clocher_kernels.cuda.executor import LOWER

FP16, FP32, I32 = torch.float16, torch.float32, torch.int32
CAPABILITY, EXPERTS = 90, 256


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, op, arguments) of what Gemma, Qwen2-MoE and DeepSeek ask for."""
    x, gates, tables = meta((1, 3072), FP32), meta((1, 8192), FP16), meta((4096, 32), FP32)
    for fmt, m, activation in (
        ("int4_sym_g128_f16", 1, "silu"),
        ("int8_row_f32", 1, "gelu"),
        ("bf16", 8, "gelu_tanh"),
        ("mxfp4", 64, "relu2"),
        ("ternary", 8, "tanh"),
    ):
        y = meta((m, 8192), FP16)
        product = {
            "x": meta((m, 3072), FP16),
            "w": weight(fmt, 8192, 3072),
            "y": y,
            "times": y,
        }
        yield activation, "linear", {**product, "activation": activation, "cap": 30.0}
    score = {"x": meta((1, 3072), FP16), "w": weight("bf16", 1, 3072), "y": meta((1, 1), FP16)}
    yield "sigmoid", "linear", {**score, "activation": "sigmoid"}
    ids, weights = meta((1, 8), I32), meta((1, 8), FP32)
    choice = {"logits": meta((1, EXPERTS), FP32), "ids": ids, "weights": weights}
    groups = {"groups": 8, "group_top": 4, "group_best": 2, "bias": meta((EXPERTS,), FP32)}
    yield (
        "norm",
        "rms_norm",
        {"x": x, "weight": meta((3072,), FP32), "residual": x, "y": x, "eps": 1e-5},
    )
    yield "rope", "rope", {"x": x, "positions": meta((1,), I32), "cos": tables, "sin": tables}
    yield "fake", "fake_quantize", {"x": gates, "y": meta((1, 8192), FP32), "dtype": "e4m3"}
    parts = {"first": meta((1, 64), FP32), "second": meta((1, 2048), FP32)}
    yield "turn", "hadamard", {"x": gates, "y": gates, "size": 64}
    table = {"ids": meta((1,), I32), "table": weight("tcq4", 32000, 3072)}
    yield "embed", "embed", {**table, "y": x}
    yield "join", "join_heads", {**parts, "y": x, "heads": 16}
    yield "resize", "join_heads", {"first": x, "y": meta((1, 2048), FP32), "heads": 16}
    yield "softmax", "route", {**choice, "score": "softmax"}
    yield "groups", "route", {**choice, "score": "sigmoid", "normalise": True, **groups}


def main() -> None:
    """Compile each call."""
    report = {}
    for name, op, arguments in calls():
        (launch,) = LOWER[op](**arguments, device=meta_device(CAPABILITY))
        code = compile_code(launch, CAPABILITY)
        report[name] = {"registers": code.registers, "local": code.local_bytes}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
