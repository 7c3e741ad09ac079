"""Running cells: fresh processes in turns, a row each, void ones repeated, what is done kept."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bench.clock import machine
from bench.sweep.cells import Cell, code_sha256, prompts_sha256, source_names
from bench.sweep.results import SCHEMA, Row, append_row, read_rows
from clocher_runtime.command.jsonline import clocher_version

REST_S = 1.0
"""Pause before a void run is repeated; it grows with each attempt."""

ENGINE = (sys.executable, "-m", "clocher_runtime.cli")

_ERROR_CHARS = 2000
_GLANCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Child:
    """What a process left behind.

    Attributes:
        exit_code: of the process.
        line: its JSON line, None if it wrote none.
        error: the end of its standard error.
        elapsed_s: how long it took.
        state: what else the machine did meanwhile.
    """

    exit_code: int
    line: dict[str, Any] | None
    error: str
    elapsed_s: float
    state: machine.State


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        cells: configurations, each with its key.
        runs: processes of each that must count.
        retries: how often a void run is repeated.
        others_limit: per cent of CPU time that other processes may take.
        tokens_max: token ids of each prompt that the first row of a cell keeps.
        patience_s: how long, in all, to wait for a quiet machine before runs.
        command: that runs it, for the rows.
    """

    cells: Sequence[Cell]
    runs: int
    retries: int = 3
    others_limit: float = machine.OTHERS_LIMIT
    tokens_max: int = 64
    patience_s: float = 0.0
    command: str = ""


@dataclass(slots=True)
class Harness:
    """Runs a plan into a result file.

    Attributes:
        path: the result file; rows that it has already are not run again.
        say: told what goes on.
        launch: runs the process of a cell; tests pass their own.
        rest_s: see `REST_S`.
    """

    path: Path
    say: Callable[[str], None]
    launch: Callable[[Cell], Child] = field(default_factory=lambda: launch)
    rest_s: float = REST_S
    _patience_s: float = 0.0

    def run(self, plan: Plan) -> list[Row]:
        """Run what is missing, in turns, and return all rows of the file.

        In every round each cell runs once, and the order turns by one from round to round. With
        more than one run, each cell starts with a process that warms caches and does not count.
        """
        rows = read_rows(self.path) if self.path.exists() else []
        done = {(row["key"], row["run"]) for row in rows if row["status"] == "ok"}
        missing = {
            cell.key: [n for n in range(1, plan.runs + 1) if (cell.key, n) not in done]
            for cell in plan.cells
        }
        total = sum(map(len, missing.values()))
        if skipped := plan.runs * len(plan.cells) - total:
            self.say(f"{skipped} of {plan.runs * len(plan.cells)} runs are in {self.path} already")
        failed: set[str] = set()
        self._patience_s = plan.patience_s
        for number in range(0 if plan.runs > 1 else 1, plan.runs + 1):
            turn = number % max(len(plan.cells), 1)
            for cell in [*plan.cells[turn:], *plan.cells[:turn]]:
                wanted = missing[cell.key]
                if cell.key in failed or not wanted or (number and number not in wanted):
                    continue
                rows += self._until_it_counts(plan, cell, number, rows)
                if rows[-1]["status"] == "error":
                    failed.add(cell.key)
        return rows

    def _until_it_counts(
        self, plan: Plan, cell: Cell, number: int, before: Sequence[Row]
    ) -> list[Row]:
        made: list[Row] = []
        for attempt in range(1, plan.retries + 2):
            self._wait_for_quiet(plan)
            self.say(f"run {number} of {plan.runs}: {cell.label}")
            started = datetime.now(UTC)
            child = self.launch(cell)
            first = not any(row["key"] == cell.key for row in [*before, *made])
            row = {
                **_facts(cell, child, plan, first),
                "run": number,
                "attempt": attempt,
                "order": len(before) + len(made) + 1,
                "started": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            row["status"], row["why"] = judge(child, plan, number)
            append_row(self.path, row)
            made.append(row)
            if row["status"] == "error":
                self.say(f"failed: {'; '.join(row['why'])}")
            if row["status"] != "void":
                break
            again = "repeated" if attempt <= plan.retries else "given up"
            self.say(f"void, {again}: {'; '.join(row['why'])}")
            if attempt <= plan.retries:
                time.sleep(self.rest_s * attempt)
        return made

    def _wait_for_quiet(self, plan: Plan) -> None:
        """Wait while others use the machine, as long as there is patience left."""
        said = False
        while self._patience_s > 0:
            before = machine.read()
            time.sleep(_GLANCE_S)
            _, state = machine.since(before)
            if not state.disturbances(_GLANCE_S, plan.others_limit):
                return
            if not said:
                self.say(f"waiting for a quiet machine ({self._patience_s:.0f} s at most)")
                said = True
            self._patience_s -= _GLANCE_S


def judge(child: Child, plan: Plan, number: int) -> tuple[str, list[str]]:
    """Return the status of a run, and why."""
    if child.exit_code or child.line is None or child.line.get("status") != "ok":
        message = (child.line or {}).get("message") or child.error or "it wrote no JSON line"
        return "error", [f"exit code {child.exit_code}: {message}"]
    if number == 0:
        return "warmup", []
    why = child.state.disturbances(child.elapsed_s, plan.others_limit)
    return ("void", why) if why else ("ok", [])


def _bare(cell: Cell) -> list[str]:
    """Return the flag of bare steps: tokens are guessed only where a cell asks for that."""
    return [] if "speculate" in cell.settings else ["--speculate=off"]


def launch(cell: Cell, program: Sequence[str] = ENGINE) -> Child:
    """Run the process of a cell."""
    environment = cell.environment(os.environ)
    before = machine.read()
    done = subprocess.run(
        [*program, *cell.flags(), *_bare(cell)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    elapsed_s, state = machine.since(before)
    return Child(
        done.returncode,
        _line(done.stdout),
        done.stderr.strip()[-_ERROR_CHARS:],
        elapsed_s,
        state,
    )


@cache
def build() -> dict[str, Any]:
    """Return version, commit and source of what is measured."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "version": clocher_version(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "code_sha256": code_sha256(),
    }


def _facts(cell: Cell, child: Child, plan: Plan, first: bool) -> Row:
    config = cell.config()
    line = child.line
    outputs = (line or {}).get("outputs") or []
    ids = [output["token_ids"] for output in outputs]
    kept = [{**o, "token_ids": o["token_ids"][: plan.tokens_max]} for o in outputs]
    names = {text for name in cell.swept for text in source_names(name)}
    return {
        "schema": SCHEMA,
        "kind": "harness",
        "command": plan.command,
        "key": cell.key,
        "label": cell.label,
        "swept": dict(cell.swept),
        "ignored": [t for t in (line or {}).get("hints_ignored", []) if t.split("=")[0] in names],
        "settings": dict(cell.settings),
        "prompts_file": None if config.prompts_file is None else str(config.prompts_file),
        "prompts_sha256": prompts_sha256(config),
        "run": 0,
        "attempt": 0,
        "order": 0,
        "status": "",
        "why": [],
        "started": "",
        "elapsed_s": round(child.elapsed_s, 3),
        "machine": machine.describe(),
        "state": child.state.document(),
        "build": build(),
        "exit_code": child.exit_code,
        "line": {**line, "outputs": []} if outputs and line else line,
        "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest() if ids else None,
        "outputs": kept if first and outputs else None,
    }


def _line(output: str) -> dict[str, Any] | None:
    for text in reversed(output.splitlines()):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return None
