"""Print, as JSON, what attention, sampling and the element-wise ops compile to for real models.

Run without TRITON_INTERPRET, see `cuda_cases.aot_report`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from aot import ARCHITECTURES, PTX_ONLY, compile_code, compile_ptx
from cuda_cases import meta, meta_device
from sass_ratchet import print_or_record

from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.prepack import TORCH_DTYPES, DeviceTensor
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.sampling import words_for

PAGE, CELLS, SLOTS, VOCABULARY = 64, 8192, 4, 201088


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return meta(shape, dtype)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return meta(shape, dtype)


def tokens_and_cache(count: int, heads: int, dim: int, kv: str) -> dict[str, Any]:
    shape = (SLOTS * CELLS // PAGE, heads, PAGE, dim)
    made: dict[str, Any] = {name: ints(count) for name in ("slots", "positions", "ends")}
    made |= {"ancestors": ints(count, dtype=torch.int64), "pages": ints(SLOTS, CELLS // PAGE)}
    for name in "kv":
        made[f"{name}_cache"] = meta(shape, TORCH_DTYPES[kv])
        if kv == "i8":
            made[f"{name}_scale"] = floats(*shape[:3])
    return made | {"cache_dtype": kv}


def attention(
    device: Device,
    count: int,
    model: tuple[int, int, int],
    kv: str,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    listed: torch.Tensor | None = None,
) -> list[Launch]:
    queries, heads, dim = model
    return LOWER["attention"](
        q=floats(count, queries * dim),
        y=floats(count, queries * dim, dtype=torch.float16),
        sinks=floats(queries) if model == GPT_OSS else None,
        listed=listed,
        scale=dim**-0.5,
        window=window,
        chunk=chunk,
        softcap=softcap,
        **tokens_and_cache(count, heads, dim, kv),
        device=device,
    )


def append(device: Device, kv: str) -> list[Launch]:
    made = tokens_and_cache(1, 8, 64, kv)
    return LOWER["kv_append"](k=floats(1, 512), v=floats(1, 512), **made, device=device)


def sample(device: Device) -> list[Launch]:
    return LOWER["sample"](
        logits=floats(1, VOCABULARY),
        allowed=ints(1, words_for(VOCABULARY)),
        masked=ints(1),
        edit_ids=ints(4096),
        edits=floats(4096, 3),
        edit_begin=ints(1),
        edit_end=ints(1),
        temperature=floats(1),
        top_k=ints(1),
        top_p=floats(1),
        min_p=floats(1),
        seeds=ints(1, dtype=torch.int64),
        draws=ints(1),
        ids=ints(1),
        device=device,
    )


def elementwise(device: Device) -> list[Launch]:
    half = torch.float16
    fmt = parse_format("int4_asym_g64_f16")
    planes = {
        "codes": ints(VOCABULARY, 360),
        "scales": floats(VOCABULARY, 45, dtype=half),
        "zeros": ints(VOCABULARY, 45, dtype=torch.uint8),
    }
    table = DeviceTensor((VOCABULARY, 2880), fmt, planes)
    x, narrow, tables = floats(1, 2880), floats(1, 2880, dtype=half), floats(CELLS, 32)
    launches = LOWER["rms_norm"](x=x, weight=floats(2880), y=narrow, eps=1e-5, device=device)
    launches += LOWER["rope"](
        x=floats(1, 4096), positions=ints(1), cos=tables, sin=tables, device=device
    )
    launches += LOWER["embed"](ids=ints(1), table=table, y=x, device=device)
    return launches + LOWER["gather_rows"](x=narrow, rows=ints(1), y=narrow, device=device)


# Query heads, key/value heads, head dimension.
GPT_OSS, LLAMA, LLAMA4, GEMMA2 = (64, 8, 64), (32, 8, 128), (40, 8, 128), (16, 8, 256)


def configurations(every: bool) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield (name, what lowers it, its arguments)."""
    yield "gpt-oss-bf16-window-m8", attention, (8, GPT_OSS, "bf16", 128)
    yield "llama-i8-m1", attention, (1, LLAMA, "i8")
    yield "llama-bf16-m128", attention, (128, LLAMA, "bf16")
    yield "append-e4m3", append, ("e4m3",)
    yield "sample", sample, ()
    yield "gpt-oss", elementwise, ()
    for kv in ("f32", "bf16", "f16", "e4m3", "e5m2", "i8") if every else ():
        yield f"append-{kv}", append, (kv,)
        for name, model in (("gpt-oss", GPT_OSS), ("bitnet", (20, 5, 128)), ("mha", (32, 32, 128))):
            yield f"{name}-{kv}-m1", attention, (1, model, kv)
            yield f"{name}-{kv}-m128", attention, (128, model, kv)
            yield f"{name}-{kv}-window-m128", attention, (128, model, kv, 128)
        for count in (1, 128):
            if kv != "e5m2":  # of which sm_90 keeps one pointer in memory
                yield f"llama4-{kv}-m{count}", attention, (count, LLAMA4, kv, 0, 8192)
            if kv != "f32":  # registers do not hold a block of 16 keys of 256 fp32
                yield f"gemma2-{kv}-m{count}", attention, (count, GEMMA2, kv, 4096, 0, 50.0)


def report_of(
    configurations: Iterator[tuple[str, Any, tuple[Any, ...]]], architectures: tuple[int, ...]
) -> dict[str, Any]:
    """Compile each for architectures; return the figures of its kernels."""
    report: dict[str, Any] = {}
    for name, lower, arguments in configurations:
        for capability in architectures:
            for launch in lower(meta_device(capability), *arguments):
                code = compile_code(launch, capability)
                wide = sum(n for op, n in code.instructions.items() if op.startswith("LDG.E.128"))
                where = report.setdefault(f"{name}{launch.kernel.__name__}", {})
                where[f"sm_{capability}"] = {
                    "registers": code.registers,
                    "local": code.local_bytes,
                    "shared": code.shared_bytes,
                    "wide_loads": wide,
                }
    return report


def main(every: bool = False) -> None:
    """Compile the few telling configurations, or those of every KV dtype and architecture."""
    report = report_of(configurations(every), ARCHITECTURES if every else (80, 90))
    for name, lower, arguments in configurations(every):
        if every or name in ("gpt-oss-bf16-window-m8", "sample"):
            for capability in PTX_ONLY:
                for launch in lower(meta_device(capability), *arguments):
                    assert ".entry" in compile_ptx(launch, capability)
    print_or_record("attention", report)


if __name__ == "__main__":
    main()
