"""The table of lowering functions: which ops the CPU back end executes, and how."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from cpu_fallback import (
    attention,
    bsr,
    elementwise,
    integer,
    kv,
    linear,
    moe,
    quantized,
    quantized_moe,
    sampling,
)
from cpu_fallback.bind import BoundCall
from cpu_fallback.tape import Launch

_MODULES = (
    attention,
    bsr,
    elementwise,
    integer,
    kv,
    linear,
    moe,
    quantized,
    quantized_moe,
    sampling,
)

LOWER: Mapping[str, Callable[[BoundCall], Sequence[Launch]]] = MappingProxyType(
    {name: lower for module in _MODULES for name, lower in module.LOWER.items()}
)
"""Op name -> function from a bound call to its launches."""
