"""The r16 layout: integer weights as tiles of 16 output rows, for dot products without shuffles.

A tile is 16 rows by all of K, contiguous. A line of 64 bytes holds four bytes of each row, so lane
r of a 16-lane register belongs to row r and nothing is ever summed across lanes. Bytes are
unsigned: code + bias, the bias taken off with the sum of the activations.

    code      columns per line   byte                                bias
    int4      8                  columns 2i (low nibble) and 2i + 1  8, or the zero point
    fp4       8                  as int4, the e2m1 code              12, after look-up of 2 * value
    int8      4                  code + 128                          128
    ternary   16                 bits 2p, 2p + 1: column 4p + i      1

i is the byte's place 0 .. 3 in its lane. The columns of a row come in units of 32, the last one
filled with bytes that are multiplied by zeros. Scales stand before the lines that they scale, as
they are stored in the tensor, in heads of whole lines: a head holds `per_head` records, one for
each block of columns, of 16 scales and, if the format has them, 16 zero points. A scale per row is
a line of 16 fp32 at the end of the tile.
"""

from dataclasses import dataclass

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Format, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.scaling import Group

ROWS = 16
UNIT = 32
LINE = 64

_COLUMNS = {"int4": 8, "fp4": 8, "int8": 4, "ternary": 16}
_SCALE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e8m0": 1}
_BLOCKS = (128, 64, 32)

BIAS = {"int4": 8, "fp4": 12, "int8": 128, "ternary": 1}


@dataclass(frozen=True)
class Layout:
    """How the tiles of a format are laid out.

    Attributes:
        code: "int4", "fp4", "int8" or "ternary".
        scale: "f32", "f16", "bf16" or "e8m0" for a scale per block of columns, "row" for one per
            row, "one" for one for the tensor, which the tile does not hold.
        block: columns per scale: 32, 64 or 128; 0 if there is one per row or for the tensor.
        zeros: whether each block has a zero point.
    """

    code: str
    scale: str
    block: int = 0
    zeros: bool = False

    @property
    def name(self) -> str:
        """Name for kernels: "int4_f16_32"."""
        zeros = "z" if self.zeros else ""
        return f"{self.code}{zeros}_{self.scale}" + (f"_{self.block}" if self.block else "")

    @property
    def lines(self) -> int:
        """Lines per unit of 32 columns."""
        return UNIT // _COLUMNS[self.code]

    @property
    def record(self) -> int:
        """Bytes of the scales and zero points of a block."""
        return ROWS * (_SCALE_BYTES[self.scale] + self.zeros)

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
        return size + (LINE if self.scale == "row" else 0)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the tiles of a tensor [N, K] or [E, N, K]."""
        *lead, n, k = shape
        tiles = -(-n // ROWS) * self.tile_bytes(k)
        return tiles * lead[0] if lead else tiles


def layout_of(op_name: str, fmt: Format) -> Layout:
    """Return the layout of a format's tiles.

    Raises:
        UnsupportedOp: the format is not an integer one, or its groups are not whole units.
    """
    match fmt:
        case Int4(symmetric=symmetric, group=group, scale_dtype=scale):
            if group == "row" and symmetric:
                return Layout("int4", "row")
            if block := _block(group):
                return Layout("int4", scale, block, not symmetric)
        case Int8(group="tensor" | "row"):
            return Layout("int8", "row")
        case Int8(group=group, scale_dtype=scale):
            if block := _block(group):
                return Layout("int8", scale, block)
        case Mxfp4():
            return Layout("fp4", "e8m0", 32)
        case Ternary():
            return Layout("ternary", "one")
    raise UnsupportedOp(
        f"{op_name}: no CPU kernel reads the format {fmt.name} with int8 activations; expected "
        "int8 or int4 with a scale per row or per multiple of 32 columns, mxfp4 or ternary; "
        "keep its activations fp32"
    )


def _block(group: Group) -> int:
    """Return the columns per scale in a tile; a longer group's scale is repeated."""
    if group == "row":
        return _BLOCKS[0]
    return next((block for block in _BLOCKS if isinstance(group, int) and group % block == 0), 0)
