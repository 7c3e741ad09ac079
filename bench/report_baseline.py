"""Write a result file as Markdown tables: a baseline to keep, or to paste.

python scripts/make_baseline_md.py build/bench/bench.jsonl --out BASELINE.md
"""

import sys
from dataclasses import replace
from pathlib import Path

import click

from bench.report_data import read_file
from bench.report_document import markdown
from bench.report_page import write_text
from bench.report_sections import sections
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.exit_codes import ExitCode, exit_code


@click.command(help=__doc__)
@click.argument("results", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), help="default: standard output")
def main(results: tuple[Path, ...], out: Path | None) -> None:
    """Render the tables."""
    try:
        files = [read_file(path) for path in results]
        found = sections(files)
        if not found:
            raise UsageError(f"{results[0]}: no report shows this kind of result file")
        tables = [s for s in found if s.tables or s.text]
        text = markdown("Baseline", (), [replace(section, plots=()) for section in tables])
        if out is None:
            click.echo(text, nl=False)
        else:
            write_text(out, text)
    except ClocherError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(exit_code(error))
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(ExitCode.DEVICE)


if __name__ == "__main__":
    main()
