r"""Speed by the strict contract: three windows, and checks that it can be believed.

    python -m bench.strict [--model-dir DIR] [--tokens N] [--json FILE]

Several processes, one after another, each measure a cold generation from launch to text and then,
in turns, the rows ppP and tgN @ dD as llama-bench names them. Variables of the engine (IE_...)
hold. docs/benchmarking.md says what each window holds and what each check means.
"""

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click
import numpy as np

from bench import machine
from bench.cells import of_program
from bench.experiment import experiment, turns
from bench.record import Row
from bench.strict_checks import Launch, checks, row, share_of_limit, touched_sum, verdict
from clocher_kernels import __version__
from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, option
from clocher_runtime.command.loading import Engine, load_engine, numerics
from clocher_runtime.command.parameters import COUNT, FILE, PATH
from clocher_runtime.config.commands import RunConfig, resolve
from clocher_runtime.config.engine import NUMERICS
from clocher_runtime.disk.files import read_text
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.probes import WorkTouch, rss_peak_mib
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.topology import cache_bytes, read_cpus, threads_of
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.speed import Case, prompt_ids
from cpu_fallback.team.bandwidth import Reader

TEXT = Path(__file__).parents[1] / "tests/data/valid.txt"
CHECKED_TOKENS, CHECKED_BYTES = 8, 1 << 16
"""Tokens of the run whose checksum is verified; bytes per token if no work-touch is set."""

_CHARS_PER_TOKEN = 12
_OWN = ("model", "format", "act_prec", NUMERICS[1], "device", "isa", "threads", "bytes_per_token")

Task = dict[str, Any]
"""Flags of a process, prompt_tokens P, tokens N, depth D, rounds, mib, text, launched_ns."""


class Process:
    """The measurements of one process."""

    def __init__(self, task: Task, config: RunConfig, engine: Engine) -> None:
        self.task, self.config, self.engine = task, config, engine

    def touch(self, bytes_per_token: int) -> WorkTouch:
        """Return a work-touch of the weights."""
        return WorkTouch(self.engine.files, bytes_per_token, self.config.stride_bytes)

    def generate(self, ids: Sequence[int], tokens: int, touch: WorkTouch | None = None) -> Row:
        """Generate greedily; return ids and (strict, kernel) ns of prefill, decode and steps."""
        session, touch = self.engine.session, touch or self.touch(self.config.bytes_per_token)
        window = TimedWindow("strict", synchronize=session.synchronize)
        walk = touch if touch.bytes_per_token else None
        team: Any = session.executor._team  # type: ignore[attr-defined]
        compiled, kernels = team._lead, 0

        def timed(*arguments: int) -> None:
            nonlocal kernels
            start = time.perf_counter_ns()
            compiled(*arguments)
            kernels += time.perf_counter_ns() - start

        with patch.object(team, "_lead", timed):  # a step's compiled call, below the public API
            stream = session.generate([ids], tokens, Sampling(), frozenset(), window, walk)
            made, first = [next(stream).id], kernels
            made += [token.id for token in stream]
        token_ns = [span.ns for span in window.spans if span.kind == "decode"]
        decode = sum(token_ns), kernels - first
        prefill = window.total_ns - decode[0], first
        return {"ids": made, "prefill": prefill, "decode": decode, "token_ns": token_ns}

    def untimed(self, ids: Sequence[int], tokens: int) -> list[int]:
        """Return the ids that a generation without windows makes."""
        stream = self.engine.session.generate([ids], tokens, Sampling(), frozenset())
        return [token.id for token in stream]

    def prompts(self) -> tuple[list[int], list[int]]:
        """Return the prompt of pp and that of tg: a text repeated, else random ids."""
        p, depth = self.task["prompt_tokens"], max(self.task["depth"], 1)
        tokenizer, ids = self.engine.loaded.tokenizer, list[int]()
        if tokenizer is not None:
            text = read_text(self.task["text"])[: _CHARS_PER_TOKEN * max(p, depth)]
            if not (ids := tokenizer.encode(text)):
                raise UsageError(f"{self.task['text']}: no tokens in it; give a text")
        ids = prompt_ids(self.engine.session, max(p, depth), ids)
        return ids[:p], ids[:depth]

    def end_to_end(self, start_ns: int) -> Row:
        """Generate from text to text; return the three windows in ns."""
        made = self.generate(self.prompts()[1], self.task["tokens"] + 1)
        if (tokenizer := self.engine.loaded.tokenizer) is not None:
            tokenizer.decode(made["ids"])
        strict, kernels = (sum(ns) for ns in zip(made["prefill"], made["decode"], strict=True))
        end_to_end = time.monotonic_ns() - start_ns
        return {"kernels_ns": kernels, "strict_ns": strict, "end_to_end_ns": end_to_end}

    def rounds(self) -> Row:
        """Run all tests in turns, after a round that is discarded, as in llama-bench."""
        n, reader = self.task["tokens"], Reader("2m", self.task["mib"] << 20)
        prompt, start = self.prompts()
        whole = self.untimed(start, 2 * n + 1)
        tests = {
            "pp": (prompt, self.untimed(prompt, 1)),
            "tg": (start, whole[: n + 1]),
            "after": (start + whole[:n], whole[n:]),
            "double": (start, whole),
        }
        made: dict[str, list[Row]] = {name: [] for name in tests}

        def run(name: str) -> float:
            ids, expected = tests[name]
            made[name].append(self.generate(ids, len(expected)))
            return 0.0

        runs: dict[str, Callable[[], float]] = {name: partial(run, name) for name in tests}
        runs["read"] = partial(reader.gbps, threads_of(self.engine.loaded.config))
        read = turns(runs, self.task["rounds"])["read"]
        every = [each for found in made.values() for each in found]
        part = {name: "prefill" if name == "pp" else "decode" for name in tests}
        return {
            "tests": {name: [each[part[name]] for each in made[name][1:]] for name in tests},
            "token_ns": [ns for each in made["tg"][1:] for ns in each["token_ns"]],
            "read_gbps": read,
            "same_ids": {
                name: all(each["ids"] == expected for each in made[name])
                for name, (_, expected) in tests.items()
            },
            "tokens_sha256": hashlib.sha256(np.array(whole, "<i4").tobytes()).hexdigest(),
            "tokens": sum(len(each["ids"]) - 1 for each in every),
            "steps": sum(len(each["token_ns"]) for each in every),
        }

    def checksum(self) -> Row:
        """Generate with a work-touch, and sum the same bytes with NumPy."""
        per_token, stride = self.config.bytes_per_token or CHECKED_BYTES, self.config.stride_bytes
        touch = self.touch(per_token)
        self.generate(self.prompts()[1], CHECKED_TOKENS, touch)
        expected = touched_sum(self.engine.files, CHECKED_TOKENS, per_token, stride)
        walk = {"tokens": CHECKED_TOKENS, "bytes_per_token": per_token, "stride": stride}
        return {**walk, "got": touch.checksum, "expected": expected}


