r"""Reports: the commands behind run_harness_report.py and its neighbours in scripts/.

Each says what it does with --help.

\b
Exit codes:
  0  done
  1  update --check: a file is not what the result files make of it
  2  a flag, or a result file, cannot be used
  5  a file cannot be written
  else that of bench.harness, which `run` runs
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import click

from bench.measure import help_text
from bench.report.data import FOLDER, read_file
from bench.report.document import markdown
from bench.report.files import write_report
from bench.report.page import add, render
from bench.report.sections import sections
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.exit_codes import ExitCode, exit_code

RESULTS = "bench.jsonl"
DOCS = Path(__file__).resolve().parents[2] / "docs"

_FILE = click.Path(path_type=Path)


class _Command(click.Command):
    """A command whose help is a raw docstring."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "help": help_text(options["help"])})


@click.group(help=help_text(__doc__))
def main() -> None:
    """Do nothing by itself."""


@contextmanager
def _failing() -> Iterator[None]:
    """End with the code of what went wrong."""
    try:
        yield
    except ClocherError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.DEVICE)


@main.command(cls=_Command)
@click.argument("arguments", nargs=-1)
@click.option("--out-dir", type=_FILE, default=Path("build/bench"), show_default=True)
@click.option("--strict", type=_FILE, multiple=True, help="Of bench.strict.")
@click.option("--tokens-max", type=click.IntRange(0), help="Token ids of a prompt to show.")
@click.option("--title", default="Clocher benchmark", show_default=True)
def run(
    arguments: tuple[str, ...],
    out_dir: Path,
    strict: tuple[Path, ...],
    tokens_max: int | None,
    title: str,
) -> None:
    r"""Write a report that a person can open: one HTML file, with what it is made of beside it.

    \b
    python scripts/run_harness_report.py build/bench/bench.jsonl --out-dir build/bench
    python scripts/run_harness_report.py --out-dir build/bench -- --runs 3 -- --max-new 16

    Without result files bench.harness runs first, with what follows "--". --out-dir gets
    report.html, report.md, report.json and plots/*.svg. --strict adds what `bench.strict --json`
    wrote; a result file may be that of any bench.

    \b
    Exit codes:
      0  done
      2  a flag, or a result file, cannot be used
      5  a file cannot be written
      else that of bench.harness
    """
    # Flags of the harness come behind "--", which click takes away.
    results = [Path(text) for text in takewhile(lambda text: not text.startswith("-"), arguments)]
    flags = arguments[len(results) :]
    if results and flags:
        raise click.UsageError("result files and flags of the harness exclude each other")
    with _failing():
        out_dir.mkdir(parents=True, exist_ok=True)
        if flags or not (results or strict):
            results = [out_dir / RESULTS]
            _run_harness(results[0], flags)
        files = [read_file(path) for path in (*strict, *results)]
        click.echo(str(write_report(files, out_dir, title, tokens_max)))


@main.command(cls=_Command)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not current.")
@click.option("--add", "added", type=_FILE, multiple=True, help="Copy first.")
@click.option("--results", type=_FILE, default=FOLDER, help="Result files.")
@click.option("--docs", type=_FILE, default=DOCS, help="Where the page is.")
def update(check: bool, added: tuple[Path, ...], results: Path, docs: Path) -> None:
    r"""Write docs/PERFORMANCE.md and docs/plots from the result files in bench/results.

    \b
    python scripts/update_performance_md.py                      render the page
    python scripts/update_performance_md.py --check              write nothing; 1 if not current
    python scripts/update_performance_md.py --add RESULTS.jsonl  copy a result file, then render

    --add takes files of bench.harness and bench.strict, leaves out the directories of this machine,
    and replaces the copy of an earlier call.

    \b
    Exit codes:
      0  done
      1  --check: a file is not what the result files make of it
      2  a result file is missing, or is not one
      5  a file cannot be written
    """
    if check and added:
        raise click.UsageError("--check and --add exclude each other; give one")
    page, plots = docs / "PERFORMANCE.md", docs / "plots"
    with _failing():
        for path in added:
            click.echo(f"copied to {add(path, results).name}", err=True)
        found = render(results)
        if not check:
            found.write(page, plots)
        elif stale := found.stale(page, plots):
            names = ", ".join(stale)
            click.echo(
                f"not current: {names}; run python scripts/update_performance_md.py", err=True
            )
            sys.exit(1)


@main.command(cls=_Command)
@click.argument("results", type=_FILE, nargs=-1, required=True)
@click.option("--out", type=_FILE, help="default: standard output")
def baseline(results: tuple[Path, ...], out: Path | None) -> None:
    """Write a result file as Markdown tables: a baseline to keep, or to paste.

    python scripts/make_baseline_md.py build/bench/bench.jsonl --out BASELINE.md
    """
    with _failing():
        found = sections([read_file(path) for path in results])
        if not found:
            raise UsageError(f"{results[0]}: no report shows this kind of result file")
        tables = [s for s in found if s.tables or s.text]
        text = markdown("Baseline", (), [replace(section, plots=()) for section in tables])
        if out is None:
            click.echo(text, nl=False)
        else:
            write_file(out, text.encode())


def _run_harness(out: Path, flags: Sequence[str]) -> None:
    command = [sys.executable, "-m", "bench.harness", "--out", str(out), *flags]
    code = subprocess.run(command, check=False).returncode
    if code:
        click.echo(f"error: bench.harness ended with {code}; see what it says above", err=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
