"""The op table. `OPS` is the only list of ops in the project."""

from collections.abc import Mapping
from types import MappingProxyType

from clocher_kernels.ops import attention, elementwise, linear, moe, quantized, sampling
from clocher_kernels.ops.contract import OpSpec

OPS: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for module in (elementwise, linear, moe, quantized, attention, sampling)
        for spec in module.SPECS
    }
)

__all__ = ["OPS", "OpSpec"]
