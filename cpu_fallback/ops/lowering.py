"""The table of lowering functions: which ops the CPU back end executes, and how."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.ops import (
    attention,
    bsr,
    elementwise,
    kv,
    linear,
    moe,
    quantize,
    route,
    sampling,
    selection,
    skip,
)
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.team.tape import Launch

_MODULES = (
    attention,
    bsr,
    elementwise,
    kv,
    linear,
    moe,
    quantize,
    route,
    sampling,
    selection,
    skip,
)

LOWER: Mapping[str, Kernel | Callable[[BoundCall], Sequence[Launch]]] = MappingProxyType(
    {name: lower for module in _MODULES for name, lower in module.LOWER.items()}
)
"""Op name -> its kernel, or a function from a bound call to its launches."""
