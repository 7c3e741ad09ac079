"""What decoders and products know of a stored weight, and how a decoder is called.

A decoder turns columns k0 .. k1-1 of up to ROWS rows into fp32. Rows are `PITCH` bytes apart in the
panel that it writes:

    decoder(weight, expert, row, count, k0, k1, panel) -> address of the first row

`weight` is the address of a record, `Weight`; k0 is a multiple of 128, and so is k1 but for the end
of the row.
"""

from typing import NamedTuple

from llvmlite import ir

from cpu_fallback.lanes.late import i64
from cpu_fallback.lanes.record import reader
from cpu_fallback.lanes.vector import INT64, op

ROWS = 8
COLUMNS = 512
PITCH = 4 * COLUMNS
PANEL_BYTES = ROWS * PITCH


class Weight(NamedTuple):
    """What kernels know of a stored weight; addresses and bytes."""

    decoder: int  # kernel that decodes it; called by address, so it comes first
    pitch: int  # from one decoded row to the next
    n: int  # rows
    k: int  # columns
    codes: int  # the stored codes
    scales: int  # the scales, 0 if there are none
    zeros: int  # the zero points, 0 if there are none
    stride: int  # from one stored row to the next
    scale_kind: int  # entry of `decode._SCALES`
    group: int  # columns per scale
    tall: int  # rows per scale
    wide: int  # scales per row of scales
    high: int  # rows of scales per expert
    factor: float  # the one scale of the tensor, where `scale_kind` says so
    many: int = 0  # kernel of the product with many tokens (`stream`)
    block: int = 0  # columns that it decodes at a time


weight_at = reader(Weight)  # Read the record at an address


@op(i64, i64, i64, i64, i64, i64, i64, i64)
def decode(b, weight, expert, row, count, k0, k1, panel):
    """Call the decoder of a weight and return the address of the decoded rows."""
    kind = ir.FunctionType(INT64, [INT64] * 7)
    decoder = b.load(b.inttoptr(weight, INT64.as_pointer()))
    args = [weight, expert, row, count, k0, k1, panel]
    return b.call(b.inttoptr(decoder, kind.as_pointer()), args)
