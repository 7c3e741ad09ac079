r"""Speed by the strict contract: three windows, and checks that it can be believed.

    python -m bench.strict [--model-dir DIR] [--tokens N] [--depth D] [--threads N] [--json FILE]

Several processes, one after another, each measure a cold generation from launch to text and then,
in turns, the rows ppP and tgN @ dD as llama-bench names them. Variables of the engine (IE_...)
hold. docs/benchmarking.md says what each window holds and what each check means.
"""

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench import machine
from bench.cells import of_program
from bench.experiment import NEW, turns
from bench.record import Row, print_table, write_json
from bench.strict_checks import Check, Launch, checks, row, share_of_limit, tables, touched_sum
from clocher_kernels import __version__
from clocher_kernels.errors import ClocherError, UsageError
from clocher_kernels.plan import Touch
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, option, script
from clocher_runtime.command.loading import Engine, load_engine, numerics
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.config.commands import RunConfig, resolve
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.disk.files import read_text
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.probes import WorkTouch, rss_peak_mib
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.topology import cache_bytes, read_cpus, threads_of
from clocher_runtime.exit_codes import ExitCode, exit_code
from clocher_runtime.quality.speed import Case, prompt_ids
from cpu_fallback.team.bandwidth import Reader

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests/data/valid.txt"
CHECKED_TOKENS, CHECKED_BYTES = 8, 1 << 16
"""Tokens of the run whose checksum is verified; bytes per token if no work-touch is set."""

_CHARS_PER_TOKEN, _SPANS, _BATCHES = 12, 500, 7
_OWN = ("model", "format", "act_prec", NUMERICS[1], "device", "isa", "threads", "bytes_per_token")

Task = dict[str, Any]
"""Flags of a process, prompt_tokens P, tokens N, depth D, rounds, mib, text, launched_ns."""


class Process:
    """The measurements of one process."""

    def __init__(self, task: Task, config: RunConfig, engine: Engine) -> None:
        self.task, self.config, self.engine = task, config, engine
        team: Any = getattr(engine.session.executor, "_team", None)
        self._team, self._call = team, getattr(team, "_lead", None)
        self.kernels_known, self._ns = self._call is not None, 0
        self.steps = [0, 0]

    def touch(self, bytes_per_token: int) -> Touch:
        """Return a work-touch of the weights."""
        engine, stride = self.engine, self.config.stride_bytes
        made = engine.session.work_touch(bytes_per_token, stride)
        return WorkTouch(engine.files, bytes_per_token, stride) if made is None else made

    def _timed(self, *arguments: int) -> None:
        start = time.perf_counter_ns()
        if self._call is not None and arguments:
            self._call(*arguments)
        self._ns += time.perf_counter_ns() - start

    def generate(self, ids: Sequence[int], tokens: int, touch: Touch | None = None) -> Row:
        """Generate greedily; return ids and (strict, kernel) ns of prefill, decode and steps."""
        session, touch = self.engine.session, touch or self.touch(self.config.bytes_per_token)
        window = TimedWindow("strict", synchronize=session.synchronize)
        walk, self._ns = touch if touch.bytes_per_token else None, 0
        if self._call is not None:  # the compiled call of a step, below the public API
            self._team._lead = self._timed
        try:
            stream = session.generate([ids], tokens, Sampling(), frozenset(), window, walk)
            made = [next(stream).id]
            first_ns, self._ns = self._ns, 0
            made += [token.id for token in stream]
        finally:
            if self._call is not None:
                self._team._lead = self._call
        token_ns = [span.ns for span in window.spans if span.kind == "decode"]
        strict_ns = sum(token_ns)
        prefill = window.total_ns - strict_ns, first_ns
        decode = strict_ns, self._ns
        return {"ids": made, "prefill": prefill, "decode": decode, "token_ns": token_ns}

    def end_to_end(self, start_ns: int) -> Row:
        """Generate from text to text; return the three windows in ns."""
        ids = self.prompt()[: max(self.task["depth"], 1)]
        made = self.generate(ids, self.task["tokens"] + 1)
        if (tokenizer := self.engine.loaded.tokenizer) is not None:
            tokenizer.decode(made["ids"])
        return {
            "kernels_ns": made["prefill"][1] + made["decode"][1],
            "strict_ns": made["prefill"][0] + made["decode"][0],
            "end_to_end_ns": time.monotonic_ns() - start_ns,
        }

    def prompt(self) -> list[int]:
        """Return the longest prompt: the text repeated; fixed random ids without a tokenizer."""
        count = max(self.task["prompt_tokens"], self.task["depth"], 1)
        tokenizer = self.engine.loaded.tokenizer
        if tokenizer is None:
            return prompt_ids(self.engine.session, count)
        try:
            text = read_text(Path(self.task["text"]))[: _CHARS_PER_TOKEN * count]
        except OSError as error:
            raise UsageError(f"{self.task['text']}: cannot be read: {error.strerror}") from None
        ids = tokenizer.encode(text)
        if not ids:
            raise UsageError(f"{self.task['text']}: no tokens in it; give a text")
        return prompt_ids(self.engine.session, count, ids)

    def rounds(self) -> Row:
        """Run all tests in turns."""
        task, n = self.task, self.task["tokens"]
        ids = self.prompt()
        start = ids[: max(task["depth"], 1)]
        stream = self.engine.session.generate([start], 2 * n + 1, Sampling(), frozenset())
        reference = [token.id for token in stream]
        tests: dict[str, list[tuple[int, int]]] = {}
        same: dict[str, bool] = {}
        token_ns: list[list[int]] = []
        reader = Reader("2m", task["mib"] << 20)

        def read_prompt() -> float:
            done = self.generate(ids[: task["prompt_tokens"]], 1)
            tests.setdefault("pp", []).append(done["prefill"])
            return float(done["prefill"][0])

        def decode(name: str, prompt: list[int], tokens: int, expected: list[int]) -> float:
            done = self.generate(prompt, tokens + 1)
            tests.setdefault(name, []).append(done["decode"])
            same[name] = same.get(name, True) and done["ids"] == expected
            self.steps = [self.steps[0] + tokens, self.steps[1] + len(done["token_ns"])]
            if name == "tg":
                token_ns.append(done["token_ns"])
            return float(done["decode"][0])

        runs: dict[str, Callable[[], float]] = {
            "pp": read_prompt,
            "tg": lambda: decode("tg", start, n, reference[: n + 1]),
            "after": lambda: decode("after", start + reference[:n], n, reference[n:]),
            "double": lambda: decode("double", start, 2 * n, reference),
            "read": lambda: reader.gbps(threads_of(self.engine.loaded.config)),
        }
        read = turns(runs, task["rounds"], task.get("rest_s", 0.05))["read"]
        # The first round is discarded, as in llama-bench.
        return {
            "tests": {name: found[1:] for name, found in tests.items()},
            "token_ns": [ns for each in token_ns[1:] for ns in each],
            "read_gbps": read,
            "same_ids": same,
            "tokens_sha256": hashlib.sha256(np.array(reference, "<i4").tobytes()).hexdigest(),
            "tokens": self.steps[0],
            "steps": self.steps[1],
        }

    def checksum(self) -> Row:
        """Generate with a work-touch, and sum the same bytes with NumPy."""
        per_token, stride = self.config.bytes_per_token or CHECKED_BYTES, self.config.stride_bytes
        touch = self.touch(per_token)
        self.generate(self.prompt()[: max(self.task["depth"], 1)], CHECKED_TOKENS, touch)
        expected = touched_sum(self.engine.files, CHECKED_TOKENS, per_token, stride)
        walk = {"tokens": CHECKED_TOKENS, "bytes_per_token": per_token, "stride": stride}
        return {**walk, "got": touch.checksum, "expected": expected}

    def measuring_ns(self) -> float:
        """Return the cost per step of the window and the kernel timers, in ns."""
        window = TimedWindow("nothing", synchronize=self.engine.session.synchronize)
        costs = []
        for _ in range(_BATCHES):
            start = time.perf_counter_ns()
            for _ in range(_SPANS):
                with window.span("decode", 1):
                    self._timed()
            costs.append((time.perf_counter_ns() - start) / _SPANS)
        return min(costs)


