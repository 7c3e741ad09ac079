"""Blocks of ggml's quantised types: which bits are which numbers. Decoders and tiles follow.

Every type is value = scale * code - minimum, with a scale and a minimum for each run of columns. A
type whose codes are the indices of a grid has a function instead of planes, and what it unpacks to
is an entry in `recoded`.

Source: ggml-common.h (block_q4_K and so on); ggml-quants.c (dequantize_row_*); gguf-py's quants.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""Value of each code of iq4_nl and iq4_xs."""
SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""Signs of eight elements for each code of iq3_xxs: bit 7 makes the number of ones even."""
POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
"""What a byte of tq1_0 is multiplied by to bring each of its digits to the top."""


@dataclass(frozen=True)
class Plane:
    """Bytes of a block with some bits of consecutive numbers.

    The bytes of a span have a number each in their lowest bits, then the next ones above those;
    then comes the next span.
    """

    at: int  # first byte
    nbytes: int
    width: int  # bits of a number
    span: int = 0  # bytes; 0 for all
    to: int = 0  # which bit of the number they begin at
    only: int = -1  # first bit of each byte that is used, if the others are not

    @property
    def shifts(self) -> tuple[int, ...]:
        """First bits of the numbers of a byte."""
        return (self.only,) if self.only >= 0 else tuple(range(0, 9 - self.width, self.width))

    @property
    def mask(self) -> int:
        """The bits of a number, shifted to the lowest place."""
        return (1 << self.width) - 1

    @property
    def places(self) -> list[tuple[int, int]]:
        """Byte and first bit of each number."""
        span, end = self.span or self.nbytes, self.at + self.nbytes
        starts = range(self.at, end, span)
        return [(at + i, shift) for at in starts for shift in self.shifts for i in range(span)]

    def read(self, raw: np.ndarray) -> np.ndarray:
        """Return the numbers' bits in place, u8 [blocks, numbers], of blocks u8 [blocks, bytes]."""
        cells = raw[:, self.at : self.at + self.nbytes].reshape(-1, self._spans, 1, self._span)
        found = cells >> np.array(self.shifts, np.uint8)[:, None] & np.uint8(self.mask)
        return np.asarray((found << np.uint8(self.to)).reshape(len(raw), -1))

    def write(self, raw: np.ndarray, numbers: np.ndarray) -> None:
        """Undo `read`, where the bits are zero so far."""
        bits = numbers.reshape(len(raw), self._spans, -1, self._span) >> np.uint8(self.to)
        found = (bits & np.uint8(self.mask)) << np.array(self.shifts, np.uint8)[:, None]
        cells = np.bitwise_or.reduce(found, axis=2).reshape(len(raw), -1)
        raw[:, self.at : self.at + self.nbytes] |= cells

    @property
    def _span(self) -> int:
        return self.span or self.nbytes

    @property
    def _spans(self) -> int:
        return self.nbytes // self._span


Numbers = tuple[tuple[Plane, ...], ...]
"""Numbers one after the other: each part is put together from the bits of its planes."""


def read_numbers(numbers: Numbers, raw: np.ndarray) -> np.ndarray:
    """Return numbers u8 [blocks, count] of blocks u8 [blocks, bytes]."""
    parts = [reduce(np.bitwise_or, [plane.read(raw) for plane in part]) for part in numbers]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def write_numbers(numbers: Numbers, raw: np.ndarray, values: np.ndarray) -> None:
    """Undo `read_numbers`."""
    first = 0
    for part in numbers:
        count = len(part[0].places)
        for plane in part:
            plane.write(raw, values[:, first : first + count])
        first += count


def places_of(numbers: Numbers) -> list[list[tuple[int, int, int, int]]]:
    """Return of each number where its bits are: byte, first bit, mask, and bit of the number."""
    found = []
    for part in numbers:
        planes = [[(*place, plane.mask, plane.to) for place in plane.places] for plane in part]
        found += [list(own) for own in zip(*planes, strict=True)]
    return found


