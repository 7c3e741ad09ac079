"""Arrays <-> streams of symbols <-> bytes, for `clocher.dedup`; docs/dedup.md specifies them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats.base import unpacked

RANK_STRIDE = 4096
TRITS = 5
UNIT = RANK_STRIDE * TRITS
"""At multiples of it every stream can be entered: a byte begins and the rank is known."""
MAX_ESCAPES = (1 << 32) - 1
WIDTHS = (1, 2, 3, 4)

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Stream:
    """How a stream is stored.

    `mode` is "const", "code" (`width` bits a symbol; the last code is an escape to the exceptions),
    "trits" (5 symbols of at most 3 kinds in a byte) or "raw" (packed symbols of `bits` bits).
    `table` counts its symbols, the most frequent first; `escapes` counts stored exceptions.
    `symbols` is the table itself, u8, while it is written.
    """

    mode: str
    bits: int
    count: int
    width: int = 0
    table: int = 0
    escapes: int = 0
    symbols: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def exception_bits(self) -> int:
        """Bits of an exception."""
        return exception_bits(self.table, self.width)

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes or trits."""
        if self.mode == "trits":
            return -(-self.count // TRITS)
        return -(-self.count * self.width // 8) if self.mode == "code" else 0

    @property
    def ranks(self) -> int:
        """Entries of the rank index."""
        return (self.count - 1) // RANK_STRIDE if self.escapes else 0

    @property
    def literal_bytes(self) -> int:
        """Bytes of the exceptions, or of the symbols themselves."""
        if self.mode == "raw":
            return -(-self.count * self.bits // 8)
        return -(-self.escapes * self.exception_bits // 8)


def exception_bits(table: int, width: int) -> int:
    """Return the bits that tell apart the symbols that share the escape code."""
    rare = table - ((1 << width) - 1)
    return (rare - 1).bit_length() if rare > 1 else 0


def pack(symbols: np.ndarray, bits: int) -> np.ndarray:
    """Return symbols of 1 to 8 bits without gaps, u8, the first in the lowest bits."""
    if bits == 8:
        return symbols
    each = np.unpackbits(symbols[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(each, bitorder="little")


def unpack(data: np.ndarray, bits: int, start: int, count: int) -> np.ndarray:
    """Return packed symbols [start, start + count), u8."""
    if bits == 8:
        return data[start : start + count]
    # A group of 8 symbols is `bits` bytes; the last one may be cut short.
    first, last = start // 8 * bits, -(-(start + count) // 8) * bits
    piece = data[first:last]
    groups = np.pad(piece, (0, last - first - len(piece)))[None]
    return unpacked(groups, bits)[0, start % 8 : start % 8 + count]


def pack_trits(places: np.ndarray) -> np.ndarray:
    """Return places in the table, 0 to 2, five a byte, the first one least significant."""
    groups = np.zeros((-(-len(places) // TRITS), TRITS), np.uint8)
    groups.reshape(-1)[: len(places)] = places
    return np.asarray(groups @ 3 ** np.arange(TRITS, dtype=np.uint8))


def decoder(
    stream: Stream, values: Array, codes: Array, rank: Array, literals: Array
) -> Callable[[int, int], Array]:
    """Return a function for the values of symbols [start, stop), multiples of `UNIT` or the end.

    `values` are what the symbols of the table stand for, all different; `codes`: codes or trits,
    u8; `rank`: exceptions before each `RANK_STRIDE` symbols but the first, u32; `literals`:
    exceptions, u8.
    """
    table, width = _table(stream, values), stream.width
    frequent = min(stream.table, (1 << width) - 1)  # symbols that have a code of their own
    ranks = np.concatenate([[0], rank.astype(np.int64), [stream.escapes]])
    steps = np.diff(ranks)
    if stream.escapes and (steps.min() < 0 or steps.max() > RANK_STRIDE):
        raise FormatError("the rank index is not a count of escapes")

    def decode(start: int, stop: int) -> Array:
        count = stop - start
        if stream.mode == "const":
            return np.repeat(values[:1], count)
        if stream.mode == "trits":
            # A copy: what has been checked must not change in the file before it is used.
            index = codes[start // TRITS : -(-stop // TRITS)].copy()
            if index.max() >= len(table):
                raise FormatError("a byte of trits is above 242")
            return np.take(table, index, axis=0)[:, :TRITS].reshape(-1)[:count]
        index = _index(codes[start * width // 8 : -(-stop * width // 8)], width)
        out = np.take(table, index, axis=0, mode="clip").reshape(-1)[:count]
        if stream.escapes:
            first, last = ranks[start // RANK_STRIDE], ranks[-(-stop // RANK_STRIDE)]
            # No code but the escape stands for the first rare symbol: that one marks the places.
            where = np.flatnonzero(out == values[frequent])
            if len(where) != last - first:
                raise FormatError(f"{len(where)} escapes where the rank index has {last - first}")
            rare = unpack(literals, stream.exception_bits, int(first), len(where))
            if rare.max(initial=0) >= stream.table - frequent:
                raise FormatError("an exception is not in the table")
            out[where] = values[frequent:][rare]
        return out

    return decode


def _table(stream: Stream, values: np.ndarray) -> np.ndarray:
    """Return the values of the symbols of each index, [indices, symbols]."""
    if stream.mode == "trits":
        digits = np.arange(3**TRITS)[:, None] // 3 ** np.arange(TRITS) % 3
        # Rows of 8 are copied much faster than rows of 5.
        places = np.pad(digits, ((0, 0), (0, 8 - TRITS)))
    elif stream.mode == "code":
        width = stream.width
        bits = 12 if width == 3 else 8
        places = np.arange(1 << bits)[:, None] >> np.arange(0, bits, width) & ((1 << width) - 1)
    else:
        return values
    return np.asarray(values[np.minimum(places, len(values) - 1)])


def _index(codes: np.ndarray, width: int) -> np.ndarray:
    if width != 3:
        return codes
    short = -len(codes) % 3
    if short:
        codes = np.concatenate([codes, np.zeros(short, np.uint8)])
    groups = codes.reshape(-1, 3)
    middle = groups[:, 1].astype(np.uint16)
    index = np.empty((len(groups), 2), np.uint16)
    index[:, 0] = groups[:, 0] | ((middle & 15) << 8)
    index[:, 1] = (middle >> 4) | (groups[:, 2].astype(np.uint16) << 4)
    return index.reshape(-1)


@dataclass(frozen=True, slots=True)
class Part:
    """One stream of a split; `runs`: (lowest bit in the item, bits, lowest bit in the symbol)."""

    name: str
    bits: int
    runs: tuple[tuple[int, int, int], ...]
    item: np.dtype

    def cut(self, items: Array) -> Array:
        """Return the symbols of items, u8."""
        if self.item == np.uint8:
            return unpack(items, self.bits, 0, 8 * len(items) // self.bits)
        out = np.zeros(len(items), np.uint8)
        for source, bits, target in self.runs:
            out |= (items >> source).astype(np.uint8) << target & ((1 << bits) - 1 << target)
        return out

    def place(self, symbols: Array) -> Array:
        """Return the contribution of symbols, u8, to the items."""
        if self.item == np.uint8:
            return symbols
        wide = symbols.astype(self.item)
        out: Array | None = None
        for target, bits, source in self.runs:
            one = wide if len(self.runs) == 1 else wide & self.item.type((1 << bits) - 1 << source)
            by = self.item.type(abs(target - source))
            one = one << by if target > source else one >> by
            out = one if out is None else out | one
        assert out is not None
        return out


@dataclass(frozen=True, slots=True)
class Split:
    """How the items of an array become streams; an item is the OR of what its parts contribute."""

    item: np.dtype
    per_item: int
    parts: tuple[Part, ...]


def _split(item: str, *parts: tuple[str, int, tuple[tuple[int, int, int], ...]]) -> Split:
    kind = np.dtype(item)
    per_item = 8 // parts[0][1] if kind.itemsize == 1 else 1
    return Split(kind, per_item, tuple(Part(*part, kind) for part in parts))


SPLITS: dict[str, Split] = {
    "byte": _split("u1", ("byte", 8, ())),
    "nibble": _split("u1", ("nibble", 4, ())),
    "crumb": _split("u1", ("crumb", 2, ())),
    "bf16": _split(
        "<u2", ("exponent", 8, ((7, 8, 0),)), ("sign+mantissa", 8, ((15, 1, 7), (0, 7, 0)))
    ),
    "f16": _split(
        "<u2",
        ("exponent", 5, ((10, 5, 0),)),
        ("sign+mantissa", 3, ((15, 1, 2), (8, 2, 0))),
        ("mantissa", 8, ((0, 8, 0),)),
    ),
    "f32": _split(
        "<u4",
        ("exponent", 8, ((23, 8, 0),)),
        ("sign+mantissa", 8, ((31, 1, 7), (16, 7, 0))),
        ("mantissa 8..15", 8, ((8, 8, 0),)),
        ("mantissa 0..7", 8, ((0, 8, 0),)),
    ),
    "i32": _split("<u4", *((f"byte {i}", 8, ((8 * i, 8, 0),)) for i in range(4))),
}
"""Name -> split. Little-endian: the low bits come first."""


def splits_of(dtype: str) -> tuple[str, ...]:
    """Return the splits that an array of this element type can have."""
    return (dtype,) if dtype in SPLITS else ("byte", "nibble", "crumb")


def join(split: Split, placed: list[Array]) -> Array:
    """Return the items that placed streams make up; the first one may be written over."""
    if split.per_item > 1:
        places = placed[0].reshape(-1, split.per_item)
        whole = places[:, 0].copy()
        for place in range(1, split.per_item):
            whole |= places[:, place] << np.uint8(8 // split.per_item * place)
        return whole
    out = placed[0]
    for other in placed[1:]:
        np.bitwise_or(out, other, out=out)
    return out
