"""The `bsr_linear` op: y = x W^T over the stored blocks of block-sparse rows.

A program owns some rows of one row of blocks, and so their whole sums: nothing is added up between
programs. Blocks of any size work; sides that are powers of two, of at least 16 bytes across, are
read by whole vectors.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.gemm import TL_TYPES, operand_type
from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, stack
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.formats.bsr import Bsr


@triton.jit
def _gemv(
    x, row_ptr, col_idx, values, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr,
    COLS: tl.constexpr, LANE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply: a turn takes BLOCKS blocks, ACROSS * EACH rows and COLS columns of each.

    A thread reads LANE columns of EACH rows, which share what it reads of x.
    """
    PER_ROW: tl.constexpr = COLS // LANE
    CHUNKS: tl.constexpr = BLOCKS * ACROSS * PER_ROW
    chunk = tl.arange(0, CHUNKS)
    column = ((chunk % PER_ROW) * LANE)[:, None] + tl.arange(0, LANE)[None, :]
    row = tl.program_id(1) * (ACROSS * EACH) + (chunk // PER_ROW) % ACROSS
    nth = chunk // (PER_ROW * ACROSS)

    block_row = tl.program_id(0)
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(PDL)

    totals = ()
    for _i in tl.static_range(M * EACH):
        totals = totals + (tl.zeros((CHUNKS,), tl.float32),)
    for turn in range(first, last, BLOCKS):
        block = turn + nth
        live = block < last
        k_first = tl.load(col_idx + block, live, 0) * C
        for c0 in range(0, C, COLS):
            c = c0 + column
            inside = live[:, None] & (c < C)
            w = ()
            for r in tl.static_range(EACH):
                at = values + ((block * R + row + r * ACROSS) * C)[:, None] + c
                stored = inside & (row + r * ACROSS < R)[:, None]
                value = tl.load(at, stored, 0, eviction_policy="evict_first")
                w = w + (value.to(tl.float32),)
            k = k_first[:, None] + c
            out = ()
            for m in tl.static_range(M):
                token = tl.load(x + m * K + k, inside & (k < K), 0).to(tl.float32)
                for r in tl.static_range(EACH):
                    out = out + (totals[m * EACH + r] + tl.sum(w[r] * token, 1),)
            totals = out

    own = tl.program_id(1) * (ACROSS * EACH) + tl.arange(0, ACROSS)
    own = own[:, None] + tl.arange(0, EACH)[None, :] * ACROSS
    n = block_row * R + own
    kept = (own < R) & (n < N)
    for m in tl.static_range(M):
        parts = tl.reshape(stack(totals, m * EACH, 1, EACH), (BLOCKS, ACROSS, PER_ROW, EACH))
        total = tl.sum(tl.sum(parts, 2), 0)
        tl.store(y + m * N + n, total.to(y.dtype.element_ty), kept)


@triton.jit
def _gemm(
    x, row_ptr, col_idx, values, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr,
    OPERAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply tiles: ROWS rows of a row of blocks by BM tokens, COLS columns at a time."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    block_row = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLS)
    x_rows = x + tl.minimum(m, M - 1)[None, :] * K
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(PDL)

    total = tl.zeros((ROWS, BM), tl.float32)
    for block in range(first, last):
        k_first = tl.load(col_idx + block) * C
        for c0 in range(0, C, COLS):
            c = c0 + column
            at = values + ((block * R + row) * C)[:, None] + c[None, :]
            w = tl.load(at, (row < R)[:, None] & (c < C)[None, :], 0)
            k = k_first + c
            xt = tl.load(x_rows + k[:, None], ((c < C) & (k < K))[:, None], 0)
            total = tl.dot(w.to(OPERAND), xt.to(OPERAND), total, input_precision="ieee")

    n = block_row * R + row
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    kept = ((row < R) & (n < N))[:, None] & (m < M)[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), kept)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """How a block-sparse GEMV is cut; see `_gemv`. All sizes are powers of two.

    Attributes:
        blocks: blocks that a program reads at once.
        across: rows of a block among its threads.
        each: rows that a thread reads.
        cols: columns of a block that are read at once.
        lane: columns that a thread reads.
        warps: warps of a program.
    """

    blocks: int
    across: int
    each: int
    cols: int
    lane: int
    warps: int


def gemv_tile(block: tuple[int, int], element: int, k: int) -> GemvTile:
    """Choose the tile of a GEMV, which must not depend on the number of tokens."""
    height, width = block
    lane = 16 // element
    while width % lane or k % lane:
        lane //= 2
    warps = 2
    threads = 32 * warps
    cols = min(triton.next_power_of_2(width), 64 * lane // 8)
    each = min(triton.next_power_of_2(height), 4)
    across = min(triton.next_power_of_2(height) // each, 4, threads * lane // cols)
    return GemvTile(threads * lane // (cols * across), across, each, cols, lane, warps)


def bsr_linear(
    *, x: torch.Tensor, w: DeviceTensor, y: torch.Tensor, device: Device
) -> list[Launch]:
    """Lower `ops.linear.bsr_linear`."""
    (m, k), n = x.shape, w.shape[0]
    assert isinstance(w.format, Bsr)
    height, width = w.format.block
    values = w.planes["values"]
    args = {
        "x": x,
        "row_ptr": w.planes["row_ptr"],
        "col_idx": w.planes["col_idx"],
        "values": values,
        "y": y,
    }
    sizes = {"M": m, "N": n, "K": k, "R": height, "C": width, "PDL": device.pdl}
    block_rows = triton.cdiv(n, height)
    if m <= MAX_TOKENS:
        tile = gemv_tile(w.format.block, values.element_size(), k)
        constants = {
            **sizes,
            "BLOCKS": tile.blocks,
            "ACROSS": tile.across,
            "EACH": tile.each,
            "COLS": tile.cols,
            "LANE": tile.lane,
        }
        grid = (block_rows, triton.cdiv(height, tile.across * tile.each))
        weights = tile.each * tile.lane
        return [Launch(_gemv, grid, args, constants, tile.warps, device.pdl, weights)]

    operand = operand_type(x.dtype, device)
    rows = min(max(16, triton.next_power_of_2(height)), 64)
    bm = min(max(16, triton.next_power_of_2(m)), 32 if operand == torch.float32 else 128)
    constants = {
        **sizes,
        "ROWS": rows,
        "COLS": min(max(16, triton.next_power_of_2(width)), 32 if operand == torch.float32 else 64),
        "BM": bm,
        "OPERAND": TL_TYPES[operand],
    }
    grid = (triton.cdiv(m, bm), block_rows, triton.cdiv(height, rows))
    return [Launch(_gemm, grid, args, constants, 4, device.pdl)]


LOWER = {"bsr_linear": bsr_linear}
