"""The skeleton of a case: options, subjects run in turns, rows, table, JSON file, exit code."""

import ctypes
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import click
import numpy as np
import rich.console

from bench.record import Row, print_table, tables_of, without_directories, write_json
from clocher_kernels.errors import ClocherError
from clocher_kernels.formats import parse_format
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import Codes, Command, option, text_of
from clocher_runtime.command.parameters import COUNT, NEW, PATH, Listed, numbers, sides
from clocher_runtime.engine.topology import cpu_name, default_threads, usable_cpus
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.statistics import in_turns, ratio
from cpu_fallback.tiles.multiply import OUT, dots

if TYPE_CHECKING:
    from clocher_runtime.engine.load import Model

Key = TypeVar("Key")

REST_S = 0.05
"""Pause between two subjects: thread pools spin for a while after their work."""

_ABOVE_LIMIT, _TIMEOUT_S, _ANSWER_S = 105.0, 4 * 3600, 3600
_TURNS = 1 << 17


class NotMeasured(Exception):
    """A subject cannot run here; the text is the reason."""


def output_of(command: Sequence[object]) -> str:
    """Return what a program prints; NotMeasured with its last words if it fails."""
    words = [str(word) for word in command]
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None
    if run.returncode:
        said = run.stderr.strip().splitlines() or [f"{words[0]}: exit code {run.returncode}"]
        raise NotMeasured(said[-1].removeprefix("Error: "))
    return run.stdout


class Refused(NotMeasured):
    """A server answered with an HTTP error."""


def answer_of(url: str, wish: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON of the answer to a POST of `wish`, or to a GET; raises NotMeasured."""
    body = None if wish is None else json.dumps(wish).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_ANSWER_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        error.close()
        raise Refused(f"{url}: {error}") from None
    except (OSError, ValueError) as error:
        raise NotMeasured(f"{url}: {error}") from None


def _format(text: str) -> str:
    try:
        return text if text == "ggml" else parse_format(text).name
    except ClocherError as error:
        raise click.BadParameter(str(error)) from None


COUNTS = numbers(1, 999_999, "1,2")
SHAPES = Listed(sides, "NxK, such as 4096x14336")
FORMATS = Listed(_format, "formats of weights")
PAGES = ("4k", "2m")


def _default_counts() -> str:
    return ",".join(str(n) for n in sorted({1, default_threads()}))


TEAMS = option("--threads", COUNTS, default=_default_counts, show_default="1 and all")
TEAM = option("--threads", COUNT, default=default_threads, show_default="all usable cores")
MODEL_DIR = option("--model-dir", PATH, "default: the embedded model", envvar="MODEL_DIR")
MIB = option("--mib", click.IntRange(2), "buffer to read", default=512)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is timed; `run` makes `calls` calls, `awake` keeps its threads awake between runs."""

    run: Callable[[], object]
    calls: int = 1
    awake: Callable[[], AbstractContextManager[object]] = nullcontext
    close: Callable[[], object] = lambda: None

    def seconds(self, at_least: float = 0.0) -> float:
        """Return the seconds of a call, repeated until `at_least` seconds have passed."""
        with self.awake():
            return seconds(self.run, at_least) / self.calls


def turns(runs: Mapping[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Return each subject's measurements by round, after a discarded warm-up round."""
    return in_turns(runs, rounds, lambda done, name: time.sleep(REST_S))


def seconds(call: Callable[[], object], at_least: float = 0.0) -> float:
    """Return the seconds of one call, repeated until `at_least` seconds have passed."""
    calls = 0
    start = time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= at_least:
            return elapsed / calls


def dot_seconds(threads: int, at_least: float) -> float:
    """Return the seconds in which some threads add 10^9 products of bytes, from registers."""
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 2)(dots.address)
    out = np.zeros((threads, OUT), np.uint8)
    with ThreadPoolExecutor(threads) as pool:
        work = partial(pool.map, lambda own: call(_TURNS, own.ctypes.data), out)
        took = seconds(lambda: list(work()), at_least)
    return float(took * 1e9 / (threads * _TURNS * 8 * OUT))


def of_read(speeds: Sequence[float], reads: Sequence[float]) -> Row:
    """Return row fields for speeds beside the read bandwidth of the same rounds, GB/s."""
    share = ratio(speeds, reads)
    row = {"gbps": median(speeds), "read_gbps": median(reads), "pct_of_limit": 100 * share.value}
    return row | {"pct_low": 100 * share.low, "pct_high": 100 * share.high}


def over(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Return row fields for a ratio of speeds of the same rounds."""
    found = ratio(ours, theirs)
    return {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}


def limit_note(percent: float) -> str:
    """Return a warning if a speed is above the memory limit, else ""."""
    if percent <= _ABOVE_LIMIT:
        return ""
    return "above the limit: the weights lie in a cache, or the limit was read too low"


def opened(model_dir: Path | None, precision: str | None = None) -> "Model":
    """Return the model of a directory, or the embedded one."""
    from clocher_runtime.checkpoints import open_checkpoint  # lazy: tables need no checkpoint
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.engine.load import load_model

    return load_model(open_checkpoint(model_dir or embedded_model()), precision)


def experiment(
    kind: str,
    text: str | None,
    *options: click.Parameter,
    title: str = "",
    rounds: int | None = None,
    code: Callable[[Sequence[Row]], int] = lambda rows: not all(r.get("correct", 1) for r in rows),
    exit_codes: Codes = MappingProxyType({}),
) -> Callable[[Callable[[Any], Iterable[Row]]], click.Command]:
    """Return a decorator that makes a command of a function that yields rows.

    `kind` names the case and its rows, `title` is formatted from the first row. The function gets
    the options' values as attributes; `rounds` None omits --rounds. The command exits with the
    `code` of the rows.
    """

    def decorate(measure: Callable[[Any], Iterable[Row]]) -> click.Command:
        def run(console: Console, out: Path | None, **values: Any) -> int:
            words = without_directories([*console.words])
            about = {"kind": kind, "command": shlex.join(["python", "-m", "bench", kind, *words])}
            rows: list[Row] = []
            terminal = rich.console.Console(stderr=True)
            try:
                with terminal.status(kind) if terminal.is_terminal else nullcontext() as status:
                    for row in measure(SimpleNamespace(**values)):
                        rows.append({**about, **row})
                        if status:
                            status.update(f"{kind}: {len(rows)} rows")
            except NotMeasured as error:
                console.say(f"error: {error}")
                return ExitCode.BUG
            if rows:
                load = f"load {os.getloadavg()[0]:.1f} at the end"
                name = f"{title.format_map(rows[0])}, {cpu_name()}, {len(usable_cpus())} CPUs"
                for number, each in enumerate(tables_of(kind, rows)):
                    print_table(each.on_terminal("" if number else f"{name}, {load}"))
            if out and rows:
                write_json(out, rows)
            return int(code(rows))

        params = [*options, option("--json", NEW, "write rows there", name="out")]
        if rounds is not None:
            params.insert(-1, option("--rounds", COUNT, default=rounds))
        codes = {ExitCode.BUG: "a result was wrong or cannot be measured", **exit_codes}
        more = {"params": params, "callback": click.pass_obj(run), "exit_codes": codes}
        return Command(f"python -m bench {kind}", text_of(text), **more)

    return decorate
