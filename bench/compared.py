"""Rows of the harness combined: cells, speeds, ratios, contradictions, tables."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.record import Row, Table, figure, is_number, table
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.quality.statistics import (
    Estimate,
    Ratio,
    apart_ratio,
    median_of_runs,
    paired_ratio,
    spread,
)

SPEED = "tps_true"

# Columns of the CSV file before those of the line, and non-scalar keys of the line.
_COLUMNS = ("label", "key", "run", "attempt", "order", "status", "started", "elapsed_s")
_NOT_SCALAR = ("outputs", "gpu", "work_touch", "hints_ignored")
_MEDIANS: Mapping[str, float] = {
    **dict.fromkeys(("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "ttft_ms"), 1.0),
    **dict.fromkeys(("bytes_per_token", "bytes_touched"), 1e-6),
    **dict.fromkeys(("coverage", "effective_gbps", "rss_peak_mb", "kv_cache_mb"), 1.0),
}
"""Fields of the line whose median is shown, and the factor to its unit."""
_SPEEDS = (
    "cell | runs | tok/s [95 %] = {speed} | IQR | p50 ms = {latency_p50_ms} | "
    "p95 ms = {latency_p95_ms} | p99 ms = {latency_p99_ms} | ttft ms = {ttft_ms} | "
    "ratio | verdict"
)
_MEMORY = (
    "cell | MB/token = {bytes_per_token} | MB touched = {bytes_touched} | coverage | "
    "effective GB/s = {effective_gbps} | peak MiB = {rss_peak_mb} | KV MiB = {kv_cache_mb}"
)


@dataclass(frozen=True, slots=True)
class ResultCell:
    """The rows of one cell, in order."""

    key: str
    label: str
    rows: list[Row] = field(default_factory=list)

    @property
    def good(self) -> list[Row]:
        """Valid rows, by run number; the last of repeated runs."""
        kept = {row["run"]: row for row in self.rows if row["status"] == "ok"}
        return [kept[run] for run in sorted(kept)]

    def count(self, status: str) -> int:
        """Return how many rows have a status."""
        return sum(row["status"] == status for row in self.rows)

    def values(self, key: str = SPEED, runs: set[int] | None = None) -> list[float]:
        """Return a field of the JSON line for each valid row that has it; `runs` None means all."""
        return _values([row for row in self.good if runs is None or row["run"] in runs], key)


def group(rows: Sequence[Row]) -> list[ResultCell]:
    """Group rows into cells, in order; of equal labels with different content the last is kept."""
    cells: dict[str, ResultCell] = {}
    for row in rows:
        cells.setdefault(row["key"], ResultCell(row["key"], row["label"])).rows.append(row)
    return list({cell.label: cell for cell in cells.values()}.values())


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows flat: row fields, swept settings, machine state, scalars of the line."""
    flat = []
    for row in rows:
        own = {name: row[name] for name in _COLUMNS}
        own |= {"why": "; ".join(row["why"]), "ignored": " ".join(row["ignored"])}
        for head, part in (("set", "swept"), ("state", "state"), ("line", "line")):
            found = row[part] or {}
            own |= {f"{head}.{k}": v for k, v in found.items() if k not in _NOT_SCALAR}
        flat.append(own)
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_file(path, text.getvalue().encode())


def problems(cells: Sequence[ResultCell]) -> list[str]:
    """Return a file's faults: failed processes, or different tokens within a cell."""
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
    """Return the labels of cells without a valid run."""
    return [cell.label for cell in cells if not cell.good]


def beside(base: ResultCell, cell: ResultCell) -> Ratio | None:
    """Return the ratio to a cell of the same file, by run number; None without common runs."""
    common = {r["run"] for r in base.good} & {r["run"] for r in cell.good}
    return paired_ratio(cell.values(runs=common), base.values(runs=common)) if common else None


def apart(old: ResultCell, new: ResultCell) -> Ratio | None:
    """Return the ratio to a cell of another file; None if either has no valid run."""
    a, b = old.values(), new.values()
    return apart_ratio(b, a) if a and b else None


def pairs(
    before: Sequence[ResultCell], after: Sequence[ResultCell]
) -> list[tuple[ResultCell, ResultCell]]:
    """Return cells with the same label; two files of one cell each always pair."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    later = {cell.label: cell for cell in after}
    return [(cell, later[cell.label]) for cell in before if cell.label in later]


def cells_tables(cells: Sequence[ResultCell]) -> tuple[Table, Table]:
    """Return tables of a file's cells: speeds beside the first cell's, and memory."""
    rows = [_cell_row(cells[0], cell) for cell in cells]
    return table(_SPEEDS, rows), table(_MEMORY, rows)


def files_table(found: Sequence[tuple[ResultCell, ResultCell]]) -> Table:
    """Return pairs of cells of two files beside each other."""
    rows = [
        {
            "cell": old.label,
            "first": _spelled(old.values()),
            "second": _spelled(new.values()),
            **_compared(apart(old, new), "no run counts"),
        }
        for old, new in found
    ]
    return table("cell | first | second | ratio | verdict", rows)


def _cell_row(base: ResultCell, cell: ResultCell) -> Row:
    speeds, void = cell.values(), cell.count("void")
    counted = f"{len(cell.good)} ({void} void)" if void else str(len(cell.good))
    row: Row = {"cell": cell.label, "runs": counted}
    if not speeds:
        disturbed = _values([r for r in cell.rows if r["status"] == "void" and r["line"]], SPEED)
        failed = "failed" if cell.count("error") else "void: the machine was disturbed"
        speed = f"({figure(median(disturbed))})" if disturbed else "-"
        return {**row, "speed": speed, "verdict": failed}
    row |= {"speed": _spelled(speeds), "IQR": figure(spread(speeds))}
    row |= _compared(beside(base, cell), "no run in common") if cell is not base else {}
    if ignored := sorted({name for each in cell.rows for name in each["ignored"]}):
        row["verdict"] = f"{row.get('verdict', '')} (ignored: {', '.join(ignored)})".strip()
    medians = {key: cell.values(key) for key in _MEDIANS}
    return row | {k: figure(_MEDIANS[k] * median(found)) for k, found in medians.items() if found}


def _values(rows: Sequence[Row], key: str) -> list[float]:
    found = [row["line"].get(key) for row in rows]
    return [float(value) for value in found if is_number(value) and value > 0]


def _spelled(values: Sequence[float]) -> str:
    """Return the median of runs, with its interval in brackets if it has one."""
    return _with_interval(median_of_runs(values), figure) if values else "-"


def _compared(found: Ratio | None, otherwise: str) -> Row:
    if found is None:
        return {"verdict": otherwise}
    return {"ratio": _with_interval(found, "{:.3f}".format), "verdict": found.verdict}


def _with_interval(found: Estimate, shown: Callable[[float], str]) -> str:
    ends = f" [{shown(found.low)}, {shown(found.high)}]" if found.known else ""
    return f"{shown(found.value)}{ends}"
