"""Look for registers that are written while a tensor-core product in flight reads them (sm_90).

`wgmma` takes its left operand from registers and runs on after its instruction. What follows may
write these registers only when it has waited. Prints, for each kernel, how many products read
registers and how many instructions of the loops write too early.

Run without TRITON_INTERPRET, see `cuda_cases.aot_report`.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from aot import _compile
from cuda_cases import meta, meta_device
from cuda_cases import meta_weight as weight

from clocher_kernels.cuda.attention import attention
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.linear import linear
from clocher_kernels.cuda.moe import moe_down, moe_gate_up

DEVICE = meta_device(90)
_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);")
_PRODUCT = re.compile(r"(?:@\S+ )?[HIQ]GMMA\.\S+ R\d+, (R\d+|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)")
_WRITES = re.compile(r"(?:@!?U?P\d+ )?([A-Z0-9_.]+) (?:P\d+, )?R(\d+)(?:,|$)")
_WRITE_NONE = ("ST", "LDGSTS", "BAR", "RED", "ISETP", "FSETP", "HSETP", "BRA", "WARP")


def launches() -> Iterator[tuple[str, Launch]]:
    half = torch.float16
    plain = ("int4_sym_g128_f16", "bf16", "mxfp4", "int8_row_f32", "fp8_e4m3_row_f32")
    for fmt in (*plain, "q4_k", "q6_k", "tcq3"):
        for m in (64, 512):
            given = {"x": meta((m, 4096), half), "y": meta((m, 4096), half), "device": DEVICE}
            yield f"linear {fmt} {m}", linear(w=weight(fmt, 4096, 4096), **given)[-1]
    up, down = weight("mxfp4", 32, 5760, 2880), weight("mxfp4", 32, 2880, 2880)
    for m in (48, 128, 512, 2048):
        ids, hidden = meta((m, 4), torch.int32), meta((m, 4, 2880), half)
        given = {"ids": ids, "device": DEVICE}
        made = moe_gate_up(x=meta((m, 2880), half), w=up, y=hidden, limit=7.0, alpha=1.7, **given)
        yield f"experts up {m}", made[-1]
        y, factors = meta((m, 2880), torch.float32), meta((m, 4), torch.float32)
        yield f"experts down {m}", moe_down(x=hidden, w=down, y=y, weights=factors, **given)[-2]
    tokens = {name: meta((512,), torch.int32) for name in ("slots", "positions", "ends")}
    cache = {f"{name}_cache": meta((32, 8, 64, 128), torch.bfloat16) for name in "kv"}
    tokens |= {"pages": meta((1, 32), torch.int32), "ancestors": meta((512,), torch.int64), **cache}
    rows: dict[str, Any] = {"q": meta((512, 4096), torch.float32), "y": meta((512, 4096), half)}
    numbers: dict[str, Any] = {"cache_dtype": "bf16", "scale": 0.1, "window": 0}
    yield "attention", attention(**rows, **tokens, **numbers, device=DEVICE)[0]


def too_early(listing: str) -> tuple[int, int]:
    """Return the products that read registers, and the writes to these before they were read."""
    code = [(int(at, 16), text.strip()) for at, text in _LINE.findall(listing)]
    place = {at: index for index, (at, _) in enumerate(code)}
    products = [found.group(1) for _, text in code if (found := _PRODUCT.match(text))]
    wrong = set()
    for index, (_, text) in enumerate(code):
        target = re.search(r"BRA\S* (?:\S+, )?0x([0-9a-f]+)", text)
        begin = place.get(int(target.group(1), 16), index) if target else index
        if begin < index:
            wrong |= set(writes(code, [*range(begin, index + 1)] * 2))
    return len([name for name in products if name != "gdesc"]), len(wrong)


def writes(code: list[tuple[int, str]], order: list[int]) -> Iterator[int]:
    """Yield the instructions of two turns of a loop that write what a product may still read."""
    flying: list[set[int]] = []
    group: set[int] = set()
    for index in order:
        text = code[index][1]
        if product := _PRODUCT.match(text):
            if product.group(1) != "gdesc":
                first = int(product.group(1)[1:])
                group |= set(range(first, first + 4))
            if "gsb0" in text:
                flying, group = [*flying, group], set()
        elif wait := _WAIT.search(text):
            flying = flying[len(flying) - int(wait.group(1)) :] if int(wait.group(1)) else []
        elif (write := _WRITES.match(text)) and not write.group(1).startswith(_WRITE_NONE):
            wide = write.group(1)
            count = 4 if ".128" in wide or "LDSM" in wide else 2 if ".64" in wide else 1
            own = set(range(int(write.group(2)), int(write.group(2)) + count))
            if any(own & each for each in [*flying, group]):
                yield index


def listing_of(launch: Launch) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(_compile(launch, 90).asm["cubin"])
        file.flush()
        done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    print(json.dumps({name: too_early(listing_of(launch)) for name, launch in launches()}))
