r"""Matrix products with quantised weights: every format, at real shapes, beside plain reads.

\b
    python -m bench linear                                    the roofline of Clocher's kernels
    python -m bench linear --engines clocher,torch            beside torch, with the same weights
    python -m bench linear --engines clocher,cached           beside weights decoded ahead to fp32

For each shape, number of tokens, thread count and format, the engines and a loop that only reads
take turns. Each walks several matrices, more than a cache holds, and every byte of the weights is
counted once. Integer formats get int8 activations, float formats fp32. A result is right if it
agrees with fp64 arithmetic on the decoded weights within what the activations allow. An engine that
cannot run is shown with the reason, never with a number.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from statistics import median

import click

from bench.cases.products import ENGINES, Engine, Problem, exact_product
from bench.ops.experiment import (
    COUNTS,
    FORMATS,
    PAGES,
    SHAPES,
    TEAMS,
    Listed,
    NotMeasured,
    Row,
    experiment,
    limit_note,
    of_read,
    over,
    turns,
)
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

_FORMATS = (
    "int4_sym_g32_f16",
    "int4_sym_g128_f16",
    "int8_row_f32",
    "int8_g32_f16",
    "mxfp4",
    "ternary",
    "fp8_e4m3_row_f32",
    "fp8_e4m3_b128_f32",
    "bf16",
    "f16",
    "f32",
)
_SHAPES = "14336x4096,4096x14336,4096x2880,2560x6912"
_SECONDS = 0.1


@experiment("linear", __doc__, title="matrix products, {isa}", rounds=11)
@click.option("--formats", type=FORMATS, default=",".join(_FORMATS), show_default=True)
@click.option("--shapes", type=SHAPES, default=_SHAPES, show_default=True, help="N x K")
@click.option("--tokens", type=COUNTS, default="1", show_default=True, help="M")
@click.option("--engines", type=Listed.of(ENGINES), default="clocher", show_default=True)
@TEAMS
@click.option("--mib", type=click.IntRange(1), default=192, show_default=True, help="Per format.")
@click.option("--pages", type=click.Choice(PAGES), default="2m", help="of what is read")
def main(
    formats: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    tokens: tuple[int, ...],
    engines: tuple[str, ...],
    threads: tuple[int, ...],
    mib: int,
    pages: str,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each shape, number of tokens, thread count, format and engine."""
    reader = Reader(pages, mib << 20)
    for (n, k), m, count, name in product(shapes, tokens, threads, formats):
        problem = Problem.filling(name, n, k, m, mib << 20)
        about = {"format": name, "N": n, "K": k, "M": m, "threads": count, "isa": CURRENT.name}
        for engine, row in _compared(problem, engines, count, reader, rounds).items():
            yield {"op": "linear", **about, "engine": engine, **row}


def _compared(
    problem: Problem, names: tuple[str, ...], threads: int, reader: Reader, rounds: int
) -> dict[str, Row]:
    weights = problem.weights()
    exact = exact_product(problem, weights)
    made: dict[str, Engine] = {}
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                made[name] = stack.enter_context(closing(ENGINES[name](problem, weights, threads)))
                rows[name] = {"correct": made[name].correct(exact)}
            except NotMeasured as reason:
                rows[name] = {"note": f"not measured: {reason}"}
        runs = {name: partial(engine.seconds, _SECONDS) for name, engine in made.items()}
        took = turns({**runs, "read": lambda: 1 / reader.gbps(threads, _SECONDS)}, rounds)
    reads = [1 / value for value in took["read"]]
    for name, engine in made.items():
        share = of_read([engine.nbytes / s / 1e9 for s in took[name]], reads)
        notes = filter(None, (engine.note, limit_note(share["pct_of_limit"])))
        rows[name] |= {**share, "us": median(took[name]) / engine.products * 1e6}
        rows[name] |= {"samples": took[name], "note": "; ".join(notes)}
        if name != names[0] and names[0] in made:
            # In matmuls per second: cached weights may have fewer copies of the matrix.
            speeds = {each: [made[each].products / s for s in took[each]] for each in made}
            rows[name] |= over(speeds[names[0]], speeds[name])
    return rows


if __name__ == "__main__":
    main()
