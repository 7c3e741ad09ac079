"""One process of the strict contract; `bench.strict` starts several and reads their lines.

The first generation of the process is the cold one: its end to end begins when the process was
launched. Then everything that is compared takes turns, in rounds.
"""

import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.decode import CompiledCalls
from bench.measure import REST_S, interleave
from bench.variables import of_program
from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.loading import Engine, load_engine
from clocher_runtime.command.settings import resolve
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.probes import Touch, WorkTouch, rss_peak_mib
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.engine.topology import cache_bytes, read_cpus
from clocher_runtime.exit_codes import exit_code
from cpu_fallback.team.bandwidth import Reader

CHECKED_TOKENS = 8
CHECKED_BYTES = 1 << 16
"""Work-touch of the run whose checksum is verified, where the settings ask for none."""

_CHARS_PER_TOKEN = 12
_INDEX = 1 << 20
_SPANS, _BATCHES = 500, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process does.

    Attributes:
        flags: settings by name, as text; variables of the environment hold as well.
        prompt_tokens: P of the row ppP.
        tokens: N of the row tgN @ dD.
        depth: D.
        rounds: how often each test runs.
        mib: size of the buffer that the bandwidth is read from.
        text: file that the prompts are taken from.
        launched_ns: monotonic clock when the process was started.
        rest_s: pause before each test, in seconds.
    """

    flags: Mapping[str, str]
    prompt_tokens: int
    tokens: int
    depth: int
    rounds: int
    mib: int
    text: str
    launched_ns: int
    rest_s: float = REST_S

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.prompt_tokens, self.depth + 2 * self.tokens) + 2


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation.

    Attributes:
        ids: what was generated.
        prefill: strict and kernel time of the prompt, ns.
        decode: the same of all other tokens.
        token_ns: strict time of each of them.
    """

    ids: list[int]
    prefill: tuple[int, int]
    decode: tuple[int, int]
    token_ns: list[int]


