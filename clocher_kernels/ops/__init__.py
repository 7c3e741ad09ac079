"""The op table. `OPS` is the only list of ops in the project."""

from collections.abc import Mapping
from types import MappingProxyType

from clocher_kernels.ops import (
    attention,
    elementwise,
    linear,
    moe,
    quantize,
    sampling,
    selection,
    skip,
    sparse,
)
from clocher_kernels.ops.contract import OpSpec
from clocher_kernels.plan import Call

OPS: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for module in (
            elementwise,
            quantize,
            linear,
            skip,
            sparse,
            moe,
            attention,
            selection,
            sampling,
        )
        for spec in module.SPECS
    }
)

__all__ = ["OPS", "OpSpec", "matrices", "of_experts", "written"]


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
