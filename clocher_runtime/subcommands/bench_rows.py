"""Rows of `clocher bench`, as a table, JSON or CSV; llama-bench's keys have its meaning."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from clocher_runtime.disk.strict_json import finite
from clocher_runtime.quality.speed import Case, Runner
from clocher_runtime.quality.statistics import median_of_runs, ratio, spread

Row = dict[str, Any]

WIDE = 0.1
"""Spread of the repetitions, relative to the median, above which a figure is uncertain."""

READ_LOOP_ERROR = 1.05
"""Tolerated ratio of decoding to the read loop, which is not exact."""

_GB = 1e9
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))


def speed(case: Case, samples_ns: Sequence[int]) -> Row:
    """Return the timing fields of a case."""
    tokens = (case.prompt + case.tokens) * case.batch
    rates = [tokens * 1e9 / ns for ns in samples_ns]
    several = len(rates) > 1
    return {
        "test": case.name,
        "n_prompt": case.prompt,
        "n_gen": case.tokens,
        "n_depth": case.depth,
        "n_seqs": case.batch,
        "avg_ns": mean(samples_ns),
        "stddev_ns": stdev(samples_ns) if several else 0.0,
        "avg_ts": mean(rates),
        "stddev_ts": stdev(rates) if several else 0.0,
        "median_ts": median(rates),
        "iqr_ts": spread(rates),
        "mad_ts": median(abs(rate - median(rates)) for rate in rates),
        "ci95_ts": median_of_runs(rates).ends,
        "samples_ns": list(samples_ns),
        "samples_ts": rates,
    }


def beside_reads(row: Row, runner: Runner, case: Case, reads: Sequence[float]) -> Row:
    """Return the bandwidth fields of a row; `reads` are GB/s by round, [] if not measured."""
    nbytes = runner.bytes_per_token(case)
    said: Row = {"bytes_per_token": nbytes, "gbps": None, "read_gbps": None}
    said |= {"samples_read_gbps": list(reads), "pct_of_read": None, "pct_of_read_95": None}
    if nbytes is None:
        return said
    drawn = [rate * nbytes / _GB for rate in row["samples_ts"]]
    said["gbps"] = median(drawn)
    if reads:
        share = ratio(drawn, reads)
        said["read_gbps"] = median(reads)
        said["pct_of_read"] = 100 * share.value
        said["pct_of_read_95"] = [100 * share.low, 100 * share.high]
    return said


def above_limit(row: Row) -> bool:
    """Return whether a row exceeds the memory limit: its tokens cannot have read all weights."""
    ends = row["pct_of_read_95"]
    return ends is not None and not row["in_cache"] and ends[0] > 100 * READ_LOOP_ERROR


def doubts(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why figures are uncertain, one line each."""
    found = []
    busy, cpus = rows[0]["load1"], rows[0]["cpus"]
    if rows[0]["busy"]:
        found.append(f"the machine was busy: load average {busy:.1f} on {cpus} CPUs at the start")
    wide = [row for row in rows if row["iqr_ts"] > WIDE * row["median_ts"]]
    if wide:
        shares = ", ".join(f"{_named(row)} {row['iqr_ts'] / row['median_ts']:.0%}" for row in wide)
        found.append(f"repetitions differ by more than {WIDE:.0%} (IQR over median): {shares}")
    over = [row for row in rows if (row["pct_of_read"] or 0) > 100]
    for row in over:
        why = "within the error of the read loop"
        if row["in_cache"]:
            why = "the weights lie in a cache"
        elif above_limit(row):
            why = "no valid result: the read loop was disturbed, or less is read than is counted"
        found.append(f"{_named(row)}: {row['pct_of_read']:.0f} % of the read bandwidth: {why}")
    wrong = [_named(row) for row in rows if row["correct"] is False]
    if wrong:
        found.append(f"tokens differ, which is a defect: do not trust {', '.join(wrong)}")
    return found


def _named(row: Row) -> str:
    batch = f" -b {row['n_seqs']}" if row["n_seqs"] > 1 else ""
    return f"{row['test']} -t {row['n_threads']}{batch}"


_COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("model", lambda row: str(row["model_filename"])),
    ("size", lambda row: _scaled(row["model_size"], _UNITS)),
    ("params", lambda row: _scaled(row["model_n_params"], _COUNTS)),
    ("precision", lambda row: str(row["precision"])),
    ("backend", lambda row: f"{row['backends']} {row['isa']}"),
    ("threads", lambda row: str(row["n_threads"])),
    ("batch", lambda row: str(row["n_seqs"]) if row["shows_batch"] else ""),
    ("test", lambda row: str(row["test"])),
    ("t/s", lambda row: f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"),
    ("median [IQR]", lambda row: f"{row['median_ts']:.1f} [{row['iqr_ts']:.1f}]"),
    ("tokens/forward", lambda row: _per_pass(row)),
    ("bytes/token", lambda row: _scaled(row["bytes_per_token"], _UNITS)),
    ("GB/s", lambda row: _number(row["gbps"])),
    ("% of read", lambda row: _share(row)),
    ("same tokens", lambda row: {True: "✓", False: "✗", None: "-"}[row["correct"]]),
)


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, without empty columns."""
    several = any(row["n_seqs"] > 1 for row in rows)
    shown = [{**row, "shows_batch": several} for row in rows]
    cells = [[name, *(cell(row) for row in shown)] for name, cell in _COLUMNS]
    return aligned([column for column in cells if any(column[1:])])


def aligned(columns: Sequence[Sequence[str]]) -> str:
    """Return columns, head first, as a Markdown table; the first one is text."""
    widths = [max(map(len, column)) for column in columns]
    ruled = [
        [column[0], "-" * width if first else "-" * (width - 1) + ":", *column[1:]]
        for column, width, first in zip(
            columns, widths, (True, *[False] * len(columns)), strict=False
        )
    ]
    lines = zip(*ruled, strict=True)
    return "\n".join(
        "| "
        + " | ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def as_json(rows: Sequence[Row]) -> str:
    """Return rows as a JSON list, one row per line."""
    return "[\n" + ",\n".join(json.dumps(finite(row)) for row in rows) + "\n]"


def as_jsonl(rows: Sequence[Row]) -> str:
    """Return rows as JSON lines."""
    return "\n".join(json.dumps(finite(row)) for row in rows)


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, without list and object fields."""
    flat: list[Mapping[str, Any]] = [
        {key: value for key, value in row.items() if not isinstance(value, list | dict)}
        for row in map(finite, rows)
    ]
    names = list(dict.fromkeys(key for row in flat for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


WRITERS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "md": markdown,
    "json": as_json,
    "jsonl": as_jsonl,
    "csv": as_csv,
}


def _scaled(value: float | None, units: Sequence[tuple[str, float]]) -> str:
    if value is None:
        return ""
    for unit, size in units:
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _per_pass(row: Row) -> str:
    drafted = row["speculate"] != "off" and row["tokens_per_pass"]
    return f"{row['tokens_per_pass']:.2f}" if drafted else ""


def _share(row: Row) -> str:
    if row["pct_of_read"] is None:
        return ""
    return f"{row['pct_of_read']:.0f}" + (" (cache)" if row["in_cache"] else "")