def measure(task: Task) -> Row:
    """Return all measurements of one process."""
    longest = max(task["prompt_tokens"], task["depth"] + 2 * task["tokens"]) + 2
    bare = {"speculate": "off", "context": str(longest)}
    config = resolve({**task["flags"], **bare}, of_program(os.environ))
    if config.stub or config.batch > 1:
        raise UsageError("the strict contract is of one sequence of a model; drop --stub, BATCH")
    console = Console(stream=io.StringIO())
    engine = load_engine(config, console.compiling, console.packing)
    loaded, session = engine.loaded, engine.session
    try:
        if loaded.config.backend != "cpu":
            raise UsageError(
                f"device is {loaded.config.backend}: its kernels have no clock here; give "
                "--device cpu (python -m bench.gpu_suite measures GPUs)"
            )
        process = Process(task, config, engine)
        found: Row = {"cold": process.end_to_end(task["launched_ns"])}
        found |= {"warm": process.end_to_end(time.monotonic_ns()), **process.rounds()}
        found |= {"checksum": process.checksum(), "measuring_ns": process.measuring_ns()}
        touch = process.touch(config.bytes_per_token)
        touch(1)
    finally:
        engine.session.close()
    return {
        "model": Path(loaded.name).name,
        "format": loaded.model.precision,
        **{name: numerics(session)[name] for name in _OWN[2:4]},
        "device": loaded.config.backend,
        "isa": session.isa,
        "threads": threads_of(loaded.config),
        "bytes_per_token": loaded.model.bytes_per_token,
        "kernels_known": process.kernels_known,
        "touch_bytes_per_token": touch.bytes_touched,
        "touch_bytes_read": touch.bytes_read,
        "file_bytes": sum(file.size for file in engine.files),
        "cache_bytes": cache_bytes(read_cpus()),
        "hints_ignored": [*config.hints_ignored, *engine.hints_ignored],
        "rss_peak_mb": rss_peak_mib(),
        **found,
    }


