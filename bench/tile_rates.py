"""Rates of the integer tile kernels: weights per cycle from cache, bytes per second from memory.

    python -m bench.tile_rates --formats int4_sym_g32_f16,mxfp4 --group 128

Cache: one thread, tiles that fit in the second-level cache; cycles come from a chain of dependent
multiplications, the share of the dot-product rate from independent byte dot products, both measured
between the kernels in the same run. Memory: matrices that no cache holds, a team of threads, and
between them a plain read of the same bytes by the same team. Every figure is the best of many short
runs.
"""

import ctypes
import json
import time
from collections.abc import Callable

import click
import numpy as np

from clocher_kernels.formats import parse_format
from clocher_kernels.ops.quantized import INTEGER_FORMATS, groups_of, quantize_blocks
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback import jit, panels, rates, tape, tile_pack, tile_product
from cpu_fallback.bind import bits
from cpu_fallback.quantized import AHEAD, linear_q8
from cpu_fallback.tape import Launch
from cpu_fallback.team import Team
from cpu_fallback.tiles import ROWS, UNIT, layout_of

_TOKENS = tile_product.TOKENS


def random_tensor(name: str, n: int, k: int) -> QuantTensor:
    """Return a tensor of random codes and scales near one."""
    fmt = parse_format(name)
    rng = np.random.default_rng(7)
    planes = {}
    for plane, spec in fmt.planes((n, k)).items():
        if plane in ("codes", "blocks"):
            data = rng.integers(0, 256, spec.nbytes, dtype=np.uint8)
            data = data & 0x55 if name.startswith("ternary") else data
            planes[plane] = data.view(spec.storage).reshape(spec.shape)
        elif plane == "zeros":
            planes[plane] = rng.integers(0, 16, spec.shape).astype(np.uint8)
        else:
            one = {"f32": np.float32(1), "f16": np.float16(1), "bf16": 0x3F80, "e8m0": 127}
            planes[plane] = np.full(spec.shape, one[spec.dtype], spec.storage)
    return QuantTensor((n, k), fmt, planes)


def best_slope(run: Callable[[int], None], few: int, many: int, tries: int) -> float:
    """Return seconds per step: the best long run less the best short one."""

    def best(count: int) -> float:
        times = []
        for _ in range(tries):
            start = time.perf_counter_ns()
            run(count)
            times.append(time.perf_counter_ns() - start)
        return min(times)

    return (best(many) - best(few)) / (many - few) * 1e-9


def function(kernel: jit.Kernel, result: type | None = None) -> Callable[..., int]:
    """Return a kernel as a Python function of int64."""
    return ctypes.CFUNCTYPE(result, *[ctypes.c_int64] * kernel.params)(kernel.address)


def machine(tries: int) -> tuple[float, float]:
    """Return the clock in Hz and byte dot products (of 64 products) per cycle."""
    chain, dots = function(rates.chain, ctypes.c_int64), function(rates.dots)
    line, out = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    hertz = rates.CHAIN_CYCLES / best_slope(lambda n: chain(n, 3), 200, 2000, tries)
    step = best_slope(lambda n: dots(n, line.ctypes.data, out.ctypes.data), 400, 4000, tries)
    return hertz, rates.DOT_ACCUMULATORS / (step * hertz)


