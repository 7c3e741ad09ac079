"""Rates of the integer tile kernels from cache: weights per cycle.

    python -m bench.tile_rates --formats int4_sym_g32_f16,mxfp4 --group 128

One thread, tiles that fit in the second-level cache; cycles come from a chain of dependent
multiplications, the share of the dot-product rate from independent byte dot products, both measured
between the kernels in the same run. Every figure is the best of many short runs. `bench.roofline`
has the rates from memory.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np

from bench.ops.experiment import FORMATS, Listed, Row, experiment
from bench.ops.products import Problem
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.linear import INTEGER_FORMATS
from cpu_fallback.lanes import jit
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.tiles import panels, rates, tile_pack, tile_product
from cpu_fallback.tiles.layout import ROWS, UNIT, layout_of


class Steps(click.IntRange):
    """Multiples of a number.

    Args:
        step: what they are multiples of, and the least one.
        most: the largest.
    """

    name = "multiple"

    def __init__(self, step: int, most: int) -> None:
        super().__init__(step, most)
        self._step = step

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a number; others are refused."""
        number = int(super().convert(value, param, ctx))
        if number % self._step:
            self.fail(f"{number}; expected a multiple of {self._step}", param, ctx)
        return number


_TOKENS = Listed.of(map(str, tile_product.TOKENS))


def best_slope(run: Callable[[int], object], few: int, many: int, tries: int) -> float:
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


def machine(
    tries: int, kernel: jit.Kernel = rates.dots, each: int = rates.DOTS
) -> tuple[float, float]:
    """Return the clock in Hz and how many of a kernel's operations a cycle has.

    Args:
        tries: the best of so many.
        kernel: of `rates`: byte dot products, or multiply-adds of 16 lanes.
        each: operations in a step of it.
    """
    chain, many = function(rates.chain, ctypes.c_int64), function(kernel)
    line, out = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    hertz = rates.CHAIN_CYCLES / best_slope(lambda n: chain(n, 3), 200, 2000, tries)
    step = best_slope(lambda n: many(n, line.ctypes.data, out.ctypes.data), 400, 4000, tries)
    return hertz, each / (step * hertz)


def from_cache(name: str, group: int, k: int, widths: tuple[int, ...], tries: int) -> Iterator[Row]:
    """Yield weights per cycle and share of the dot-product rate for each panel width."""
    layout = layout_of("bench", parse_format(name))
    count = max(1, (256 << 10) // layout.tile_bytes(k))
    weight = Problem(name, ROWS * count, k, 1, 1).weights()[0]
    tiles = tile_pack.pack(layout, weight)
    product = tile_product.product_of(layout, group)
    sweep = function(rates.sweep)
    out = np.zeros(16 * 16, np.float32)
    panel = np.full(16 * panels.panel_bytes(layout, group, k), 0x3C, np.uint8)
    for tokens in widths:
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

        many = 10 + 80 // tokens
        cycles = best_slope(run, 1, 1 + many, tries) * hertz
        weights = ROWS * count * k / cycles
        yield {
            "isa": CURRENT.name,
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


@experiment("tile_rates", __doc__)
@click.option("--formats", type=FORMATS, default=",".join(INTEGER_FORMATS), show_default=True)
@click.option("--group", type=Steps(32, 4096), default=128, help="of the activations")
@click.option("--k", type=Steps(128, 8192), default=2048, help="columns; tiles stay in the cache")
@click.option(
    "--tokens", type=_TOKENS, default="1,2,3,4,6,8,16", show_default=True, help="of panels"
)
@click.option("--tries", type=click.IntRange(1), default=30, show_default=True)
def main(
    formats: tuple[str, ...], group: int, k: int, tokens: tuple[str, ...], tries: int
) -> Iterator[Row]:
    """Yield a row for each format and panel width."""
    for name in formats:
        yield from from_cache(name, group, k, tuple(map(int, tokens)), tries)


if __name__ == "__main__":
    main()
