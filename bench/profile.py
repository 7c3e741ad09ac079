"""Where the time of a step goes: a row for each kind of call of the Plan, and what is lost between.

    python -m bench profile [--model-dir DIR] [--tokens N] [--svg FILE]

The clock is written between all launches of a step, by every thread. A call's time is the mean over
threads of what its kernels took, its waiting what they spent at the barriers before them; "waiting"
is that of all calls and what threads came late or were done early, "outside" what a step takes
besides its compiled call: Python, the window, the token objects. Every figure is the median over
the steps, so shares add up to 100 % only roughly. Bytes are what a call must move at
least, and the limit is the read bandwidth that was measured in the same run. --svg draws the step
as a flame graph. With --limit, the exit code is 1 if more of a step than this share lies outside.
"""

import re
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np

from bench.experiment import MIB, MODEL_DIR, TEAM, Row, experiment, limit_note, opened
from bench.pages import filled
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import cost
from clocher_kernels.plan import Call
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine.load import PRECISIONS, Model
from clocher_runtime.engine.session import Session
from clocher_runtime.quality.speed import prompt_ids
from cpu_fallback.team.bandwidth import Reader

_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.*)")
_WARM_STEPS = 4
_BEYOND_CACHES = 8 << 20
_OUTSIDE = ("embed", "gather_rows", "sample", "advance")


class CallTime(NamedTuple):
    """One call of the Plan in one step; `nbytes` is the least it must move."""

    name: str
    layer: int | None
    ns: float  # in its kernels, mean over threads
    waiting_ns: float  # at barriers before its launches, mean over threads
    nbytes: int


class Step(NamedTuple):
    """A measured step; `late_ns` is idle time at its start and end, mean over threads."""

    ns: int
    compiled_ns: int
    late_ns: float
    calls: Sequence[CallTime]


def named(call: Call) -> tuple[str, int | None]:
    """Return the name of a call without its layer, and the layer of its weights."""
    names = call.args.values()
    weight = next((name for name in names if name.endswith((".weight", "_proj"))), "")
    layers = [int(match[1]) for match in map(_LAYER.fullmatch, names) if match]
    match = _LAYER.fullmatch(weight)
    short = (match[2] if match else weight).removesuffix(".weight")
    return f"{call.op} {short}".strip(), layers[0] if layers else None


