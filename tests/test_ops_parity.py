"""Every op, on every case of its contract: the CPU back end against the NumPy reference.

Also the law of the back end: a token's result does not depend on the number of threads, on how many
tokens the step has, or on which.
"""

import numpy as np
import pytest
from op_cases import ALL, OpRun, error, name_of

from clocher_kernels.ops.contract import Case, OpSpec
from clocher_kernels.reference import ReferenceExecutor
from cpu_fallback.executor import CpuExecutor


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(s, c, id=f"cpu-{name_of(s, c)}") for s, c in ALL]
)
def test_parity(spec: OpSpec, case: Case) -> None:
    op = OpRun(spec, case)
    expected = op.run(ReferenceExecutor)
    executor = CpuExecutor(op.plan, op.weights, threads=2)
    try:
        op.fill(executor)
        executor.step(op.plan.tokens, op.plan.rows)
        got = op.outputs(executor)
        for name in op.written:
            _close(spec, got[name], expected[name])
        lead = op.alone()
        for index in range({"": 0, "M": op.plan.tokens, "R": op.plan.rows}[lead]):
            _alone(op, op.run_alone(executor, lead, index), got, index)
    finally:
        executor.close()
    for threads in (1, 3):
        other = op.run(lambda plan, weights, n=threads: CpuExecutor(plan, weights, n))
        for name in op.written:
            assert np.array_equal(_bytes(other[name]), _bytes(got[name])), (name, threads)


def _close(spec: OpSpec, got: np.ndarray, expected: np.ndarray) -> None:
    if spec.tolerance.max == 0 or got.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    assert np.isfinite(got).all()
    rms, largest = error(got, expected)
    assert rms <= spec.tolerance.rms and largest <= spec.tolerance.max, (rms, largest)


def _alone(
    op: OpRun, alone: dict[str, np.ndarray], batch: dict[str, np.ndarray], index: int
) -> None:
    for name in op.written:
        assert np.array_equal(_bytes(alone[name][0]), _bytes(batch[name][index])), (name, index)
        if op.plan.buffers[name].role == "output":
            untouched = _bytes(alone[name][1:])
            fill = 0xFF if alone[name].dtype.kind == "f" else 0x7F
            assert (untouched == fill).all(), (name, index)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)
