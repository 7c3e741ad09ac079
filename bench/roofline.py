"""Roofline of the CPU's matrix products: every format, at real shapes, against plain reads.

    python -m bench.roofline [--formats LIST] [--shapes LIST] [--tokens 1,8] [--json FILE]

For each shape and number of tokens all formats and a loop that only reads take turns in the same
minutes. The products walk several matrices, more than a cache holds, and count every byte of the
weights once. Integer formats get int8 activations, float formats fp32 ones. A result is correct if
it agrees with fp64 arithmetic on the decoded weights, within what int8 activations allow.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product

import click

from bench.bandwidth import PAGES_READ
from bench.measure import limit_note
from bench.ops.experiment import (
    COUNTS,
    FORMATS,
    SHAPES,
    TEAMS,
    Row,
    experiment,
    of_read,
    turns,
)
from bench.ops.products import Problem, clocher, exact_product
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

_FORMATS = (
    "int4_sym_g32_f16",
    "int4_sym_g64_f16",
    "int4_sym_g128_f16",
    "int8_row_f32",
    "int8_g32_f16",
    "mxfp4",
    "ternary",
    "fp8_e4m3_row_f32",
    "fp8_e5m2_row_f32",
    "fp8_e4m3_b128_f32",
    "bf16",
    "f16",
    "f32",
)
_SHAPES = ("14336x4096", "4096x14336", "4096x2880", "2560x6912")
_SECONDS = 0.1


@experiment(
    "roofline",
    __doc__,
    "format | N x K | M | threads | GB/s | read | % of read | right | note",
    "{format} | {N} x {K} | {M} | {threads} | {gbps:.1f} | {read_gbps:.1f} | "
    "{pct_of_limit:.0f} [{pct_low:.0f}, {pct_high:.0f}] | {correct} | {note}",
    title="roofline, {isa}",
    rounds=11,
)
@click.option("--formats", type=FORMATS, default=",".join(_FORMATS), show_default=True)
@click.option("--shapes", type=SHAPES, default=",".join(_SHAPES), show_default=True)
@click.option("--tokens", type=COUNTS, default="1", show_default=True)
@TEAMS
@click.option("--mib", type=click.IntRange(1), default=192, show_default=True, help="Per format.")
@PAGES_READ
def main(
    formats: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    threads: tuple[int, ...],
    mib: int,
    pages: str,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each shape, number of tokens, thread count and format."""
    for (n, k), m, count in product(shapes, tokens, threads):
        reader = Reader(pages, mib << 20)
        runs = {"read": partial(reader.gbps, count, _SECONDS)}
        engines, correct = {}, {}
        with ExitStack() as stack:
            for name in formats:
                problem = Problem.filling(name, n, k, m, mib << 20)
                weights = problem.weights()
                engines[name] = stack.enter_context(closing(clocher(problem, weights, count)))
                correct[name] = engines[name].correct(exact_product(problem, weights))
                runs[name] = partial(engines[name].gbps, problem.nbytes, _SECONDS)
            found = turns(runs, rounds)
        for name, engine in engines.items():
            share = of_read(found[name], found["read"])
            yield {
                "op": "linear",
                "format": name,
                "N": n,
                "K": k,
                "M": m,
                "threads": count,
                "isa": CURRENT.name,
                **share,
                "correct": correct[name],
                "note": engine.note or limit_note(share["pct_of_limit"]),
            }


if __name__ == "__main__":
    main()
