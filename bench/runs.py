"""Run cells in fresh processes, in turns; void runs are repeated, finished ones kept."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine
from bench.cells import Cell, code_sha256, prompts_sha256
from bench.record import SCHEMA, Row, append_row, read_rows
from clocher_kernels import __version__
from clocher_runtime.config.commands import ALL

REST_S = 1.0
"""Pause before a void run is repeated; it grows with each attempt."""

ENGINE = (sys.executable, "-m", "clocher_runtime.cli")

_ERROR_CHARS = 2000


class Child(NamedTuple):
    """The result of a process: its JSON line, the end of stderr, the machine's state."""

    exit_code: int
    line: dict[str, Any] | None
    error: str
    state: machine.State


def launch(cell: Cell, program: Sequence[str] = ENGINE) -> Child:
    """Run the process of a cell, without drafting unless the cell sets it."""
    given = {"CLOCHER_SPECULATE": "off", **cell.environment(os.environ), "CLOCHER_EMBEDDED": "1"}
    before = machine.read()
    done = subprocess.run(
        program,
        env=given,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    state, error = machine.since(before), done.stderr.strip()[-_ERROR_CHARS:]
    return Child(done.returncode, _line(done.stdout), error, state)


@dataclass(slots=True)
class Harness:
    """Runs `runs` valid processes of each cell into the result file `path`.

    `others_limit` is in % of CPU time. `tokens_max`: prompt token ids kept in a cell's first row.
    `say` prints progress.
    """

    path: Path
    cells: Sequence[Cell]
    runs: int
    retries: int = 3
    others_limit: float = machine.OTHERS_LIMIT
    tokens_max: int = 64
    command: str = ""
    say: Callable[[str], None] = lambda said: None
    launch: Callable[[Cell], Child] = launch
    rest_s: float = REST_S

    def run(self) -> list[Row]:
        """Run missing rows in rotating order, with a warm-up per cell; return all rows."""
        rows = read_rows(self.path) if self.path.exists() else []
        done = {(row["key"], row["run"]) for row in rows if row["status"] == "ok"}
        turns = [
            (number, self.cells[(number - 1 + turn) % len(self.cells)])
            for number in range(1, self.runs + 1)
            for turn in range(len(self.cells))
        ]
        missing = [(number, cell) for number, cell in turns if (cell.key, number) not in done]
        if skipped := len(turns) - len(missing):
            self.say(f"{skipped} of {len(turns)} runs are in {self.path} already")
        waiting = {cell.key for _, cell in missing} if self.runs > 1 else set()
        warm = [(0, cell) for cell in self.cells if cell.key in waiting]
        failed: set[str] = set()
        for number, cell in warm + missing:
            if cell.key not in failed:
                self._until_it_counts(cell, number, rows)
                failed |= {cell.key} if rows[-1]["status"] == "error" else set()
        return rows

    def _until_it_counts(self, cell: Cell, number: int, rows: list[Row]) -> None:
        for attempt in range(1, self.retries + 2):
            self.say(f"run {number} of {self.runs}: {cell.label}")
            started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            child = self.launch(cell)
            status, why = judge(child, self.others_limit, number)
            first = not any(row["key"] == cell.key for row in rows)
            row = self._facts(cell, child, first)
            row |= {"run": number, "attempt": attempt, "order": len(rows) + 1}
            row |= {"started": started, "status": status, "why": why}
            append_row(self.path, row)
            rows.append(row)
            if status != "void":
                if status == "error":
                    self.say(f"failed: {'; '.join(why)}")
                return
            again = attempt <= self.retries
            self.say(f"void, {'repeated' if again else 'given up'}: {'; '.join(why)}")
            if again:
                time.sleep(self.rest_s * attempt)

    def _facts(self, cell: Cell, child: Child, first: bool) -> Row:
        """Return a row without its run number and status."""
        config, line = cell.config(), child.line or {}
        outputs = line.get("outputs") or []
        ids = [output["token_ids"] for output in outputs]
        kept = [{**o, "token_ids": o["token_ids"][: self.tokens_max]} for o in outputs]
        names = {text for name in cell.swept for text in (ALL[name].flag, *ALL[name].env)}
        ignored = [text for text in line.get("hints_ignored", []) if text.split("=")[0] in names]
        return {
            "schema": SCHEMA,
            "kind": "harness",
            "command": self.command,
            "key": cell.key,
            "label": cell.label,
            "swept": dict(cell.swept),
            "ignored": ignored,
            "settings": dict(cell.settings),
            "prompts_file": None if config.prompts_file is None else str(config.prompts_file),
            "prompts_sha256": prompts_sha256(config),
            "elapsed_s": round(child.state.seconds, 3),
            "machine": machine.describe(),
            "state": child.state._asdict(),
            "build": build(),
            "exit_code": child.exit_code,
            "line": {**line, "outputs": []} if outputs else child.line,
            "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest() if ids else None,
            "outputs": kept if first and outputs else None,
        }


def judge(child: Child, others_limit: float, number: int) -> tuple[str, list[str]]:
    """Return the status of a run and its reasons."""
    if child.exit_code or child.line is None or child.line.get("status") != "ok":
        message = (child.line or {}).get("message") or child.error or "it wrote no JSON line"
        return "error", [f"exit code {child.exit_code}: {message}"]
    if number == 0:
        return "warmup", []
    why = child.state.disturbances(others_limit)
    return ("void", why) if why else ("ok", [])


@cache
def build() -> dict[str, Any]:
    """Return version, commit and source hash of the engine."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=20)
        commit = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return {
        "version": __version__,
        "commit": commit.removesuffix("-dirty") or None,
        "dirty": commit.endswith("-dirty") if commit else None,
        "code_sha256": code_sha256(),
    }


def _line(output: str) -> dict[str, Any] | None:
    for text in reversed(output.splitlines()):
        with suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(text), dict):
                return value
    return None