def child(text: str) -> int:
    """Run a task given as JSON; print a JSON line, also for an error."""
    try:
        print(json.dumps(measure(json.loads(text))))
    except (ClocherError, MemoryError) as error:
        print(json.dumps({"error": str(error) or "out of memory", "code": int(exit_code(error))}))
    return 0


def launch(task: Task) -> Launch:
    """Run one process and return its measurements; exit with its code if it failed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    code = "import sys; from bench.strict import child; sys.exit(child(sys.argv[1]))"
    command = [sys.executable, "-c", code, json.dumps(task)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    found = json.loads(lines[-1]) if lines and not done.returncode else {}
    if "error" in found or not found:
        said = found.get("error", f"a measuring process ended with {done.returncode}")
        click.echo(f"error: {said}", err=True)
        raise SystemExit(found.get("code", ExitCode.BUG))
    return dict(found)


def rows_of(task: Task, launches: Sequence[Launch], found: Sequence[Check]) -> list[Row]:
    """Return the rows of a result file: the contract, then the tests."""
    first = launches[0]
    command = shlex.join(["python", "-m", "bench.strict", *sys.argv[1:]])
    shared: Row = {"kind": "strict", "command": command} | {key: first[key] for key in _OWN}
    per_token = first["bytes_per_token"] + first["touch_bytes_read"]
    share = share_of_limit(launches, per_token)
    tg = row(launches, "tg", Case(0, task["tokens"], task["depth"]).name, task["tokens"])
    steps = np.asarray([ns for each in launches for ns in each["token_ns"]])
    tg |= {
        "gbps": per_token * tg["tok_s"] / 1e9,
        "read_gbps": median([value for each in launches for value in each["read_gbps"]]),
        "pct_of_limit": 100 * share.value if share.known else None,
        "pct_of_limit_95": share.ends and [100 * end for end in share.ends],
        "latency_us": [float(v) / 1e3 for v in np.percentile(steps, range(101))],
    }
    windows = {
        kind: {
            f"{window}_s": median(each[kind][f"{window}_ns"] for each in launches) / 1e9
            for window in ("kernels", "strict", "end_to_end")
        }
        for kind in ("cold", "warm")
    }
    same = ("file_bytes", "cache_bytes", "touch_bytes_per_token", "hints_ignored", "tokens_sha256")
    contract = {
        **shared,
        "op": "strict",
        "version": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "tokens": task["tokens"] + 1,
        "prompt_tokens": max(task["depth"], 1),
        "windows": windows,
        **{key: first[key] for key in same},
        "rss_peak_mb": max(each["rss_peak_mb"] for each in launches),
        "checks": [check._asdict() for check in found],
    }
    pp = row(launches, "pp", Case(task["prompt_tokens"], 0).name, task["prompt_tokens"])
    return [contract, {**shared, **pp}, {**shared, **tg}]


def verdict(found: Sequence[Check]) -> ExitCode:
    """Return the exit code for some checks."""
    statuses = {check.status for check in found}
    if "fail" in statuses:
        return ExitCode.MISMATCH
    return ExitCode.UNDECIDED if "undecided" in statuses else ExitCode.OK


@script(
    "strict",
    option("--model-dir", PATH, "default: MODEL_DIR, else the embedded model"),
    *engine_options(*NUMERICS, reads=False, envvar=None),
    option("--threads", COUNT, "default: all usable cores"),
    option("--prompt-tokens", COUNT, "P", default=128),
    option("--tokens", COUNT, "N", default=128),
    option("--depth", click.IntRange(0), "D", default=512),
    option("--launches", COUNT, "processes", default=3),
    option("--rounds", COUNT, "in each", default=5),
    option("--mib", click.IntRange(2), "buffer to read", default=512),
    option("--text", PATH, "prompts come from it", default=TEXT, show_default=False),
    option("--json", NEW, "write rows there", name="out"),
    help=__doc__,
    exit_codes={
        ExitCode.OK: "every check holds",
        ExitCode.MISMATCH: "a check failed",
        ExitCode.UNDECIDED: "no check failed, but the machine was too noisy for all of them",
    },
)
def main(console: Console, launches: int, out: Path | None, **options: Any) -> ExitCode:
    """Measure, check and print."""
    flags = {name: options.pop(name) for name in ("model_dir", *NUMERICS, "threads")}
    given = {name: str(value) for name, value in flags.items() if value is not None}
    task = {**options, "text": str(options["text"]), "flags": given}
    before = machine.read()
    measured = [launch({**task, "launched_ns": time.monotonic_ns()}) for _ in range(launches)]
    elapsed_s, state = machine.since(before)
    found = checks(measured, state.disturbances(elapsed_s))
    rows = rows_of(task, measured, found)
    windows, tests, contract = tables(rows)
    about = "  ".join(str(rows[0][key]) for key in ("model", "format", "isa", "threads"))
    print_table(windows.on_terminal(f"{about}  activations {rows[0]['act_prec']}"))
    print_table(tests.on_terminal())
    for mark, name, detail in contract.rows:
        click.echo(f" {mark} {name}: {detail}")
    if out:
        write_json(out, rows)
    return verdict(found)


if __name__ == "__main__":
    main()
