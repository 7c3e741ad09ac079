"""Result rows: how they are stored, read, and shown in tables (`KINDS` has the columns)."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import rich.table
from rich.console import Console
from rich.text import Text

from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import parse_json, parse_lines, read_as

Row = dict[str, Any]

SCHEMA = "clocher.bench/1"
MARKS: Mapping[str, str] = {"pass": "✓", "fail": "✗", "undecided": "?"}
FOLDER = Path(__file__).with_name("results")

MAX_BYTES = 64 << 20
_BAR = " | "
_SAID = {True: "yes", False: "NO", None: ""}
_FIGURE = re.compile(r"[-+(]?[0-9][0-9.,%x]*( \[[^]]*\])?\)?|-")
_PATH = re.compile(r"(?<![\w/.:~-])(?:/[^\s/'\"=,;]+)*/([^\s/'\"=,;]+)")
_NAMED = re.compile(r"(\d{4}-\d{2}-\d{2})-([a-z]+-[a-z0-9]+)-")


class _HarnessRow(msgspec.Struct):
    """What a row of the harness must have."""

    schema: Literal["clocher.bench/1"]
    key: str
    label: str
    run: int
    status: Literal["ok", "void", "warmup", "error"]
    why: list[str]
    ignored: list[str]
    line: Row | None
    outputs: list[Row] | None = None


class Kind(NamedTuple):
    """How rows of a kind are shown: a title, and columns as `table` takes them."""

    title: str
    columns: str = ""


_OVER = "{ratio:.2f}x [{ratio_low:.2f}, {ratio_high:.2f}]"
_OF_READ = (
    "GB/s = {gbps:.1f} | read GB/s = {read_gbps:.1f} | "
    "% of read = {pct_of_limit:.0f} [{pct_low:.0f}, {pct_high:.0f}]"
)

KINDS: Mapping[str, Kind] = {
    "strict": Kind(
        "Strict contract",
        "test | tok/s = {tok_s:.4g} | 95 % = {tok_s_95[0]:.4g} to {tok_s_95[1]:.4g} | "
        "kernels alone = {kernels_tok_s:.4g} | GB/s = {gbps:.2f} | read GB/s = {read_gbps:.2f} | "
        "% of limit = {pct_of_limit:.0f} | "
        "95 % = {pct_of_limit_95[0]:.0f} to {pct_of_limit_95[1]:.0f}",
    ),
    "harness": Kind("Harness: fresh processes in turns"),
    "peers": Kind(
        "Models beside other engines",
        "model | format | test | engine | tok/s = {tok_s:.2f} | GB/s = {gbps:.1f} | "
        "read GB/s = {read_gbps:.1f} | % of read = {pct_of_limit:.0f} | "
        f"Clocher / peer = {_OVER} | note",
    ),
    "linear": Kind(
        "Matrix products",
        f"format | N x K = {{N}} x {{K}} | M | threads | engine | us = {{us:.1f}} | {_OF_READ} | "
        f"% of dots = {{pct_of_dots:.0f}} | Clocher / engine = {_OVER} | right = {{correct}} | "
        "note",
    ),
    "real": Kind(
        "Published files",
        "model | engine | tokens = {tokens_text} | "
        "KLD of text = {kld_text:.5f} ± {kld_error_text:.5f} | same top-1 = {same_top_text:.4f} | "
        "perplexity = {perplexity_text:.3f} | over fp32 = {ppl_ratio_text:.4f} | "
        "tokens = {tokens_turns} | KLD of turns = {kld_turns:.5f} ± {kld_error_turns:.5f} | "
        "same top-1 = {same_top_turns:.4f} | MMLU, % = {mmlu:.1f} ± {mmlu_error:.1f} | "
        "GSM8K, % = {gsm8k:.1f} ± {gsm8k_error:.1f} | "
        "HumanEval, % = {humaneval:.1f} ± {humaneval_error:.1f} | pp512 = {pp512:.0f} | "
        "tg64 = {tg64:.1f} | start, s = {start_s:.2f} | MiB = {memory_mib:.0f}",
    ),
    "quantise": Kind(
        "Quantised real weights",
        "model | format | method | bits of the layers = {bits:.2f} | of all = {all_bits:.2f} | "
        "MiB = {mib:.1f} | "
        "KLD of text = {kld_text:.5f} ± {kld_error_text:.5f} | over llama.cpp = {over_text:.2f} | "
        "KLD of turns = {kld_turns:.5f} ± {kld_error_turns:.5f} | "
        "over llama.cpp = {over_turns:.2f} | same top-1 = {same_top_text:.4f} | "
        "perplexity, over floats = {ppl_ratio_text:.4f}",
    ),
    "speculation": Kind(
        "Speculation by kind of text",
        "text | setting | n | tok/s off = {off_tok_s:.1f} | tok/s = {tok_s:.1f} | "
        "over off = {over_off:.2f}x | tokens a pass = {tokens_per_pass:.2f} | "
        "same ids = {correct} | note",
    ),
    "schemas": Kind(
        "JSON schemas",
        "suite | schemas = {n} | compiled | ms, median = {compile_ms_p50:.1f} | "
        "p99 = {compile_ms_p99:.0f} | us a mask, median = {mask_us_p50:.0f} | "
        "p99 = {mask_us_p99:.0f} | most = {mask_us_max:.0f} | "
        "obeying texts allowed = {accepted} of {accepted_of} | "
        "others stopped = {rejected} of {rejected_of} | "
        "texts at T = 1 = {asked} | ended = {ended} | obey = {obeying}",
    ),
    "tools": Kind(
        "Tool calls",
        "suite | server = {engine} | tool_choice = {choice} | n | "
        "right, % = {right:.1f} ± {error:.1f} | parseable, % = {parseable:.1f} | s = {seconds:.0f}",
    ),
    "block_sparse": Kind(
        "Block-sparse weights",
        "block | product = {op} | sparsity = {sparsity:.0%} | us = {us:.0f} | GB/s = {gbps:.1f} | "
        "% of read = {pct_of_limit:.0f} | x dense = {speedup:.2f} | right = {correct} | "
        "break-even density = {break_even:.0%}",
    ),
    "ptq_calib": Kind(
        "Min-max calibration",
        "tensor | "
        + " | ".join(
            f"{what} {kind} = {{{what}_{kind}:.6f}}"
            for what in ("cosine", "rms")
            for kind in ("per-tensor", "per-row", "per-group")
        ),
    ),
    "profile": Kind(
        "Where a step goes",
        "call = {name} | calls | us = {us:.1f} | share = {share:.1%} | "
        "waiting us = {waiting_us:.1f} | bytes = {nbytes:,} | GB/s = {gbps:.1f} | note",
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


def table(columns: str, rows: Iterable[Row]) -> Table:
    """Return a table of rows, without empty columns.

    `columns` are headings, each with a format string unless it names the value: "format | GB/s =
    {gbps:.1f}". A row without the value leaves its cell empty.
    """
    pairs = [column.partition(" = ") for column in columns.split(_BAR)]
    lines = [[_cell(shown or f"{{{head}}}", row) for head, _, shown in pairs] for row in rows]
    filled = [index for index in range(len(pairs)) if any(line[index] for line in lines)]
    return Table(
        tuple(pairs[index][0] for index in filled),
        tuple(tuple(line[index] for index in filled) for line in lines),
    )


def tables_of(kind: str, rows: Sequence[Row]) -> list[Table]:
    """Return the tables of rows of a kind; of an unknown one, all short values."""
    if kind == "strict":
        return _strict_tables(*rows)
    if kind in KINDS and KINDS[kind].columns:
        return [table(KINDS[kind].columns, rows)]
    values = [
        (key, value)
        for row in rows
        for key, value in row.items()
        if key not in ("kind", "command", "op") and not isinstance(value, list | dict)
    ]
    rates = {key for key, value in values if isinstance(value, float)}
    names = dict.fromkeys(key for key, _ in values)
    shown = (f"{key} = {{{key}:.4g}}" if key in rates else key for key in names)
    return [table(_BAR.join(shown), rows)]


def _strict_tables(contract: Row, *tests: Row) -> list[Table]:
    """Return the tables of tests, windows and checks."""
    windows = [
        {"name": name.replace("_", " "), "cold": cold, "warm": warm}
        for name in ("kernels", "strict", "end_to_end")
        for cold, warm in [[contract["windows"][k][f"{name}_s"] for k in ("cold", "warm")]]
    ]
    marked = [{**c, "mark": MARKS.get(c["status"], "?")} for c in contract["checks"]]
    return [
        table(KINDS["strict"].columns, tests),
        table("window = {name} | cold, s = {cold:.3f} | warm, s = {warm:.3f}", windows),
        table("contract = {mark} | check = {name} | figures = {detail}", marked),
    ]


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


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except ClocherError as error:
        raise UsageError(str(error)) from None


@_named_errors()
def read_rows(path: Path) -> list[Row]:
    """Return a harness file's rows, without an unterminated last line, or UsageError."""
    data = read_bytes(path, MAX_BYTES)
    return [_row(*line) for line in parse_lines(data[: data.rfind(b"\n") + 1], path)]


