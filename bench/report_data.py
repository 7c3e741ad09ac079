"""Result files, read for a report: what kind each is, with its fields checked."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.harness_results import read_rows
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_json

Row = Mapping[str, Any]
Kind = Literal["harness", "strict", "peers", "roofline", "decode", "block_sparse", "other"]

FOLDER = Path(__file__).resolve().parent / "results"
"""Result files that docs/PERFORMANCE.md is made of."""

MAX_BYTES = 64 << 20

_NAMED = re.compile(r"(\d{4}-\d{2}-\d{2})-(.+?)-(?:harness|strict|peers|roofline|decode|block)\b")
_ROOFLINE = {"format": str, "N": int, "K": int, "M": int, "threads": int, "isa": str}
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "roofline": {**_ROOFLINE, "gbps": float, "read_gbps": float, "pct_of_limit": float},
    "peers": {"engine": str, "model": str, "format": str, "test": str, "threads": int, "note": str},
    "decode": {"model": str, "format": str, "test": str, "threads": int, "tok_s": float}
    | {"bytes_per_token": int, "gbps": float, "pct_of_limit": float, "samples": list},
    "block_sparse": {
        "op": str,
        "block": str,
        "sparsity": float,
        "speedup": float,
        "break_even": float,
    }
    | {"threads": int, "n": int, "k": int, "m": int, "inner": str},
}
"""Fields that every row of a kind needs; float stands for any finite number."""

_MAYBE = (
    *("tok_s", "gbps", "read_gbps", "pct_of_limit", "pct_low", "pct_high"),
    *("ratio", "ratio_low", "ratio_high"),
)

_CONTRACT = {"model": str, "format": str, "isa": str, "act_prec": str, "threads": int}
_CONTRACT |= {"bytes_per_token": int, "windows": dict, "checks": list, "machine": dict}
_CONTRACT |= {"command": str, "date": str, "tokens": int, "prompt_tokens": int}
_CHECK = {"name": str, "status": str, "detail": str}
_WINDOWS = {"kernels_s": float, "strict_s": float, "end_to_end_s": float}
# Fields of the line of a harness row that are shown: a number, or null.
LINE_NUMBERS = (
    *(
        "tps_true",
        "latency_p50_ms",
        "latency_p95_ms",
        "ttft_ms",
        "bytes_per_token",
        "bytes_touched",
    ),
    *("coverage", "effective_gbps", "rss_peak_mb", "threads", "wall_time_s", "tokens_generated"),
)


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result file.

    Attributes:
        name: of the file, without its directory.
        kind: which bench wrote it; "other" where no report shows it.
        rows: as they are in it.
        date: of the measurement; "" if nothing says so.
        machine: what it ran on; "" if nothing says so.
    """

    name: str
    kind: Kind
    rows: Sequence[Row]
    date: str = ""
    machine: str = ""

    @property
    def stem(self) -> str:
        """Its name without the suffix."""
        return Path(self.name).stem


def read_folder(folder: Path = FOLDER) -> list[ResultFile]:
    """Return every result file of a folder, by name.

    Raises:
        UsageError: the folder is not there, or a file is not a result file.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory; give one with result files")
    paths = (path for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))
    return [read_file(path) for path in sorted(paths)]


def read_file(path: Path) -> ResultFile:
    """Return a result file: JSON of a bench, or JSONL of the harness.

    Raises:
        UsageError: it cannot be read, or is not what a bench writes.
    """
    if path.suffix == ".jsonl":
        if not path.is_file():
            raise UsageError(f"{path}: no such file; give a file that bench.harness wrote")
        rows = read_rows(path)
        for number, row in enumerate(rows, 1):
            _check_harness(row, f"{path}, line {number}")
        first: Row = rows[0] if rows else {}
        started = next((r["started"] for r in rows if isinstance(r.get("started"), str)), "")
        return ResultFile(
            path.name, "harness", rows, started[:10], machine_text(first.get("machine"))
        )
    try:
        found = parse_json(read_bytes(path, MAX_BYTES), str(path))
    except ClocherError as error:
        raise UsageError(str(error)) from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UsageError(f"{path}: expected a list of rows, as --json of a bench writes it")
    kind = _kind(found)
    if kind == "strict":
        _check_strict(found, str(path))
    for number, row in enumerate(found, 1):
        if fields := _FIELDS.get(kind):
            _check_row(row, fields, f"{path}, row {number}")
    named = _NAMED.match(path.name)
    date, machine = named.groups() if named else ("", "")
    if kind == "strict":
        date, machine = found[0]["date"], machine_text(found[0]["machine"])
    return ResultFile(path.name, kind, found, date, machine)


def require(row: object, fields: Mapping[str, type], where: str) -> None:
    """Check that a row has some fields; float stands for any finite number.

    Raises:
        UsageError: one is missing, or is something else.
    """
    if not isinstance(row, dict):
        raise UsageError(f"{where}: expected an object, got {type(row).__name__}")
    for name, kind in fields.items():
        if name not in row:
            raise UsageError(f"{where}: {name} is missing")
        good = is_number(row[name]) if kind is float else type(row[name]) is kind
        if not good:
            wanted = "a finite number" if kind is float else kind.__name__
            raise UsageError(f"{where}: {name} is {row[name]!r:.40}, expected {wanted}")


def is_number(value: object) -> bool:
    """Whether a value of a row is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def machine_text(machine: object) -> str:
    """Return what the harness says of a machine, in one line."""
    if not isinstance(machine, dict):
        return ""
    cpus, memory = machine.get("cpus"), machine.get("memory_bytes")
    parts = [str(machine.get("cpu", "")), f"{cpus} CPUs" if is_number(cpus) else ""]
    if isinstance(memory, int):
        parts.append(f"{memory / 2**30:.0f} GiB")
    parts.append(f"Linux {machine['kernel']}" if machine.get("kernel") else "")
    return ", ".join(part for part in parts if part)


