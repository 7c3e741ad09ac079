"""Vector types for Numba, and what it takes to make an intrinsic.

Numba has no vector types: `late` gives it one whose data model is an LLVM vector. `op` makes an
intrinsic of a function that emits LLVM; `simd`, `memory` and `sync` are lists of such functions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.late import Intrinsic, Kind, VecT, cgutils, i64, numba_type, void

LANES = 16
INT1, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, DOUBLE, VOID = ir.FloatType(), ir.DoubleType(), ir.VoidType()

F32, I32, MASK = VecT(FLOAT, LANES), VecT(INT32, LANES), VecT(INT1, LANES)
BYTES = VecT(INT8, 64)  # 64 bytes, signed or unsigned as the operation says
SHORTS = ir.VectorType(INT16, 32)  # The LLVM type of 64 bytes as int16


def op(result: Kind, *params: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: function (builder, *values) -> value that emits LLVM -> intrinsic.

    Arguments are cast to the types of the parameters.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is void else made

            return numba_type(result)(*map(numba_type, params)), generate

        return intrinsic(typing, emit.__name__, [f"p{i}" for i in range(len(params))])

    return decorate


def intrinsic(typing: Callable[..., Any], name: str, params: Sequence[str]) -> Intrinsic:
    """Return the intrinsic of a typing function (context, *params)."""
    # Numba looks at the parameters of the typing function.
    names = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in ("context", *params)]
    typing.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    typing.__name__ = name
    return Intrinsic(typing)


def call(b: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Emit a call of an LLVM intrinsic or of a C function."""
    function = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), values)


def call_at(b: Any, address: Any, result: ir.Type, *values: Any) -> Any:
    """Emit a call of the function at an address."""
    function = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.inttoptr(address, function.as_pointer()), values)


def caller(params: int) -> Any:
    """Return the intrinsic (address, *int64) that calls a kernel of so many parameters."""

    def call_kernel(b: Any, address: Any, *values: Any) -> None:
        call_at(b, address, VOID, *values)

    return op(void, *[i64] * (params + 1))(call_kernel)


def number(value: int) -> ir.Constant:
    """Return a constant int64."""
    return ir.Constant(INT64, value)


def emit_at(b: Any, base: Any, index: Any, size: Any) -> Any:
    """Emit base + index * size."""
    return b.add(base, b.mul(index, number(size) if isinstance(size, int) else size))


def behind(b: Any, base: Any, nbytes: int) -> Any:
    """Emit base + nbytes."""
    return b.add(base, number(nbytes))


def constant(kind: VecT | ir.VectorType, values: Any) -> ir.Constant:
    """Return a constant vector of these values, or of one value everywhere."""
    vector = kind.llvm if isinstance(kind, VecT) else kind
    many = isinstance(values, (list, tuple, range))
    return ir.Constant(vector, list(values) if many else [values] * vector.count)


def spread(b: Any, kind: VecT | ir.VectorType, scalar: Any) -> Any:
    """Emit a vector with a scalar in every lane."""
    vector = kind.llvm if isinstance(kind, VecT) else kind
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, vector.count), None))


def shuffle(b: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Emit a shuffle: lanes of two vectors, those of the second one behind those of the first."""
    return b.shuffle_vector(x, y, constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def pick(b: Any, vector: Any, lanes: Sequence[int]) -> Any:
    """Emit a shuffle: the lanes of one vector, in another order or number."""
    return shuffle(b, vector, ir.Constant(vector.type, ir.Undefined), lanes)