def measure(task: Task) -> Launch:
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
                f"device is {loaded.config.backend}: its kernels have no clock here; set "
                "CLOCHER_DEVICE=cpu (python -m bench.gpu_suite measures GPUs)"
            )
        process = Process(task, config, engine)
        found = {"cold": process.end_to_end(task["launched_ns"])}
        found |= {"warm": process.end_to_end(time.monotonic_ns()), **process.rounds()}
        found |= {"checksum": process.checksum()}
    finally:
        session.close()
    touch = process.touch(config.bytes_per_token)
    touch(1)
    return {
        "model": Path(loaded.name).name,
        "format": loaded.model.precision,
        **numerics(session),
        "device": loaded.config.backend,
        "isa": session.isa,
        "threads": threads_of(loaded.config),
        "bytes_per_token": loaded.model.bytes_per_token,
        "touch_bytes_per_token": touch.bytes_touched,
        "touch_bytes_read": touch.bytes_read,
        "file_bytes": sum(file.size for file in engine.files),
        "cache_bytes": cache_bytes(read_cpus()),
        "hints_ignored": [*config.hints_ignored, *engine.hints_ignored],
        "rss_peak_mb": rss_peak_mib(),
        **found,
    }


def launch(task: Task) -> Launch:
    """Return the measurements of a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as processes:
        return processes.submit(measure, {**task, "launched_ns": time.monotonic_ns()}).result()


def rows_of(task: Task, launches: Sequence[Launch], found: Sequence[Row]) -> list[Row]:
    """Return the rows of a result file: the contract, then the tests."""
    first = launches[0]
    shared = {key: first[key] for key in _OWN}
    per_token = first["bytes_per_token"] + first["touch_bytes_read"]
    share = share_of_limit(launches, per_token)
    pp = row(launches, "pp", Case(task["prompt_tokens"], 0))
    tg = row(launches, "tg", Case(0, task["tokens"], task["depth"]))
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
        "checks": found,
    }
    return [contract, {**shared, **pp}, {**shared, **tg}]


@experiment(
    "strict",
    __doc__,
    option("--model-dir", PATH, "default: MODEL_DIR, else the embedded model"),
    *engine_options(*NUMERICS, reads=False, envvar=None),
    option("--threads", COUNT, "default: all usable cores"),
    option("--prompt-tokens", COUNT, "P", default=128),
    option("--tokens", COUNT, "N", default=128),
    option("--depth", click.IntRange(0), "D", default=512),
    option("--launches", COUNT, "processes", default=3),
    option("--mib", click.IntRange(2), "buffer to read", default=512),
    option("--text", FILE, "prompts come from it", default=TEXT, show_default=False),
    title="{model}  {format}  {isa}  {threads}  activations {act_prec}",
    rounds=5,
    code=lambda rows: verdict(rows[0]["checks"]),
    exit_codes={
        ExitCode.MISMATCH: "a check failed",
        ExitCode.UNDECIDED: "no check failed, but the machine was too noisy for all of them",
    },
)
def main(asked: Any) -> Iterator[Row]:
    """Measure, check, and yield the contract and the tests."""
    task = vars(asked)
    flags = {name: task.pop(name) for name in ("model_dir", *NUMERICS, "threads")}
    task["flags"] = {name: str(value) for name, value in flags.items() if value is not None}
    before = machine.read()
    measured = [launch(task) for _ in range(asked.launches)]
    yield from rows_of(task, measured, checks(measured, machine.since(before).disturbances()))


if __name__ == "__main__":
    main()
