"""Packing ggml's blocks of 256 columns: the dwords of 16 rows go to lines."""

from typing import NamedTuple

import numpy as np

from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import reader
from cpu_fallback.tiles.layout import BLOCK, ROWS, BlockLayout
from cpu_fallback.tiles.row_lines import move_lines, read_some


class BlockSource(NamedTuple):
    """What is packed, and to where; addresses and bytes."""

    n: int  # rows of an expert
    blocks: int  # of a row
    block_bytes: int  # of a stored block
    tiles: int  # of an expert
    order: int  # the dword that each line holds, int64
    stored: int  # the stored blocks
    target: int  # the tiles


_source_at = reader(BlockSource)


def block_source(
    layout: BlockLayout, tensor: QuantTensor, order: np.ndarray, target: np.ndarray
) -> BlockSource:
    """Return the record of `pack_blocks` for a tensor; `order` is the layout's, int64."""
    *_, n, k = tensor.shape
    return BlockSource(
        n=n,
        blocks=k // BLOCK,
        block_bytes=layout.block_bytes,
        tiles=-(-n // ROWS),
        order=order.ctypes.data,
        stored=tensor.planes["blocks"].ctypes.data,
        target=target.ctypes.data,
    )


@device
def _is_run(order, i, lines):
    """Return whether lines i .. i + 3 hold four dwords in a row."""
    if i + 4 > lines:
        return False
    first = v.read_i64(order + 8 * i)
    return (
        v.read_i64(order + 8 * i + 8) == first + 1
        and v.read_i64(order + 8 * i + 16) == first + 2
        and v.read_i64(order + 8 * i + 24) == first + 3
    )


def _blocks(form, begin, stop):
    """Pack tiles begin .. stop-1."""
    f = _source_at(form)
    n, block_bytes = f.n, f.block_bytes
    stride = f.blocks * block_bytes
    lines = (block_bytes + 3) >> 2
    at = f.target + begin * f.blocks * lines * 64
    for tile in range(begin, stop):
        row = tile % f.tiles * 16
        rows = min(16, n - row)
        source = f.stored + (tile // f.tiles * n + row) * stride
        for _ in range(f.blocks):
            i = 0
            while i < lines:
                dword = 4 * v.read_i64(f.order + 8 * i)
                if rows == 16 and dword + 16 <= block_bytes and _is_run(f.order, i, lines):
                    move_lines(source + dword, stride, at + 64 * i, 0)
                    i += 4
                    continue
                for r in range(rows):
                    block = source + r * stride
                    value = read_some(block + dword, block + block_bytes)
                    v.write_i32(at + 64 * i + 4 * r, value)
                i += 1
            source += block_bytes
            at += 64 * lines


pack_blocks = Kernel(_blocks)
