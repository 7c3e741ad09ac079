"""The r16 layout: integer weights as tiles of 16 output rows, for dot products without shuffles.

A tile is 16 rows by all of K, contiguous. A line of 64 bytes holds four bytes of each row, so lane
r of a 16-lane register belongs to row r and nothing is ever summed across lanes. Bytes are
unsigned: code + bias, the bias taken off with the sum of the activations; on NEON, which
multiplies signed bytes, int8 and iq4 have none.

    code      columns per line   byte                                bias
    int4      8                  columns 2i (low nibble) and 2i + 1  8, or the zero point
    fp4       8                  as int4, the e2m1 code              12, after look-up of 2 * value
    iq4       8                  as below                            128, after look-up
    q4        8                  as below                            none: the block has a minimum
    q5        8                  as below, and a line of high bits   16, or a minimum
    int8      4                  code + 128                          128
    ternary   16                 bits 2p, 2p + 1: column 4p + i      1
    tcq2 ..5  32 in all lines    of `Tcq`, as below                  64, after look-up

i is the byte's place 0 .. 3 in its lane. In iq4, q4 and q5 the low nibble of line l of a unit is
column 4l + i, the high one column 16 + 4l + i; bit o of the fifth line of q5 is the high bit of
column 4o + i. Of trellises lane r belongs to row `EVENS_FIRST[r]`, for which a weight's bits before
it are nearer, and the two low bits of m change places with those of the other in their nibble.
The columns of a row come in units of 32, the last one filled with
bytes that are multiplied by zeros. Scales stand before the lines that they scale, as they are
stored in the tensor, in heads of whole lines: a head holds `per_head` records, one for each block
of columns, of 16 scales and, if the format has them, 16 zero points or minima. A scale per row is a
line of 16 fp32 at the end of the tile.

ggml's types with blocks of 256 columns are laid out by `BlockLayout` instead: a line holds a dword
of the stored block of each row, and nothing is unpacked or scaled before the product. So they take
the bytes that they have in the file; a block that is no whole number of dwords has a line that is
half empty. Lines stand in the order in which a product wants them, or memory would be slow.

    kind    bits   lines of a block of 256 columns
    q4_k    4.5    (d, dmin) | 3 of 6-bit scales and minima | 32 of codes
    q5_k    5.5    the same 4 | 8 of codes | 8 of high bits | 24 of codes
    q6_k    6.625  d | 4 of i8 scales | twice: 4 of low nibbles, 4 of high bits, 4 and 4, 8 of low
    q3_k    3.5    d | 3 of 6-bit scales | 4 of low bits, 4 of high bits, 4 and 4, 8 of low
    q2_k    2.625  (d, dmin) | 4 of 4-bit scales and minima | 16 of codes
    iq4_xs  4.25   (d, high bits of scales) | low nibbles of scales | 32 of codes
    iq3_s   4.25   d | 1 of scales | 32 of nibbles: `ggml_blocks.recoded`; others of a grid likewise
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Format, Ggml, Int4, Int8, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.base import Group
from clocher_kernels.formats.ggml_blocks import PLANES, places_of
from clocher_kernels.formats.tcq import TCQ
from cpu_fallback.lanes.isa import CURRENT

ROWS = 16
EVENS_FIRST = (*range(0, ROWS, 2), *range(1, ROWS, 2))
"""The row of each lane of trellises."""
UNIT = 32
OPERANDS = 8  # Of a unit: four columns each
LINE = 64

LINES = {**TCQ, "int4": 4, "fp4": 4, "iq4": 4, "q4": 4, "q5": 5, "int8": 8, "ternary": 2}
"""Code -> lines that hold 32 columns."""
SCALE_BYTES = {"u8": 1, "f32": 4, "f16": 2, "bf16": 2, "e8m0": 1}
_OFFSET_BYTES = {"": 0, "zeros": 1, "minima": 2}
_BLOCKS = (128, 64, 32)

SIGNED = CURRENT.neon
"""Whether int8 and iq4 are multiplied as signed bytes; the other operands fit seven bits."""
BIAS = dict.fromkeys(TCQ, 64)
BIAS |= {"int4": 8, "fp4": 12, "iq4": 128, "q4": 8, "q5": 16, "int8": 128, "ternary": 1}
if SIGNED:
    BIAS |= {"iq4": 0, "int8": 0}

BLOCK = 256  # Columns of a block of `BlockLayout`


@dataclass(frozen=True)
class Layout:
    """How the tiles of a format are laid out."""

    code: str  # of `LINES`
    # "f32", "f16", "bf16" or "e8m0" for a scale per block of columns, "row" for one per row, "u8"
    # for both, "one" for one for the tensor, which the tile does not hold
    scale: str
    block: int = 0  # columns per scale: 32, 64 or 128; 0 if there is one per row or for the tensor
    offset: str = ""  # what each block has too: "zeros", integer points, or "minima" to be added

    @property
    def name(self) -> str:
        """Name for kernels: "int4_f16_32"."""
        name = f"{self.code}{self.offset[:1]}_{self.scale}"
        return name + (f"_{self.block}" if self.block else "")

    @property
    def by_row(self) -> bool:
        """Whether a scale per row stands at the end of the tile."""
        return self.scale in ("row", "u8")

    @property
    def lines(self) -> int:
        """Lines per unit of 32 columns."""
        return LINES[self.code]

    @property
    def record(self) -> int:
        """Bytes of the scales and offsets of a block."""
        return ROWS * (SCALE_BYTES[self.scale] + _OFFSET_BYTES[self.offset])

    @property
    def per_head(self) -> int:
        """Blocks per head: the fewest that fill whole lines."""
        return next(n for n in (1, 2, 4) if n * self.record % LINE == 0)

    @property
    def head(self) -> int:
        """Bytes of a head."""
        return self.per_head * self.record

    def tile_bytes(self, k: int) -> int:
        """Return the bytes of a tile of K columns."""
        units = -(-k // UNIT)
        size = units * self.lines * LINE
        if self.block:
            blocks = -(-k // self.block)
            size += -(-blocks // self.per_head) * self.head
        return size + (LINE if self.by_row else 0)


@cache
def _order(kind: str) -> tuple[int, ...]:
    about = PLANES[kind]
    own = [*places_of(about.scales), *places_of(about.minima)]
    first = [about.at("d"), *sorted(byte for places in own for byte, *_ in places)]
    codes = places_of(about.codes)
    for start in range(0, BLOCK, about.run):
        for plane in zip(*codes[start : start + about.run : 4], strict=True):
            first += [byte for byte, *_ in plane]
    return tuple(dict.fromkeys(byte // 4 for byte in first))


@dataclass(frozen=True)
class BlockLayout:
    """How the tiles of a type of ggml with blocks of 256 columns are laid out."""

    kind: str  # of `Ggml`

    @property
    def name(self) -> str:
        """Name for kernels: the kind."""
        return self.kind

    @property
    def order(self) -> tuple[int, ...]:
        """The dword of the block that each line holds: the scales, then codes as they are used."""
        return _order(self.kind)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block as it is packed."""
        return PLANES[self.kind].fields.itemsize

    @property
    def lines(self) -> int:
        """Lines per block."""
        return -(-self.block_bytes // 4)

    def tile_bytes(self, k: int) -> int:
        """Return the bytes of a tile of K columns, a multiple of 256."""
        return k // BLOCK * self.lines * LINE


_UNITS = {
    "q4_1": Layout("q4", "f16", UNIT, "minima"),
    "q5_0": Layout("q5", "f16", UNIT),
    "q5_1": Layout("q5", "f16", UNIT, "minima"),
    "iq4_nl": Layout("iq4", "f16", UNIT),
}
"""Type of ggml with blocks of 32 columns -> layout."""


def tiles_in(shape: tuple[int, ...]) -> int:
    """Return the tiles of a tensor [N, K] or [E, N, K]."""
    *lead, n, _ = shape
    return -(-n // ROWS) * (lead[0] if lead else 1)


def nbytes_of(layout: Layout | BlockLayout, shape: tuple[int, ...]) -> int:
    """Return the bytes of the tiles of a tensor [N, K] or [E, N, K]."""
    return tiles_in(shape) * layout.tile_bytes(shape[-1])


def layout_of(op_name: str, fmt: Format) -> Layout | BlockLayout:
    """Return the layout of the tiles of a format: integers in groups of whole units.

    Raises UnsupportedOp for another one.
    """
    match fmt:
        case Int4(symmetric=symmetric, group=group, scale_dtype=scale):
            if group == "row" and symmetric:
                return Layout("int4", "row")
            if block := _block(group):
                return Layout("int4", scale, block, "" if symmetric else "zeros")
        case Int8(group="tensor" | "row"):
            return Layout("int8", "row")
        case Int8(group=group, scale_dtype=scale):
            if block := _block(group):
                return Layout("int8", scale, block)
        case Mxfp4():
            return Layout("fp4", "e8m0", 32)
        case Ternary():
            return Layout("ternary", "one")
        case Tcq():
            return Layout(fmt.name, "u8", fmt.turned)
        case Ggml(kind=kind) if kind in _UNITS:
            return _UNITS[kind]
        case Ggml(kind=kind, block=256):
            return BlockLayout(kind)
    raise UnsupportedOp(
        f"{op_name}: no CPU kernel reads the format {fmt.name} with int8 activations; expected "
        "int8 or int4 with a scale per row or per multiple of 32 columns, mxfp4, ternary, tcq, "
        "one of ggml's types; keep its activations fp32"
    )


def _block(group: Group) -> int:
    """Return the columns per scale in a tile; a longer group's scale is repeated."""
    if group == "row":
        return _BLOCKS[0]
    return next((block for block in _BLOCKS if isinstance(group, int) and group % block == 0), 0)


def lines_of(places: tuple[int, ...]) -> np.ndarray:
    """Return, of each line of a unit, 2 * its byte, + 1 if the next three lines go on from it."""
    runs = [places[i : i + 4] == tuple(range(p, p + 16, 4)) for i, p in enumerate(places)]
    return np.array([2 * p + run for p, run in zip(places, runs, strict=True)], np.int64)
