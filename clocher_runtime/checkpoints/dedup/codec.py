"""Arrays <-> streams of symbols <-> bytes: what `clocher.dedup` stores. docs/dedup.md specifies it.

Numbers are cut where the parts repeat (`SPLITS`); each part is a stream. A stream is a sequence of
symbols, u8 here, of `bits` bits each. What is decoded need not be the symbols: every function takes
the value that each symbol of the table stands for, of any type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.errors import FormatError

RANK_STRIDE = 4096
TRITS = 5
UNIT = RANK_STRIDE * TRITS
"""Symbols at whose multiples every stream can be entered: a byte begins, and the rank is known."""
MAX_ESCAPES = (1 << 32) - 1
WIDTHS = (1, 2, 3, 4)

Array = np.ndarray
Mode = Literal["const", "code", "trits", "raw"]


@dataclass(frozen=True, slots=True)
class Stream:
    """How a stream is stored.

    `mode`: "const": one symbol throughout. "code": `width` bits a symbol; the last code is an
    escape, and the next exception says which of the rarer symbols it is. "trits": one of at most 3
    symbols, 5 of them a byte. "raw": the symbols themselves, packed; `bits`: bits of a symbol;
    `count`: symbols; `width`: bits of a code; `table`: symbols in the table, the most frequent
    first; 0 for "raw"; `escapes`: exceptions that are stored; 0 if an escape can mean one symbol
    only.
    """

    mode: Mode
    bits: int
    count: int
    width: int = 0
    table: int = 0
    escapes: int = 0

    @property
    def frequent(self) -> int:
        """Symbols that have a code of their own."""
        return min(self.table, (1 << self.width) - 1)

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
    """Return the bits that tell the symbols apart that share the escape code."""
    rare = table - ((1 << width) - 1)
    return (rare - 1).bit_length() if rare > 1 else 0


def pack(symbols: np.ndarray, bits: int) -> np.ndarray:
    """Return symbols of 1 to 8 bits without gaps, u8, the first in the lowest bits."""
    if bits == 8:
        return symbols
    groups = np.zeros((-(-len(symbols) // 8), 8), np.uint8)
    groups.reshape(-1)[: len(symbols)] = symbols
    words = np.zeros(len(groups), np.uint64)
    for place in range(8):
        words |= groups[:, place].astype(np.uint64) << np.uint64(place * bits)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)
    return packed[: -(-len(symbols) * bits // 8)]


def unpack(data: np.ndarray, bits: int, start: int, count: int) -> np.ndarray:
    """Return packed symbols [start, start + count), u8."""
    if bits == 8:
        return data[start : start + count]
    first, last = start // 8, -(-(start + count) // 8)
    piece = data[first * bits : last * bits]
    padded = np.zeros((last - first, 8), np.uint8)
    if short := (last - first) * bits - len(piece):
        piece = np.concatenate([piece, np.zeros(short, np.uint8)])
    padded[:, :bits] = piece.reshape(-1, bits)
    words = padded.view(np.uint64)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    symbols = ((words >> shifts) & np.uint64((1 << bits) - 1)).astype(np.uint8).reshape(-1)
    return symbols[start - first * 8 : start - first * 8 + count]


def pack_trits(places: np.ndarray) -> np.ndarray:
    """Return places in the table, 0 to 2, five a byte, the first one least significant."""
    groups = np.zeros((-(-len(places) // TRITS), TRITS), np.uint8)
    groups.reshape(-1)[: len(places)] = places
    total = groups[:, TRITS - 1].copy()
    for place in range(TRITS - 2, -1, -1):
        total = total * np.uint8(3) + groups[:, place]
    return total


class Decoder:
    """Decodes a stream, any `UNIT` of it.

    `stream`: how it is stored; `values`: what each symbol of the table stands for; all different;
    `codes`: codes or trits, u8; `rank`: exceptions before each `RANK_STRIDE` symbols but the first,
    u32; `literals`: exceptions, u8. Raises FormatError.
    """

    def __init__(
        self,
        stream: Stream,
        values: np.ndarray,
        codes: np.ndarray,
        rank: np.ndarray,
        literals: np.ndarray,
    ) -> None:
        self.stream, self._values = stream, values
        self._codes, self._literals = codes, literals
        self._rank = np.zeros(0, np.int64)
        if stream.escapes:
            self._rank = np.concatenate([[0], rank.astype(np.int64), [stream.escapes]])
            steps = np.diff(self._rank)
            if steps.min() < 0 or steps.max() > RANK_STRIDE:
                raise FormatError("the rank index is not a count of escapes")
        self._table = _table(stream, values)

    def decode(self, start: int, stop: int) -> np.ndarray:
        """Return the values of symbols [start, stop).

        `start`: a multiple of `UNIT`; `stop`: a multiple of `UNIT`, or the end. Raises FormatError.
        """
        stream, count = self.stream, stop - start
        if stream.mode == "const":
            return np.repeat(self._values[:1], count)
        if stream.mode == "trits":
            # A copy: what has been checked must not change in the file before it is used.
            index = self._codes[start // TRITS : -(-stop // TRITS)].copy()
            if index.max() >= len(self._table):
                raise FormatError("a byte of trits is above 242")
            return np.take(self._table, index, axis=0)[:, :TRITS].reshape(-1)[:count]
        width = stream.width
        codes = self._codes[start * width // 8 : -(-stop * width // 8)]
        found = np.take(self._table, _index(codes, width), axis=0, mode="clip")
        out = found.reshape(-1)[:count]
        if stream.escapes:
            self._place_exceptions(out, start, stop)
        return out

    def _place_exceptions(self, out: np.ndarray, start: int, stop: int) -> None:
        stream = self.stream
        frequent = stream.frequent
        first = self._rank[start // RANK_STRIDE]
        last = self._rank[-(-stop // RANK_STRIDE)]
        # No code but the escape stands for the first rare symbol, so that one marks the places.
        where = np.flatnonzero(out == self._values[frequent])
        if len(where) != last - first:
            raise FormatError(f"{len(where)} escapes where the rank index has {last - first}")
        if len(where):
            rare = unpack(self._literals, stream.exception_bits, int(first), len(where))
            if rare.max() >= stream.table - frequent:
                raise FormatError("an exception is not in the table")
            out[where] = self._values[frequent:][rare]


def _table(stream: Stream, values: np.ndarray) -> np.ndarray:
    """Return the values of all symbols that one index stands for, [indices, symbols]."""
    if stream.mode == "trits":
        digits = np.arange(3**TRITS)[:, None] // 3 ** np.arange(TRITS) % 3
        # Rows of 8 are copied much faster than rows of 5.
        digits = np.pad(digits, ((0, 0), (0, 8 - TRITS)))
        table: np.ndarray = values[np.minimum(digits, len(values) - 1)]
        return table
    if stream.mode != "code":
        return values
    width = stream.width
    bits = 12 if width == 3 else 8
    codes = np.arange(1 << bits)[:, None] >> np.arange(0, bits, width) & ((1 << width) - 1)
    table = values[np.minimum(codes, len(values) - 1)]
    return table


def _index(codes: np.ndarray, width: int) -> np.ndarray:
    """Return codes as indices into the table."""
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
    """One stream of a split.

    `name`: for people; `bits`: bits of a symbol; `cut`: items -> symbols, u8; `place`: symbols, u8
    -> what they contribute to the items; different for each symbol.
    """

    name: str
    bits: int
    cut: Callable[[Array], Array]
    place: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Split:
    """How the items of an array become streams.

    `item`: type of an item; `per_item`: symbols of an item in each stream; `parts`: the streams. An
    item is the OR of what they contribute.
    """

    item: np.dtype
    per_item: int
    parts: tuple[Part, ...]


def _bytes_of(items: Array, shift: int) -> Array:
    return (items >> shift).astype(np.uint8)


def _sign_and_mantissa(symbols: Array) -> Array:
    placed = symbols.astype(np.uint16)
    placed *= 257
    placed &= 0x807F
    return placed


def _low_byte(name: str, item: type[np.unsignedinteger], shift: int = 0) -> Part:
    return Part(
        name,
        8,
        lambda items: _bytes_of(items, shift),
        lambda symbols: symbols.astype(item) << item(shift),
    )


_BF16 = (
    Part("exponent", 8, lambda v: _bytes_of(v, 7), lambda s: s.astype(np.uint16) << np.uint16(7)),
    Part(
        "sign+mantissa",
        8,
        lambda v: _bytes_of(v, 8) & 0x80 | v.astype(np.uint8) & 0x7F,
        _sign_and_mantissa,
    ),
)
_F16 = (
    Part(
        "exponent",
        5,
        lambda v: _bytes_of(v, 10) & 31,
        lambda s: s.astype(np.uint16) << np.uint16(10),
    ),
    Part(
        "sign+mantissa",
        3,
        lambda v: _bytes_of(v, 13) & 4 | _bytes_of(v, 8) & 3,
        lambda s: (
            (s & 4).astype(np.uint16) << np.uint16(13) | (s & 3).astype(np.uint16) << np.uint16(8)
        ),
    ),
    _low_byte("mantissa", np.uint16),
)
_F32 = (
    Part("exponent", 8, lambda v: _bytes_of(v, 23), lambda s: s.astype(np.uint32) << np.uint32(23)),
    Part(
        "sign+mantissa",
        8,
        lambda v: _bytes_of(v, 24) & 0x80 | _bytes_of(v, 16) & 0x7F,
        lambda s: _sign_and_mantissa(s).astype(np.uint32) << np.uint32(16),
    ),
    _low_byte("mantissa 8..15", np.uint32, 8),
    _low_byte("mantissa 0..7", np.uint32),
)


def _crumbs(items: Array) -> Array:
    spread = items.astype(np.uint32)
    spread |= spread << np.uint32(12)
    spread &= 0x000F000F
    spread |= spread << np.uint32(6)
    spread &= 0x03030303
    return spread.view(np.uint8)


def _from_crumbs(symbols: Array) -> Array:
    words = symbols.view(np.uint32).copy()
    words |= words >> np.uint32(6)
    words |= words >> np.uint32(12)
    return words.astype(np.uint8)


def _nibbles(items: Array) -> Array:
    spread = items.astype(np.uint16)
    spread |= spread << np.uint16(4)
    spread &= 0x0F0F
    return spread.view(np.uint8)


def _from_nibbles(symbols: Array) -> Array:
    words = symbols.view(np.uint16)
    return (words | words >> np.uint16(4)).astype(np.uint8)


def _same(items: Array) -> Array:
    return items


SPLITS: dict[str, Split] = {
    "byte": Split(np.dtype(np.uint8), 1, (Part("byte", 8, _same, _same),)),
    "nibble": Split(np.dtype(np.uint8), 2, (Part("nibble", 4, _nibbles, _same),)),
    "crumb": Split(np.dtype(np.uint8), 4, (Part("crumb", 2, _crumbs, _same),)),
    "bf16": Split(np.dtype("<u2"), 1, _BF16),
    "f16": Split(np.dtype("<u2"), 1, _F16),
    "f32": Split(np.dtype("<u4"), 1, _F32),
    "i32": Split(
        np.dtype("<u4"), 1, tuple(_low_byte(f"byte {i}", np.uint32, 8 * i) for i in range(4))
    ),
}
"""Name -> split. Little-endian: the low bits come first."""

_PACK: dict[int, Callable[[Array], Array]] = {1: _same, 2: _from_nibbles, 4: _from_crumbs}


def splits_of(dtype: str) -> tuple[str, ...]:
    """Return the splits that an array of this element type can have."""
    return (dtype,) if dtype in SPLITS else ("byte", "nibble", "crumb")


def join(split: Split, placed: list[Array]) -> Array:
    """Return the items that placed streams make up; the first one may be written over."""
    if split.per_item > 1:
        return _PACK[split.per_item](placed[0])
    out = placed[0]
    for other in placed[1:]:
        np.bitwise_or(out, other, out=out)
    return out
