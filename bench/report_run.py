r"""Write a report that a person can open: one HTML file, with what it is made of beside it.

\b
python scripts/run_harness_report.py build/bench/bench.jsonl --out-dir build/bench
python scripts/run_harness_report.py --out-dir build/bench -- --runs 3 -- --max-new 16

Without result files bench.harness runs first, with what follows "--". --out-dir gets report.html,
report.md, report.json and plots/*.svg. --strict adds what `bench.strict --json` wrote; a result
file may be that of any bench.

\b
Exit codes:
  0  done
  2  a flag, or a result file, cannot be used
  5  a file cannot be written
  else that of bench.harness
"""

import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import click

from bench.measure import help_text
from bench.report_data import read_file
from bench.report_files import write_report
from clocher_kernels.errors import ClocherError
from clocher_runtime.exit_codes import ExitCode, exit_code

RESULTS = "bench.jsonl"


@click.command(help=help_text(__doc__))
@click.argument("arguments", nargs=-1)
@click.option(
    "--out-dir", type=click.Path(path_type=Path), default=Path("build/bench"), show_default=True
)
@click.option("--strict", type=click.Path(path_type=Path), multiple=True, help="Of bench.strict.")
@click.option("--tokens-max", type=click.IntRange(0), help="Token ids of a prompt to show.")
@click.option("--title", default="Clocher benchmark", show_default=True)
def main(
    arguments: tuple[str, ...],
    out_dir: Path,
    strict: tuple[Path, ...],
    tokens_max: int | None,
    title: str,
) -> None:
    """Run the harness if need be, and write the report."""
    # Flags of the harness come behind "--", which click takes away.
    results = [Path(text) for text in takewhile(lambda text: not text.startswith("-"), arguments)]
    flags = arguments[len(results) :]
    if results and flags:
        raise click.UsageError("result files and flags of the harness exclude each other")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if flags or not (results or strict):
            results = [out_dir / RESULTS]
            _run_harness(results[0], flags)
        files = [read_file(path) for path in (*strict, *results)]
        click.echo(str(write_report(files, out_dir, title, tokens_max)))
    except ClocherError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.DEVICE)


def _run_harness(out: Path, flags: Sequence[str]) -> None:
    command = [sys.executable, "-m", "bench.harness", "--out", str(out), *flags]
    code = subprocess.run(command, check=False).returncode
    if code:
        click.echo(f"error: bench.harness ended with {code}; see what it says above", err=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
