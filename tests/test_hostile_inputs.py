"""Integers that select what is not there: every back end does what the reference does with them."""

import numpy as np
import pytest
from cuda_cases import run_interpreted
from hostile_inputs import careless, hostile, selectors
from op_cases import ALL, ON_CUDA, ONE_EACH, OpRun, error, name_of

from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.contract import Case, OpSpec
from clocher_kernels.ops.sampling import NO_TOKEN
from cpu_fallback.executor import CpuExecutor

_EACH = {name_of(*own) for own in ONE_EACH}
CASES = [
    pytest.param(s, c, id=name_of(s, c), marks=() if name_of(s, c) in _EACH else pytest.mark.slow)
    for s, c in ALL
    if selectors(OpRun(s, c))
]
CASES_ON_GPU = [
    pytest.param(s, c, id=name_of(s, c))
    for s, c in ON_CUDA
    if "moe" not in s.name  # their experts are chosen by a kernel
    and selectors(OpRun(s, c))
    and not c.id.startswith(("large", "long", "listed", "topk-prefill", "topk-decode-m1"))
]
_SAMPLE = [pytest.param(c, id=c.id) for c in OPS["sample"].cases]


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_cpu(spec: OpSpec, case: Case) -> None:
    op = OpRun(spec, case)
    executor = CpuExecutor(op.plan, op.weights, threads=1)
    try:
        for kind, values in hostile(op):
            op.values = values
            expected = op.run(ReferenceExecutor)
            op.fill(executor)
            executor.step(op.plan.tokens, op.plan.rows)
            _hold(op, kind, op.outputs(executor), expected)
    finally:
        executor.close()


@pytest.mark.parametrize(("spec", "case"), CASES_ON_GPU)
@pytest.mark.one_in(3, of="spec")
def test_cuda(spec: OpSpec, case: Case) -> None:
    op = OpRun(spec, case)
    for kind, values in hostile(op):
        if kind not in ("past", "mixed"):
            continue  # the interpreter is slow
        op.values = values
        _hold(op, kind, run_interpreted(op), op.run(ReferenceExecutor))


def _hold(
    op: OpRun, kind: str, got: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    tolerance = op.spec.allowed(op.case)
    for name in op.written:
        if tolerance.max == 0:
            assert got[name].tobytes() == expected[name].tobytes(), (kind, name)
        else:
            rms, largest = error(got[name], expected[name])
            assert rms <= tolerance.rms and largest <= tolerance.max, (kind, name, rms, largest)


@pytest.mark.parametrize("case", _SAMPLE)
def test_whatever_the_settings_a_token_is_drawn(case: Case) -> None:
    op = OpRun(OPS["sample"], case)
    for kind, values in careless(op):
        op.values = values
        runs = [op.run(lambda plan, weights: CpuExecutor(plan, weights, 1))]
        if case.id == "t1-k8-p0.5-r5-v37":  # the interpreter is slow
            runs.append(_drawn(op))
        for got in runs:
            ids = got["ids"]
            if kind.startswith("logits"):
                assert (ids == NO_TOKEN).all(), (kind, ids)
            else:
                assert ((ids >= 0) & (ids < case.sizes["V"])).all(), (kind, ids)


def _drawn(op: OpRun) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        return run_interpreted(op)
