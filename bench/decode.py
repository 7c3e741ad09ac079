"""Decode speed of a model, beside the limit that reading its weights sets.

    python -m bench.decode --model-dir DIR [--precision P] [--threads 1,2] [--json FILE]

The limit is read bandwidth over bytes per token; the bandwidth is measured in the same rounds with
the same threads. "outside" is the share of a step's time that is not spent in the compiled call:
Python, the window, the token objects. Timed: decode steps with sampling; not load, compilation,
prefill and text. "same ids" says that every round and every thread count gave the same tokens.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.bandwidth import MIB, PAGES_READ
from bench.measure import NotMeasured, limit_note, ratio
from bench.ops.experiment import MODEL_DIR, TEAMS, Row, experiment, of_read, opened, turns
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import PRECISIONS, Model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from cpu_fallback.team.bandwidth import Reader


class CompiledCalls:
    """Reads the clock around the one compiled call of a CPU step, below everything public.

    Attributes:
        ns: time spent in it since it was last set to 0.
        calls: how many there were since then.
        known: whether the executor has such a call.
    """

    def __init__(self, executor: object) -> None:
        self.ns = self.calls = 0
        self._team: Any = getattr(executor, "_team", None)
        self._call: Callable[..., Any] | None = getattr(self._team, "_lead", None)
        self.known = self._call is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read the clock for as long as this is open."""
        if self._call is None:
            yield
            return
        self._team._lead = self.timed
        try:
            yield
        finally:
            self._team._lead = self._call

    def timed(self, *arguments: int) -> None:
        """Make the compiled call."""
        assert self._call is not None
        start = time.perf_counter_ns()
        self._call(*arguments)
        self.ns += time.perf_counter_ns() - start
        self.calls += 1


class Runner:
    """A session with a number of threads, measured step by step.

    Args:
        model: what to run.
        threads: of the team.
        context: tokens that one run needs, prompt and output.
        pretranspose: weights to prepack, as `Session` takes it.
        speculate: who guesses tokens, as `Session` takes it.
        act_sparsity: which activations are dropped, as `Session` takes it.
        act_calibration: ids of a text, as `Session` takes them.

    Attributes:
        ids: hash of the tokens of every generation so far.
        spent: steps, time of all and time in compiled calls (ns) of every generation so far.
    """

    def __init__(
        self,
        model: Model,
        threads: int,
        context: int,
        pretranspose: str | None = None,
        speculate: str = "off",
        act_sparsity: str | None = None,
        act_calibration: Sequence[int] | None = None,
    ) -> None:
        self.session = Session(
            model,
            EngineConfig(
                threads=threads,
                context=context,
                pretranspose=pretranspose,
                speculate=speculate,
                act_sparsity=act_sparsity,
            ),
            calibration=act_calibration,
        )
        self.session.warm()
        self.vocab_size = model.spec.vocab_size
        self.ids: list[str] = []
        self.spent: list[tuple[int, int, int]] = []
        self._compiled = CompiledCalls(self.session.executor)

    def decode(self, tokens: int, prompt: int = 1) -> float:
        """Generate tokens after a prompt of so many, and return decode steps a second."""
        window = TimedWindow("decode")
        made = []
        ids = self._random(prompt) if prompt > 1 else [1]
        stream = self.session.generate([ids], tokens + 1, stop_ids=frozenset(), window=window)
        made.append(next(stream).id)
        self._compiled.ns = self._compiled.calls = 0
        with self._compiled.watched():
            start = time.perf_counter_ns()
            made += [token.id for token in stream]
            elapsed = time.perf_counter_ns() - start
        self.ids.append(hashlib.sha256(np.array(made, "<i4").tobytes()).hexdigest())
        if self._compiled.known:
            self.spent.append((self._compiled.calls, elapsed, self._compiled.ns))
        steps = [span for span in window.spans if span.kind == "decode"]
        return len(steps) / (sum(span.ns for span in steps) / 1e9)

    def prefill(self, tokens: int) -> float:
        """Read a prompt of this length, and return its tokens a second."""
        ids = self._random(tokens)
        window = TimedWindow("prefill")
        for _ in self.session.generate([ids], 1, stop_ids=frozenset(), window=window):
            pass
        return tokens / (window.total_ns / 1e9)

    def _random(self, count: int) -> list[int]:
        ids: list[int] = np.random.default_rng(0).integers(self.vocab_size, size=count).tolist()
        return ids

    def outside_share(self) -> float:
        """Return the median share of time outside compiled calls, the first generation left out.

        Raises:
            NotMeasured: the executor does not show its calls.
        """
        if not self.spent:
            raise NotMeasured("this executor does not show its compiled call")
        return median(1 - inside / total for _, total, inside in self.spent[1:] or self.spent)

    def close(self) -> None:
        """End the session."""
        self.session.close()


@experiment(
    "decode",
    __doc__,
    "test | threads | tok/s | GB/s | read GB/s | % of limit | outside | scaling | same ids | note",
    "{test} | {threads} | {tok_s:.2f} | {gbps:.1f} | {read_gbps:.1f} | "
    "{pct_of_limit:.0f} [{pct_low:.0f}, {pct_high:.0f}] | {outside_share:.2%} | "
    "{scaling:.2f} | {correct} | {note}",
    title="{model}  {format}",
    rounds=7,
)
@MODEL_DIR
@click.option("--precision", type=click.Choice(PRECISIONS), help="default: as stored")
@TEAMS
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True)
@PAGES_READ
@MIB
def main(
    model_dir: Path | None,
    precision: str | None,
    threads: tuple[int, ...],
    tokens: int,
    pages: str,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each thread count; none is correct if the tokens differ."""
    model, reader = opened(model_dir, precision), Reader(pages, mib << 20)
    context = min(model.spec.max_positions, tokens + 2)
    with ExitStack() as stack:
        runners = {n: stack.enter_context(closing(Runner(model, n, context))) for n in threads}
        runs: dict[tuple[str, int], Callable[[], float]] = {}
        for count, runner in runners.items():
            runs["decode", count] = partial(runner.decode, tokens)
            runs["read", count] = partial(reader.gbps, count)
        found = turns(runs, rounds)
    same = len({ids for runner in runners.values() for ids in runner.ids}) == 1
    for count, runner in runners.items():
        speeds = found["decode", count]
        limit = of_read([s * model.bytes_per_token / 1e9 for s in speeds], found["read", count])
        note = limit_note(limit["pct_of_limit"])
        try:
            outside = runner.outside_share()
        except NotMeasured as reason:
            outside, note = None, f"outside: not measured: {reason}"
        yield {
            "op": "decode",
            "test": f"tg{tokens}",
            "model": model.checkpoint.path.name,
            "format": model.precision,
            "threads": count,
            "isa": runner.session.isa,
            "tok_s": median(speeds),
            "samples": speeds,
            "bytes_per_token": model.bytes_per_token,
            **limit,
            "pct_of_limit_95": [limit["pct_low"], limit["pct_high"]],
            "read_huge_share": reader.huge_share,
            "outside_share": outside,
            "scaling": ratio(speeds, found["decode", threads[0]]).value,
            "tokens_sha256": runner.ids[-1],
            "correct": same,
            "note": note,
        }


if __name__ == "__main__":
    main()
