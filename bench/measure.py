"""How things are compared: in turns, by medians, with an interval for every ratio.

Turns are those of `clocher_runtime.quality.turns`. A ratio is that of
the medians; its interval comes from drawing rounds anew, contestants of a round together, because
they shared the machine's mood.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine.topology import cpu_name, usable_cpus
from clocher_runtime.quality.statistics import ratio as ratio
from clocher_runtime.quality.turns import in_turns

Rows = list[dict[str, Any]]

REST_S = 0.05
"""Pause between two contestants: thread pools spin for a while after their work."""

_ABOVE_LIMIT = 105.0


class NotMeasured(Exception):
    """A contestant that cannot run here; its text is the reason."""


def interleave(
    runs: Mapping[str, Callable[[], float]],
    rounds: int,
    progress: Callable[[int, str], None] | None = None,
    rest_s: float = REST_S,
) -> dict[str, list[float]]:
    """Run every contestant once a round, see `in_turns`, with a pause before each.

    Args:
        runs: what to call, by name; it returns its measurement.
        rounds: how often; one more round comes first and is thrown away.
        progress: called with (calls done, name of the next).
        rest_s: the pause, in seconds.

    Returns:
        The measurements of each contestant, by round.
    """

    def pause(done: int, name: str) -> None:
        if progress:
            progress(done, name)
        time.sleep(rest_s)

    return in_turns(runs, rounds, pause)


def seconds(call: Callable[[], object], at_least: float = 0.0) -> float:
    """Return the seconds of one call; it is repeated until `at_least` seconds have passed."""
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least:
            return elapsed / calls


def limit_note(percent: float) -> str:
    """Return a warning where a speed is above the limit that memory sets, else ""."""
    if percent <= _ABOVE_LIMIT:
        return ""
    return "above the limit: the weights lie in a cache, or the limit was read too low"


def machine() -> str:
    """Return the processor, the CPUs that may be used, and how busy the machine is."""
    return f"{cpu_name()}, {len(usable_cpus())} CPUs, load {os.getloadavg()[0]:.1f} at the end"


def help_text(docstring: str | None) -> str:
    """Return a docstring as the text of --help.

    In a raw docstring, click's mark of a paragraph that keeps its lines is spelled out.
    """
    return (docstring or "").replace("\\b\n", "\b\n")


def print_table(table: Table) -> None:
    """Print a table, wide where there is no terminal to fit it to."""
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)


def write_json(path: Path, rows: Rows) -> None:
    """Write rows as a JSON list, a row a line; the file appears whole or not at all."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    write_file(path, f"[\n{lines}\n]\n".encode())
