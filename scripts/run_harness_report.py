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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from bench.report_data import read_file
from bench.report_files import write_report
from clocher_kernels.errors import ClocherError
from clocher_runtime.exit_codes import ExitCode, exit_code

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "bench.jsonl"


@click.command(help=__doc__, context_settings={"allow_interspersed_args": True})
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
    own = sys.argv[1:]
    runs_harness = "--" in own
    results = [Path(text) for text in ([] if runs_harness else arguments)]
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if not results and (runs_harness or not strict):
            results = [out_dir / RESULTS]
            _run_harness(results[0], own[own.index("--") + 1 :] if runs_harness else [])
        files = [read_file(path) for path in (*strict, *results)]
        click.echo(str(write_report(files, out_dir, title, tokens_max)))
    except ClocherError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.DEVICE)


def _run_harness(out: Path, arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "bench" / "harness.py"), "--out", str(out), *arguments]
    code = subprocess.run(command, check=False).returncode
    if code:
        click.echo(f"error: bench.harness ended with {code}; see what it says above", err=True)
        sys.exit(code)


if __name__ == "__main__":
    main()
