"""Run one op on inputs of a test's own, on the CPU back end or in the reference."""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.cases import case_plan
from clocher_kernels.ops.contract import Case, Value
from clocher_kernels.plan import Attr
from cpu_fallback.executor import CpuExecutor

Values = dict[str, np.ndarray]


def run(
    op: str,
    sizes: Mapping[str, int],
    attrs: Mapping[str, Attr],
    values: Mapping[str, Value],
    threads: int = 2,
) -> Values:
    """Return the buffers that an op writes; `threads` 0 asks the reference.

    Sizes are needed for outputs, and for M and R. Outputs are NaN before.
    """
    plan = case_plan(OPS[op], Case("own", sizes, attrs), values)
    weights = {name: values[name] for name in plan.weights}
    executor = CpuExecutor(plan, weights, threads) if threads else ReferenceExecutor(plan, weights)
    try:
        for name, buffer in plan.buffers.items():
            if buffer.role == "output":
                executor.array(name).view(np.uint8)[...] = 0xFF
            else:
                executor.array(name)[...] = values[name]
        executor.step(plan.tokens, plan.rows)
        written = [p.name for p in OPS[op].params if p.kind in ("out", "inout")]
        return {name: executor.array(name).copy() for name in written if name in plan.buffers}
    finally:
        executor.close()
