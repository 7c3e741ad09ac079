r"""Run the engine in fresh processes, again and again and in turns, and say what the numbers allow.

\b
    python -m bench.harness [--prompts FILE] [--runs N] [--sweep SWEEP] [--out FILE]
                            [--config bench.toml] [FLAGS OF clocher-run]
    python -m bench.harness --compare BEFORE.jsonl AFTER.jsonl
    python -m bench.harness --verify FILE.jsonl

Each process adds a line to the result file (docs/benchmarking.md); a file that exists is continued,
and what it has already is not run again. Beside FILE.jsonl lies FILE.csv. A run in which other
processes, the hypervisor or a throttle took the CPU is void and repeated. "faster" and "slower" are
reported where the intervals do not overlap and the difference is 3 % or more. --sweep runs the
product of settings: 'act_quant=int8,fp8|prefetch=off,auto,256'.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # python bench/harness.py: import from the root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click

from bench import compared, machine
from bench.cells import base_settings, command_of, content_key, make_cells, of_program
from bench.record import print_table, read_rows
from bench.runs import Harness
from clocher_kernels.errors import UsageError
from clocher_runtime.command.clocher_run import clocher_run
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, script
from clocher_runtime.command.parameters import PATH
from clocher_runtime.config.commands import ALL, read_toml, setting_texts
from clocher_runtime.config.values import Given
from clocher_runtime.exit_codes import ExitCode

FOLDER = Path("build/bench")

OPTIONS = (
    option("--runs", click.IntRange(1, 10_000), "processes of each cell", default=3, envvar="RUNS"),
    option("--sweep", str, "'name=value,value|name=value'", default="", show_default=False),
    option("--label", str, "name of the cell, or in front of those of a sweep", default=""),
    option("--out", PATH, f"result file (unset: {FOLDER}/DATE.jsonl)"),
    option("--retries", click.IntRange(0, 100), "how often a void run is repeated", default=3),
    option(
        "--others-limit",
        click.FloatRange(0, 100),
        "per cent of CPU time that others may take",
        default=machine.OTHERS_LIMIT,
    ),
    option(
        "--tokens-max",
        click.IntRange(0, 1 << 24),
        "token ids of a prompt that the result file keeps",
        default=64,
        envvar="REPORT_TOKENS_MAX",
    ),
)
"""Settings of the harness itself; each may stand in the file of --config."""


def read_settings(
    context: click.Context, option: click.Parameter, path: Path | None
) -> dict[str, Given]:
    """Make a TOML file's settings of the harness defaults; return those of the engine."""
    document = {} if path is None else read_toml(path)
    engine = document.pop("engine", {})
    if not isinstance(engine, dict):
        raise UsageError(f"{path}: engine is not a table; write [engine]")
    context.default_map = setting_texts(document, {str(o.name) for o in OPTIONS}, str(path))
    texts = setting_texts(engine, {*ALL} - {"config"}, str(path))
    return {name: Given(f"{path}, engine: {name}", raw) for name, raw in texts.items()}


def measure(harness: Harness) -> int:
    """Run a harness, write its files, print its table; return the exit code."""
    out, order = harness.path, [cell.key for cell in harness.cells]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out.parent}: {error.strerror}; choose another with --out") from None
    rows = harness.run()
    own = [row for row in rows if row["key"] in order]
    compared.write_csv(out.with_suffix(".csv"), rows)
    cells = compared.group(sorted(own, key=lambda row: order.index(row["key"])))
    title = "median of runs [95 % interval], IQR; ratios are to the first row"
    print_table(compared.cells_tables(cells)[0].on_terminal(title))
    click.echo(f"{out} and {out.with_suffix('.csv').name}")
    for problem in compared.problems(cells):
        click.echo(f"note: {problem}", err=True)
    last = [cell[-1] for cell in cells.values()]
    failed = [row["exit_code"] or 1 for row in last if row["status"] == "error"]
    return int(failed[0]) if failed else _undecided(compared.unmeasured(cells) == [*cells])


