"""`clocher bench compare`: significant differences of `clocher bench` or llama-bench results."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import click
import msgspec

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.command.script_run import PATH, Report, script
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_json, read_as
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.speed import Case
from clocher_runtime.quality.statistics import apart_ratio
from clocher_runtime.subcommands.bench_rows import aligned, as_json

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


_MOST_BYTES = 16 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]

Key = tuple[Case, int]


class Samples(msgspec.Struct, frozen=True):
    """The compared fields of a row; keys are llama-bench's, except n_seqs."""

    n_prompt: _Count
    n_gen: _Count
    n_threads: _Count
    samples_ts: Annotated[list[_Rate], msgspec.Meta(min_length=1, max_length=10_000)]
    n_depth: _Count = 0
    n_seqs: _Count = 1
    cpu_info: Annotated[str, msgspec.Meta(max_length=256)] = ""
    model_filename: Annotated[str, msgspec.Meta(max_length=4096)] = ""

    @property
    def case(self) -> Case:
        """The test."""
        return Case(self.n_prompt, self.n_gen, self.n_depth, self.n_seqs)

    @property
    def name(self) -> str:
        """The name of the test."""
        return self.case.name


def read_samples(path: Path) -> dict[Key, Samples]:
    """Return the rows of a result file; raises FormatError, ModelNotFound."""
    data = read_bytes(path, _MOST_BYTES)
    where = str(path)
    if data.lstrip()[:1] == b"[":
        values = read_as(parse_json(data, where), list[Samples], where)
    else:
        lines = [line for line in data.splitlines() if line.strip()]
        values = [
            read_as(parse_json(line, f"{where}:{number}"), Samples, f"{where}:{number}")
            for number, line in enumerate(lines, 1)
        ]
    found: dict[Key, Samples] = {}
    for row in values:
        key = row.case, row.n_threads
        if key in found:
            raise FormatError(
                f"{where}: two rows of {row.name} with {row.n_threads} threads; expected one"
            )
        found[key] = row
    if not found:
        raise FormatError(f"{where}: no rows; expected what clocher bench -o json writes")
    return found


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
    """Run `clocher bench compare`; return the exit code."""
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


def _row(first: Samples, second: Samples) -> dict[str, Any]:
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


def _differences(first: Mapping[Any, Samples], second: Mapping[Any, Samples]) -> list[str]:
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
