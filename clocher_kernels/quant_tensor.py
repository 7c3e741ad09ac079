"""A tensor: a logical shape, a format, and the planes (arrays) that the format names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from clocher_kernels.formats.base import Format, require_finite, turn


class BlockRows(NamedTuple):
    """The rows of a tensor as a file has them: blocks of a type of ggml, one after the other."""

    at: np.ndarray  # address of each row, int64 [..., N]
    arrays: tuple[np.ndarray, ...]  # where they lie, u8
    where: str = ""  # the tensor, for messages

    @classmethod
    def of(cls, data: np.ndarray, shape: tuple[int, ...]) -> "BlockRows":
        """Return rows [*shape] that lie one after the other in an array."""
        first, step = int(data.ctypes.data), data.nbytes // prod(shape)
        at = np.arange(first, first + step * prod(shape), step, dtype=np.int64)
        return cls(at.reshape(shape), (data,))


@dataclass(eq=False)
class LatePlanes(Mapping[str, np.ndarray]):
    """Planes that `make` computes when one of `names` is first asked for.

    `rows`, if a file has the rows as blocks, tells where, for those who can do without the planes;
    `are_new`: the planes take memory, they are no views of the file.
    """

    names: tuple[str, ...]
    make: Callable[[], Mapping[str, np.ndarray]]
    rows: Callable[[], BlockRows] | None = None
    are_new: bool = True

    @cached_property
    def _made(self) -> Mapping[str, np.ndarray]:
        return self.make()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantTensor:
    """A stored tensor.

    `shape` is logical: [N, K], or [E, N, K] for experts. `planes` by name ("data", "codes",
    "scales", "zeros", ...) may be read-only views of a mapped file.
    """

    shape: tuple[int, ...]
    format: Format
    planes: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        expected = self.format.planes(self.shape)
        if set(expected) != set(self.planes):
            raise ShapeError(
                f"{self.format.name}: planes {sorted(self.planes)}, expected {sorted(expected)}"
            )
        held = self.held
        for name, plane in expected.items() if held else ():
            got = held[name]
            if got.shape != plane.shape or got.dtype != plane.storage:
                raise ShapeError(
                    f"{self.format.name}: plane {name!r} of a {list(self.shape)} tensor is "
                    f"{got.dtype}{list(got.shape)}, expected {plane.storage}{list(plane.shape)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return self.format.nbytes(self.shape)

    @property
    def held(self) -> Mapping[str, np.ndarray]:
        """The planes that are arrays already: all, or none of `LatePlanes`."""
        return {} if isinstance(self.planes, LatePlanes) else self.planes

    def decode(self) -> np.ndarray:
        """Return the values as fp32, in the logical shape."""
        stored = self.stored()
        return turn(stored, self.format.turned) if self.format.turned else stored

    def stored(self) -> np.ndarray:
        """Return what products multiply inputs by, fp32: rotated if the format has that."""
        return self.format.decode(self.planes, self.shape)

    def check(self) -> None:
        """Raise FormatError if a stored code is forbidden by the format."""
        self.format.check(self.planes, self.shape)

    def __repr__(self) -> str:
        return f"QuantTensor({list(self.shape)}, {self.format.name}, {self.nbytes} bytes)"


def encode(values: np.ndarray, fmt: Format) -> QuantTensor:
    """Encode fp32 values [..., N, K] in a format."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if fmt.turned:
        fmt.planes(values.shape)  # or there may be no blocks to rotate
        require_finite(fmt.name, values)
        values = turn(values, fmt.turned)
    return QuantTensor(values.shape, fmt, fmt.encode(values))
