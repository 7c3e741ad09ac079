"""The op table. `OPS` is the only list of ops in the project."""

from collections.abc import Mapping
from types import MappingProxyType

from clocher_kernels.ops import attention, elementwise, linear, moe, quantize, sampling
from clocher_kernels.ops.contract import OpSpec
from clocher_kernels.plan import Call

OPS: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for module in (elementwise, quantize, linear, moe, attention, sampling)
        for spec in module.SPECS
    }
)

__all__ = ["OPS", "OpSpec", "of_experts", "written"]


def written(call: Call) -> frozenset[str]:
    """Return the names of the buffers that a call writes."""
    params = {p.name for p in OPS[call.op].params if p.kind in ("out", "inout")}
    return frozenset(name for param, name in call.args.items() if param in params)


def of_experts(call: Call) -> bool:
    """Return whether a call multiplies by the matrices of experts, [E, N, K]."""
    matrix = OPS[call.op].matrix
    return matrix is not None and len(matrix.letters) == 3
