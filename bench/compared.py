"""Rows of the harness combined: cells, speeds, ratios, contradictions, tables."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.cells import source_names
from bench.record import Row, Table, figure, is_number, table
from clocher_runtime.config.engine import HINTS
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.quality.statistics import (
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
_MEDIANS = ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "ttft_ms", "bytes_per_token")
_MEDIANS += ("bytes_touched", "coverage", "effective_gbps", "rss_peak_mb", "kv_cache_mb")
_SPEED = (
    "cell | runs | tok/s [95 %] | IQR | p50 ms | p95 ms | p99 ms | ttft ms | ratio | verdict",
    "{label} | {counted} | {tok_s} | {iqr} | {latency_p50_ms} | {latency_p95_ms} | "
    "{latency_p99_ms} | {ttft_ms} | {ratio} | {verdict}",
)
_MEMORY = (
    "cell | MB/token | MB touched | coverage | effective GB/s | peak MiB | KV MiB",
    "{label} | {mb_per_token} | {mb_touched} | {coverage} | {effective_gbps} | {rss_peak_mb} | "
    "{kv_cache_mb}",
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

    @property
    def ignored(self) -> list[str]:
        """Swept settings that the engine ignored."""
        return sorted({str(name) for row in self.rows for name in row.get("ignored") or ()})

    @property
    def swept(self) -> Mapping[str, str]:
        """Settings that differ from the neighbouring cells."""
        return dict(self.rows[0].get("swept") or {})

    def count(self, status: str) -> int:
        """Return how many rows have a status."""
        return sum(row["status"] == status for row in self.rows)

    def values(self, key: str = SPEED, runs: set[int] | None = None) -> list[float]:
        """Return a field of the JSON line for each valid row that has it; `runs` None means all."""
        found = [row["line"].get(key) for row in self.good if runs is None or row["run"] in runs]
        return [float(value) for value in found if is_number(value) and value > 0]


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


def beside(base: ResultCell, cell: ResultCell) -> tuple[Ratio | None, str]:
    """Return ratio and verdict against a cell of the same file, paired by run number."""
    if base.swept != cell.swept and _acted_on(base) == _acted_on(cell):
        return None, "the engine does the same as in the first row"
    common = {r["run"] for r in base.good} & {r["run"] for r in cell.good}
    if not common:
        return None, "no run in common"
    found = paired_ratio(cell.values(runs=common), base.values(runs=common))
    return found, found.verdict


def pairs(
    before: Sequence[ResultCell], after: Sequence[ResultCell]
) -> list[tuple[ResultCell, ResultCell]]:
    """Return cells with the same label; two files of one cell each always pair."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    later = {cell.label: cell for cell in after}
    return [(cell, later[cell.label]) for cell in before if cell.label in later]


def compare_files(old: ResultCell, new: ResultCell) -> Ratio | None:
    """Return the speed ratio of cells of two files; None if either has no valid run."""
    a, b = old.values(), new.values()
    return apart_ratio(b, a) if a and b else None


def cells_tables(cells: Sequence[ResultCell]) -> tuple[Table, Table]:
    """Return tables of a file's cells: speeds beside the first cell's, and memory."""
    rows = [_cell_row(cells[0], cell) for cell in cells]
    return table(*_SPEED, rows), table(*_MEMORY, rows)


def files_table(found: Sequence[tuple[ResultCell, ResultCell]]) -> Table:
    """Return pairs of cells of two files beside each other."""
    rows = []
    for old, new in found:
        compared = compare_files(old, new)
        sides = {name: spelled(c.values()) for name, c in (("a", old), ("b", new))}
        verdict = compared.verdict if compared else "no run counts"
        rows.append({"cell": old.label, **sides, "ratio": _spelled(compared), "verdict": verdict})
    heads = "cell | first | second | ratio | verdict"
    return table(heads, "{cell} | {a} | {b} | {ratio} | {verdict}", rows)


def _cell_row(base: ResultCell, cell: ResultCell) -> Row:
    speeds, void = cell.values(), cell.count("void")
    counted = f"{len(cell.good)} ({void} void)" if void else str(len(cell.good))
    row: Row = {"label": cell.label, "counted": counted}
    if not speeds:
        disturbed = [r["line"].get(SPEED) for r in cell.rows if r["status"] == "void" and r["line"]]
        values = [float(value) for value in disturbed if is_number(value)]
        row["tok_s"] = f"({figure(median(values))})" if values else "-"
        failed = "failed" if cell.count("error") else "void: the machine was disturbed"
        return {**row, "verdict": failed}
    ratio, verdict = beside(base, cell) if cell is not base else (None, "")
    if cell.ignored:
        verdict = f"{verdict} (ignored: {', '.join(cell.ignored)})".strip()
    middles = {key: median(found) for key in _MEDIANS if (found := cell.values(key))}
    for name, key in (("mb_per_token", "bytes_per_token"), ("mb_touched", "bytes_touched")):
        middles |= {name: middles[key] / 1e6} if key in middles else {}
    return {
        **row,
        "tok_s": spelled(speeds),
        "iqr": figure(spread(speeds)),
        **{key: figure(value) for key, value in middles.items()},
        "ratio": _spelled(ratio),
        "verdict": verdict,
    }


def spelled(values: Sequence[float]) -> str:
    """Return the median of runs, with its interval in brackets if it has one."""
    if not values:
        return "-"
    found = median_of_runs(values)
    ends = f" [{figure(found.low)}, {figure(found.high)}]" if found.known else ""
    return f"{figure(found.value)}{ends}"


def _spelled(found: Ratio | None) -> str:
    if found is None:
        return ""
    return f"{found.value:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.known else "")


def _acted_on(cell: ResultCell) -> Mapping[str, str]:
    ignored = {text.partition("=")[0] for text in cell.ignored}
    return {
        name: raw
        for name, raw in cell.swept.items()
        if name not in HINTS and not source_names(name) & ignored
    }
