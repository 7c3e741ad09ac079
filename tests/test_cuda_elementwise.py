"""The element-wise CUDA kernels in Triton's interpreter, against the NumPy references."""

import pytest
from cuda_cases import run_interpreted
from op_cases import ALL, OpRun, error, name_of

from clocher_kernels.ops.contract import Case, OpSpec
from clocher_kernels.reference import ReferenceExecutor

OPS = ("glu",)


@pytest.mark.parametrize(
    ("spec", "case"), [pytest.param(s, c, id=name_of(s, c)) for s, c in ALL if s.name in OPS]
)
def test_parity(spec: OpSpec, case: Case) -> None:
    op = OpRun(spec, case)
    got, expected = run_interpreted(op), op.run(ReferenceExecutor)
    for name in op.written:
        rms, largest = error(got[name], expected[name])
        assert rms <= spec.tolerance.rms and largest <= spec.tolerance.max, (name, rms, largest)