@_named_errors()
def read_file(path: Path) -> ResultFile:
    """Return a result file (JSON or JSONL); UsageError if it is not one."""
    if path.suffix == ".jsonl":
        rows, kind = read_rows(path), "harness"
    else:
        rows = parse_json(read_bytes(path, MAX_BYTES), str(path))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{path}: expected a list of rows, as --json of a bench writes it")
        said = rows[0].get("kind", rows[0].get("op")) if rows else None
        kind = said if isinstance(said, str) else "other"
    first = rows[0] if rows else {}
    if kind == "strict" and not isinstance(first.get("checks"), list):
        raise UsageError(f"{path}: its first row is not a contract with checks")
    named = _NAMED.match(path.name)
    date, machine = named.groups() if named else ("", "")
    if isinstance(first.get("machine"), dict):
        date = str(first.get("started", first.get("date", date)))[:10]
        machine = machine_text(first["machine"])
    return ResultFile(path.name, kind, rows, date, machine)


def read_folder(folder: Path = FOLDER) -> list[ResultFile]:
    """Return every result file of a folder, by name; UsageError if one is invalid."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory; give one with result files")
    paths = (path for path in folder.iterdir() if path.suffix in (".json", ".jsonl"))
    return [read_file(path) for path in sorted(paths)]


def machine_text(machine: Row) -> str:
    """Return what a row says of a machine, in one line."""
    memory = machine.get("memory_bytes")
    shown = {**machine, "gib": memory / 2**30 if is_number(memory) else None}
    return _cell("{cpu}, {cpus} CPUs, {gib:.0f} GiB, Linux {kernel}", shown)


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


def _row(found: Row, where: str) -> Row:
    row: Row = {"why": [], "ignored": [], "line": None, **found}
    if read_as(row, _HarnessRow, where).status == "ok" and row["line"] is None:
        raise UsageError(f"{where}: a run that is ok has no line")
    return row
