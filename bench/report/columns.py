"""Columns, declared once: the same cells stand on the terminal, in Markdown and in HTML.

A cell is text in which `...` is code.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from rich.text import Text

from clocher_runtime.quality.statistics import Estimate, Ratio

Row = Mapping[str, Any]
Show = Callable[[Row], str]
Columns = Mapping[str, Show]
"""Heading, with the unit -> what a row shows there."""

NONE = "-"
MARKS: Mapping[str, str] = {"pass": "✓", "fail": "✗", "undecided": "?"}
_FIGURE = re.compile(r"[-+(]?[0-9][0-9.,%x]*( \[[^]]*\])?\)?|-")
_RIGHT = {True: "yes", False: "NO", None: NONE}


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def on_terminal(self, title: str = "") -> rich.table.Table:
        """Return it for the terminal."""
        made = rich.table.Table(title=title)
        for index, heading in enumerate(self.head):
            cells = [line[index] for line in self.rows]
            figures = all(is_figure(cell) or not cell for cell in cells)
            made.add_column(Text(heading), justify="right" if figures else "left", overflow="fold")
        for line in self.rows:
            made.add_row(*(Text(cell.replace("`", "")) for cell in line))
        return made


def table(columns: Columns, rows: Iterable[Row]) -> Table:
    """Return the table of some rows."""
    return Table(
        tuple(columns), tuple(tuple(show(row) for show in columns.values()) for row in rows)
    )


def text(key: str) -> Show:
    """Show a text as it is; nothing where there is none."""
    return lambda row: plain(str(row.get(key) or ""))


def code_of(key: str) -> Show:
    """Show a text as code."""
    return lambda row: code(str(row[key]))


def model(key: str = "model") -> Show:
    """Show the last part of a model's path."""
    return lambda row: plain(model_name(row[key]))


def number(key: str, scale: float = 1.0, none: str = NONE) -> Show:
    """Show a number, over `scale`, with four digits that count."""
    return lambda row: none if row.get(key) is None else figure(row[key] / scale)


def estimate(key: str, ends: str) -> Show:
    """Show a number and its interval, which stands under another key."""
    return lambda row: NONE if row.get(key) is None else spelled(row[key], row.get(ends))


def times(key: str, *ends: str) -> Show:
    """Show a ratio and its interval: under one key as a list, or under two."""
    return _with_interval("{:.2f}x", "{:.2f}", key, ends)


def percent(key: str, *ends: str) -> Show:
    """Show per cent and its interval: under one key as a list, or under two."""
    return _with_interval("{:.0f}", "{:.0f}", key, ends)


def _with_interval(value: str, end: str, key: str, ends: Sequence[str]) -> Show:
    def show(row: Row) -> str:
        if row.get(key) is None:
            return NONE
        found = [row.get(name) for name in ends]
        low_high = found[0] if len(ends) == 1 else found if None not in found else None
        interval = f" [{', '.join(map(end.format, low_high))}]" if low_high else ""
        return value.format(row[key]) + interval

    return show


def share(key: str) -> Show:
    """Show a share as per cent."""
    return lambda row: f"{row[key]:.0%}"


def right(key: str = "correct") -> Show:
    """Show whether something was right; NO is loud."""
    return lambda row: _RIGHT[row.get(key)]


def is_figure(cell: str) -> bool:
    """Whether a cell holds a number, perhaps with its interval, and nothing else."""
    return bool(_FIGURE.fullmatch(cell))


def figure(value: float) -> str:
    """Return a number with four digits that count."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spelled(value: float, ends: Sequence[float] | None) -> str:
    """Return a value, and its interval in brackets if there is one."""
    return f"{figure(value)} [{figure(ends[0])}, {figure(ends[1])}]" if ends else figure(value)


def of_runs(found: Estimate | None) -> str:
    """Return the median of some runs with its interval."""
    return NONE if found is None else spelled(found.value, found.ends)


def of_ratio(found: Ratio | None) -> str:
    """Return a ratio of speeds with its interval."""
    if found is None:
        return NONE
    return f"{found.value:.3f}" + (f" [{found.low:.3f}, {found.high:.3f}]" if found.known else "")


def code(shown: str) -> str:
    """Return text that is shown as it is, in a cell or a paragraph."""
    return f"`{plain(shown)}`"


def plain(shown: str) -> str:
    """Return text of a result file without anything that a cell would take for markup."""
    return " ".join(shown.replace("`", "'").split())


def model_name(path: str) -> str:
    """Return the last part of a model's path."""
    return Path(path).name or path


ATTENTION: Columns = {
    "model": text("model"),
    "cache": code_of("kv"),
    "context": text("context"),
    "tokens": text("tokens"),
    "threads": text("threads"),
    "GB/s": number("gbps"),
    "read GB/s": number("read_gbps"),
    "% of limit [95 %]": percent("pct_of_limit", "pct_low", "pct_high"),
    "GFLOP/s": number("gflops"),
}
SPARSE_ATTENTION: Columns = {
    "model": text("model"),
    "cache": code_of("kv"),
    "context": text("context"),
    "--attn": code_of("attn"),
    "read": share("share"),
    "us a layer": number("us_per_layer"),
    "dense": number("dense_us_per_layer"),
    "times as fast [95 %]": times("of_dense", "of_dense_low", "of_dense_high"),
    "GB/s": number("gbps"),
    "read GB/s": number("read_gbps"),
}
SKIP: Columns = {
    "model": model(),
    "of": text("test"),
    "zero gates": share("zero_gates"),
    "zero codes": share("zero_codes"),
    "skipping": number("skipping"),
    "dense": number("dense"),
    "times as fast [95 %]": times("speedup", "low", "high"),
    "same": right(),
}
ACT_SPARSITY: Columns = {
    "model": model(),
    "--act-sparsity": code_of("rule"),
    "zeros": share("zeros"),
    "tok/s": number("sparse"),
    "dense tok/s": number("dense"),
    "times as fast [95 %]": times("speedup", "low", "high"),
}
SPECULATION: Columns = {
    "workload": text("workload"),
    "engine": text("engine"),
    "streams": text("streams"),
    "tok/s": number("tok_s"),
    "tokens a pass": number("tokens_per_pass"),
    "over off [range]": times("over_off", "over_off_range"),
    "over the peer [range]": times("over_peer", "over_peer_range"),
    "same ids": text("same_ids"),
}
