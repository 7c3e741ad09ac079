"""What is not finite is never lost: no op turns NaN, infinity or an overflow into a number.

The back ends must give the tokens that the references give something that is not finite, and leave
all others bit by bit as they are. So the sampler, which looks at every logit, sees each fault. Or
they refuse the weights when they pack them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda_cases import run_interpreted
from op_cases import Arrays, OpRun, name_of
from planting import odd_tokens, one_case_of_each, plants, ready

from clocher_kernels.errors import FormatError
from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.ops.contract import Case, OpSpec
from cpu_fallback.executor import CpuExecutor

CASES = one_case_of_each()


def run_cpu(run: OpRun) -> Arrays:
    return run.run(lambda plan, weights: CpuExecutor(plan, weights, 2))


def with_values(run: OpRun, values: dict) -> OpRun:
    run.values = values
    run.weights = {name: values[name] for name in run.plan.weights}
    return run


def check(spec: OpSpec, case: Case, back_end: Callable[[OpRun], Arrays]) -> None:
    clean = back_end(ready(spec, case))
    seen = 0
    for param, what, values in plants(ready(spec, case)):
        run = with_values(ready(spec, case), values)
        with np.errstate(all="ignore"):
            odd = odd_tokens(run, run.run(ReferenceExecutor))
            try:
                got = back_end(run)
            except FormatError as error:
                assert param in run.plan.weights, what
                assert "a scale is NaN or infinite" in str(error), what
                seen += bool(odd.any())
                continue
        np.testing.assert_array_equal(odd_tokens(run, got), odd, what)
        for name in run.written if param in run.plan.buffers else ():
            np.testing.assert_array_equal(got[name][~odd], clean[name][~odd], what)
        seen += bool(odd.any())
    assert seen


@pytest.mark.parametrize(("spec", "case"), [pytest.param(*c, id=name_of(*c)) for c in CASES])
@pytest.mark.one_in(2, of="spec")
def test_cpu(spec: OpSpec, case: Case) -> None:
    check(spec, case, run_cpu)


_PRODUCTS = ("linear", "moe", "relu2", "skip")


def _on_gpu() -> Iterator[Any]:
    """Yield the cases of the CUDA kernels; those that take the interpreter long are slow tests."""
    for spec, case in CASES:
        if "cuda" not in case.missing:
            few = case.id == "f32-m5-e4-a3-n37-i96" or not spec.name.startswith(_PRODUCTS)
            yield pytest.param(
                spec, case, id=name_of(spec, case), marks=[] if few else pytest.mark.slow
            )


@pytest.mark.parametrize(("spec", "case"), list(_on_gpu()))
def test_cuda(spec: OpSpec, case: Case) -> None:
    check(spec, case, run_interpreted)
