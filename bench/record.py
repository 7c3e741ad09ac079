"""Result rows: how they are stored, read, and shown in tables (`KINDS` has the columns)."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import rich.table
from rich.console import Console
from rich.text import Text

from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import parse_json

Row = dict[str, Any]

SCHEMA = "clocher.bench/1"
MARKS: Mapping[str, str] = {"pass": "✓", "fail": "✗", "undecided": "?"}
STATUSES = ("ok", "void", "warmup", "error")
FOLDER = Path(__file__).with_name("results")

MAX_BYTES = 64 << 20
_BAR = " | "
_SAID = {True: "yes", False: "NO", None: ""}
_FIGURE = re.compile(r"[-+(]?[0-9][0-9.,%x]*( \[[^]]*\])?\)?|-")
_REQUIRED = {"schema": str, "key": str, "label": str, "run": int, "status": str}
_PATH = re.compile(r"(?<![\w/.:~-])(?:/[^\s/'\"=,;]+)*/([^\s/'\"=,;]+)")
_NAMED = re.compile(r"(\d{4}-\d{2}-\d{2})-([a-z]+-[a-z0-9]+)-")
_OF_READ = "{gbps:.1f} | {read_gbps:.1f} | {pct_of_limit:.0f} [{pct_low:.0f}, {pct_high:.0f}]"
_READ = "GB/s | read GB/s | % of read"


class Kind(NamedTuple):
    """How rows of a kind are shown: a title, and columns as `table` takes them."""

    title: str
    heads: str
    cells: str


KINDS: Mapping[str, Kind] = {
    "strict": Kind("Strict contract", "", ""),
    "harness": Kind("Harness: fresh processes in turns", "", ""),
    "peers": Kind(
        "Models beside other engines",
        "model | format | test | engine | tok/s | GB/s | read GB/s | % of read | "
        "Clocher / peer | note",
        "{model} | {format} | {test} | {engine} | {tok_s:.2f} | {gbps:.1f} | {read_gbps:.1f} | "
        "{pct_of_limit:.0f} | {ratio:.2f}x [{ratio_low:.2f}, {ratio_high:.2f}] | {note}",
    ),
    "linear": Kind(
        "Matrix products",
        f"format | N x K | M | threads | engine | us | {_READ} | % of dots | Clocher / engine | "
        "right | note",
        "{format} | {N} x {K} | {M} | {threads} | {engine} | {us:.1f} | " + _OF_READ + " | "
        "{pct_of_dots:.0f} | "
        "{ratio:.2f}x [{ratio_low:.2f}, {ratio_high:.2f}] | {correct} | {note}",
    ),
    "real": Kind(
        "Published files",
        "model | engine | tokens | KLD of text | same top-1 | perplexity | over fp32 | tokens | "
        "KLD of turns | "
        "same top-1 | MMLU, % | GSM8K, % | HumanEval, % | pp512 | tg64 | start, s | MiB",
        "{model} | {engine} | {tokens_text} | {kld_text:.5f} ± {kld_error_text:.5f} | "
        "{same_top_text:.4f} | {perplexity_text:.3f} | {ppl_ratio_text:.4f} | {tokens_turns} | "
        "{kld_turns:.5f} ± {kld_error_turns:.5f} | "
        "{same_top_turns:.4f} | {mmlu:.1f} ± {mmlu_error:.1f} | {gsm8k:.1f} ± {gsm8k_error:.1f} | "
        "{humaneval:.1f} ± {humaneval_error:.1f} | {pp512:.0f} | {tg64:.1f} | "
        "{start_s:.2f} | {memory_mib:.0f}",
    ),
    "quantise": Kind(
        "Quantised real weights",
        "model | format | method | bits of the layers | MiB | KLD of text | over llama.cpp | "
        "KLD of turns | over llama.cpp | same top-1 | perplexity, over floats",
        "{model} | {format} | {method} | {bits:.2f} | {mib:.1f} | "
        "{kld_text:.5f} ± {kld_error_text:.5f} | {over_text:.2f} | "
        "{kld_turns:.5f} ± {kld_error_turns:.5f} | {over_turns:.2f} | {same_top_text:.4f} | "
        "{ppl_ratio_text:.4f}",
    ),
    "speculation": Kind(
        "Speculation by kind of text",
        "text | setting | n | tok/s off | tok/s | over off | tokens a pass | same ids | note",
        "{text} | {setting} | {n} | {off_tok_s:.1f} | {tok_s:.1f} | {over_off:.2f}x | "
        "{tokens_per_pass:.2f} | {correct} | {note}",
    ),
    "schemas": Kind(
        "JSON schemas",
        "suite | schemas | compiled | ms, median | p99 | us a mask, median | p99 | most | "
        "obeying texts allowed | others stopped | T = 1: asked | ended | obey",
        "{suite} | {n} | {compiled} | {compile_ms_p50:.1f} | {compile_ms_p99:.0f} | "
        "{mask_us_p50:.0f} | {mask_us_p99:.0f} | {mask_us_max:.0f} | {accepted} of {accepted_of} | "
        "{rejected} of {rejected_of} | {asked} | {ended} | {obeying}",
    ),
    "tools": Kind(
        "Tool calls",
        "suite | server | tool_choice | n | right, % | parseable, % | s",
        "{suite} | {engine} | {choice} | {n} | {right:.1f} ± {error:.1f} | {parseable:.1f} | "
        "{seconds:.0f}",
    ),
    "block_sparse": Kind(
        "Block-sparse weights",
        "block | product | sparsity | us | GB/s | % of read | x dense | right | break-even density",
        "{block} | {op} | {sparsity:.0%} | {us:.0f} | {gbps:.1f} | {pct_of_limit:.0f} | "
        "{speedup:.2f} | {correct} | {break_even:.0%}",
    ),
    "ptq_calib": Kind(
        "Min-max calibration",
        "tensor | cosine per-tensor | cosine per-row | cosine per-group | rms per-tensor | "
        "rms per-row | rms per-group",
        "{tensor} | {cosine_per-tensor:.6f} | {cosine_per-row:.6f} | {cosine_per-group:.6f} | "
        "{rms_per-tensor:.6f} | {rms_per-row:.6f} | {rms_per-group:.6f}",
    ),
    "profile": Kind(
        "Where a step goes",
        "call | calls | us | share | waiting us | bytes | GB/s | note",
        "{name} | {calls} | {us:.1f} | {share:.1%} | {waiting_us:.1f} | {nbytes:,} | {gbps:.1f} | "
        "{note}",
    ),
}
"""Kinds known to reports; other rows show their short values."""


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def on_terminal(self, title: str = "") -> rich.table.Table:
        """Return it for the terminal."""
        made = rich.table.Table(title=title)
        for index, heading in enumerate(self.head):
            figures = all(is_figure(line[index]) or not line[index] for line in self.rows)
            made.add_column(Text(heading), justify="right" if figures else "left", overflow="fold")
        for line in self.rows:
            made.add_row(*map(Text, line))
        return made


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A result file; unknown `date` or `machine` is ""."""

    name: str
    kind: str
    rows: Sequence[Row]
    date: str = ""
    machine: str = ""

    @property
    def command(self) -> str:
        """The command that wrote it, without directories; "" if unknown."""
        said = self.rows[0].get("command") if self.rows else None
        return str(without_directories(said)) if isinstance(said, str) else ""