def placed(calls: Sequence[Call]) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each call, and the layer that it is part of."""
    layer: int | None = None
    for call in calls:
        name, found = named(call)
        layer = layer if found is None else found
        inside = call.op not in _OUTSIDE and "lm_head" not in name and "model.norm" not in name
        yield name, layer if inside else None


class Profiler:
    """A session whose steps are timestamped."""

    def __init__(self, model: Model, threads: int, context: int) -> None:
        self.model = model
        config = EngineConfig(
            threads=threads, context=context, chunk=512, stamped=True, speculate="off"
        )
        self.session = Session(model, config)
        self.session.warm()
        self._executor: Any = self.session.executor
        self._stamps = self._executor.stamps

    def decode(self, tokens: int, depth: int) -> list[Step]:
        """Generate tokens after a prompt of `depth`; return all steps but the first few."""
        prompt = prompt_ids(self.session, depth)
        stream = self.session.generate([prompt], tokens + _WARM_STEPS + 1, stop_ids=frozenset())
        next(stream)
        found = []
        start = time.perf_counter_ns()
        for _ in stream:
            # Nothing else between two steps: threads that wait for long fall asleep.
            found.append((time.perf_counter_ns() - start, self._stamps.times.copy()))
            start = time.perf_counter_ns()
        costs = self._costs(1, 1)
        return [self._step(ns, times, costs) for ns, times in found[_WARM_STEPS:]]

    def prefill(self, tokens: int, times: int) -> list[Step]:
        """Prefill a prompt several times; return the last step of each."""
        prompt, found = prompt_ids(self.session, tokens), []
        for _ in range(times + 1):
            stream = self.session.generate([prompt], 1, stop_ids=frozenset())
            start = time.perf_counter_ns()
            next(stream)
            found.append((time.perf_counter_ns() - start, self._stamps.times.copy()))
        costs = self._costs(tokens, 1)
        return [self._step(ns, stamps, costs) for ns, stamps in found[1:]]

    def _step(self, ns: int, times: np.ndarray, costs: list[int]) -> Step:
        arrived, started, ended = times[:, :-1:2], times[:, 1::2], times[:, 2::2]
        kernels, waiting = (
            np.bincount(self._stamps.calls, spans.mean(axis=0), len(costs))
            for spans in (ended - started, started - arrived)
        )
        begin, end = times[:, 0].min(), times[:, -1].max()
        late = float((times[:, 0] - begin + end - times[:, -1]).mean())
        names, layers = zip(*placed(self._executor.plan.calls), strict=True)
        calls = map(CallTime, names, layers, kernels.tolist(), waiting.tolist(), costs)
        return Step(ns, int(end - begin), late, tuple(calls))

    def _costs(self, tokens: int, rows: int) -> list[int]:
        plan, count = self._executor.plan, {"M": tokens, "R": rows}
        costs = []
        for call in plan.calls:
            values = {}
            for param, name in call.args.items():
                if name in plan.buffers:
                    array, lead = self._executor.array(name), plan.buffers[name].rows
                    values[param] = array[: count[lead]] if lead else array
                else:
                    known = plan.consts if name in plan.consts else self.model.weights
                    values[param] = known[name]
            costs.append(int(cost(OPS[call.op], values, call.attrs).bytes))
        return costs


def median_step(steps: Sequence[Step]) -> Step:
    """Return the step of median time."""
    return sorted(steps, key=lambda step: step.ns)[len(steps) // 2]


def rows_of(steps: Sequence[Step], read_gbps: float) -> list[Row]:
    """Return a row for each kind of call, by share; then waiting and outside. Medians of steps."""
    whole = median(step.ns for step in steps)
    kinds = list(dict.fromkeys(call.name for call in steps[0].calls))
    rows: list[Row] = []
    for kind in kinds:
        calls = [[call for call in step.calls if call.name == kind] for step in steps]
        ns = median(sum(call.ns for call in each) for each in calls)
        nbytes = sum(call.nbytes for call in calls[-1])
        gbps = nbytes / ns if ns else 0.0
        rows.append(
            {
                "name": kind,
                "calls": len(calls[0]),
                "us": ns / 1e3,
                "share": ns / whole,
                "waiting_us": median(sum(call.waiting_ns for call in each) for each in calls) / 1e3,
                "nbytes": nbytes,
                "gbps": gbps,
                "pct_of_limit": 100 * gbps / read_gbps,
                "note": _note(nbytes, 100 * gbps / read_gbps),
            }
        )
    rows.sort(key=lambda row: -row["us"])
    waiting = median(sum(c.waiting_ns for c in step.calls) + step.late_ns for step in steps)
    outside = median(step.ns - step.compiled_ns for step in steps)
    for name, ns in (("waiting", waiting), ("outside", outside)):
        rows.append({"name": name, "us": ns / 1e3, "share": ns / whole})
    rows.append({"name": "step", "us": whole / 1e3, "share": 1.0})
    return rows


def _note(nbytes: int, percent: float) -> str:
    said = (f"{percent:.0f} % of the limit", limit_note(percent))
    return ": ".join(filter(None, said)) if nbytes >= _BEYOND_CACHES else ""


class Frame(NamedTuple):
    """A rectangle of the flame graph: its level, start and length in ns, name, tooltip."""

    level: int
    start: float
    ns: float
    name: str
    note: str = ""


def flame(step: Step, title: str) -> list[Frame]:
    """Return a step as frames: the step, its compiled call, layers, calls, kernels and waiting."""
    outside = step.ns - step.compiled_ns
    frames = [Frame(0, 0, step.ns, title), Frame(1, 0, step.compiled_ns, "compiled call")]
    frames += [Frame(1, step.compiled_ns, outside, "Python")]
    at = 0.0
    for layer, calls in groupby(step.calls, lambda call: call.layer):
        start = at
        for call in calls:
            note = f"{call.nbytes / 1e6:.2f} MB, {call.nbytes / max(call.ns, 1):.1f} GB/s"
            frames += [Frame(3, at, call.ns + call.waiting_ns, call.name, note)]
            frames += [Frame(4, at, call.ns, "kernel")]
            frames += [Frame(4, at + call.ns, call.waiting_ns, "waiting")]
            at += call.ns + call.waiting_ns
        frames += [Frame(2, start, at - start, "model" if layer is None else f"layer {layer}")]
    return frames


def svg(frames: Sequence[Frame], title: str) -> str:
    """Return the picture of frames, of which the first is the whole; level 0 is at the top."""
    return filled("flame.svg", frames=frames, title=title)


@experiment(
    "profile",
    __doc__,
    MODEL_DIR,
    option("--precision", click.Choice(PRECISIONS), "default: as stored"),
    TEAM,
    option("--tokens", COUNT, "steps", default=32),
    option("--depth", COUNT, "prompt", default=16),
    option("--prefill", click.IntRange(1, 512), "profile the prefill of N tokens"),
    MIB,
    option("--limit", click.FloatRange(0, 1), "largest share outside"),
    option("--svg", PATH, "draw the median step there"),
    title="{model} {format}, {test}, {threads} threads, read {read_gbps:.1f} GB/s",
    code=lambda rows: any(r["name"] == "outside" and r["share"] > r.get("limit", 1) for r in rows),
)
def main(asked: Any) -> Iterator[Row]:
    """Measure, draw, and yield a row for each kind of call."""
    model, threads = opened(asked.model_dir, asked.precision), asked.threads
    longest = max(asked.prefill or 0, asked.depth + asked.tokens + _WARM_STEPS) + 1
    profiler = Profiler(model, threads, min(longest, model.spec.max_positions))
    reader = Reader("2m", asked.mib << 20)
    before = reader.gbps(threads)
    if asked.prefill:
        steps, test = profiler.prefill(asked.prefill, asked.tokens), f"pp{asked.prefill}"
    else:
        steps = profiler.decode(asked.tokens, asked.depth)
        test = f"tg{len(steps)} @ d{asked.depth}"
    read_gbps = median([before, reader.gbps(threads), reader.gbps(threads)])
    profiler.session.close()
    name = asked.model_dir.name if asked.model_dir else "embedded"
    title = f"{name} {model.precision}, {test}, {threads} threads, read {read_gbps:.1f} GB/s"
    if asked.svg:
        frames = flame(median_step(steps), f"{test}, {threads} threads")
        write_file(asked.svg, svg(frames, title).encode())
    about = {"op": "profile", "model": name, "format": model.precision, "test": test}
    about |= {"threads": threads, "isa": profiler.session.isa, "read_gbps": read_gbps}
    about |= {} if asked.limit is None else {"limit": asked.limit}
    yield from ({**about, **row} for row in rows_of(steps, read_gbps))
