r"""Speed by the strict contract: three windows, and checks that it can be believed.

    python -m bench.strict [--model-dir DIR] [--tokens N] [--depth D] [--threads N] [--json FILE]

Several processes, one after another, each measure a cold generation from launch to text and then,
in turns, the rows ppP and tgN @ dD as llama-bench names them. Variables of the engine (IE_...)
hold. docs/benchmarking.md says what each window holds and what each check means.

\b
Exit codes:
  0  every check holds
  2  a flag or a variable cannot be used
  3  the model is missing, invalid or not supported
  6  out of memory
  7  a check failed
  9  no check failed, but the machine was too noisy for all of them
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console

from bench.bandwidth import DEFAULT_BYTES
from bench.clock import machine
from bench.measure import Rows, help_text, print_table, write_json
from bench.report.sections import strict_tables
from bench.strict.checks import (
    Check,
    Launch,
    checks,
    percentiles_us,
    row,
    share_of_limit,
)
from bench.strict.launch import Task, as_json
from clocher_kernels.ops.attention import KV_DTYPES
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.engine.load import PRECISIONS
from clocher_runtime.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path("tests/data/valid.txt")
_WINDOWS = ("kernels", "strict", "end_to_end")


class LaunchFailed(Exception):
    """A process that could not measure.

    Attributes:
        code: its exit code, which becomes ours.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def launch(task: Task) -> Launch:
    """Run one process and return what it measured.

    Raises:
        LaunchFailed: it said why it could not, or it died.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "bench.strict.launch", as_json(task)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode or not lines:
        raise LaunchFailed(f"a measuring process ended with {done.returncode}", ExitCode.BUG)
    found: Launch = json.loads(lines[-1])
    if "error" in found:
        raise LaunchFailed(found["error"], found["code"])
    return found


def rows_of(
    task: Task, launches: Sequence[Launch], found: Sequence[Check], about: dict[str, Any]
) -> Rows:
    """Return the rows of a result file: the contract first, then the tests."""
    first = launches[0]
    made = {
        "kind": "strict",
        "command": shlex.join(["python", "-m", "bench.strict", *sys.argv[1:]]),
    }
    own = ("model", "format", "act_prec", "kv_dtype", "device", "isa", "threads", "bytes_per_token")
    shared = {key: first[key] for key in own}
    per_token = first["bytes_per_token"] + first["touch_bytes_read"]
    share = share_of_limit(launches, per_token)
    tg = row(launches, "tg", tg_name(task), task.tokens)
    gbps = per_token * tg["tok_s"] / 1e9
    tg |= {
        "gbps": gbps,
        "read_gbps": median([value for each in launches for value in each["read_gbps"]]),
        "pct_of_limit": 100 * share.value if share.known else None,
        "pct_of_limit_95": share.ends and [100 * end for end in share.ends],
        "latency_us": percentiles_us([ns for each in launches for ns in each["token_ns"]]),
    }
    windows = {
        kind: {
            f"{window}_s": median(each[kind][f"{window}_ns"] for each in launches) / 1e9
            for window in _WINDOWS
        }
        for kind in ("cold", "warm")
    }
    contract = {
        **made,
        "op": "strict",
        **shared,
        **about,
        "tokens": task.tokens + 1,
        "prompt_tokens": max(task.depth, 1),
        "windows": windows,
        "file_bytes": first["file_bytes"],
        "cache_bytes": first["cache_bytes"],
        "touch_bytes_per_token": first["touch_bytes_per_token"],
        "hints_ignored": first["hints_ignored"],
        "rss_peak_mb": max(each["rss_peak_mb"] for each in launches),
        "tokens_sha256": first["tokens_sha256"],
        "checks": [check.document() for check in found],
    }
    pp = row(launches, "pp", f"pp{task.prompt_tokens}", task.prompt_tokens)
    return [contract, *({**made, **shared, **test} for test in (pp, tg))]


def tg_name(task: Task) -> str:
    """Return what llama-bench calls the decode test."""
    return f"tg{task.tokens}" + (f" @ d{task.depth}" if task.depth else "")


def show(rows: Rows) -> None:
    """Print the windows, the rows and the ticks."""
    contract = rows[0]
    about = ("model", "format", "isa", "threads")
    title = "  ".join(str(contract[key]) for key in about) + "  activations "
    title += f"{contract['act_prec']}\n{contract['machine']['cpu']}, {contract['date']}"
    windows, tests, ticks = strict_tables(rows)
    print_table(windows.on_terminal(title))
    print_table(tests.on_terminal())
    for mark, name, detail in ticks.rows:
        click.echo(f" {mark} {name}: {detail}")


def verdict(found: Sequence[Check]) -> ExitCode:
    """Return the exit code for some checks."""
    statuses = {check.status for check in found}
    if "fail" in statuses:
        return ExitCode.MISMATCH
    return ExitCode.UNDECIDED if "undecided" in statuses else ExitCode.OK


@click.command(help=help_text(__doc__))
@click.option("--model-dir", type=click.Path(), help="default: MODEL_DIR, else the embedded model")
@click.option("--precision", type=click.Choice(PRECISIONS), help="default: as stored")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), help="default: the back end's")
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="P")
@click.option("--tokens", type=click.IntRange(1), default=128, show_default=True, help="N")
@click.option("--depth", type=click.IntRange(0), default=512, show_default=True, help="D")
@click.option("--launches", type=click.IntRange(1), default=3, show_default=True, help="processes")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="in each")
@click.option("--mib", type=click.IntRange(2), default=DEFAULT_BYTES >> 20, help="Buffer to read.")
@click.option("--text", type=click.Path(), help="Prompts come from it.  [default: a text of tests]")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(
    model_dir: str | None,
    precision: str | None,
    kv_dtype: str | None,
    threads: int | None,
    prompt_tokens: int,
    tokens: int,
    depth: int,
    launches: int,
    rounds: int,
    mib: int,
    text: str | None,
    out: Path | None,
) -> None:
    """Measure, check and print."""
    options = {"model_dir": model_dir, "precision": precision, "kv_dtype": kv_dtype}
    flags = {name: value for name, value in options.items() if value is not None}
    if threads is not None:
        flags["threads"] = str(threads)
    console = Console(stderr=True)
    measured = []
    before = machine.read()
    start = datetime.now(UTC)
    with console.status("measuring") as status:
        for number in range(1, launches + 1):
            status.update(f"process {number} of {launches}")
            task = Task(
                flags=flags,
                prompt_tokens=prompt_tokens,
                tokens=tokens,
                depth=depth,
                rounds=rounds,
                mib=mib,
                text=text or str(ROOT / TEXT),
                launched_ns=time.monotonic_ns(),
            )
            try:
                measured.append(launch(task))
            except LaunchFailed as error:
                click.echo(f"error: {error}", err=True)
                raise SystemExit(error.code) from None
    elapsed_s, state = machine.since(before)
    why = state.disturbances(elapsed_s)
    found = checks(measured, why)
    about = {
        "version": clocher_version(),
        "date": start.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "state": state.document(),
    }
    rows = rows_of(task, measured, found, about)
    show(rows)
    if out:
        write_json(out, rows)
    raise SystemExit(verdict(found))


if __name__ == "__main__":
    main()
