"""Rows of the harness combined: cells, speeds, ratios, contradictions, tables."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from clocher_runtime.subcommands.bench import as_csv

SPEED = "tps_true"

_BYTES = ("bytes_per_token", "bytes_touched")
_MEDIANS = ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "ttft_ms", *_BYTES)
_MEDIANS += ("coverage", "effective_gbps", "rss_peak_mb", "kv_cache_mb")
"""Fields of the line whose medians are shown, bytes as MB."""
_SPEEDS = (
    "cell | runs | tok/s [95 %] = {speed} | IQR | p50 ms = {latency_p50_ms} | "
    "p95 ms = {latency_p95_ms} | p99 ms = {latency_p99_ms} | ttft ms = {ttft_ms} | "
    "ratio | verdict"
)
_MEMORY = (
    "cell | MB/token = {bytes_per_token} | MB touched = {bytes_touched} | coverage | "
    "effective GB/s = {effective_gbps} | peak MiB = {rss_peak_mb} | KV MiB = {kv_cache_mb}"
)

Cells = Mapping[str, Sequence[Row]]
"""The rows of each cell, in order, by its label."""


def group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows into cells, in order; of equal labels with different content the last is kept."""
    last = {row["label"]: row["key"] for row in rows}
    cells: dict[str, list[Row]] = {}
    for row in rows:
        if row["key"] == last[row["label"]]:
            cells.setdefault(row["label"], []).append(row)
    return cells


def good(cell: Sequence[Row]) -> list[Row]:
    """Return the valid rows of a cell, by run number; the last of repeated runs."""
    kept = {row["run"]: row for row in cell if row["status"] == "ok"}
    return [kept[run] for run in sorted(kept)]


def values(rows: Sequence[Row], key: str = SPEED) -> list[float]:
    """Return a field of the JSON line for each row that has it."""
    found = [row["line"].get(key) for row in rows]
    return [float(value) for value in found if is_number(value) and value > 0]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows flat, fields of objects as "line.tps_true", without what was generated."""
    write_file(path, as_csv([dict(_flat(row)) for row in rows]).encode())


def _flat(row: Row, head: str = "") -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{head}{name}.")
        elif name != "outputs":
            yield f"{head}{name}", "; ".join(map(str, value)) if isinstance(value, list) else value


def problems(cells: Cells) -> list[str]:
    """Return a file's faults: failed processes, or different tokens within a cell."""
    found = []
    for label, rows in cells.items():
        tokens = {row["tokens_sha256"] for row in rows if row.get("tokens_sha256")}
        if len(tokens) > 1:
            found.append(f"{label}: its processes generated {len(tokens)} different texts")
        for row in rows:
            if row["status"] == "error":
                found.append(f"{label}, run {row['run']}: {'; '.join(row['why'])}")
    return found


def unmeasured(cells: Cells) -> list[str]:
    """Return the labels of cells without a valid run."""
    return [label for label, rows in cells.items() if not good(rows)]


def beside(base: Sequence[Row], cell: Sequence[Row]) -> Ratio | None:
    """Return the ratio to a cell of the same file, by run number; None without common runs."""
    first, second = (
        {row["run"]: speed for row in good(each) for speed in values([row])}
        for each in (base, cell)
    )
    common = sorted(first.keys() & second.keys())
    speeds = ([runs[run] for run in common] for runs in (second, first))
    return paired_ratio(*speeds) if common else None


def apart(old: Sequence[Row], new: Sequence[Row]) -> Ratio | None:
    """Return the ratio to a cell of another file; None if either has no valid run."""
    a, b = values(good(old)), values(good(new))
    return apart_ratio(b, a) if a and b else None


def pairs(before: Cells, after: Cells) -> dict[str, tuple[Sequence[Row], Sequence[Row]]]:
    """Return cells with the same label; two files of one cell each always pair."""
    if len(before) == len(after) == 1:
        after = dict(zip(before, after.values(), strict=True))
    return {label: (rows, after[label]) for label, rows in before.items() if label in after}


def cells_tables(cells: Cells, *columns: str, **more: str) -> tuple[Table, ...]:
    """Return tables of a file's cells; by default speeds beside the first cell's, and memory."""
    base = next(iter(cells.values()), ())
    rows = [{"cell": label, **more, **_cell_row(base, cell)} for label, cell in cells.items()]
    return tuple(table(each, rows) for each in columns or (_SPEEDS, _MEMORY))


def files_table(found: Mapping[str, tuple[Sequence[Row], Sequence[Row]]]) -> Table:
    """Return pairs of cells of two files beside each other."""
    rows = []
    for label, (old, new) in found.items():
        sides = {"first": _spelled(values(good(old))), "second": _spelled(values(good(new)))}
        rows.append({"cell": label, **sides, **_compared(apart(old, new), "no run counts")})
    return table("cell | first | second | ratio | verdict", rows)


def _cell_row(base: Sequence[Row], cell: Sequence[Row]) -> Row:
    counted, statuses = good(cell), Counter(row["status"] for row in cell)
    void = f" ({statuses['void']} void)" if statuses["void"] else ""
    row: Row = {"runs": f"{len(counted)}{void}"}
    if not (speeds := values(counted)):
        disturbed = values([row for row in cell if row["status"] == "void" and row["line"]])
        failed = "failed" if statuses["error"] else "void: the machine was disturbed"
        speed = f"({figure(median(disturbed))})" if disturbed else "-"
        return {**row, "speed": speed, "verdict": failed}
    row |= {"speed": _spelled(speeds), "IQR": figure(spread(speeds))}
    row |= _compared(beside(base, cell), "no run in common") if cell is not base else {}
    if ignored := sorted({name for each in cell for name in each["ignored"]}):
        row["verdict"] = f"{row.get('verdict', '')} (ignored: {', '.join(ignored)})".strip()
    for key in _MEDIANS:
        if found := values(counted, key):
            row[key] = figure(median(found) / (1e6 if key in _BYTES else 1))
    return row


def _spelled(speeds: Sequence[float]) -> str:
    """Return the median of runs, with its interval in brackets if it has one."""
    return _with_interval(median_of_runs(speeds), figure) if speeds else "-"


def _compared(found: Ratio | None, otherwise: str) -> Row:
    if found is None:
        return {"verdict": otherwise}
    return {"ratio": _with_interval(found, "{:.3f}".format), "verdict": found.verdict}


def _with_interval(found: Estimate, shown: Callable[[float], str]) -> str:
    ends = f" [{shown(found.low)}, {shown(found.high)}]" if found.known else ""
    return f"{shown(found.value)}{ends}"
