"""Records: what a kernel finds at an address, read by name.

A record is a run of int64. A `NamedTuple` says what they are, in its order: an `int` is a number or
an address, a `float` is an fp32 in the low half, a `Kernel` is its address, and another NamedTuple
lies in place, read as its address:

    class Panels(NamedTuple):
        paired: int
        factor: float

    panels_at = reader(Panels)

    @device
    def fill(panels): ... panels_at(panels).factor ...

The record of an op's kernel begins with what its contract says: each dimension letter, each
parameter that is an array, each attribute that is a number. Reading all of it is one intrinsic;
LLVM drops what the kernel does not use.

    @executes("rms_norm", groups=int)
    def rms_norm(a, rank, size, scratch): ... a.M * a.groups, a.x, a.eps ...

M and R are the step's numbers by then, `a.rec` and `a.ctl` the addresses of the record and of the
control block.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import OpSpec, rows_of
from cpu_fallback.lanes.jit import Kernel, device, f32, i64, numba_type
from cpu_fallback.lanes.memory import emit_load
from cpu_fallback.lanes.simd import FLOAT, INT64, intrinsic, number

Value = int | float | Kernel | tuple[Any, ...]

COUNT = "count"  # Kind of a field: the step's M or R
_NUMBERS: Mapping[Any, Any] = {int: i64, float: f32, Kernel: i64, COUNT: i64}


def words(value: Value) -> Iterator[int | Kernel]:
    """Yield the int64 of a record, or of a value in one; a Kernel stands for its address."""
    if isinstance(value, tuple):
        for inner in value:
            yield from words(inner)
    elif isinstance(value, float | np.floating):
        yield int(np.float32(value).view(np.int32))
    else:
        yield value if isinstance(value, Kernel) else int(value)


def length(record: type) -> int:
    """Return how many int64 a record is."""
    kinds = get_type_hints(record).values()
    return sum(1 if kind in _NUMBERS else length(kind) for kind in kinds)


def reader(record: type) -> Any:
    """Return the intrinsic that reads a record: address -> NamedTuple."""
    return _intrinsic(record, get_type_hints(record), ())


@cache
def contract_fields(spec: OpSpec) -> dict[str, Any]:
    """Return the fields that the contract of an op gives: name -> kind, or int for an address."""
    fields: dict[str, Any] = {}
    for param in spec.params:
        letters = param.letters
        fields |= {letter: int for letter in letters if letter not in fields}
        if rows_of(param):
            fields[letters[0]] = COUNT
    fields |= {param.name: int for param in spec.params if param.kind != "matrix"}
    for name, attribute in spec.attributes.items():
        if attribute.annotation in (int, float):
            fields[name] = attribute.annotation
    return fields


def executes(
    op: str, own: type | None = None, **more: Any
) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator for a function (a, rank, size, scratch): the kernel of an op.

    Its record has the fields of the contract, then what `BoundCall.launch` is given: a NamedTuple
    `own`, or a tuple of the fields `more`.
    """
    fields = contract_fields(OPS[op]) | (get_type_hints(own) if own else {}) | more

    def decorate(function: Callable[..., None]) -> Kernel:
        names = ("rec", "ctl", *fields)
        read = _intrinsic(namedtuple(f"{function.__name__}_args", names), fields, ("rec", "ctl"))
        body = device(function)

        def entry(rec, ctl, rank, size, scratch):
            body(read(rec, ctl), rank, size, scratch)

        entry.__name__, entry.__doc__ = function.__name__, function.__doc__
        entry.__module__ = function.__module__
        return Kernel(entry)

    return decorate


def _intrinsic(record: type, fields: Mapping[str, Any], given: Sequence[str]) -> Any:
    """Make the intrinsic that reads these fields, behind the addresses that it was given."""
    kinds = [_NUMBERS.get(kind, i64) for kind in fields.values()]
    params = (i64,) * max(1, len(given))

    def typing(context: Any, *args: Any) -> Any:
        from numba import types

        of = [numba_type(kind) for kind in (*[i64] * len(given), *kinds)]
        return types.BaseTuple.from_types(of, record)(*map(numba_type, params)), generate

    def generate(context: Any, builder: Any, signature: Any, addresses: Any) -> Any:
        values, offset = list(addresses[: len(given)]), 0
        for kind in fields.values():
            at = builder.add(addresses[0], number(offset))
            if kind is float:
                values.append(emit_load(builder, FLOAT, at))
            elif kind is COUNT:
                values.append(_emit_count(builder, at, addresses[1]))
            else:
                values.append(emit_load(builder, INT64, at) if kind in _NUMBERS else at)
            offset += 8 if kind in _NUMBERS else 8 * length(kind)
        return context.make_tuple(builder, signature.return_type, values)

    return intrinsic(typing, record.__name__, given or ("at",))


def _emit_count(builder: Any, at: Any, ctl: Any) -> Any:
    """Emit a count: -1 is the step's M, -2 its R, in the control block; others are themselves."""
    count = emit_load(builder, INT64, at)
    place = builder.sub(ctl, builder.shl(builder.add(count, number(1)), number(3)))
    follows = builder.icmp_signed("<", count, number(0))
    return emit_load(builder, INT64, builder.select(follows, place, at))
