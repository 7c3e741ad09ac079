"""Products of many tokens with float weights, as a share of the rate of fp32 multiply-adds.

    python -m bench.float_rates [--formats LIST] [--shapes LIST] [--tokens 64,128] [--json FILE]

One thread. Each product walks several matrices, more than the second-level cache holds, and takes
turns with a loop of independent multiply-adds in registers, which says what the processor could do
in that minute, and, where the processor has them, with dot products of bf16 pairs, which our
kernels do not use. Figures are the best of the rounds, for a neighbour on the same core slows
products by a third and the loop not at all; the share of the medians stands beside. Activations are
fp32. A result is correct if it agrees with fp64 arithmetic.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product

import click
import numpy as np

from bench.measure import ratio, seconds
from bench.ops.experiment import COUNTS, FORMATS, SHAPES, Row, experiment, turns
from bench.ops.products import Engine, Problem, clocher, exact_product
from bench.tile_rates import function, machine
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.vector import LANES
from cpu_fallback.tiles import rates
from cpu_fallback.tiles.bf16_dots import DOTS, MACS, bf16_dots

_FORMATS = ("bf16", "f16", "f32", "fp8_e4m3_row_f32", "fp8_e4m3_b128_f32")
_SHAPES = ("2048x2048", "8192x2048", "2048x8192", "4096x2880")
_SECONDS = 0.03
_TRIES = 15


@experiment(
    "float_rates",
    __doc__,
    "format | N x K | M | per cycle | of the FMA rate % | medians % | right",
    "{format} | {N} x {K} | {M} | {macs_per_cycle:.1f} | {pct_of_fma_rate:.0f} | "
    "{pct_median:.0f} | {correct}",
    title="float products, {isa}, multiply-adds a cycle: fp32 {fma_per_cycle:.1f}, bf16 pairs "
    "{bf16_dots_per_cycle:.1f} (0: none)",
    rounds=15,
)
@click.option("--formats", type=FORMATS, default=",".join(_FORMATS), show_default=True)
@click.option("--shapes", type=SHAPES, default=",".join(_SHAPES), show_default=True)
@click.option("--tokens", type=COUNTS, default="64,128", show_default=True)
@click.option("--mib", type=click.IntRange(1), default=16, show_default=True, help="Per format.")
def main(
    formats: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each shape, number of tokens and format."""
    many = function(rates.fmas)
    ones, out = np.ones(16, np.float32), np.zeros(16, np.float32)
    for (n, k), m in product(shapes, tokens):
        hertz, fmas = machine(_TRIES, rates.fmas, rates.FMAS)
        steps = int(_SECONDS * hertz * fmas / rates.FMAS)

        def rate(steps: int = steps) -> float:
            took: float = seconds(lambda: many(steps, ones.ctypes.data, out.ctypes.data))
            return float(steps * rates.FMAS * LANES / took)

        runs, correct = {"fma": rate}, {}
        if (dots := bf16_dots()) is not None:

            def dot_rate(steps: int = steps // 4, dots: Callable[..., object] = dots) -> float:
                took = seconds(lambda: dots(steps, ones.ctypes.data, out.ctypes.data))
                return steps * DOTS * MACS / took

            runs["bf16 dots"] = dot_rate
        with ExitStack() as stack:
            for name in formats:
                problem = Problem.filling(name, n, k, m, mib << 20)
                weights = problem.weights()
                engine = stack.enter_context(closing(clocher(problem, weights, 1)))
                correct[name] = engine.correct(exact_product(problem, weights))
                runs[name] = partial(_rate, engine, problem)
            found = turns(runs, rounds)
        fastest = {name: max(rates_of) for name, rates_of in found.items()}
        cycle = fastest["fma"] / (LANES * fmas)
        for name in formats:
            yield {
                "isa": CURRENT.name,
                "format": name,
                "N": n,
                "K": k,
                "M": m,
                "ghz": round(hertz / 1e9, 2),
                "fma_per_cycle": round(LANES * fmas, 1),
                "bf16_dots_per_cycle": round(fastest.get("bf16 dots", 0.0) / cycle, 1),
                "macs_per_cycle": round(fastest[name] / cycle, 1),
                "pct_of_fma_rate": round(100 * fastest[name] / fastest["fma"], 1),
                "pct_median": round(100 * ratio(found[name], found["fma"]).value, 1),
                "correct": correct[name],
            }


def _rate(engine: Engine, problem: Problem) -> float:
    """Return the multiply-adds of a second."""
    return problem.copies * problem.n * problem.k * problem.m / engine.seconds(_SECONDS)


if __name__ == "__main__":
    main()
