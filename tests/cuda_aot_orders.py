"""Print, as JSON, how products of 1 to 8 tokens, and of 32 by bricks, are summed on a GPU.

Lanes that hold pieces of a sum are added up by registers, threads and warps, in an order that
follows from how the axis is laid out over them. Run without TRITON_INTERPRET, see
`cuda_cases.aot_report`.
"""

import json
import re
from collections.abc import Iterator

import torch
from aot import compile_ir
from cuda_cases import meta, meta_device, meta_weight

from clocher_kernels.cuda.bricks import in_bricks
from clocher_kernels.cuda.linear import linear

FORMATS = ("int4_sym_g128_f16", "int4_asym_g64_f16", "mxfp4", "int8_row_f32", "int8_g64_f16")
FORMATS += ("fp8_e4m3_row_f32", "fp8_e4m3_b128_f32", "bf16", "f32")
CASES = [(name, 4096, 4096) for name in FORMATS]
CASES += [("int4_sym_g128_f16", 28672, 4096), ("q4_k", 28672, 4096), ("q6_k", 4096, 14336)]
CASES += [("tcq3", 8960, 1536)]
CASES += [("bf16", 201088, 2880)]  # where other numbers of lanes and warps share a row
_LAYOUT = re.compile(r"^(#\w+) = (#ttg\.\w+)<\{(.*)\}>$", re.M)
_REDUCE = re.compile(r'"tt\.reduce"\(.*?<\{axis = (\d+) : i32.*?\}\) : \(tensor<([^>]*)>', re.S)
_BASES = re.compile(r"(\w+) = (\[\[.*?\]\]|\[\])")


def orders(ir: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each sum its length, and how many registers, threads and warps hold its pieces."""
    layouts = {name: (kind, text) for name, kind, text in _LAYOUT.findall(ir)}
    for axis, tensor in _REDUCE.findall(ir):
        shape, layout = tensor.split(", ")
        length = int(shape.split("x")[int(axis)])
        kind, text = layouts[layout]
        if kind == "#ttg.linear":
            parts = {name: json.loads(bases) for name, bases in _BASES.findall(text)}
            held = [
                1 << sum(bool(base[int(axis)]) for base in parts[p])
                for p in ("register", "lane", "warp")
            ]
        else:
            sizes = {
                name: json.loads(f"[{value}]")
                for name, value in re.findall(r"(\w+) = \[(.*?)\]", text)
            }
            _, threads, warps = (
                sizes.get(p, [1, 1, 1])[int(axis)]  # of an `mma` only warps share the first axis
                for p in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
            )
            held = [max(length // (threads * warps), 1), threads, warps]
        yield length, *held


def main() -> None:
    found: dict[str, dict[str, list[tuple[int, ...]]]] = {}
    for name, n, k in CASES:
        w = meta_weight(name, n, k)
        for m in (1, 2, 4, 8, 16, 32) if in_bricks(w.format, w.shape) else (1, 2, 4, 8):
            x, y = meta((m, k), torch.float16), meta((m, n), torch.float16)
            (launch,) = linear(x=x, w=w, y=y, device=meta_device(90))
            found.setdefault(f"{name} {n}x{k}", {})[str(m)] = sorted(
                set(orders(compile_ir(launch, 90)))
            )
    print(json.dumps({"code": found}))


if __name__ == "__main__":
    main()
