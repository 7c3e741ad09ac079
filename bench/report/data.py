"""Result files, read for a report: what kind each is, with its fields checked."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from bench.report.columns import Row, model_name
from bench.sweep.results import read_rows
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_json

Kind = Literal[
    "harness",
    "strict",
    "peers",
    "roofline",
    "decode",
    "serving",
    "attention",
    "block_sparse",
    "sparse_attention",
    "skip",
    "act_sparsity",
    "speculation",
    "other",
]

FOLDER = Path(__file__).resolve().parents[1] / "results"
"""Result files that docs/PERFORMANCE.md is made of."""

MAX_BYTES = 64 << 20

_NAMED = re.compile(
    r"(\d{4}-\d{2}-\d{2})-(.+?)-(?:harness|strict|peers|roofline|decode|serving|attention|block|"
    r"sparse-attention|skip|act-sparsity|speculation)\b"
)
Fields = Mapping[str, type]
"""Key of a row -> what it holds; float stands for any finite number."""

_SPELLED = {str: "text", int: "an integer", float: "a finite number", bool: "true or false"}
_SPELLED |= {list: "a list", dict: "an object"}
_ROOFLINE = {"format": str, "N": int, "K": int, "M": int, "threads": int, "isa": str}
_DECODE = {"model": str, "format": str, "test": str, "threads": int, "tok_s": float}
_SPARSE = {"op": str, "block": str, "sparsity": float, "speedup": float, "break_even": float}
_ATTENTION = {"model": str, "kv": str, "context": int, "tokens": int, "threads": int}
_SAVING = {"model": str, "format": str, "threads": int, "isa": str}
_SERVING = {"op": str, "server": str, "prompt_tokens": int, "new_tokens": int}
_FIELDS: Mapping[str, Fields] = {
    "roofline": {**_ROOFLINE, "gbps": float, "read_gbps": float, "pct_of_limit": float},
    "peers": {"engine": str, "model": str, "format": str, "test": str, "threads": int, "note": str},
    "decode": {**_DECODE, "bytes_per_token": int, "gbps": float, "pct_of_limit": float}
    | {"samples": list},
    "serving": _SERVING,
    "attention": {**_ATTENTION, "isa": str, "gbps": float, "read_gbps": float, "gflops": float},
    "block_sparse": {**_SPARSE, "threads": int, "n": int, "k": int, "m": int, "inner": str},
    "sparse_attention": {**_ATTENTION, "isa": str, "attn": str, "gbps": float, "read_gbps": float}
    | {"share": float, "us_per_layer": float, "dense_us_per_layer": float},
    "skip": {**_SAVING, "test": str, "zero_gates": float, "zero_codes": float},
    "act_sparsity": {**_SAVING, "rule": str, "zeros": float, "sparse": float, "dense": float},
    "speculation": {"model": str, "format": str, "threads": int, "workload": str, "engine": str}
    | {"streams": int, "tok_s": float},
}
"""What every row of a kind needs."""

_NUMBERS = ("tok_s", "gbps", "read_gbps", "pct_of_limit", "pct_low", "pct_high")
_NUMBERS += ("ratio", "ratio_low", "ratio_high", "kernels_tok_s")
_NUMBERS += ("skipping", "dense", "speedup", "low", "high")
_NUMBERS += ("of_dense", "of_dense_low", "of_dense_high", "acceptance", "tokens_per_pass")
_NUMBERS += ("over_off", "over_peer")
_NUMBERS += ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p95_ms", "itl_p99_ms", "client_cpu")
_MAYBE: Fields = {**dict.fromkeys(_NUMBERS, float), "correct": bool, "samples": list}
_MAYBE |= {"load": str, "streams": int, "error_count": int}
"""What a row may have and a report shows."""

_CONTRACT = {"model": str, "format": str, "isa": str, "act_prec": str, "threads": int}
_CONTRACT |= {"bytes_per_token": int, "windows": dict, "checks": list, "machine": dict}
_CONTRACT |= {"date": str, "tokens": int, "prompt_tokens": int}
_CHECK = {"name": str, "status": str, "detail": str}
_WINDOWS = {"kernels_s": float, "strict_s": float, "end_to_end_s": float}
_HARNESS: Fields = {"why": list, "ignored": list, "swept": dict, "settings": dict}
_LINE = ("tps_true", "latency_p50_ms", "latency_p95_ms", "ttft_ms", "bytes_per_token")
_LINE += ("bytes_touched", "coverage", "effective_gbps", "rss_peak_mb", "threads", "wall_time_s")
_LINE += ("tokens_generated",)


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

    @property
    def command(self) -> str:
        """What made it, without directories; "" if it does not say so."""
        said = self.rows[0].get("command") if self.rows else None
        return without_places(said) if isinstance(said, str) else ""


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


def require(row: object, fields: Fields, where: str) -> None:
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
            raise UsageError(f"{where}: {name} is {row[name]!r:.40}, expected {_SPELLED[kind]}")


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
    nodes = machine.get("numa_nodes")
    if is_number(nodes):
        parts.append(f"{nodes} NUMA node{'s' if nodes != 1 else ''}")
    if isinstance(memory, int):
        parts.append(f"{memory / 2**30:.0f} GiB")
    parts.append(f"Linux {machine['kernel']}" if machine.get("kernel") else "")
    return ", ".join(part for part in parts if part)


def without_places(command: str) -> str:
    """Return a command whose paths have lost their directories."""
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    found = []
    for word in words:
        head, equals, tail = word.rpartition("=")
        found.append(f"{head}{equals}{model_name(tail) if tail.startswith('/') else tail}")
    return shlex.join(found)


def _allow(row: Row, fields: Fields, where: str) -> None:
    """Check what a row may have; null is as good as nothing."""
    require(row, {name: k for name, k in fields.items() if row.get(name) is not None}, where)


def _check_row(row: Row, fields: Fields, where: str) -> None:
    """Check fields that a row needs, and those that it may have and a report shows."""
    require(row, fields, where)
    samples = row.get("samples")
    # Where two sides were compared they are those of each.
    sides = samples.values() if isinstance(samples, dict) else [samples]
    for side in sides:
        _allow({**row, "samples": side}, _MAYBE, where)
    for name in ("tok_s_95", "pct_of_limit_95", "latency_us", "over_off_range", "over_peer_range"):
        values = row.get(name)
        numbers = isinstance(values, list) and len(values) >= 2 and all(map(is_number, values))
        if values is not None and not numbers:
            raise UsageError(f"{where}: {name} is {values!r:.40}, expected two numbers or more")


def _kind(rows: Sequence[Row]) -> Kind:
    ops = {row.get("op") for row in rows}
    said = rows[0].get("kind") if rows else None
    if said is not None:
        # Peers are run on products as well, which no report shows.
        shown = said in get_args(Kind) and (said != "peers" or ops == {"model"})
        return said if shown else "other"
    # Rows of before they said so.
    if "strict" in ops:
        return "strict"
    if "bsr_linear" in ops:
        return "block_sparse"
    if ops == {"model"}:
        return "peers"
    if ops == {"decode"}:
        return "decode"
    if ops == {"attention"}:
        return "attention"
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
        _check_row(row, {"test": str, "tok_s": float, "launches": int}, f"{where}, row {number}")


def _check_harness(row: Row, where: str) -> None:
    require(row, {name: kind for name, kind in _HARNESS.items() if name in row}, where)
    if not all(isinstance(text, str) for text in (*row.get("why", ()), *row.get("ignored", ()))):
        raise UsageError(f"{where}: why and ignored hold texts")
    if row.get("line") is not None:
        require(row, {"line": dict}, where)
        _allow(row["line"], dict.fromkeys(_LINE, float), f"{where}: line")
