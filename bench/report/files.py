"""The files of a report: an HTML page, the same as Markdown, its data as JSON, its plots."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.charts import svg
from bench.report.columns import MARKS, Row, Table, code, model_name, plain
from bench.report.data import ResultFile
from bench.report.document import Section, html, markdown
from bench.report.sections import sections
from bench.sweep.results import group
from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.quality.statistics import median_of_runs

SCHEMA = "clocher.report/1"

_TEXT_CHARS = 400


def write_report(
    files: Sequence[ResultFile], folder: Path, title: str, tokens_max: int | None = None
) -> Path:
    """Write report.html, report.md, report.json and plots; return the HTML file.

    Args:
        files: what it is about.
        folder: it exists.
        title: of the report.
        tokens_max: token ids of a prompt that are shown; None: all that the files hold.

    Raises:
        UsageError: no file is of a kind that a report shows.
    """
    found = sections(files)
    if not found:
        names = ", ".join(file.name for file in files)
        raise UsageError(f"{names}: nothing in it that a report shows; give a file with results")
    whole = [_overview(files), *_settings(files), *found, *_outputs(files, tokens_max)]
    intro = (
        "Speeds are tokens a second unless a column says otherwise; brackets hold 95 % intervals.",
    )
    pictures = {plot.name: svg(plot.chart) for section in whole for plot in section.plots}
    (folder / "plots").mkdir(exist_ok=True)
    page = folder / "report.html"
    texts = {folder / "plots" / f"{name}.svg": picture for name, picture in pictures.items()}
    texts[folder / "report.md"] = markdown(title, intro, whole)
    texts[folder / "report.json"] = f"{json.dumps(document(files, tokens_max), indent=1)}\n"
    texts[page] = html(title, intro, whole, pictures)
    for path, text in texts.items():
        write_file(path, text.encode())
    return page


def document(files: Sequence[ResultFile], tokens_max: int | None = None) -> dict[str, Any]:
    """Return a report as data: cells with their tokens, checks of the strict contract."""
    cells = [_cell(file, cell, tokens_max) for file in files for cell in _cells(file)]
    strict = [
        {"file": file.name, "model": file.rows[0]["model"], "checks": file.rows[0]["checks"]}
        for file in files
        if file.kind == "strict"
    ]
    return {
        "schema": SCHEMA,
        "files": [file.name for file in files],
        "cells": cells,
        "strict": strict,
    }


def _overview(files: Sequence[ResultFile]) -> Section:
    """Return the ticks of all files, and what ran where."""
    rows = []
    for file in files:
        marks = ""
        if file.kind == "strict":
            statuses = [check["status"] for check in file.rows[0]["checks"]]
            worst = next((s for s in ("fail", "undecided") if s in statuses), "pass")
            marks = MARKS[worst]
        rows.append(
            (marks, code(file.name), file.kind.replace("_", "-"), file.date, plain(file.machine))
        )
    head = ("contract", "file", "what", "date", "machine")
    return Section("Overview", tables=(Table(head, tuple(rows)),))


def _settings(files: Sequence[ResultFile]) -> list[Section]:
    """Return the settings that the cells of a harness file share; labels name the others."""
    rows = []
    for file in files:
        given = [cell.rows[0].get("settings", {}) for cell in _cells(file)]
        first = given[0] if given else {}
        for name in sorted(first):
            if all(other.get(name) == first[name] for other in given):
                value = str(first[name])
                shown = model_name(value) if value.startswith("/") else value
                rows.append((code(file.name), code(str(name)), code(shown) if shown else ""))
    if not rows:
        return []
    table = Table(("file", "setting of all cells", "value"), tuple(rows))
    return [Section("Settings", tables=(table,))]


def _outputs(files: Sequence[ResultFile], tokens_max: int | None) -> list[Section]:
    """Return what was generated, once for all cells that agree."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for file in files:
        for cell in _cells(file):
            for number, output in enumerate(_texts(cell.rows), 1):
                ids = " ".join(map(str, output["token_ids"][:tokens_max]))
                text = output["text"][:_TEXT_CHARS]
                made = str(number), code(ids) if ids else "", code(text) if text.strip() else ""
                found.setdefault(made, []).append(plain(cell.label))
    if not found:
        return []
    rows = [
        (number, ids, text, f"{len(labels)}: {', '.join(labels)}")
        for (number, ids, text), labels in found.items()
    ]
    table = Table(("prompt", "token ids", "text", "cells"), tuple(rows))
    return [Section("What was generated", tables=(table,))]


def _cell(file: ResultFile, cell: Any, tokens_max: int | None) -> dict[str, Any]:
    speeds = cell.values()
    found = median_of_runs(speeds) if speeds else None
    hashes = sorted({r["tokens_sha256"] for r in cell.rows if r.get("tokens_sha256")})
    return {
        "file": file.name,
        "label": cell.label,
        "key": cell.key,
        "runs": len(cell.good),
        "void": cell.count("void"),
        "tok_s": found and found.value,
        "tok_s_95": found and found.ends,
        "tokens_sha256": hashes,
        "outputs": [
            {"token_ids": output["token_ids"][:tokens_max], "text": output["text"]}
            for output in _texts(cell.rows)
        ],
    }


def _cells(file: ResultFile) -> list[Any]:
    return group([dict(row) for row in file.rows]) if file.kind == "harness" else []


def _texts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the outputs that a cell holds, as far as they are what they should be."""
    held: list[Any] = next(
        (row["outputs"] for row in rows if isinstance(row.get("outputs"), list)), []
    )
    return [
        output
        for output in held
        if isinstance(output, dict)
        and isinstance(output.get("text"), str)
        and isinstance(output.get("token_ids"), list)
        and all(type(i) is int for i in output["token_ids"])
    ]
