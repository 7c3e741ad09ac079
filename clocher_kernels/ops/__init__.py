"""The op table, the only list of ops in the project, and the executor of its references."""

from collections.abc import Generator, Mapping

import numpy as np

from clocher_kernels.ops import (
    attention,
    elementwise,
    linear,
    moe,
    quantize,
    sampling,
    selection,
    skip,
)
from clocher_kernels.ops.contract import OpSpec
from clocher_kernels.plan import Call, Executor, Plan
from clocher_kernels.quant_tensor import QuantTensor

OPS: Mapping[str, OpSpec] = {
    spec.name: spec
    for module in (elementwise, quantize, linear, skip, moe, attention, selection, sampling)
    for spec in module.SPECS
}
"""Op name -> contract, in the order of docs/ops.md."""

__all__ = ["OPS", "OpSpec", "ReferenceExecutor", "matrices", "of_experts", "written"]


def written(call: Call) -> frozenset[str]:
    """Return the names of the buffers that a call writes."""
    params = {p.name for p in OPS[call.op].params if p.kind in ("out", "inout")}
    return frozenset(name for param, name in call.args.items() if param in params)


def of_experts(call: Call) -> bool:
    """Return whether a call multiplies by the matrices of experts, [E, N, K]."""
    matrix = OPS[call.op].matrix
    return matrix is not None and len(matrix.letters) == 3


def matrices(call: Call) -> list[str]:
    """Return the names of the matrices that a call, if whole, multiplies by or looks up."""
    params = [p.name for p in OPS[call.op].params if p.kind == "matrix"]
    return [call.args[param] for param in params if param in call.args]


class ReferenceExecutor(Executor):
    """Execute a Plan with the op table's NumPy references: slow, simple, always available."""

    isa = "numpy"

    def __init__(self, plan: Plan, weights: Mapping[str, np.ndarray | QuantTensor]) -> None:
        self.plan = plan
        self._values: dict[str, np.ndarray | QuantTensor] = {
            **{name: b.allocate() for name, b in plan.buffers.items()},
            **plan.consts,
            **{name: weights[name] for name in plan.weights},
        }

    def array(self, name: str) -> np.ndarray:
        """Return the live array of a buffer, at capacity."""
        value = self._values[name]
        assert isinstance(value, np.ndarray)
        return value

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for the first `tokens` tokens and `rows` output rows."""
        for _ in self.walk(tokens, rows):
            pass

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call, yielding each executed call."""
        count = {"M": tokens, "R": rows}
        for call in self.plan.calls:
            values = {}
            for param, name in call.args.items():
                value = self._values[name]
                buffer = self.plan.buffers.get(name)
                if buffer is not None and buffer.rows:
                    value = value[: count[buffer.rows]]  # type: ignore[index]
                values[param] = value
            OPS[call.op].reference(**values, **call.attrs)
            yield call
