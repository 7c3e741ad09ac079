"""One op of the op table, ready to be timed on a back end, and whether it is right there."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from bench.op_run import OpRun, error
from clocher_kernels.ops import OpSpec
from clocher_kernels.ops.contract import Case, Cost, Tolerance
from clocher_kernels.reference import ReferenceExecutor
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.ops.lowering import LOWER as CPU_LOWER
from cpu_fallback.team.hints import Hints

DEVICES = ("cpu", "cuda")

_ENOUGH_BYTES = 4 << 20
_MOST_CALLS = 32

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timed:
    """What a benchmark runs, and what it says besides the time.

    Attributes:
        run: makes `calls` calls of the op and returns when they are done.
        calls: of the op.
        cost: of one call: bytes that must move, and operations.
        facts: where it runs, and `correct`: whether the first call gave what the reference gives.
        awake: a context in which threads wait for the next run without falling asleep.
        close: releases it.
    """

    run: Callable[[], object]
    calls: int
    cost: Cost
    facts: Facts
    awake: Callable[[], AbstractContextManager[object]] = nullcontext
    close: Callable[[], object] = field(default=lambda: None)

    def rates(self, seconds: float) -> Facts:
        """Return time, bandwidth and arithmetic of one call, from the seconds of a run."""
        call = seconds / self.calls
        return {
            "us_per_call": call * 1e6,
            "gbps": self.cost.bytes / call / 1e9,
            "gflops": self.cost.flops / call / 1e9,
        }


def has_kernel(device: str, op: str) -> bool:
    """Return whether a device can run an op."""
    if device == "cuda":
        from clocher_kernels.cuda.lowering import LOWER as CUDA_LOWER

        return op in CUDA_LOWER
    return op in CPU_LOWER


def timed(spec: OpSpec, case: Case, device: str, threads: int) -> Timed:
    """Return an op on a back end, compared with its reference.

    Args:
        spec: the op.
        case: sizes and settings.
        device: one of `DEVICES`.
        threads: threads of the CPU team.
    """
    op = OpRun(spec, case)
    cost = cost_of(op)
    # A call that is over at once would measure how long it takes to wake the team.
    calls = max(1, min(_MOST_CALLS, _ENOUGH_BYTES // max(cost.bytes, 1)))
    facts = {
        "op": spec.name,
        "case": case.id,
        "device": device,
        "bytes": cost.bytes,
        "flops": cost.flops,
        "calls": calls,
    }
    if device == "cuda":
        return _on_gpu(spec, case, calls, cost, facts)
    return _on_cpu(op, threads, calls, cost, facts)


def cost_of(op: OpRun) -> Cost:
    """Return the cost of one call."""
    return op.spec.cost(op.values, op.case.attrs)


def compare(op: OpRun, got: Mapping[str, np.ndarray]) -> Facts:
    """Compare what an op wrote with the reference: whether it is `correct`, and its errors."""
    expected = op.run(ReferenceExecutor)
    facts: Facts = {"correct": True, "rms_error": 0.0, "max_error": 0.0}
    for name in op.written:
        if op.spec.tolerance.max == 0 or expected[name].dtype.kind != "f":
            facts["correct"] &= bool(np.array_equal(got[name], expected[name]))
            continue
        if not np.isfinite(got[name]).all():  # and errors that are not numbers are not JSON
            facts |= {"correct": False, "rms_error": None, "max_error": None}
            break
        rms, largest = error(got[name], expected[name])
        facts["rms_error"] = max(facts["rms_error"], rms)
        facts["max_error"] = max(facts["max_error"], largest)
        facts["correct"] &= _within(op.spec.tolerance, rms, largest)
    return facts


def _within(tolerance: Tolerance, rms: float, largest: float) -> bool:
    return rms <= tolerance.rms and largest <= tolerance.max


def _on_cpu(op: OpRun, threads: int, calls: int, cost: Cost, facts: Facts) -> Timed:
    # A team that is free to use fewer threads would make "2 threads" mean something else.
    hints = Hints(adaptive=False)
    plan = op.plan
    executor = CpuExecutor(plan, op.weights, threads, hints=hints)
    op.fill(executor)
    executor.step(plan.tokens, plan.rows)
    facts |= compare(op, op.outputs(executor))
    facts |= {"isa": executor.isa, "threads": threads}
    if calls > 1:
        executor.close()
        plan = replace(plan, calls=plan.calls * calls)
        executor = CpuExecutor(plan, op.weights, threads, hints=hints)
        op.fill(executor)

    def run() -> None:
        executor.step(plan.tokens, plan.rows)

    return Timed(run, calls, cost, facts, executor.running, executor.close)


def _on_gpu(spec: OpSpec, case: Case, calls: int, cost: Cost, facts: Facts) -> Timed:
    from bench.gpu.parity import Trial, narrow_names
    from bench.gpu.setting import make_setting
    from clocher_kernels.cuda.launch import execute

    setting = make_setting(dry=False)
    act = "f16" if narrow_names(spec) else "f32"
    trial = Trial(setting, spec, case, act)
    row = trial.check()
    facts |= {
        "correct": row["status"] == "ok",
        "rms_error": row.get("rms"),
        "max_error": row.get("max"),
        "isa": f"sm_{setting.device.capability}",
        "activations": act,
    }
    replay = setting.timer.replay([partial(execute, trial.launches())] * calls)

    def run() -> None:
        replay()
        setting.timer.synchronize()

    return Timed(run, calls, cost, facts)
