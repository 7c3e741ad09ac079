"""Every op of the op table at sizes of real models, with pytest-benchmark.

Usage: `make microbench ARGS="-k cpu-linear-mxfp4"`. A benchmark whose first call differs from the
reference fails. Data may stay in caches: for memory bandwidth see `python -m bench linear`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pytest

from bench.experiment import Subject
from bench.ops import OpRun, Row, judge, real_cases
from clocher_kernels.cuda import unusable
from clocher_kernels.ops import OpSpec, ReferenceExecutor
from clocher_kernels.ops.contract import Case
from clocher_runtime.engine.topology import default_threads
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team.placement import Hints

DEVICES = ("cpu", "cuda")
ROWS = pytest.StashKey[list[Row]]()

_MOST_S = 0.1
_LEAST_ROUNDS = 5
_ENOUGH_BYTES = 4 << 20
_MOST_CALLS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(Subject):
    """An op on a back end, and facts: device, cost of a call, `correct`."""

    facts: Row

    def rates(self, seconds: float) -> Row:
        """Return time, bandwidth and arithmetic of one call, from the seconds of a run."""
        call = seconds / self.calls
        return {
            "us_per_call": call * 1e6,
            "gbps": self.facts["bytes"] / call / 1e9,
            "gflops": self.facts["flops"] / call / 1e9,
        }


def timed(spec: OpSpec, case: Case, device: str, threads: int) -> Timed:
    """Return an op on one of `DEVICES`, compared with its reference."""
    op = OpRun(spec, case)
    cost = op.cost()
    # A very short call would measure waking the team.
    calls = max(1, min(_MOST_CALLS, _ENOUGH_BYTES // max(cost.bytes, 1)))
    facts: Row = {"op": spec.name, "case": case.id, "device": device, "calls": calls}
    facts |= {"bytes": cost.bytes, "flops": cost.flops}
    return _on_gpu(spec, case, facts) if device == "cuda" else _on_cpu(op, threads, facts)


def compare(op: OpRun, got: Mapping[str, np.ndarray]) -> Row:
    """Return whether outputs are `correct`, and their errors."""
    expected = op.run(ReferenceExecutor)
    pairs = {name: (got[name], expected[name]) for name in op.written}
    return _verdict(judge(op.spec.allowed(op.case), pairs))


def _verdict(judged: Row) -> Row:
    return {"correct": judged.pop("status") == "ok", **judged}


def _on_cpu(op: OpRun, threads: int, facts: Row) -> Timed:
    # A dynamic team could use fewer threads than the result says.
    bind = partial(CpuExecutor, threads=threads, hints=Hints(adaptive=False))
    facts |= compare(op, op.run(bind))
    plan = replace(op.plan, calls=op.plan.calls * facts["calls"])
    executor = bind(plan, op.weights)
    op.fill(executor)
    return Timed(
        run=partial(executor.step, plan.tokens, plan.rows),
        calls=facts["calls"],
        awake=executor.running,
        close=executor.close,
        facts=facts | {"isa": executor.isa, "threads": threads},
    )


def _on_gpu(spec: OpSpec, case: Case, facts: Row) -> Timed:
    from bench.gpu.parity import Trial
    from bench.gpu.setting import make_setting
    from clocher_kernels.cuda.launch import execute

    setting = make_setting(dry=False)
    act = "f16" if spec.narrow else "f32"
    trial = Trial(setting, spec, case, act)
    facts |= _verdict(trial.check())
    facts |= {"isa": f"sm_{setting.device.capability}", "activations": act}
    replay = setting.replay([partial(execute, trial.launches())] * facts["calls"])

    def run() -> None:
        replay()
        setting.synchronize()

    return Timed(run=run, calls=facts["calls"], facts=facts)


def parameters(devices: Sequence[str]) -> list[Any]:
    """Return (op, case, device) for pytest, where the device has a kernel."""
    return [
        pytest.param(spec, case, device, id=f"{device}-{spec.name}-{case.id}")
        for device in devices
        for spec, case in real_cases()
        if device not in case.missing
    ]


@pytest.fixture
def subject(spec: OpSpec, case: Case, device: str) -> Iterator[Timed]:
    """Bind the op to the device; release it afterwards."""
    made = timed(spec, case, device, default_threads())
    yield made
    made.close()


@pytest.mark.benchmark(max_time=_MOST_S, min_rounds=_LEAST_ROUNDS, disable_gc=True)
@pytest.mark.parametrize(("spec", "case", "device"), parameters(DEVICES[: 1 if unusable() else 2]))
def test_op(subject: Timed, benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Time an op; fail if its first call was wrong."""
    benchmark.extra_info |= subject.facts
    with subject.awake():
        benchmark(subject.run)
    if benchmark.stats is not None:  # --benchmark-disable runs it once
        benchmark.extra_info |= subject.rates(median(benchmark.stats.stats.data))
    facts = benchmark.extra_info
    row = {"name": request.node.callspec.id, "megabytes": facts["bytes"] / 1e6, **facts}
    request.config.stash.setdefault(ROWS, []).append(row)
    assert subject.facts["correct"], f"differs from the reference: {subject.facts}"
