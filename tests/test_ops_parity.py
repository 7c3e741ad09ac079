"""Every op, on the cases of its contract: both back ends against the NumPy reference.

Also the law of the CPU back end: a token's result does not depend on the number of threads, on how
many tokens the step has, or on which. CUDA kernels run in Triton's interpreter here.
"""

import numpy as np
import pytest
from op_cases import ALL, ON_CUDA, OpRun, error, name_of

from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Tolerance
from cpu_fallback.executor import CpuExecutor

_ON_CPU = [pytest.param(s, c, id=f"cpu-{name_of(s, c)}") for s, c in ALL]


@pytest.mark.parametrize(("spec", "case"), _ON_CPU)
def test_cpu(spec: OpSpec, case: Case) -> None:
    _on_cpu(spec, case, threads=(1,), alone=2)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case"), _ON_CPU)
def test_cpu_with_three_threads_and_each_token_alone(spec: OpSpec, case: Case) -> None:
    _on_cpu(spec, case, threads=(1, 3), alone=1 << 30)


def _on_cpu(spec: OpSpec, case: Case, threads: tuple[int, ...], alone: int) -> None:
    """Compare two threads with the reference, other numbers of threads, and some tokens alone."""
    op = OpRun(spec, case)
    expected = op.run(ReferenceExecutor)
    executor = CpuExecutor(op.plan, op.weights, threads=2)
    try:
        op.fill(executor)
        executor.step(op.plan.tokens, op.plan.rows)
        got = op.outputs(executor)
        for name in op.written:
            _close(spec.allowed(case), got[name], expected[name])
        lead = _lead(op)
        count = {"": 0, "M": op.plan.tokens, "R": op.plan.rows}[lead]
        for index in range(0, count, max(1, (count - 1) // (alone - 1))):  # the last one, too
            _alone(op, _run_alone(op, executor, lead, index), got, index)
    finally:
        executor.close()
    for many in threads:
        other = op.run(lambda plan, weights, n=many: CpuExecutor(plan, weights, n))
        for name in op.written:
            assert np.array_equal(_bytes(other[name]), _bytes(got[name])), (name, many)


def _lead(op: OpRun) -> str:
    """Return "M" or "R" if the op's outputs are independent rows, else ""."""
    leads = {op.plan.buffers[name].rows for name in op.written}
    lead = leads.pop()
    count = {"M": op.plan.tokens, "R": op.plan.rows, "": 1}[lead]
    return lead if not leads and count > 1 else ""


def _run_alone(op: OpRun, executor: CpuExecutor, lead: str, index: int) -> dict[str, np.ndarray]:
    """Run the case for one token or row, moved to the front; return the whole buffers."""
    op.fill(executor)
    for name, buffer in op.plan.buffers.items():
        if buffer.rows == lead and buffer.role != "output":
            executor.array(name)[0] = op.values[name][index]
    tokens = 1 if lead == "M" else op.plan.tokens
    executor.step(tokens, 1 if lead == "R" else op.plan.rows)
    return op.outputs(executor)


def _interpreted(spec: OpSpec, case: Case) -> bool:
    """Return whether the interpreter, which is slow, has time for a case of a product."""
    fmt, large = case.formats.get("w", ""), "large" in case.id
    if not fmt:
        return not case.id.startswith(("listed-prefill", "topk-prefill"))
    if "E" in case.sizes:  # one token in every format, many in the two that models ship
        return not large and (case.sizes["M"] == 1 or fmt in ("mxfp4", "bf16"))
    if "x" in case.formats:
        return not large
    if large:
        return fmt in ("int4_asym_g34_f32", "int8_g37_bf16", "fp8_e4m3_b128_bf16")
    if case.sizes["M"] == 1 and "act" in case.options:
        return True
    if case.sizes["M"] == 2:
        return fmt not in ("ternary", "ternary_f32", "ternary_inverse_f32", "fp8_e5m2_tensor_f32")
    twins = ("ternary_", "int4_asym_row_f32", "fp8_e5m2_tensor_f32")
    return case.sizes["M"] == 37 and not fmt.startswith(twins)


@pytest.mark.parametrize(
    ("spec", "case"),
    [pytest.param(s, c, id=f"cuda-{name_of(s, c)}") for s, c in ON_CUDA if _interpreted(s, c)],
)
@pytest.mark.one_in(5, of="spec")
def test_cuda(spec: OpSpec, case: Case) -> None:
    from cuda_cases import run_interpreted  # slow, and test_isa.py runs this file without it

    op = OpRun(spec, case)
    got, expected = run_interpreted(op), op.run(ReferenceExecutor)
    for name in op.written:
        _close(spec.allowed(case), got[name], expected[name])


def _close(limit: Tolerance, got: np.ndarray, expected: np.ndarray) -> None:
    if limit == EXACT or got.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    assert np.isfinite(got).all()
    rms, largest = error(got, expected)
    assert rms <= limit.rms and largest <= limit.max, (rms, largest)


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