def from_cache(name: str, group: int, k: int, tries: int) -> list[dict[str, object]]:
    """Return rows: weights per cycle and share of the dot-product rate for each panel width."""
    layout = layout_of("bench", parse_format(name))
    count = max(1, (256 << 10) // layout.tile_bytes(k))
    tiles = tile_pack.pack(layout, random_tensor(name, ROWS * count, k))
    product = tile_product.product_of(layout, group)
    sweep = function(rates.sweep)
    out = np.zeros(16 * 16, np.float32)
    panel = np.ones(16 * panels.panel_bytes(layout, group, k), np.uint8)
    rows = []
    for tokens in _TOKENS:
        hertz, peak = machine(tries)

        def run(repeats: int, tokens: int = tokens) -> None:
            sweep(
                product.address,
                tiles.data.ctypes.data,
                tiles.tile_bytes,
                count,
                repeats,
                panel.ctypes.data,
                out.ctypes.data,
                -(-k // UNIT),
                tokens,
                0,
            )

        many = 2 + 40 // tokens
        cycles = best_slope(run, 1, 1 + many, tries) * hertz
        weights = ROWS * count * k / cycles
        rows.append(
            {
                "format": name,
                "group": group,
                "K": k,
                "M": tokens,
                "ghz": round(hertz / 1e9, 2),
                "weights_per_cycle": round(weights, 1),
                "macs_per_cycle": round(weights * tokens, 1),
                "pct_of_dot_rate": round(100 * weights * tokens / (64 * peak), 1),
                "gbps_one_core": round(tiles.data.nbytes * hertz / cycles / 1e9, 1),
            }
        )
    return rows


def from_memory(
    name: str, group: int, n: int, k: int, tokens: int, threads: int, tries: int, ahead: int
) -> dict[str, object]:
    """Return a row: bytes per second of products with matrices in memory, and of plain reads."""
    layout = layout_of("bench", parse_format(name))
    copies = max(1, (128 << 20) // layout.nbytes((n, k)))
    tensor = random_tensor(name, n, k)
    packed = [tile_pack.pack(layout, tensor) for _ in range(copies)]
    q, scale = np.empty((tokens, k), np.int8), np.empty((tokens, groups_of(k, group)), np.float32)
    x = np.random.default_rng(3).standard_normal((tokens, k), dtype=np.float32)
    quantize_blocks(x=x, q=q, scale=scale, group=group)
    y = np.empty((tokens, n), np.float32)
    per_token = panels.panel_bytes(layout, group, k)
    form = panels.fields(layout, group, bits(packed[0].factor))
    product = tile_product.product_of(layout, group)
    arrays = (q.ctypes.data, scale.ctypes.data, scale.shape[1], y.ctypes.data, 0, 0, product)
    scratch = 4096 + 16 * per_token

    def launches(kind: str) -> list[Launch]:
        if kind == "read":
            return [
                Launch(rates.read, (t.data.ctypes.data, t.data.nbytes // 512), _NONE, _NONE, 4096)
                for t in packed
            ]
        return [
            Launch(
                linear_q8,
                (
                    tokens,
                    n,
                    k,
                    *arrays,
                    t.data.ctypes.data,
                    t.tile_bytes,
                    16,
                    per_token,
                    ahead,
                    *form,
                ),
                _NONE,
                frozenset({"y"}),
                scratch,
            )
            for t in packed
        ]

    teams = {}
    for kind in ("product", "read"):
        work = launches(kind)
        jit.warm([tape.lead, tape.serve, product, *(launch.kernel for launch in work)])
        teams[kind] = Team(threads, tape.encode(work), scratch)
    times: dict[str, list[float]] = {"product": [], "read": []}
    for _ in range(tries):
        for kind, team in teams.items():
            with team.running():
                start = time.perf_counter()
                team.step(tokens, 0)
                times[kind].append(time.perf_counter() - start)
    for team in teams.values():
        team.close()
    nbytes = sum(t.data.nbytes for t in packed)
    ratios = [r / p for p, r in zip(times["product"], times["read"], strict=True)]
    return {
        "op": "linear_q8",
        "format": name,
        "group": group,
        "N": n,
        "K": k,
        "M": tokens,
        "threads": threads,
        "gbps": round(nbytes / min(times["product"]) / 1e9, 1),
        "read_gbps": round(nbytes / min(times["read"]) / 1e9, 1),
        "pct_best": round(100 * min(times["read"]) / min(times["product"]), 1),
        "pct_median": round(100 * float(np.median(ratios)), 1),
    }


_NONE: frozenset[str] = frozenset()


@click.command(help=__doc__)
@click.option("--formats", default=",".join(INTEGER_FORMATS), help="comma-separated")
@click.option("--group", type=int, default=128, show_default=True, help="of the activations")
@click.option("--k", type=int, default=2048, show_default=True, help="columns, cache part")
@click.option("--shape", default="4096x14336", show_default=True, help="NxK, memory part")
@click.option("--tokens", type=int, default=1, show_default=True, help="M, memory part")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--ahead", type=int, default=AHEAD, show_default=True, help="bytes to prefetch")
@click.option("--tries", type=int, default=30, show_default=True)
@click.option("--part", type=click.Choice(["cache", "memory", "both"]), default="both")
def main(
    formats: str,
    group: int,
    k: int,
    shape: str,
    tokens: int,
    threads: int,
    ahead: int,
    tries: int,
    part: str,
) -> None:
    """Measure and print one JSON line per figure."""
    n, columns = map(int, shape.split("x"))
    for name in formats.split(","):
        if part != "memory":
            for row in from_cache(name, group, k, tries):
                click.echo(json.dumps(row))
        if part != "cache":
            row = from_memory(name, group, n, columns, tokens, threads, tries, ahead)
            click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
