"""Roofline of the CPU's matrix products: every format, at real shapes, against plain reads.

    python -m bench.roofline [--formats LIST] [--shapes LIST] [--tokens 1,8] [--json FILE]

For each shape and number of tokens all formats and a loop that only reads take turns in the same
minutes. The products walk several matrices, more than a cache holds, and count every byte of the
weights once. Integer formats get int8 activations, float formats fp32 ones. A result is correct if
it agrees with fp64 arithmetic on the decoded weights, within what int8 activations allow.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.bandwidth import Reader, default_counts, parse_counts
from bench.matmuls import Problem, clocher, exact_product
from bench.measure import (
    Rows,
    interleave,
    limit_note,
    machine,
    print_table,
    ratio,
    write_json,
)
from clocher_kernels.formats import parse_format
from cpu_fallback.lanes.isa import CURRENT

FORMATS = (
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
SHAPES = ("14336x4096", "4096x14336", "4096x2880", "2560x6912")
_READ = "read"
_SECONDS = 0.1


def parse_shapes(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    """Read "NxK,NxK"."""
    shapes = value.split(",")
    for shape in shapes:
        n, _, k = shape.partition("x")
        if not (n.isdigit() and k.isdigit() and int(n) and int(k)):
            raise click.BadParameter(f"{shape!r}; expected NxK, such as 4096x14336")
    return shapes


def measure(
    formats: list[str],
    shape: str,
    tokens: int,
    threads: int,
    nbytes: int,
    rounds: int,
    pages: str,
    progress: Callable[[int, str], None] | None = None,
) -> Rows:
    """Return a row for each format: GB/s of weights, and the share of the read bandwidth."""
    n, k = (int(part) for part in shape.split("x"))
    reader = Reader(pages, nbytes)
    runs: dict[str, Callable[[], float]] = {_READ: lambda: reader.gbps(threads, _SECONDS)}
    engines, correct = {}, {}
    for name in formats:
        problem = Problem.filling(name, n, k, tokens, nbytes)
        weights = problem.weights()
        engine = clocher(problem, weights, threads)
        correct[name] = engine.correct(exact_product(problem, weights))
        engines[name] = engine
        runs[name] = lambda engine=engine, problem=problem: engine.gbps(problem.nbytes, _SECONDS)  # type: ignore[misc]
    found = interleave(runs, rounds, progress)
    rows: Rows = []
    for name, engine in engines.items():
        share = ratio(found[name], found[_READ])
        rows.append(
            {
                "op": "linear",
                "format": name,
                "N": n,
                "K": k,
                "M": tokens,
                "threads": threads,
                "isa": CURRENT.name,
                "gbps": median(found[name]),
                "read_gbps": median(found[_READ]),
                "pct_of_limit": 100 * share.value,
                "pct_low": 100 * share.low,
                "pct_high": 100 * share.high,
                "correct": correct[name],
                "note": engine.note or limit_note(100 * share.value),
            }
        )
        engine.close()
    return rows


def _formats(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    names = value.split(",")
    for name in names:
        parse_format(name)
    return names


@click.command(help=__doc__)
@click.option("--formats", default=",".join(FORMATS), callback=_formats, show_default=True)
@click.option("--shapes", default=",".join(SHAPES), callback=parse_shapes, show_default=True)
@click.option("--tokens", default="1", callback=parse_counts, show_default=True)
@click.option("--threads", default=default_counts, callback=parse_counts, show_default="1 and all")
@click.option("--mib", type=click.IntRange(1), default=192, show_default=True, help="Per format.")
@click.option("--rounds", type=click.IntRange(1), default=11, show_default=True)
@click.option("--pages", type=click.Choice(["4k", "2m"]), default="2m", show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(
    formats: list[str],
    shapes: list[str],
    tokens: tuple[int, ...],
    threads: tuple[int, ...],
    mib: int,
    rounds: int,
    pages: str,
    out: Path | None,
) -> None:
    """Measure and print."""
    rows: Rows = []
    cases = [(s, m, t) for s in shapes for m in tokens for t in threads]
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        bar = bars.add_task("roofline", total=len(cases))
        for shape, m, count in cases:
            rows += measure(formats, shape, m, count, mib << 20, rounds, pages)
            bars.advance(bar)
    table = Table("format", "N x K", "M", "threads", "GB/s", "read", "% of read", "right", "note")
    table.title = f"roofline, {CURRENT.name}, {machine()}"
    for row in rows:
        percent = f"{row['pct_of_limit']:.0f} [{row['pct_low']:.0f}, {row['pct_high']:.0f}]"
        table.add_row(
            row["format"],
            f"{row['N']} x {row['K']}",
            str(row["M"]),
            str(row["threads"]),
            f"{row['gbps']:.1f}",
            f"{row['read_gbps']:.1f}",
            percent,
            "yes" if row["correct"] else "NO",
            row["note"],
        )
    print_table(table)
    if out:
        write_json(out, rows)
    if not all(row["correct"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
