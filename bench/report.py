"""Reports: the commands behind run_harness_report.py and its neighbours in scripts/."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from bench.compared import Cells, cells_tables, group
from bench.pages import Section, add, filled, markdown, render
from bench.record import FOLDER, KINDS, ResultFile, Table, read_file, table, tables_of
from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.exit_codes import ExitCode

DOCS = Path(__file__).resolve().parents[1] / "docs"

_TEXT_CHARS = 400


@script(
    "run_harness_report",
    click.Argument(["results"], type=PATH, nargs=-1),
    option("--out-dir", PATH, default=Path("build/bench")),
    option("--strict", PATH, "of bench.strict", multiple=True),
    option("--tokens-max", click.IntRange(0), "token ids of a prompt to show"),
    option("--title", str, default="Clocher benchmark"),
)
def run(
    console: Console,
    results: tuple[Path, ...],
    out_dir: Path,
    strict: tuple[Path, ...],
    tokens_max: int | None,
    title: str,
) -> None:
    """Write a report that a person can open: report.html and report.md in --out-dir.

    python scripts/run_harness_report.py build/bench/bench.jsonl --out-dir build/bench

    RESULTS are files of bench.harness (make bench runs it) or of any case; --strict adds what
    `bench.strict --json` wrote.
    """
    files = [read_file(path) for path in (*strict, *results)]
    if not files:
        raise UsageError("no result files; give those that make bench or a case wrote")
    out_dir.mkdir(parents=True, exist_ok=True)
    click.echo(str(write_report(files, out_dir, title, tokens_max)))


@script(
    "update_performance_md",
    switch("--check", "write nothing; exit with 1 if a file is not current"),
    option("--add", PATH, "copy first", name="added", multiple=True),
    option("--results", PATH, "result files", default=FOLDER),
    option("--docs", PATH, "where the page is", default=DOCS),
    exit_codes={ExitCode.BUG: "--check: a file is not what the result files make of it"},
)
def update(
    console: Console, check: bool, added: tuple[Path, ...], results: Path, docs: Path
) -> ExitCode:
    r"""Write docs/PERFORMANCE.md and its plot from the result files in bench/results.

    \b
    python scripts/update_performance_md.py                      render the page
    python scripts/update_performance_md.py --check              write nothing; 1 if not current
    python scripts/update_performance_md.py --add RESULTS.jsonl  copy a result file, then render

    --add takes files of bench.harness and bench.strict, leaves out the directories of this machine,
    and replaces the copy of an earlier call.
    """
    if check and added:
        raise UsageError("--check and --add exclude each other; give one")
    for path in added:
        console.say(f"copied to {add(path, results).name}")
    files = {docs / name: text for name, text in render(results).items()}
    stale = [path for path in files if not path.is_file() or path.read_text() != files[path]]
    if check and stale:
        names = ", ".join(path.name for path in stale)
        console.say(f"not current: {names}; run python scripts/update_performance_md.py")
        return ExitCode.BUG
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        write_file(path, files[path].encode())
    return ExitCode.OK


@script(
    "make_baseline_md",
    click.Argument(["results"], type=PATH, nargs=-1, required=True),
    option("--out", PATH, "default: standard output"),
)
def baseline(console: Console, results: tuple[Path, ...], out: Path | None) -> None:
    """Write a result file as Markdown tables: a baseline to keep, or to paste.

    python scripts/make_baseline_md.py build/bench/bench.jsonl --out BASELINE.md
    """
    text = markdown("Baseline", (), sections([read_file(path) for path in results]))
    if out is None:
        click.echo(text, nl=False)
    else:
        write_file(out, text.encode())


def write_report(
    files: Sequence[ResultFile], folder: Path, title: str, tokens_max: int | None = None
) -> Path:
    """Write report.html and report.md to an existing folder; return the HTML file."""
    whole = sections(files, tokens_max)
    intro = ("Speeds are tokens a second unless a column says otherwise; [..]: 95 % intervals.",)
    page = folder / "report.html"
    write_file(folder / "report.md", markdown(title, intro, whole).encode())
    write_file(page, filled("report.html", title=title, intro=intro, sections=whole).encode())
    return page


def sections(files: Sequence[ResultFile], tokens_max: int | None = None) -> list[Section]:
    """Return a section for each file; UsageError if no file has rows."""
    found = [_section(file, tokens_max) for file in files if file.rows]
    if not found:
        names = ", ".join(file.name for file in files)
        raise UsageError(f"{names}: no report shows an empty file; give one with results")
    return found


def _section(file: ResultFile, tokens_max: int | None) -> Section:
    title = KINDS[file.kind].title if file.kind in KINDS else file.kind.replace("_", " ")
    origin = ", ".join(part for part in (file.date, file.machine) if part) or "date unknown"
    text = f"{_plain(origin)}; from `{_plain(file.name)}`."
    text += f" Command: `{_plain(file.command)}`" if file.command else ""
    if file.kind == "harness":
        lines = [row["line"] or {} for row in file.rows]
        keys = ("model", "precision", "device", "isa", "threads")
        same = {key: {str(each[key]) for each in lines if each.get(key)} for key in keys}
        facts = [Path(values.pop()).name for values in same.values() if len(values) == 1]
        text += f" All cells: {_plain(', '.join(facts))}." if facts else ""
        cells = group(file.rows)
        why = [{"status": row["status"], "why": each} for row in file.rows for each in row["why"]]
        lost = table("did not count = {status} | why", why)
        tables = [*cells_tables(cells), lost, _generated(cells, tokens_max)]
    else:
        tables = tables_of(file.kind, file.rows)
    return Section(title, (text,), tuple(each for each in tables if each.rows))


def _generated(cells: Cells, tokens_max: int | None) -> Table:
    """Return what cells generated, and which of them did the same."""
    found: dict[tuple[int, str, str], list[str]] = {}
    for label, cell in cells.items():
        held = next((row["outputs"] for row in cell if row.get("outputs")), [])
        for number, output in enumerate(held, 1):
            ids = " ".join(map(str, output["token_ids"][:tokens_max]))
            text = _plain(output["text"][:_TEXT_CHARS])
            key = number, ids and f"`{ids}`", text and f"`{text}`"
            found.setdefault(key, []).append(label)
    rows = [
        {"prompt": number, "ids": ids, "text": text, "cells": f"{len(own)}: {shown}"}
        for (number, ids, text), own in found.items()
        for shown in [_plain(", ".join(own))]
    ]
    return table("prompt | token ids = {ids} | generated text = {text} | cells", rows)


def _plain(shown: str) -> str:
    return " ".join(shown.replace("`", "'").split())


if __name__ == "__main__":
    {"run": run, "update": update, "baseline": baseline}[sys.argv[1]].main(sys.argv[2:])