class Runner:
    """Generates with an engine, timed or not."""

    def __init__(self, engine: Engine, bytes_per_token: int, stride: int) -> None:
        self._engine = engine
        self._touch = bytes_per_token, stride
        self.calls = CompiledCalls(getattr(engine.session, "executor", None))

    def touch(self, bytes_per_token: int, stride: int) -> Touch:
        """Return a work-touch of the weights."""
        made = self._engine.session.work_touch(bytes_per_token, stride)
        return WorkTouch(self._engine.files, bytes_per_token, stride) if made is None else made

    def timed(self, prompt: Sequence[int], tokens: int, touch: Touch | None = None) -> Generation:
        """Generate with the window open, greedily, to the end."""
        session, calls = self._engine.session, self.calls
        touch = touch or self.touch(*self._touch)
        window = TimedWindow("strict", synchronize=session.synchronize)
        calls.ns = 0
        with calls.watched():
            stream = session.generate(
                [prompt],
                tokens,
                Sampling(),
                frozenset(),
                window,
                touch if touch.bytes_per_token else None,
            )
            ids = [next(stream).id]
            kernels_ns, calls.ns = calls.ns, 0
            ids += [token.id for token in stream]
        token_ns = [span.ns for span in window.spans if span.kind == "decode"]
        strict_ns = sum(token_ns)
        prefill = window.total_ns - strict_ns, kernels_ns
        return Generation(ids, prefill, (strict_ns, calls.ns), token_ns)

    def untimed(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Generate without a window, and return the ids."""
        stream = self._engine.session.generate([prompt], tokens, Sampling(), frozenset())
        return [token.id for token in stream]

    def measuring_ns(self) -> float:
        """Return what the window and the watch of the kernels cost a step, in ns."""
        window = TimedWindow("nothing", synchronize=self._engine.session.synchronize)
        calls = CompiledCalls(SimpleNamespace(_team=SimpleNamespace(_lead=lambda *_: None)))
        costs = []
        for _ in range(_BATCHES):
            start = time.perf_counter_ns()
            for _ in range(_SPANS):
                with window.span("decode", 1):
                    calls.timed(0, 0, 0, 0)
            costs.append((time.perf_counter_ns() - start) / _SPANS)
        return min(costs)


def measure(task: Task) -> dict[str, Any]:
    """Return everything that one process measured.

    Raises:
        ClocherError: the model cannot be run like this.
    """
    bare = {"speculate": "off", "context": str(task.context)}
    config = resolve({**task.flags, **bare}, of_program(os.environ))
    if task.flags.get("speculate", "off") != "off":
        raise UsageError("the strict contract is of bare steps; drop --speculate")
    if config.stub or config.batch > 1:
        raise UsageError("the strict contract is of one sequence of a model; drop --stub, BATCH")
    console = Console(io.StringIO())
    engine = load_engine(config, 1, console.compiling, console.packing)
    if engine.device != "cpu":
        engine.session.close()
        raise UsageError(
            f"device is {engine.device}: its kernels have no clock here; give --device cpu "
            "(python -m bench.gpu_suite measures GPUs)"
        )
    try:
        runner = Runner(engine, config.bytes_per_token, config.stride_bytes)
        loaded_ns = time.monotonic_ns()
        engine.session.warm()
        ids = prompt_ids(engine, task)
        depth = max(task.depth, 1)
        cold = _end_to_end(engine, runner, task, depth, task.launched_ns)
        warm = _end_to_end(engine, runner, task, depth, time.monotonic_ns())
        found = _rounds(runner, ids, depth, task, engine.threads)
        per_token = config.bytes_per_token or CHECKED_BYTES
        checksum = _checksum(engine, runner, ids[:depth], per_token, config.stride_bytes)
        measuring_ns = runner.measuring_ns()
        touch = runner.touch(config.bytes_per_token, config.stride_bytes)
        touch(1)
    finally:
        engine.session.close()
    return {
        "model": Path(engine.model).name,
        "format": engine.precision,
        "act_prec": engine.act_prec,
        "kv_dtype": engine.kv_dtype,
        "device": engine.device,
        "isa": engine.isa,
        "threads": engine.threads,
        "kernels_known": runner.calls.known,
        "bytes_per_token": engine.bytes_per_token,
        "touch_bytes_per_token": touch.bytes_touched,
        "touch_bytes_read": touch.bytes_read,
        "stride": config.stride_bytes,
        "file_bytes": sum(file.size for file in engine.files),
        "cache_bytes": cache_bytes(read_cpus()),
        "hints_ignored": [*config.hints_ignored, *engine.hints_ignored],
        "load_ns": loaded_ns - task.launched_ns,
        "cold": cold,
        "warm": warm,
        "checksum": checksum,
        "measuring_ns": measuring_ns,
        "rss_peak_mb": rss_peak_mib(),
        **found,
    }


def prompt_ids(engine: Engine, task: Task) -> list[int]:
    """Return as many token ids as the longest prompt has: of the text, over and over.

    A model without a tokenizer gets ids at random, always the same.
    """
    count = max(task.prompt_tokens, task.depth, 1)
    session: Any = engine.session
    if engine.tokenizer is None:
        rng = np.random.default_rng(0)
        return [int(i) for i in rng.integers(session.model.spec.vocab_size, size=count)]
    ids = engine.tokenizer.encode(_text(task, count))
    if not ids:
        raise UsageError(f"{task.text}: no tokens in it; give a text")
    return (ids * (count // len(ids) + 1))[:count]


def touched_sum(files: Sequence[np.ndarray], tokens: int, per_token: int, stride: int) -> int:
    """Return the checksum of a work-touch, straight from its definition in docs/json-line.md."""
    ring = sum(file.size for file in files)
    ends = np.cumsum([file.size for file in files])
    total = 0
    for token in range(tokens):
        reads = -(-per_token // stride)
        for first in range(0, reads, _INDEX):
            k = np.arange(first, min(first + _INDEX, reads), dtype=np.int64)
            at = (token * per_token + k * stride) % ring
            which = np.searchsorted(ends, at, side="right")
            for number in np.unique(which):
                own = at[which == number] - (ends[number] - files[number].size)
                total += int(files[number][own].sum(dtype=np.uint64))
    return total % (1 << 64)


def digest(ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()


def _text(task: Task, tokens: int) -> str:
    try:
        with open(task.text, encoding="utf-8") as file:
            return file.read(_CHARS_PER_TOKEN * tokens)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{task.text}: cannot be read: {error}; give --text FILE") from None


def _end_to_end(
    engine: Engine, runner: Runner, task: Task, depth: int, start_ns: int
) -> dict[str, int]:
    """Generate from text to text, and return the three windows in ns."""
    before = time.monotonic_ns()
    ids = prompt_ids(engine, task)[:depth]
    tokenised = time.monotonic_ns()
    made = runner.timed(ids, task.tokens + 1)
    generated = time.monotonic_ns()
    if engine.tokenizer is not None:
        engine.tokenizer.decode(made.ids)
    end = time.monotonic_ns()
    return {
        "kernels_ns": made.prefill[1] + made.decode[1],
        "strict_ns": made.prefill[0] + made.decode[0],
        "end_to_end_ns": end - start_ns,
        "before_ns": before - start_ns,
        "tokenise_ns": tokenised - before,
        "detokenise_ns": end - generated,
    }


def _rounds(runner: Runner, ids: list[int], depth: int, task: Task, threads: int) -> dict[str, Any]:
    """Run all tests in turns."""
    n = task.tokens
    reader = Reader("2m", task.mib << 20)
    reference = runner.untimed(ids[:depth], 2 * n + 1)
    after_prompt = ids[:depth] + reference[:n]
    tests: dict[str, list[tuple[int, int]]] = {"pp": [], "tg": [], "after": [], "double": []}
    made: dict[str, bool] = dict.fromkeys(("tg", "after", "double"), True)
    token_ns: list[list[int]] = []
    steps = [0, 0]

    def pp() -> float:
        done = runner.timed(ids[: task.prompt_tokens], 1)
        tests["pp"].append(done.prefill)
        return float(done.prefill[0])

    def generate(name: str, prompt: list[int], tokens: int, expected: list[int]) -> float:
        done = runner.timed(prompt, tokens + 1)
        tests[name].append(done.decode)
        made[name] &= done.ids == expected
        steps[0] += tokens
        steps[1] += len(done.token_ns)
        if name == "tg":
            token_ns.append(done.token_ns)
        return float(done.decode[0])

    runs: dict[str, Callable[[], float]] = {
        "pp": pp,
        "tg": lambda: generate("tg", ids[:depth], n, reference[: n + 1]),
        "after": lambda: generate("after", after_prompt, n, reference[n:]),
        "double": lambda: generate("double", ids[:depth], 2 * n, reference),
        "read": lambda: reader.gbps(threads),
    }
    read = interleave(runs, task.rounds, rest_s=task.rest_s)["read"]
    # The round that comes first is thrown away, here as there.
    return {
        "tests": {name: pairs[1:] for name, pairs in tests.items()},
        "token_ns": [ns for each in token_ns[1:] for ns in each],
        "read_gbps": read,
        "read_huge_share": reader.huge_share,
        "same_ids": made,
        "tokens_sha256": digest(reference),
        "tokens": steps[0],
        "steps": steps[1],
    }


def _checksum(
    engine: Engine, runner: Runner, prompt: list[int], per_token: int, stride: int
) -> dict[str, int]:
    """Generate with a work-touch, and sum the same bytes with NumPy."""
    touch = runner.touch(per_token, stride)
    runner.timed(prompt, CHECKED_TOKENS, touch)
    expected = touched_sum(engine.files, CHECKED_TOKENS, per_token, stride)
    return {
        "tokens": CHECKED_TOKENS,
        "bytes_per_token": per_token,
        "stride": stride,
        "got": touch.checksum,
        "expected": expected,
    }


def main(argv: Sequence[str]) -> int:
    """Measure as the JSON text in `argv[0]` says; print a JSON line, of an error too."""
    try:
        print(json.dumps(measure(Task(**json.loads(argv[0])))))
    except (ClocherError, MemoryError) as error:
        print(json.dumps({"error": str(error) or "out of memory", "code": int(exit_code(error))}))
    return 0


def as_json(task: Task) -> str:
    """Return a task as `main` takes it."""
    return json.dumps(asdict(task))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