def compare(before: Path, after: Path) -> int:
    """Print two result files side by side; return the exit code."""
    found = compared.pairs(*(compared.group(read_rows(path)) for path in (before, after)))
    if not found:
        raise UsageError(f"{before} and {after} have no label in common: nothing to compare")
    title = f"{compared.SPEED}, second file / first file"
    print_table(compared.files_table(found).on_terminal(title))
    machines = {row["machine"]["host_sha256"] for pair in found.values() for c in pair for row in c}
    if len(machines) > 1:
        click.echo("the files are of different machines: nothing follows from them", err=True)
        return ExitCode.UNDECIDED
    ratios = [compared.apart(*pair) for pair in found.values()]
    verdicts = {ratio.verdict if ratio else "too few runs" for ratio in ratios}
    return ExitCode.REJECTED if "slower" in verdicts else _undecided("too few runs" in verdicts)


def verify(path: Path) -> int:
    """Print the contradictions in a result file; return the exit code."""
    cells = compared.group(read_rows(path))
    found = compared.problems(cells)
    for problem in found:
        click.echo(f"verify: {problem}")
    if not cells:
        raise UsageError(f"{path}: no rows; run the harness first")
    if found:
        return ExitCode.MISMATCH
    runs = sum(len(compared.good(cell)) for cell in cells.values())
    click.echo(f"verify: {runs} runs count, no failure, equal tokens in all processes of a cell")
    for label in compared.unmeasured(cells):
        click.echo(f"verify: undecided: {label}: the machine was disturbed in every run")
    return _undecided(bool(compared.unmeasured(cells)))


def _undecided(it_is: bool) -> int:
    return ExitCode.UNDECIDED if it_is else ExitCode.OK


@script(
    "harness",
    *OPTIONS,
    click.Option(["--prompts", "prompts_file"], metavar="PATH", help=ALL["prompts_file"].help),
    option(
        "--config",
        PATH,
        "TOML file: settings above, [engine] the rest",
        name="in_file",
        is_eager=True,
        callback=read_settings,
    ),
    option("--compare", PATH, "two result files: exit 8 if slower", name="pair", nargs=2),
    option("--verify", PATH, "look for contradictions in a result file", name="verified"),
    click.Argument(["flags"], nargs=-1, type=click.UNPROCESSED),
    help=__doc__,
    exit_codes={
        ExitCode.MISMATCH: "--verify found a contradiction",
        ExitCode.REJECTED: "--compare found a slowdown",
        ExitCode.UNDECIDED: "they cannot tell",
    },
    epilog="Another exit code is that of the engine that failed.",
)
def command(
    console: Console,
    in_file: dict[str, Given],
    pair: tuple[Path, Path] | None,
    verified: Path | None,
    prompts_file: str | None,
    flags: Sequence[str],
    sweep: str,
    label: str,
    out: Path | None,
    **given: Any,
) -> int:
    """Measure, or look at what was measured."""
    if pair:
        return compare(*pair)
    if verified:
        return verify(verified)
    # A benchmark generates the full number of tokens.
    engine = {"ignore_eos": "1"} | ({"prompts_file": prompts_file} if prompts_file else {})
    engine |= clocher_run.texts(flags)
    settings = base_settings(engine, of_program(os.environ), in_file)
    cells = [
        replace(cell, key=content_key(cell, Path.cwd(), machine.describe()["host_sha256"]))
        for cell in make_cells(settings, sweep, label)
    ]
    out = out or FOLDER / f"{datetime.now(UTC).strftime('%Y-%m-%dT%H-%M-%SZ')}.jsonl"
    said = command_of(settings, sweep, given["runs"])
    return measure(Harness(out, cells, command=said, say=console.say, **given))


command.ignore_unknown_options = True  # they are the engine's
main = command.run


if __name__ == "__main__":
    sys.exit(main())
