"""Result files of the harness: rows in, rows out, and what the rows of a cell say together.

docs/benchmarking.md describes the rows.
"""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.sweep.cells import source_names
from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import HINTS
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.quality.statistics import Ratio, apart_ratio, paired_ratio

SCHEMA = "clocher.bench/1"
STATUSES = ("ok", "void", "warmup", "error")
SPEED = "tps_true"

Row = dict[str, Any]

_REQUIRED = {"schema": str, "key": str, "label": str, "run": int, "status": str}
# Columns of the CSV file before those of the line, and the keys of the line that are no scalars.
_COLUMNS = ("label", "key", "run", "attempt", "order", "status", "started", "elapsed_s")
_NOT_SCALAR = ("outputs", "gpu", "work_touch", "hints_ignored")


@dataclass(frozen=True, slots=True)
class ResultCell:
    """The rows of one cell.

    Attributes:
        key: what identifies it.
        label: what it is called.
        rows: all of them, in order.
    """

    key: str
    label: str
    rows: list[Row] = field(default_factory=list)

    @property
    def good(self) -> list[Row]:
        """Rows that count, by number of the run; of a number that was run twice the last."""
        return sorted({r["run"]: r for r in self.rows if r["status"] == "ok"}.values(), key=_run)

    @property
    def ignored(self) -> list[str]:
        """Swept settings that the engine did not act on."""
        return sorted({name for row in self.rows for name in row.get("ignored", [])})

    @property
    def swept(self) -> Mapping[str, str]:
        """Settings that make it different from its neighbours."""
        return dict(self.rows[0].get("swept", {}))

    def count(self, status: str) -> int:
        """Return how many rows have a status."""
        return sum(row["status"] == status for row in self.rows)

    def values(self, key: str = SPEED, runs: set[int] | None = None) -> list[float]:
        """Return a number of the line for each row that counts, where it is known.

        Args:
            key: of the line.
            runs: numbers of runs to take; None: all.
        """
        rows = [row for row in self.good if runs is None or row["run"] in runs]
        found = [row["line"].get(key) for row in rows]
        return [float(value) for value in found if value is not None and value > 0]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a result file.

    A last line without its end, which a killed harness leaves, does not count.

    Raises:
        UsageError: the file cannot be read, or has a line that is not a row of this schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: {reason}; give a file that bench.harness wrote") from None
    lines = text.split("\n")[:-1]
    return [_row(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def group(rows: Sequence[Row]) -> list[ResultCell]:
    """Return the cells of some rows, in the order in which they appear.

    Of cells with one label but different content (code or files changed in between) the last one
    is returned.
    """
    cells: dict[str, ResultCell] = {}
    for row in rows:
        cells.setdefault(row["key"], ResultCell(row["key"], row["label"])).rows.append(row)
    return list({cell.label: cell for cell in cells.values()}.values())


def append_row(path: Path, row: Row) -> None:
    """Append a row; it is on disk when this returns."""
    with path.open("ab+") as file:
        # A line that a killed harness left open is not continued by this one.
        if file.tell() and not _ends_a_line(file):
            _cut_last_line(file)
        file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows flat: those of the row, swept settings, state, then scalars of the line."""
    lines = [row["line"] or {} for row in rows]
    swept = list(dict.fromkeys(name for row in rows for name in row["swept"]))
    state = list(dict.fromkeys(name for row in rows for name in row["state"]))
    keys = list(dict.fromkeys(k for line in lines for k in line if k not in _NOT_SCALAR))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [*_COLUMNS, "why", "ignored", *(f"set.{n}" for n in swept), *(f"state.{n}" for n in state)]
        + [f"line.{key}" for key in keys]
    )
    for row, line in zip(rows, lines, strict=True):
        writer.writerow(
            [*(row[name] for name in _COLUMNS), "; ".join(row["why"]), " ".join(row["ignored"])]
            + [row["swept"].get(name) for name in swept]
            + [row["state"].get(name) for name in state]
            + [line.get(key) for key in keys]
        )
    write_file(path, text.getvalue().encode())


def problems(cells: Sequence[ResultCell]) -> list[str]:
    """Return what is wrong with a result file; empty if nothing is.

    No process may have failed, and every process of a cell must have generated the same tokens,
    the one that only warmed the caches included.
    """
    found = []
    for cell in cells:
        tokens = {r["tokens_sha256"] for r in cell.rows if r.get("tokens_sha256")}
        if len(tokens) > 1:
            found.append(f"{cell.label}: its processes generated {len(tokens)} different texts")
        for row in cell.rows:
            if row["status"] == "error":
                found.append(f"{cell.label}, run {row['run']}: {'; '.join(row['why'])}")
    return found


def unmeasured(cells: Sequence[ResultCell]) -> list[str]:
    """Return the labels of cells that have no run that counts."""
    return [cell.label for cell in cells if not cell.good]


def paired(base: ResultCell, cell: ResultCell) -> Ratio | None:
    """Return the speed of a cell over that of another of its file, by number of the run.

    None: no run of both counts.
    """
    common = {r["run"] for r in base.good} & {r["run"] for r in cell.good}
    return paired_ratio(cell.values(runs=common), base.values(runs=common)) if common else None


def beside(base: ResultCell, cell: ResultCell) -> tuple[Ratio | None, str]:
    """Return ratio and verdict of a cell of the same file."""
    if base.swept != cell.swept and _acted_on(base) == _acted_on(cell):
        return None, "the engine does the same as in the first row"
    found = paired(base, cell)
    return found, "no run in common" if found is None else found.verdict


def pairs(
    before: Sequence[ResultCell], after: Sequence[ResultCell]
) -> list[tuple[ResultCell, ResultCell]]:
    """Return cells with one label; two files of one cell each are a pair whatever their labels."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    later = {cell.label: cell for cell in after}
    return [(cell, later[cell.label]) for cell in before if cell.label in later]


def compare_files(old: ResultCell, new: ResultCell) -> Ratio | None:
    """Return the speed of a cell over that of another file; None where no run of one counts."""
    a, b = old.values(), new.values()
    return apart_ratio(b, a) if a and b else None


def _acted_on(cell: ResultCell) -> Mapping[str, str]:
    """Return the swept settings that the engine acts on."""
    ignored = {text.partition("=")[0] for text in cell.ignored}
    return {
        name: raw
        for name, raw in cell.swept.items()
        if name not in HINTS and not source_names(name) & ignored
    }


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or row.get("schema") != SCHEMA:
        raise UsageError(f"{where}: expected an object with schema {SCHEMA!r}")
    for name, kind in _REQUIRED.items():
        if not isinstance(row.get(name), kind):
            raise UsageError(f"{where}: {name} is not there or not {kind.__name__}")
    if row["status"] not in STATUSES:
        raise UsageError(f"{where}: status {row['status']!r}; known are {', '.join(STATUSES)}")
    if row["status"] == "ok" and not isinstance(row.get("line"), dict):
        raise UsageError(f"{where}: a run that is ok has no line")
    return row


def _run(row: Row) -> int:
    return int(row["run"])


def _ends_a_line(file: io.BufferedRandom) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _cut_last_line(file: io.BufferedRandom) -> None:
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
