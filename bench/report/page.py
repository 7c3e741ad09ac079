"""docs/PERFORMANCE.md and its plots, rendered from the result files of a folder."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.charts import Chart, Ratios, is_current, svg
from bench.report.columns import code, model_name
from bench.report.data import ResultFile, read_file, read_folder
from bench.report.document import markdown
from bench.report.sections import missing, sections
from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import write_file

NOTE = "<!-- Written by scripts/update_performance_md.py from bench/results. Do not edit. -->"
_INTRO = (
    NOTE,
    "Every figure here comes from a file in `bench/results`; the command beside it makes such a "
    "file, with DIR and PATH for places; what a file does not record, such as the rounds of some "
    "benches, is left at its default. [Benchmarking](benchmarking.md) says how they are measured. "
    "Speeds are tokens a second unless a column says otherwise. The limit is the read "
    "bandwidth that was measured beside it, over the bytes that must be read; brackets hold 95 % "
    "intervals.",
)
_PATH = re.compile(r"(?<![\w/.:~-])(?:/[^\s/'\"=,;]+)*/([^\s/'\"=,;]+)")


@dataclass(frozen=True, slots=True)
class Page:
    """What is written.

    Attributes:
        text: of the page.
        plots: name -> what is drawn.
    """

    text: str
    plots: Mapping[str, Chart | Ratios]

    def stale(self, page: Path, plots: Path) -> list[str]:
        """Return the files that are not what they should be, those that should not be included."""
        found = [] if _content(page) == self.text else [page.name]
        found += [f"{name}.svg" for name in self._old(plots)]
        return found + [path.name for path in self._gone(plots)]

    def write(self, page: Path, plots: Path) -> None:
        """Write what is not current, and remove plots that are no more. Each file appears whole.

        Raises:
            UsageError: a plot is to be drawn, and matplotlib is not installed.
        """
        plots.mkdir(parents=True, exist_ok=True)
        for name in self._old(plots):
            write_file(plots / f"{name}.svg", svg(self.plots[name]).encode())
        for path in self._gone(plots):
            path.unlink()
        write_file(page, self.text.encode())

    def _old(self, plots: Path) -> list[str]:
        """Return the plots that show something else, or nothing."""
        return [
            name
            for name, chart in self.plots.items()
            if not is_current(_content(plots / f"{name}.svg") or "", chart)
        ]

    def _gone(self, plots: Path) -> list[Path]:
        return sorted(path for path in plots.glob("*.svg") if path.stem not in self.plots)


def render(folder: Path) -> Page:
    """Return the page of a folder of result files.

    Raises:
        UsageError: the folder or a file in it cannot be used.
    """
    files = read_folder(folder)
    found = sections(files)
    parts = [markdown("Performance", _INTRO, found).rstrip()]
    if rest := missing(files):
        parts += ["## Not measured yet", "\n".join(f"- {line}" for line in rest)]
    if others := [file for file in files if file.kind == "other"]:
        names = "\n".join(f"- {code(file.name)}" for file in others)
        parts += ["## Files that other pages speak of", names]
    plots = {plot.name: plot.chart for section in found for plot in section.plots}
    return Page("\n\n".join(parts) + "\n", plots)


def add(path: Path, folder: Path) -> Path:
    """Copy a result file into the folder, without directories of this machine.

    The copy is named by date, machine and model of the measurement, so that the same file again
    replaces it.

    Returns:
        The copy.

    Raises:
        UsageError: it is not a result file, holds nothing that counts, or says not where and when
            it was measured.
    """
    file = read_file(path)
    if file.kind not in ("harness", "strict"):
        raise UsageError(
            f"{path}: a file of kind {file.kind!r} does not say where it was measured; name it "
            f"DATE-MACHINE-{file.kind}.json and put it into {folder} yourself"
        )
    if not any(row.get("status", "ok") == "ok" for row in file.rows):
        raise UsageError(f"{path}: no run counts, so there is nothing to show")
    machine = file.rows[0].get("machine") or {}
    host = str(machine.get("host_sha256", "unknown"))
    words = [file.date, host, file.kind, _model(file), file.stem]
    name = "-".join(re.sub(r"[^\w.-]+", "-", word) for word in words if word)
    target = folder / f"{name}{path.suffix}"
    rows = [without_directories(row) for row in file.rows]
    if path.suffix == ".jsonl":
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    else:
        text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
    write_file(target, text.encode())
    return target


def without_directories(value: Any) -> Any:
    """Return a value in which absolute paths have lost their directories."""
    if isinstance(value, str):
        return _PATH.sub(r"\1", value)
    if isinstance(value, list):
        return [without_directories(item) for item in value]
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    return value


def _model(file: ResultFile) -> str:
    lines = (row.get("line") or row for row in file.rows)
    return next(
        (model_name(line["model"]) for line in lines if isinstance(line.get("model"), str)), ""
    )


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
