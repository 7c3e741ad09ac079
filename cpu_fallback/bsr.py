"""Block-sparse rows: the product of `product`, over the stored blocks only."""

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Bsr
from cpu_fallback import decode
from cpu_fallback.bind import BoundCall, counted, share
from cpu_fallback.decode import COLUMNS, ROWS
from cpu_fallback.jit import device, kernel
from cpu_fallback.memory import field, read_f32, read_i32, write_f32, write_i64
from cpu_fallback.product import PANEL, SCRATCH, SUMS, TOKENS, XS, accumulate, clear, finish
from cpu_fallback.tape import Launch


@kernel
def bsr_linear(rec, ctl, rank, size, scratch):
    """Compute y = x W^T; each thread has a range of block rows.

    Fields: M, N, K, block height, block width, block rows, x, y, row_ptr, col_idx, stored blocks
    as a matrix [blocks * height, width].
    """
    m, n, height = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 3)
    first, last = share(field(rec, 5), rank, size)
    for block_row in range(first, last):
        top = block_row * height
        bottom = min(top + height, n)
        for row in range(top, bottom, ROWS):
            count = min(ROWS, bottom - row)
            for start in range(0, m, TOKENS):
                _rows(rec, block_row, row, count, start, min(TOKENS, m - start), scratch)


@device
def _rows(rec, block_row, row, count, start, tokens, scratch):
    n, k, height, width = field(rec, 1), field(rec, 2), field(rec, 3), field(rec, 4)
    x, y, row_ptr, col_idx = field(rec, 6), field(rec, 7), field(rec, 8), field(rec, 9)
    blocks = rec + 80
    pitch = field(blocks, 1)
    for t in range(tokens):
        write_i64(scratch + XS + 8 * t, x + 4 * (start + t) * k)
    clear(scratch, tokens)
    begin, end = read_i32(row_ptr + 4 * block_row), read_i32(row_ptr + 4 * block_row + 4)
    for index in range(begin, end):
        column = read_i32(col_idx + 4 * index) * width
        clipped = min(width, k - column)
        stored = index * height + row - block_row * height
        for c in range(0, clipped, COLUMNS):
            stop = min(c + COLUMNS, clipped)
            w = decode.decode(blocks, 0, stored, count, c, stop, scratch + PANEL)
            accumulate(w, pitch, count, tokens, column + c, stop - c, scratch)
    finish(scratch, tokens)
    for t in range(tokens):
        for r in range(count):
            value = read_f32(scratch + SUMS + 4 * (t * ROWS + r))
            write_f32(y + 4 * ((start + t) * n + row + r), value)


def _bsr_linear(call: BoundCall) -> list[Launch]:
    weight = call.tensor("w")
    if not isinstance(weight.format, Bsr):
        raise UnsupportedOp(
            f"bsr_linear: the weight's format is {weight.format.name}; expected block-sparse rows, "
            "bsr_<R>x<C>_<dtype>"
        )
    # The kernel follows these indices without looking.
    weight.check()
    height, width = weight.format.block
    planes = weight.planes
    fields = [
        call.count("x"),
        call.dim("N"),
        call.dim("K"),
        height,
        width,
        len(planes["row_ptr"]) - 1,
        call.address("x"),
        call.address("y"),
        int(planes["row_ptr"].ctypes.data),
        int(planes["col_idx"].ctypes.data),
        *decode.plain(weight.format.inner, planes["values"], weight.format.nnzb * height, width),
    ]
    return [call.launch(bsr_linear, fields, SCRATCH)]


LOWER = {"bsr_linear": _bsr_linear}