def table(heads: str, cells: str, rows: Iterable[Row]) -> Table:
    """Return a table of rows, without empty columns.

    `heads` are the headings, "format | GB/s"; `cells` the format strings, "{format} | {gbps:.1f}".
    A row without the value leaves its cell empty.
    """
    lines = [[_cell(shown, row) for shown in cells.split(_BAR)] for row in rows]
    names = heads.split(_BAR)
    filled = [index for index in range(len(names)) if any(line[index] for line in lines)]
    return Table(
        tuple(names[index] for index in filled),
        tuple(tuple(line[index] for index in filled) for line in lines),
    )


def table_of(kind: str, rows: Sequence[Row]) -> Table:
    """Return the table of rows of a kind; of an unknown one, all short values."""
    if kind in KINDS and KINDS[kind].heads:
        return table(KINDS[kind].heads, KINDS[kind].cells, rows)
    keys = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if key not in ("kind", "command", "op") and not isinstance(value, list | dict)
    )
    rates = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    cells = _BAR.join(f"{{{key}:.4g}}" if key in rates else f"{{{key}}}" for key in keys)
    return table(_BAR.join(keys), cells, rows)


def print_table(made: rich.table.Table) -> None:
    """Print a table; wide if stdout is no terminal."""
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(made)


def is_figure(cell: str) -> bool:
    """Whether a cell is a number, perhaps with its interval."""
    return bool(_FIGURE.fullmatch(cell))