class Parts(NamedTuple):
    """What blocks hold: value = scale * code - minimum, in fp32, both operations rounded.

    Attributes:
        scales: fp32 [blocks, S]; S runs of a block share one each.
        codes: i8 or u8 [blocks, S, columns of a run].
        minima: fp32 [blocks, S], if the type has them.
    """

    scales: np.ndarray
    codes: np.ndarray
    minima: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """A type of blocks.

    Scales are d * (a number - scale_bias), or d; minima are dmin * a number, or -m.
    """

    block: int  # elements
    fields: np.dtype  # a block's bytes; those of f16 are d, and dmin or m
    codes: Numbers = ()
    run: int = 32  # columns that share a scale
    bias: int = 0  # what is taken off codes
    table: np.ndarray | None = None  # i8 [16], the values of codes
    scales: Numbers = ()
    scale_bias: int = 0
    minima: Numbers = ()
    factor: float = 1.0  # of scales, a power of two
    # fields to the numbers of scales [blocks, S] and codes i8 [blocks, elements], without planes
    grid: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def low(self) -> str:
        """The field that minima follow from, or ""."""
        return next((name for name in ("dmin", "m") if name in (self.fields.names or ())), "")

    @property
    def above(self) -> int | None:
        """Bits of a code beside a plane of four; None without one, or where codes are indices."""
        if self.table is not None or not self.codes or self.codes[0][0].width != 4:
            return None
        return sum(plane.width for plane in self.codes[0][1:])

    def at(self, field: str) -> int:
        """Return the first byte of a field."""
        assert self.fields.fields is not None
        return int(self.fields.fields[field][1])

    def numbers(self, blocks: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """Return what scales are d times of, [blocks, S] or None, and codes [blocks, elements]."""
        if self.grid:
            return self.grid(blocks)
        raw = blocks.view(np.uint8).reshape(len(blocks), -1)
        codes = read_numbers(self.codes, raw)
        if self.table is not None:
            codes = self.table[codes]
        elif self.bias:
            codes = codes.view(np.int8) - np.int8(self.bias)
        if not self.scales:
            return None, codes
        return read_numbers(self.scales, raw).view(np.int8) - np.int8(self.scale_bias), codes

    def unpack(self, blocks: np.ndarray) -> Parts:
        """Return what blocks, an array of `fields`, hold."""
        scales, codes = self.numbers(blocks)
        d = blocks["d"].astype(np.float32)[:, None]
        if scales is not None:
            d = d * scales.astype(np.float32) * np.float32(self.factor)
        minima = None
        if self.low:
            minima = blocks[self.low].astype(np.float32)[:, None]
            raw = blocks.view(np.uint8).reshape(len(blocks), -1)
            minima = minima * read_numbers(self.minima, raw) if self.minima else -minima
        return Parts(d, codes.reshape(len(blocks), d.shape[1], -1), minima)


_GRIDS = {
    **{"iq3_xxs": (256, 4), "iq3_s": (512, 4), "iq2_xxs": (256, 8)},
    **{"iq2_xs": (512, 8), "iq2_s": (1024, 8), "iq1_s": (2048, 8)},
}
"""Groups of values, and values of a group, of each grid of ggml_grids.i8, in its order."""


@cache
def grid(name: str) -> np.ndarray:
    """Return the groups of values that a type of 1 to 3 bits can store, i8 [groups, 4 or 8].

    They were found by search, so there is no formula for them. Source: ggml-common.h (iq3s_grid).
    """
    values = np.frombuffer(Path(__file__).with_name("ggml_grids.i8").read_bytes(), np.int8)
    starts = np.cumsum([groups * size for groups, size in _GRIDS.values()])
    parts = dict(zip(_GRIDS, np.split(values, starts[:-1]), strict=True))
    return parts[name].reshape(_GRIDS[name])


def _signed(magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return groups of magnitudes, i8, with the signs u8 [blocks, 32], a bit an element."""
    negative = (signs[..., None] >> np.arange(8, dtype=np.uint8) & 1).view(np.int8)
    magnitudes = magnitudes.reshape(negative.shape)
    return np.where(negative, -magnitudes, magnitudes).reshape(len(magnitudes), -1)


def _iq3_s(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = Plane(0, 4, 4, 1).read(blocks["scales"])
    high = Plane(0, 8, 1, 1).read(blocks["qh"])
    indices = blocks["qs"] | high.astype(np.uint16) << 8
    return 1 + 2 * scales, _signed(grid("iq3_s")[indices], blocks["signs"])


def _iq3_xxs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = blocks["scales_and_signs"]
    signs = SIGNS[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    codes = _signed(grid("iq3_xxs")[blocks["qs"]], signs.reshape(-1, 32))
    return 1 + 2 * (words >> 28).astype(np.uint8), codes


def _iq2_xxs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = blocks["words"].reshape(-1, 8, 2)
    signs = SIGNS[words[..., 1:] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 32)
    codes = _signed(grid("iq2_xxs")[indices], signs.reshape(-1, 32))
    return 1 + 2 * (words[..., 1] >> 28).astype(np.uint8), codes


def _iq2_xs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes = _signed(grid("iq2_xs")[blocks["qs"] & 511], SIGNS[blocks["qs"] >> 9])
    return 1 + 2 * Plane(0, 8, 4, 1).read(blocks["scales"]), codes


def _iq2_s(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    indices = blocks["qs"] | Plane(0, 8, 2, 1).read(blocks["qh"]).astype(np.uint16) << 8
    codes = _signed(grid("iq2_s")[indices], blocks["signs"])
    return 1 + 2 * Plane(0, 8, 4, 1).read(blocks["scales"]), codes


def _iq1_s(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight times what is stored: -1, 0 or 1, and an eighth added or taken off."""
    high = blocks["qh"]
    indices = high[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    indices = blocks["qs"] | indices.reshape(-1, 32) << 8
    eighths = np.where(high >> 15, -1, 1).astype(np.int8)[..., None]
    codes = 8 * grid("iq1_s")[indices].reshape(len(blocks), 8, 32) + eighths
    return (1 + 2 * (high >> 12 & 7)).astype(np.uint8), codes.reshape(len(blocks), -1)


def _tq1_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each byte is a fraction of 256 in base three: its next digit is the whole part of three."""
    runs = (
        blocks["qs"][:, None, :32] * POWERS,
        blocks["qs"][:, None, 32:] * POWERS,
        blocks["qh"][:, None] * POWERS[:4],
    )
    bytes_ = np.concatenate([run.reshape(len(blocks), -1) for run in runs], axis=1)
    digits = (bytes_.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
    return np.ones((len(blocks), 1), np.uint8), digits


def _at(nbytes: int, **places: int) -> np.dtype:
    """Return fields of f16 at these bytes."""
    names, offsets = list(places), list(places.values())
    formats = ["<f2"] * len(names)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})


def _sixes(first: int, nibble: int) -> Numbers:
    """Return eight 6-bit numbers of q4_k and q5_k: the last four have their high bits elsewhere."""
    last = (Plane(12, 4, 4, only=nibble), Plane(first, 4, 2, to=4, only=6))
    return (Plane(first, 4, 6),), last


_SCALES, _MINIMA = _sixes(4, 0), _sixes(8, 4)
_D = ("d", "<f2")

KINDS = {
    "q4_k": Kind(
        *(256, _at(144, d=0, dmin=2), ((Plane(16, 128, 4, 32),),)),
        scales=_SCALES,
        minima=_MINIMA,
    ),
    "q5_k": Kind(
        *(256, _at(176, d=0, dmin=2), ((Plane(48, 128, 4, 32), Plane(16, 32, 1, 32, 4)),)),
        scales=_SCALES,
        minima=_MINIMA,
    ),
    "q6_k": Kind(
        *(256, _at(210, d=208), ((Plane(0, 128, 4, 64), Plane(128, 64, 2, 32, 4)),), 16, 32),
        scales=((Plane(192, 16, 8),),),
    ),
    "q3_k": Kind(
        *(256, _at(110, d=108), ((Plane(32, 64, 2, 32), Plane(0, 32, 1, 32, 2)),), 16, 4),
        scales=((Plane(96, 8, 4), Plane(104, 4, 2, to=4)),),
        scale_bias=32,
    ),
    "q2_k": Kind(
        *(256, _at(84, d=80, dmin=82), ((Plane(16, 64, 2, 32),),), 16),
        scales=((Plane(0, 16, 4, only=0),),),
        minima=((Plane(0, 16, 4, only=4),),),
    ),
    "q4_1": Kind(32, _at(20, d=0, m=2), ((Plane(4, 16, 4),),)),
    "q5_0": Kind(32, _at(22, d=0), ((Plane(6, 16, 4), Plane(2, 4, 1, 1, 4)),), bias=16),
    "q5_1": Kind(32, _at(24, d=0, m=2), ((Plane(8, 16, 4), Plane(4, 4, 1, 1, 4)),)),
    "iq4_nl": Kind(32, _at(18, d=0), ((Plane(2, 16, 4),),), table=IQ4_VALUES),
    "iq4_xs": Kind(
        *(256, _at(136, d=0), ((Plane(8, 128, 4, 16),),)),
        table=IQ4_VALUES,
        scales=((Plane(4, 4, 4, 1), Plane(2, 2, 2, 1, 4)),),
        scale_bias=32,
    ),
    "iq3_s": Kind(
        256,
        np.dtype([_D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]),
        grid=_iq3_s,
    ),
    "iq3_xxs": Kind(
        256,
        np.dtype([_D, ("qs", "u1", 64), ("scales_and_signs", "<u4", 8)]),
        grid=_iq3_xxs,
        factor=0.25,
    ),
    "iq2_xxs": Kind(256, np.dtype([_D, ("words", "<u4", 16)]), grid=_iq2_xxs, factor=0.125),
    "iq2_xs": Kind(
        256, np.dtype([_D, ("qs", "<u2", 32), ("scales", "u1", 8)]), grid=_iq2_xs, factor=0.125
    ),
    "iq2_s": Kind(
        256,
        np.dtype([_D, ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]),
        grid=_iq2_s,
        factor=0.125,
    ),
    "iq1_s": Kind(
        256, np.dtype([_D, ("qs", "u1", 32), ("qh", "<u2", 8)]), grid=_iq1_s, factor=0.125
    ),
    "tq1_0": Kind(256, np.dtype([("qs", "u1", 48), ("qh", "u1", 4), _D]), run=256, grid=_tq1_0),
}
"""Name -> type."""


def _nibbles(values: list[int], run: int = 32, factor: float = 1.0) -> Kind:
    """Return blocks of 16 values, four bits for the odd scale of each run."""
    nbytes, table = 128 // run, np.array([*values, *[0] * (16 - len(values))], np.int8)
    codes, scales = ((Plane(4 + nbytes, 128, 4, 16),),), ((Plane(4, nbytes, 4, to=1),),)
    fields = _at(132 + nbytes, d=0)
    return Kind(256, fields, codes, run, 0, table, scales, scale_bias=-1, factor=factor)


def _both(*magnitudes: int) -> list[int]:
    return [*(-m for m in reversed(magnitudes)), *magnitudes]


RECODED = {
    "iq3_s": _nibbles(_both(*range(1, 16, 2))),
    "iq3_xxs": _nibbles(_both(2, 6, 10, 14, 18, 22, 26, 31), factor=0.5),
    "iq2_xxs": _nibbles(_both(8, 25, 43), factor=0.125),
    "iq2_xs": _nibbles(_both(8, 25, 43), 16, factor=0.125),
    "iq2_s": _nibbles(_both(8, 25, 43), 16, factor=0.125),
    "iq1_s": _nibbles(_both(1, 7, 9), factor=0.125),
    "tq1_0": Kind(
        *(256, _at(72, d=0), ((Plane(8, 64, 2, 16),),)),
        bias=1,
        scales=((Plane(4, 4, 4),),),
    ),
}
"""Types whose codes are of a grid -> blocks of planes with the same values."""
PLANES = {**KINDS, **RECODED}
"""Type -> the blocks that kernels read."""


def recoded(name: str, stored: np.ndarray) -> np.ndarray:
    """Return blocks of `RECODED`, u8 [blocks, bytes], of stored ones, u8 [blocks, bytes]."""
    old, new = KINDS[name], RECODED[name]
    blocks = np.zeros(len(stored), new.fields)
    raw = blocks.view(np.uint8).reshape(len(blocks), -1)
    table = np.arange(-new.bias, 16 - new.bias) if new.table is None else new.table
    index = np.zeros(256, np.uint8)
    index[table.astype(int) * int(new.factor / old.factor) & 255] = np.arange(16)
    for start in range(0, len(stored), 1024):
        piece = slice(start, start + 1024)
        source = np.ascontiguousarray(stored[piece]).view(old.fields)[:, 0]
        scales, codes = old.numbers(source)
        assert scales is not None
        blocks["d"][piece] = source["d"]
        repeated = np.repeat(scales.astype(np.uint8), 256 // new.run // scales.shape[1], axis=1)
        write_numbers(new.scales, raw[piece], repeated)
        write_numbers(new.codes, raw[piece], index[codes.view(np.uint8)])
    return raw
