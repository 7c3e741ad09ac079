"""`clocher bench compare`: what two runs of `clocher bench` or llama-bench allow one to say."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import PATH, Report, script
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.subcommands.bench_samples import Samples

NAME = "clocher bench compare"

_ABOUT = """Compare two result files, row by row: how fast is the second, over the first?

Files are those of `clocher bench -o json` or `-o jsonl`; those of llama-bench can be read, too.
Rows belong together that have the same test, threads and batch. The interval is a bootstrap 95 %
interval of the medians, of the worst case, for the runs were not made in turns: it leaves out 1
only if the intervals of both medians do not touch. A difference is called one from 3 % on."""

_EXAMPLES = (
    ("before and after", "clocher bench compare before.json after.json"),
    ("for a script", "clocher bench compare before.json after.json --fail-below 0.95"),
    ("beside llama-bench -o json", "clocher bench compare llama.json ours.json"),
)

_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag cannot be used, or the files have no row in common"),
    (ExitCode.MODEL, "a file is missing, or no result file"),
    (ExitCode.REJECTED, "--fail-below: a row is slower than that, beyond noise"),
    (ExitCode.UNDECIDED, "--fail-below: a row has too few repetitions to tell"),
)


def _ratio(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= 10):
        raise click.BadParameter(f"{value:g}; expected a ratio above 0, at most 10, such as 0.95")
    return value


@script(
    NAME,
    click.argument("first", type=PATH),
    click.argument("second", type=PATH),
    click.option(
        "--fail-below",
        type=float,
        callback=_ratio,
        metavar="RATIO",
        help="exit with 8 if a ratio is less, and its interval leaves out 1",
    ),
    click.option(
        "-o", "--output", type=click.Choice(["md", "json"]), default="md", show_default=True
    ),
    examples=_EXAMPLES,
    exit_codes=_CODES,
    help=_ABOUT,
)
def compare(
    report: Report, first: Path, second: Path, fail_below: float | None, output: str
) -> int:
    """Compare two files, write the rows, and return the exit code."""
    from clocher_runtime.subcommands.bench_rows import aligned, as_json
    from clocher_runtime.subcommands.bench_samples import read_samples

    before, after = read_samples(first), read_samples(second)
    for difference in _differences(before, after):
        report.done(difference)
    rows = [_row(before[key], after[key]) for key in before if key in after]
    if not rows:
        raise UsageError(
            f"{first} and {second} have no row in common; expected the same tests, such as "
            f"{next(iter(before.values())).name}, threads and batch in both"
        )
    if output == "json":
        click.echo(as_json(rows))
    else:
        columns = [[head, *(str(row[key]) for row in rows)] for head, key in _COLUMNS]
        click.echo(aligned(columns))
    return _code(rows, fail_below)


COMMAND = compare


def main(argv: Sequence[str] | None = None) -> int:
    """Run `clocher bench compare` and return the exit code."""
    return compare.run(argv)


_COLUMNS = (
    ("test", "test"),
    ("threads", "n_threads"),
    ("batch", "n_seqs"),
    ("first t/s", "first"),
    ("second t/s", "second"),
    ("second / first", "shown"),
    ("second is", "verdict"),
)


def _row(first: "Samples", second: "Samples") -> dict[str, Any]:
    from statistics import median

    from clocher_runtime.quality.statistics import apart_ratio

    found = apart_ratio(second.samples_ts, first.samples_ts)
    return {
        "test": first.name,
        "n_threads": first.n_threads,
        "n_seqs": first.n_seqs,
        "first": round(median(first.samples_ts), 2),
        "second": round(median(second.samples_ts), 2),
        "ratio": found.value,
        "ratio_95": found.ends,
        "shown": str(found) if found.known else f"{found.value:.2f}x",
        "verdict": found.verdict,
    }


def _code(rows: Sequence[Mapping[str, Any]], limit: float | None) -> ExitCode:
    if limit is None:
        return ExitCode.OK
    if any(row["ratio"] < limit and row["ratio_95"] and row["ratio_95"][1] < 1 for row in rows):
        return ExitCode.REJECTED
    return ExitCode.OK if all(row["ratio_95"] for row in rows) else ExitCode.UNDECIDED


def _differences(first: "Mapping[Any, Samples]", second: "Mapping[Any, Samples]") -> list[str]:
    """Return what is in one file only, and whether the machines or the models are the same."""
    found = []
    for here, there, which in ((first, second, "first"), (second, first, "second")):
        alone = [here[key].name for key in here if key not in there]
        if alone:
            found.append(f"only in the {which} file: {', '.join(alone)}")
    for what in ("cpu_info", "model_filename"):
        names = [
            sorted({getattr(each, what).rpartition("/")[2] for each in file.values()})
            for file in (first, second)
        ]
        if names[0] != names[1]:
            shown = " and ".join("/".join(each) or "unknown" for each in names)
            found.append(f"not the same {what}: {shown:.400}")
    return found