def figure(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def is_number(value: object) -> bool:
    """Whether a value is a finite number; booleans are not."""
    return not isinstance(value, bool) and isinstance(value, int | float) and abs(value) < 1e300


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a JSON list, one a line, atomically."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    write_file(path, f"[\n{lines}\n]\n".encode())


def append_row(path: Path, row: Row) -> None:
    """Append a row as a line and flush it to disk."""
    with path.open("ab+") as file:
        # Do not continue an unterminated line of a killed harness.
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[Row]:
    """Return a harness file's rows, without an unterminated last line, or UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise UsageError(f"{path}: {reason}; give a file that bench.harness wrote") from None
    lines = text.split("\n")[:-1]
    return [_row(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def read_file(path: Path) -> ResultFile:
    """Return a result file (JSON or JSONL); UsageError if it is not one."""
    if path.suffix == ".jsonl":
        rows = read_rows(path)
        date = next((str(row["started"])[:10] for row in rows if row.get("started")), "")
        first = rows[0].get("machine") if rows else None
        return ResultFile(path.name, "harness", rows, date, machine_text(first))
    try:
        found = parse_json(read_bytes(path, MAX_BYTES), str(path))
    except ClocherError as error:
        raise UsageError(str(error)) from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UsageError(f"{path}: expected a list of rows, as --json of a bench writes it")
    said = found[0].get("kind", found[0].get("op")) if found else None
    kind = said if isinstance(said, str) else "other"
    if kind == "strict" and not isinstance(found[0].get("checks"), list):
        raise UsageError(f"{path}: its first row is not a contract with checks")
    named = _NAMED.match(path.name)
    date, machine = named.groups() if named else ("", "")
    if found and isinstance(found[0].get("machine"), dict):
        date = str(found[0].get("date", date))
        machine = machine_text(found[0]["machine"])
    return ResultFile(path.name, kind, found, date, machine)


def read_folder(folder: Path = FOLDER) -> list[ResultFile]:
    """Return every result file of a folder, by name; UsageError if one is invalid."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory; give one with result files")
    paths = (path for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))
    return [read_file(path) for path in sorted(paths)]


def machine_text(machine: object) -> str:
    """Return what a row says of a machine, in one line."""
    if not isinstance(machine, dict):
        return ""
    cpus, memory = machine.get("cpus"), machine.get("memory_bytes")
    parts = [str(machine.get("cpu", "")), f"{cpus} CPUs" if is_number(cpus) else ""]
    parts.append(f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else "")
    parts.append(f"Linux {machine['kernel']}" if machine.get("kernel") else "")
    return ", ".join(part for part in parts if part)


def without_directories(value: Any) -> Any:
    """Return a value with absolute paths cut to file names: rows are published."""
    if isinstance(value, str):
        return _PATH.sub(r"\1", value)
    if isinstance(value, list):
        return [without_directories(item) for item in value]
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    return value


def _cell(shown: str, row: Row) -> str:
    said = {
        key: _SAID[value] if value is None or isinstance(value, bool) else value
        for key, value in row.items()
    }
    try:
        return " ".join(shown.format_map(said).split())
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
        return ""


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
    for name in ("why", "ignored"):
        said = row.setdefault(name, [])
        if not isinstance(said, list) or not all(isinstance(text, str) for text in said):
            raise UsageError(f"{where}: {name} is {said!r:.40}, expected a list of texts")
    if row["status"] not in STATUSES:
        raise UsageError(f"{where}: status {row['status']!r}; known are {', '.join(STATUSES)}")
    if row.setdefault("line", None) is not None and not isinstance(row["line"], dict):
        raise UsageError(f"{where}: line is {row['line']!r:.40}, expected an object")
    if row["status"] == "ok" and row["line"] is None:
        raise UsageError(f"{where}: a run that is ok has no line")
    return row
