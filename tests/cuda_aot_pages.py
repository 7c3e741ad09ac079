"""Print, as JSON, what bounds of pages, lists of them and attention that reads some compile to.

Run without TRITON_INTERPRET, see `cuda_cases.aot_report`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from aot import ARCHITECTURES
from cuda_aot_attention import (
    GEMMA2,
    GPT_OSS,
    LLAMA,
    attention,
    floats,
    ints,
    report_of,
    tokens_and_cache,
)
from sass_ratchet import print_or_record

from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.ops.attention import KV_DTYPES

Model = tuple[int, int, int]
MODES: dict[str, dict[str, Any]] = {
    "topk": {"budget": 32},
    "threshold": {"margin": 8.0},
    "dynamic": {"mass": 0.9},
    "window": {},
}


def bounds_of(heads: int, dim: int, cells: int) -> torch.Tensor:
    return floats(4 * cells // 64, heads, 2, dim)


def bound(device: Device, model: Model, kv: str) -> list[Launch]:
    made = tokens_and_cache(1, model[1], model[2], kv)
    made = {name: value for name, value in made.items() if not name.startswith("v_")}
    return LOWER["page_bounds"](bounds=bounds_of(*model[1:], 8192), **made, device=device)


def select(device: Device, model: Model, mode: str, cells: int) -> list[Launch]:
    queries, heads, dim = model
    made = {name: ints(1) for name in ("slots", "positions", "ends")}
    made |= {"ancestors": ints(1, dtype=torch.int64), "pages": ints(4, cells // 64)}
    if MODES[mode]:
        made["bounds"] = bounds_of(heads, dim, cells)
    return LOWER["select_pages"](
        q=floats(1, queries * dim),
        listed=ints(1, heads, cells // 4096, dtype=torch.int64),
        counts=ints(1, heads, 2, dtype=torch.int64),
        cells=64,
        scale=dim**-0.5,
        **made,
        **MODES[mode],
        device=device,
    )


def listed(device: Device, model: Model, kv: str) -> list[Launch]:
    lists = ints(1, model[1], 2, dtype=torch.int64)
    return attention(device, 1, model, kv, listed=lists)


def configurations(every: bool) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield (name, what lowers it, its arguments)."""
    yield "bounds-e4m3", bound, (LLAMA, "e4m3")
    yield "topk", select, (LLAMA, "topk", 32768)
    yield "gpt-oss-bf16", listed, (GPT_OSS, "bf16")
    yield "llama-i8", listed, (LLAMA, "i8")
    if not every:
        return
    for kv in KV_DTYPES:
        yield f"bounds-{kv}", bound, (LLAMA, kv)
        for name, model in (("gpt-oss", GPT_OSS), ("llama", LLAMA), ("gemma2", GEMMA2)):
            # Registers do not hold 256 fp32 columns; of e5m2 sm_90 keeps 24 bytes in memory.
            if (name, kv) not in (("gemma2", "f32"), ("llama", "e5m2")):
                yield f"{name}-{kv}", listed, (model, kv)
    for mode in MODES:
        for cells in (8192, 131072, 1 << 19):
            yield f"{mode}-{cells}", select, (GPT_OSS, mode, cells)


def main(every: bool = False) -> None:
    """Compile the few telling configurations, or those of every KV dtype and architecture."""
    architectures = ARCHITECTURES if every else (80, 90)
    print_or_record("pages", report_of(configurations(every), architectures))


if __name__ == "__main__":
    main()
