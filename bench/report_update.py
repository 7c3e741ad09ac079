r"""Write docs/PERFORMANCE.md and docs/plots from the result files in bench/results.

\b
python scripts/update_performance_md.py                      render the page
python scripts/update_performance_md.py --check              write nothing; 1 if it is not current
python scripts/update_performance_md.py --add RESULTS.jsonl  copy a result file, then render

--add takes files of bench.harness and bench.strict, leaves out the directories of this machine, and
replaces the copy of an earlier call.

\b
Exit codes:
  0  done
  1  --check: a file is not what the result files make of it
  2  a result file is missing, or is not one
  5  a file cannot be written
"""

import sys
from pathlib import Path

import click

from bench.measure import help_text
from bench.report_data import FOLDER
from bench.report_page import add, render
from clocher_kernels.errors import ClocherError
from clocher_runtime.exit_codes import ExitCode, exit_code

DOCS = Path(__file__).resolve().parents[1] / "docs"


@click.command(help=help_text(__doc__))
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not current.")
@click.option("--add", "added", type=click.Path(path_type=Path), multiple=True, help="Copy first.")
@click.option("--results", type=click.Path(path_type=Path), default=FOLDER, help="Result files.")
@click.option("--docs", type=click.Path(path_type=Path), default=DOCS, help="Where the page is.")
def main(check: bool, added: tuple[Path, ...], results: Path, docs: Path) -> None:
    """Render the page, or compare it."""
    if check and added:
        raise click.UsageError("--check and --add exclude each other; give one")
    page, plots = docs / "PERFORMANCE.md", docs / "plots"
    try:
        for path in added:
            click.echo(f"copied to {add(path, results).name}", err=True)
        found = render(results)
        if not check:
            found.write(page, plots)
            return
    except ClocherError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.DEVICE)
    if stale := found.stale(page, plots):
        click.echo(
            f"not current: {', '.join(stale)}; run python scripts/update_performance_md.py",
            err=True,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
