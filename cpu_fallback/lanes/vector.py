"""Vector types for Numba, and what it takes to make an intrinsic.

Numba has no vector types: `late` gives it one whose data model is an LLVM vector. `op` makes an
intrinsic of a function that emits LLVM; `simd`, `memory` and `sync` are lists of such functions.
"""

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.late import Intrinsic, Kind, VecT, cgutils, numba_type, void

LANES = 16


_I1, _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
_FLOAT = ir.FloatType()

F32 = VecT(_FLOAT, LANES)
I32 = VecT(_I32, LANES)
MASK = VecT(_I1, LANES)
BYTES = VecT(_I8, 64)
"""64 bytes, signed or unsigned as the operation says."""


def op(result: Kind, *params: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function that emits LLVM.

    Args:
        result: type of the result.
        params: types of the parameters; arguments are cast to them.

    Returns:
        A decorator for a function (builder, *values) -> value.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is void else made

            return numba_type(result)(*map(numba_type, params)), generate

        typing.__name__ = emit.__name__
        typing.__doc__ = emit.__doc__
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return Intrinsic(typing)

    return decorate


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Emit a call of an LLVM intrinsic or of a C function."""
    function = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), values)


def constant(vector: VecT, values: Any) -> ir.Constant:
    """Return a constant vector of 16 values, or of 16 times one value."""
    n = vector.llvm.count
    return ir.Constant(
        vector.llvm, list(values) if isinstance(values, (list, tuple)) else [values] * n
    )


def spread(builder: Any, vector: VecT, scalar: Any) -> Any:
    """Emit a vector with a scalar in every lane."""
    undefined = ir.Constant(vector.llvm, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.llvm.count), None)
    return builder.shuffle_vector(first, undefined, zeros)


def pick(builder: Any, vector: Any, lanes: list[int]) -> Any:
    """Emit a shuffle: the lanes of one vector, in another order or number."""
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)
