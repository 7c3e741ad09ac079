"""Run the engine in fresh processes, again and again and in turns, and say what the numbers allow.

    python -m bench.harness [--prompts FILE] [--runs N] [--rounds N] [--sweep SWEEP] [--out FILE]
                            [--config bench.toml] [-- FLAGS OF clocher-run]
    python -m bench.harness --compare BEFORE.jsonl AFTER.jsonl
    python -m bench.harness --verify FILE.jsonl

Each process adds a line to the result file (docs/benchmarking.md); a file that exists is continued,
and what it has already is not run again. Beside FILE.jsonl lies FILE.csv. A run in which other
processes, the hypervisor or a throttle took the CPU is void and repeated. "faster" and "slower" are
reported where the intervals do not overlap and the difference is 3 % or more. --sweep runs the
product of settings: 'act_quant=int8,fp8|prefetch=off,auto,256'.

Exit codes: 0 done; 2 bad flag, variable or file; 7 --verify found a contradiction; 8 --compare
found a slowdown; 9 they cannot tell; 130 interrupted; else that of the engine that failed.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # python bench/harness.py: import from the root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from rich.console import Console

from bench import compared, machine
from bench.cells import base_settings, command_of, content_key, make_cells, of_program
from bench.record import print_table, read_rows
from bench.runs import Harness, Plan
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.command.clocher_run import COMMAND
from clocher_runtime.config.commands import ALL, read_toml, setting_texts, sources_of
from clocher_runtime.config.values import PATH, Given, Setting, Value, integer, number, text
from clocher_runtime.exit_codes import ExitCode, exit_code

FOLDER = Path("build/bench")

_OWN: Mapping[str, tuple[Value, str, Any, tuple[str, ...]]] = {
    "runs": (integer(1, 10_000), "processes of each cell", 3, ("RUNS",)),
    "sweep": (text("SWEEP"), "'name=value,value|name=value'", "", ()),
    "label": (text(), "name of the cell, or in front of those of a sweep", "", ()),
    "out": (PATH, f"result file (unset: {FOLDER}/DATE.jsonl)", None, ()),
    "retries": (integer(0, 100), "how often a void run is repeated", 3, ()),
    "others_limit": (
        number(0, 100),
        "per cent of CPU time that others may take",
        machine.OTHERS_LIMIT,
        (),
    ),
    "patience": (number(0, 1e6), "seconds, in all, to wait for a quiet machine", 20.0, ()),
    "tokens_max": (
        integer(0, 1 << 24),
        "token ids of a prompt that the result file keeps",
        64,
        ("REPORT_TOKENS_MAX",),
    ),
}
OPTIONS: Mapping[str, tuple[Setting, Any]] = {
    name: (Setting("Run", takes, about, f"--{name.replace('_', '-')}", variables), default)
    for name, (takes, about, default, variables) in _OWN.items()
}
"""Settings of the harness itself, and their defaults."""

_PASSED = {"prompts": "prompts_file", "rounds": "rounds", "model-dir": "model_dir"}
_PASSED |= {"device": "device"}


class Job(NamedTuple):
    """A plan and the result file."""

    plan: Plan
    out: Path


def prepare(
    given: Mapping[str, str],
    engine_flags: Mapping[str, str],
    environ: Mapping[str, str],
    config: Path | None,
) -> Job:
    """Return the job: flags win over variables, variables over the TOML file."""
    document = {} if config is None else read_toml(config)
    engine = document.pop("engine", {})
    if not isinstance(engine, dict):
        raise UsageError(f"{config}: engine is not a table; write [engine]")

    def in_file(table: Mapping[str, Any], known: set[str], where: str) -> dict[str, Given]:
        texts = setting_texts(table, known, str(config))
        return {name: Given(f"{where}: {name}", raw) for name, raw in texts.items()}

    own = in_file(document, {*OPTIONS}, f"{config}")
    theirs = in_file(engine, {*ALL} - {"config"}, f"{config}, engine")
    values = {name: default for name, (_, default) in OPTIONS.items()}
    for name, (setting, _) in OPTIONS.items():
        if sources := sources_of(name, setting, given, environ, own):
            values[name] = setting.takes.read(sources[0].source, sources[0].raw)
    # A benchmark generates the full number of tokens.
    settings = base_settings({"ignore_eos": "1", **engine_flags}, environ, theirs)
    host = machine.describe()["host_sha256"]
    cells = make_cells(settings, values["sweep"], values["label"])
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    plan = Plan(
        [replace(cell, key=content_key(cell, Path.cwd(), host)) for cell in cells],
        values["runs"],
        values["retries"],
        values["others_limit"],
        values["tokens_max"],
        values["patience"],
        command_of(settings, values["sweep"], values["runs"]),
    )
    return Job(plan, values["out"] or FOLDER / f"{stamp}.jsonl")


def measure(job: Job, console: Console) -> int:
    """Run a job, write its files, print its table; return the exit code."""
    try:
        job.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{job.out.parent}: {error.strerror}; choose another with --out") from None
    rows = Harness(job.out, lambda said: console.print(said, markup=False)).run(job.plan)
    order = [cell.key for cell in job.plan.cells]
    own = [row for row in rows if row["key"] in order]
    compared.write_csv(job.out.with_suffix(".csv"), rows)
    cells = sorted(compared.group(own), key=lambda cell: order.index(cell.key))
    title = "median of runs [95 % interval], IQR; ratios are to the first row"
    print_table(compared.cells_tables(cells)[0].on_terminal(title))
    click.echo(f"{job.out} and {job.out.with_suffix('.csv').name}")
    for problem in compared.problems(cells):
        click.echo(f"note: {problem}", err=True)
    last = {row["key"]: row for row in own}.values()
    failed = [row["exit_code"] or 1 for row in last if row["status"] == "error"]
    if failed:
        return int(failed[0])
    return _undecided(len(compared.unmeasured(cells)) == len(cells))


def compare(before: Path, after: Path) -> int:
    """Print two result files side by side; return the exit code."""
    found = compared.pairs(*(compared.group(read_rows(path)) for path in (before, after)))
    if not found:
        raise UsageError(f"{before} and {after} have no label in common: nothing to compare")
    title = f"{compared.SPEED}, second file / first file"
    print_table(compared.files_table(found).on_terminal(title))
    hosts = {row["machine"]["host_sha256"] for pair in found for c in pair for row in c.rows}
    if len(hosts) > 1:
        click.echo("the files are of different machines: nothing follows from them", err=True)
        return ExitCode.UNDECIDED
    verdicts = {r and r.verdict for r in (compared.compare_files(*pair) for pair in found)}
    if "slower" in verdicts:
        return ExitCode.REJECTED
    return _undecided(bool(verdicts & {None, "too few runs"}))


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
    runs = sum(len(cell.good) for cell in cells)
    click.echo(f"verify: {runs} runs count, no failure, equal tokens in all processes of a cell")
    for label in compared.unmeasured(cells):
        click.echo(f"verify: undecided: {label}: the machine was disturbed in every run")
    return _undecided(bool(compared.unmeasured(cells)))


def _undecided(it_is: bool) -> int:
    return ExitCode.UNDECIDED if it_is else ExitCode.OK


def _options() -> list[click.Parameter]:
    own: list[click.Parameter] = []
    for name, (setting, default) in OPTIONS.items():
        shown = setting.help + (f" [default: {default}]" if default else "")
        shown += f" [env: {', '.join(setting.env)}]" if setting.env else ""
        own.append(click.Option([setting.flag, name], metavar=setting.takes.metavar, help=shown))
    own += [
        click.Option(
            [f"--{flag}", f"engine_{name}"], metavar=ALL[name].takes.metavar, help=ALL[name].help
        )
        for flag, name in _PASSED.items()
    ]
    file = click.Path(path_type=Path)
    return [
        *own,
        click.Option(["--config"], type=file, help="TOML file: settings above, [engine] the rest"),
        click.Option(["--compare"], type=file, nargs=2, help="two result files: exit 8 if slower"),
        click.Option(["--verify"], type=file, help="look for contradictions in a result file"),
        click.Argument(["flags"], nargs=-1, type=click.UNPROCESSED),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    command = click.Command("harness", params=_options(), help=__doc__)
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        with command.make_context("harness", arguments) as context:
            values = context.params
        if values["compare"]:
            return compare(*values["compare"])
        if values["verify"]:
            return verify(values["verify"])
        given = {name: values[name] for name in OPTIONS if values[name] is not None}
        flags = {name: values[f"engine_{name}"] for name in _PASSED.values()}
        engine = {name: value for name, value in flags.items() if value is not None}
        engine |= COMMAND.parse(values["flags"]) or {}
        return measure(prepare(given, engine, of_program(os.environ), values["config"]), console)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        console.print(f"error: {error.format_message()} See --help.", markup=False)
        return ExitCode.USAGE
    except (ClocherError, KeyboardInterrupt) as error:
        console.print(f"error: {error or type(error).__name__}", markup=False)
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
