"""Stored arrays <-> streams of symbols: where numbers are cut so that the parts repeat."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Part:
    """One stream of a split.

    Attributes:
        name: for people.
        bits: bits of a symbol.
        cut: items -> symbols, u8.
        place: symbols, u8 -> what they contribute to the items; different for each symbol.
    """

    name: str
    bits: int
    cut: Callable[[Array], Array]
    place: Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Split:
    """How the items of an array become streams.

    Attributes:
        item: type of an item.
        per_item: symbols of an item in each stream.
        parts: the streams. An item is the OR of what they contribute.
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
