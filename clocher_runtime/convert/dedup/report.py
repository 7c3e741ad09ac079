"""What deduplication does to a model, plane by plane, for people."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from clocher_runtime.checkpoints.dedup.codec import Stream
from clocher_runtime.checkpoints.dedup.index import StoredPlane
from clocher_runtime.checkpoints.dedup.planes import SPLITS


@dataclass(frozen=True, slots=True)
class Gain:
    """One plane before and after.

    Attributes:
        name: tensor and plane.
        dtype: element type of the plane.
        nbytes: its size.
        stored: bytes that it takes, without padding.
        how: how it is stored.
    """

    name: str
    dtype: str
    nbytes: int
    stored: int
    how: str

    @property
    def percent(self) -> float:
        """Part of the size that is saved, in per cent."""
        return 100 * (1 - self.stored / self.nbytes)


def gains(planes: Iterable[StoredPlane]) -> Iterator[Gain]:
    """Yield what is gained on each plane."""
    for plane in planes:
        stored = sum(nbytes for _, nbytes in plane.parts())
        name = f"{plane.tensor} {plane.key}"
        yield Gain(name, plane.plane.dtype, plane.plane.nbytes, stored, describe(plane))


def describe(plane: StoredPlane) -> str:
    """Return in a few words how a plane is stored."""
    over = "XOR base: " if plane.xor else ""
    if plane.mode == "blocks":
        return f"{over}{plane.unique} of {plane.blocks} blocks"
    if plane.mode == "streams":
        parts = zip(SPLITS[plane.split].parts, plane.streams, strict=True)
        return over + ", ".join(f"{part.name} {_stream(stream)}" for part, stream in parts)
    fixed = {"raw": "as it is", "same": f"same as plane {plane.of}", "base": "in the base"}
    return fixed[plane.mode]


def _stream(stream: Stream) -> str:
    if stream.mode == "code":
        escaped = f" + {100 * stream.escapes / stream.count:.2f} % escapes"
        return f"{stream.width}-bit code{escaped if stream.escapes else ''}"
    return {"const": "constant", "trits": "5 per byte", "raw": "as it is"}[stream.mode]
