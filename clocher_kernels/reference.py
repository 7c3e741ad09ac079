"""The reference executor: run a Plan in NumPy, op by op."""

from collections.abc import Generator, Mapping

import numpy as np

from clocher_kernels.ops import OPS
from clocher_kernels.plan import Call, Executor, Plan
from clocher_kernels.quant_tensor import QuantTensor


class ReferenceExecutor(Executor):
    """Execute a Plan with the op table's NumPy references: slow, simple, always available."""

    name = "reference"
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