def model_name(text: str) -> str:
    """Return the last part of a model's path."""
    return Path(text).name or text


def _check_row(row: Row, fields: Mapping[str, type], where: str) -> None:
    """Check fields that a row needs, and those that it may have and a report shows."""
    require(row, fields, where)
    for name in _MAYBE:
        if row.get(name) is not None:
            require(row, {name: float}, where)
    if row.get("correct") is not None:
        require(row, {"correct": bool}, where)
    ends = row.get("pct_of_limit_95")
    if ends is not None and not (
        isinstance(ends, list) and len(ends) == 2 and all(map(is_number, ends))
    ):
        raise UsageError(f"{where}: pct_of_limit_95 is {ends!r:.40}, expected two numbers")
    if not isinstance(row.get("samples", []), list):
        raise UsageError(f"{where}: samples is no list")


def _kind(rows: Sequence[Row]) -> Kind:
    ops = {row.get("op") for row in rows}
    if "strict" in ops:
        return "strict"
    if "bsr_linear" in ops:
        return "block_sparse"
    if ops == {"model"}:
        return "peers"
    if ops == {"decode"}:
        return "decode"
    if ops == {"linear"} and not any("engine" in row for row in rows):
        return "roofline"
    return "other"


def _check_strict(rows: Sequence[Row], where: str) -> None:
    if rows[0].get("op") != "strict":
        raise UsageError(f"{where}: its first row is not the contract")
    require(rows[0], _CONTRACT, f"{where}, row 1")
    for kind in ("cold", "warm"):
        require(rows[0]["windows"].get(kind), _WINDOWS, f"{where}, row 1, windows, {kind}")
    for number, check in enumerate(rows[0]["checks"], 1):
        require(check, _CHECK, f"{where}, row 1, check {number}")
    for number, row in enumerate(rows[1:], 2):
        here = f"{where}, row {number}"
        require(row, {"test": str, "tok_s": float, "launches": int}, here)
        for name in ("kernels_tok_s", "gbps", "read_gbps", "pct_of_limit"):
            if row.get(name) is not None:
                require(row, {name: float}, here)
        for name in ("tok_s_95", "pct_of_limit_95", "latency_us"):
            values = row.get(name)
            if values is not None and not (
                isinstance(values, list) and len(values) >= 2 and all(map(is_number, values))
            ):
                raise UsageError(f"{here}: {name} is {values!r:.40}, expected a list of numbers")


def _check_harness(row: Row, where: str) -> None:
    for name, kind in (("why", list), ("ignored", list), ("swept", dict), ("settings", dict)):
        if name in row and not isinstance(row[name], kind):
            raise UsageError(f"{where}: {name} is {row[name]!r:.40}, expected {kind.__name__}")
    if not all(isinstance(text, str) for text in (*row.get("why", ()), *row.get("ignored", ()))):
        raise UsageError(f"{where}: why and ignored hold texts")
    line = row.get("line")
    if line is None:
        return
    if not isinstance(line, dict):
        raise UsageError(f"{where}: line is {line!r:.40}, expected an object or null")
    for name in LINE_NUMBERS:
        if line.get(name) is not None and not is_number(line[name]):
            raise UsageError(
                f"{where}: line: {name} is {line[name]!r:.40}, expected a number or null"
            )
