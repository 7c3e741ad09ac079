"""From an op call of a Plan to launches: checked arrays on one side, raw addresses on the other.

Every kernel module exports LOWER, a table from op name to the op's kernel, or to a function that
takes a `BoundCall` and returns launches, where the kernel needs more than the contract says:

    def _rms_norm(call: BoundCall) -> list[Launch]:
        return [call.launch(rms_norm, (parts(call, "x", call.dim("D")),))]

    LOWER = {"rms_norm": _rms_norm, "gather_rows": gather_rows}

By then dtype, shape and contiguity of every argument have been checked against the op's contract,
so a kernel may use the addresses as they are. What it reads there is not checked: an integer that
selects something goes through `within`, or what it selects is not written (`ops.contract`).
`record` says how a kernel reads its arguments.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops.contract import OpSpec, Param, Value
from clocher_kernels.plan import Attr, Buffer, Call
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import COUNT, contract_fields, words
from cpu_fallback.lanes.record import Value as Field
from cpu_fallback.team.placement import Asked
from cpu_fallback.team.tape import Launch

T = TypeVar("T")

_COUNT = {"M": -1, "R": -2}
"""What a record has for the step's number of tokens or rows, in place of a size."""


# Return the contiguous range [first, last) of `total` units that is this thread's.
share = device(lambda total, rank, size: (total * rank // size, total * (rank + 1) // size))
# Return the number in 0 .. count - 1 that is nearest to an index.
within = device(lambda index, count: max(min(index, count - 1), 0))


class BoundCall:
    """An op call with its arrays, checked against the op's contract. Raises ShapeError."""

    def __init__(
        self,
        spec: OpSpec,
        call: Call,
        values: Mapping[str, Value],
        buffers: Mapping[str, Buffer],
        hints: Asked | None = None,
    ) -> None:
        self.spec = spec
        self.hints = hints or Asked()
        self._call = call
        self._values = {param: values[name] for param, name in call.args.items()}
        self._rows = {param: buffers[n].rows for param, n in call.args.items() if n in buffers}
        self._buffers = buffers
        self._dims: dict[str, int] = {}
        self._leads: dict[str, str] = {}
        for param in spec.params:
            if param.name in self._values:
                self._check(param)
            elif not param.optional:
                raise ShapeError(f"{spec.name}: no argument for {param.name!r}")

    def has(self, param: str) -> bool:
        """Return whether an optional parameter is there."""
        return param in self._values

    def array(self, param: str) -> np.ndarray:
        """Return the array of a buffer or vector parameter, at capacity."""
        value = self._values[param]
        assert isinstance(value, np.ndarray)
        return value

    def tensor(self, param: str) -> QuantTensor:
        """Return the tensor of a matrix parameter."""
        value = self._values[param]
        assert isinstance(value, QuantTensor)
        return value

    def address(self, param: str) -> int:
        """Return the address of a buffer or vector parameter, 0 if it is absent."""
        return int(self.array(param).ctypes.data) if self.has(param) else 0

    def attr(self, name: str) -> Attr:
        """Return an attribute of the call; if it is not there, the reference's default."""
        if name in self._call.attrs:
            return self._call.attrs[name]
        default = self.spec.attributes[name].default
        if default is inspect.Parameter.empty:
            raise ShapeError(f"{self.spec.name}: no attribute {name!r}")
        given: Attr = default
        return given

    def choice(self, name: str, known: Mapping[str, T]) -> T:
        """Return what an attribute names in a table. Raises UnsupportedOp."""
        wanted = str(self.attr(name))
        if wanted not in known:
            raise UnsupportedOp(
                f"{self.spec.name}: no CPU kernel for {name}={wanted!r}; there are "
                f"{', '.join(known)}"
            )
        return known[wanted]

    def dim(self, letter: str) -> int:
        """Return the size that a dimension letter stands for, at capacity."""
        return self._dims[letter]

    def launch(
        self,
        kernel: Kernel,
        own: tuple[Field, ...] = (),
        scratch: int = 0,
        shares: int = 1,
        shared: int = 0,
    ) -> Launch:
        """Return a launch that reads the call's inputs and writes its outputs; see `Launch`.

        `own`: what the kernel reads besides its contract.
        """
        args = [(self.spec.param(p).kind, name) for p, name in self._call.args.items()]
        used = [(kind, name) for kind, name in args if name in self._buffers]
        reads = frozenset(name for kind, name in used if kind != "out")
        writes = frozenset(name for kind, name in used if kind in ("out", "inout"))
        fields = (*words(tuple(self._contract())), *words(own))
        return Launch(kernel, fields, reads, writes, scratch, shares, shared)

    def _contract(self) -> Iterator[Field]:
        """Yield the values of `contract_fields`: 0 for what an absent parameter would say."""
        params = {param.name for param in self.spec.params}
        letters = {letter for param in self.spec.params for letter in param.letters}
        for name, kind in contract_fields(self.spec).items():
            if kind == COUNT:
                rows = self._leads.get(name, "")
                yield _COUNT[rows] if rows else self._dims[name]
            elif name in letters:
                yield self._dims.get(name, 0)
            else:
                yield self.address(name) if name in params else kind(self.attr(name))

    def _check(self, param: Param) -> None:
        value = self._values[param.name]
        where = f"{self.spec.name}: {param.name!r} ({self._call.args[param.name]})"
        if (param.kind == "matrix") != isinstance(value, QuantTensor):
            raise ShapeError(f"{where} is a {type(value).__name__}; a {param.kind} is wanted")
        arrays = value.held.values() if isinstance(value, QuantTensor) else (value,)
        if not all(array.flags.c_contiguous for array in arrays):
            raise ShapeError(f"{where} is not contiguous; copy it with numpy.ascontiguousarray")
        types = [STORAGE[dtype] for dtype in param.dtypes]
        if isinstance(value, np.ndarray) and types and value.dtype not in types:
            expected = " or ".join(map(str, types))
            raise ShapeError(f"{where} is {value.dtype}; expected {expected}")
        letters, sizes = param.letters, param.sizes(value.shape)
        if sizes is None:
            raise ShapeError(f"{where} has shape {list(value.shape)}; expected [{param.dims}]")
        if letters and param.name in self._rows:
            rows = self._rows[param.name]
            if self._leads.setdefault(letters[0], rows) != rows:
                raise ShapeError(
                    f"{where}: {letters[0]} follows {rows or 'nothing'} in this buffer and "
                    f"{self._leads[letters[0]] or 'nothing'} elsewhere in the call"
                )
        for letter, size in sizes.items():
            if self._dims.setdefault(letter, size) != size:
                raise ShapeError(
                    f"{where} has shape {list(value.shape)}, [{param.dims}], but {letter} is "
                    f"{self._dims[letter]} elsewhere in the call"
                )


Lower = Callable[[BoundCall], Sequence[Launch]]
