"""Which op of a step first made NaN or infinity, found by executing it again call by call."""

from collections.abc import Iterable
from contextlib import closing

import numpy as np

from clocher_kernels.dtypes import LARGEST, to_f32
from clocher_kernels.errors import NonFinite
from clocher_kernels.ops import OPS
from clocher_kernels.plan import Call, Executor
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.load import Weights

_PIECE = 1 << 20


def explain(
    executor: Executor, weights: Weights, act_prec: str, steps: Iterable[tuple[int, int]]
) -> NonFinite:
    """Execute steps again and return the error that explains their non-finite logits.

    `steps` stages inputs and yields counts of tokens and rows; earlier KV must be unchanged.
    """
    for tokens, rows in steps:
        if (found := _first(executor, tokens, rows)) is not None:
            call, place, token = found
            sequence, position = (int(executor.array(n)[token]) for n in ("slots", "positions"))
            reason = _reason(call, weights, act_prec)
            return NonFinite(
                f"{place} gave NaN or infinity at token {position} of the sequence; {reason}",
                sequence,
            )
    return NonFinite(
        "the logits were NaN or infinite, and finite when the step was repeated: this machine does "
        "not always compute the same; check its memory"
    )


def _first(executor: Executor, tokens: int, rows: int) -> tuple[Call, str, int] | None:
    """Return the first call with a non-finite output, its place, and the token."""
    plan, counts = executor.plan, {"M": tokens, "R": rows}
    weight, known = "", frozenset(plan.weights)
    with closing(executor.walk(tokens, rows)) as calls:
        for call in calls:
            read = [name for name in call.args.values() if name in known]
            weight = next(iter(read), weight)
            for param in OPS[call.op].params:
                name = call.args.get(param.name, "")
                buffer = plan.buffers.get(name)
                if buffer is None or param.kind == "in" or buffer.dtype != "f32":
                    continue
                count = counts.get(buffer.rows, 0)  # the cache has none: it shows in attention
                values = executor.peek(name, count)
                bad = ~np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
                if bad.any():
                    row = int(bad.argmax())
                    token = int(executor.array("rows")[row]) if buffer.rows == "R" else row
                    return call, f"{call.op} {'of' if read else 'after'} {weight}", token
    return None


def _reason(call: Call, weights: Weights, act_prec: str) -> str:
    for name in call.args.values():
        if count := _non_finite(weights[name]) if name in weights else 0:
            return (
                f"{count} stored value(s) of {name} are NaN or infinite: the file is damaged or "
                "was converted wrongly; get it, or convert it, again"
            )
    if act_prec in ("fp16", "bf16"):
        return f"the weights are finite: beyond the range of {act_prec}; try --act-prec fp32"
    return "the weights are finite, but too large: a sum overflowed fp32; check the model's scales"


def _non_finite(weight: np.ndarray | QuantTensor) -> int:
    if isinstance(weight, np.ndarray):
        return int((~np.isfinite(weight)).sum())
    count = 0
    for name, plane in weight.format.planes(weight.shape).items():
        if plane.dtype in LARGEST:
            stored = weight.planes[name].reshape(-1)
            for start in range(0, stored.size, _PIECE):
                values = to_f32(stored[start : start + _PIECE], plane.dtype)
                count += int((~np.isfinite(values)).sum())
    return count
