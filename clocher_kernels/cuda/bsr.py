"""The `bsr_linear` op: y = x W^T over the stored blocks of block-sparse rows."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import dot, token_factors, unit, weight_factors
from clocher_kernels.cuda.dots import split4, vector_dot
from clocher_kernels.cuda.gemv_bits import MAX_TOKENS
from clocher_kernels.cuda.gemv_bytes import MOST_SLICED, arithmetic, stack
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.linear import TL_TYPES, decoded, operand_type
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.cuda.scalar import Tail, finish, start
from clocher_kernels.formats.bsr import Bsr


@triton.jit
def _gemv(
    x, row_ptr, col_idx, values, scales, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr,
    COLS: tl.constexpr, LANE: tl.constexpr,
    CODE: tl.constexpr, MATH: tl.constexpr, UNIT: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Multiply floats or int8: a turn takes BLOCKS blocks, ACROSS * EACH rows, COLS columns.

    A thread reads LANE columns of EACH rows. K, C, COLS and LANE count weights, or words of four.
    """
    PER_ROW: tl.constexpr = COLS // LANE
    CHUNKS: tl.constexpr = BLOCKS * ACROSS * PER_ROW
    FACTORS: tl.constexpr = 8 if MATH == "pairs" else 1
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
            w, factors = (), ()
            for r in tl.static_range(EACH):
                at = block * R + row + r * ACROSS
                stored = live & (row + r * ACROSS < R)
                held = values + (at * C)[:, None] + c
                held = tl.load(held, inside & stored[:, None], 0, eviction_policy="evict_first")
                w = w + weight_factors(held, CHUNKS, CODE, MATH, ASM)
                if scales is not None:
                    factors = factors + (tl.load(scales + at, stored, 0).to(tl.float32) * UNIT,)
            k = k_first[:, None] + c
            out = ()
            for m in tl.static_range(M):
                token = tl.load(x + m * K + k, inside & (k < K), 0)
                token = token_factors(token, CHUNKS, MATH)
                for r in tl.static_range(EACH):
                    part = dot(w, token, FACTORS * r, CHUNKS, LANE, MATH, ASM)
                    if scales is not None:
                        part *= factors[r]
                    out = out + (totals[m * EACH + r] + part,)
            totals = out

    own = tl.program_id(1) * (ACROSS * EACH) + tl.arange(0, ACROSS)
    own = own[:, None] + tl.arange(0, EACH)[None, :] * ACROSS
    n = block_row * R + own
    kept = (own < R) & (n < N)
    for m in tl.static_range(M):
        parts = tl.reshape(stack(totals, m * EACH, 1, EACH), (BLOCKS, ACROSS, PER_ROW, EACH))
        total = tl.sum(tl.sum(parts, 2), 0)
        finish(total, bias, times, residual, y, m, n, kept, N, F, ACT, CAP)


@triton.jit
def _gemv_int4(
    x, row_ptr, col_idx, values, scales, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    BLOCKS: tl.constexpr, ACROSS: tl.constexpr, EACH: tl.constexpr, PER_ROW: tl.constexpr,
    BM: tl.constexpr, LANE: tl.constexpr, VECTORS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Multiply prepacked int4, in tiles [lanes, BM, EACH] and vectors of LANE weights."""
    LANES: tl.constexpr = BLOCKS * ACROSS * PER_ROW
    WORDS: tl.constexpr = LANE // 8
    lane = tl.arange(0, LANES)[:, None, None]
    m = tl.arange(0, BM)[None, :, None]
    row = tl.program_id(1) * (ACROSS * EACH) + lane // PER_ROW % ACROSS * EACH
    row += tl.arange(0, EACH)[None, None, :]
    nth = lane // (PER_ROW * ACROSS)
    zero = tl.full((1, 1, 1), 8, tl.int32)

    block_row = tl.program_id(0)
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(PDL)

    total = tl.zeros((LANES, BM, EACH), tl.float32)
    for turn in range(first, last, BLOCKS):
        block = turn + nth
        live = block < last
        k_first = tl.load(col_idx + block, live, 0) * C
        # Rows beyond the block repeat its last one and are not stored.
        at = block * R + tl.minimum(row, R - 1)
        scale = tl.load(scales + at, live, 0).to(tl.float32)
        for v0 in range(0, VECTORS, PER_ROW):
            v = v0 + lane % PER_ROW
            inside = live & (v < VECTORS)
            word = ((at * VECTORS + v) * WORDS)[:, :, :, None] + tl.arange(0, WORDS)
            to = values + word
            if WORDS == 4:
                to = tl.max_contiguous(to, (2, 1, 1, 4))
            held = tl.load(to, inside[:, :, :, None], 0, eviction_policy="evict_first")
            words = split4(held) if WORDS == 4 else tl.split(held)
            total += scale * vector_dot(
                x + m * K, (m < M) & inside, k_first + v * LANE, words, None, None, zero,
                K, 0, "int4", LANE, PAIRS, ASM,
            )  # fmt: skip

    total = tl.reshape(total, (BLOCKS, ACROSS, PER_ROW, BM, EACH))
    own = tl.program_id(1) * (ACROSS * EACH) + tl.arange(0, ACROSS)[:, None, None] * EACH
    own += tl.arange(0, EACH)[None, None, :]
    n = block_row * R + own
    kept = (own < R) & (n < N) & (m < M)
    total = tl.sum(tl.sum(total, 2), 0)
    finish(total, bias, times, residual, y, m, n, kept, N, F, ACT, CAP)


@triton.jit
def _gemm(
    x, row_ptr, col_idx, values, scales, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr,
    CODE: tl.constexpr, PER: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    OPERAND: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
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
        if scales is not None:
            scale = tl.load(scales + block * R + row, row < R, 0).to(tl.float32)[:, None] * UNIT
        for c0 in range(0, C, COLS):
            c = c0 + column
            element = c0 // PER + tl.arange(0, COLS // PER)
            at = values + ((block * R + row) * STRIDE)[:, None] + element[None, :]
            held = tl.load(at, (row < R)[:, None] & (element < STRIDE)[None, :], 0)
            w = decoded(held, CODE, OPERAND, ASM)
            if CODE == "int4":
                w -= 8
            k = k_first + c
            xt = tl.load(x_rows + k[:, None], ((c < C) & (k < K))[:, None], 0).to(OPERAND)
            if scales is None:
                total = tl.dot(w, xt, total, input_precision="ieee")
            else:
                total += tl.dot(w, xt, input_precision="ieee") * scale

    n = (block_row * R + row)[:, None]
    m = m.to(tl.int64)[None, :]
    kept = (row < R)[:, None] & (n < N) & (m < M)
    finish(total, bias, times, residual, y, m, n, kept, N, F, ACT, CAP)


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tiling of a block-sparse GEMV; all sizes are powers of two.

    A program reads `cols` columns of `blocks` blocks at once; threads share out `across` rows of a
    block and read `lane` columns of `each` rows.
    """

    blocks: int
    across: int
    each: int
    cols: int
    lane: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' names of its blocks and rows."""
        return {"BLOCKS": self.blocks, "ACROSS": self.across, "EACH": self.each}

    def grid(self, rows: int, block: tuple[int, int]) -> tuple[int, int]:
        """Return (rows of blocks, parts of a block's rows)."""
        return triton.cdiv(rows, block[0]), triton.cdiv(block[0], self.across * self.each)


def gemv_tile(block: tuple[int, int], lane: int, tokens: int) -> GemvTile:
    """Choose the tile for 1 to 8 tokens, which affect only `each`: no sum changes."""
    height, width = block
    warps = 2
    threads = 32 * warps
    cols = min(max(triton.next_power_of_2(width), lane), 8 * lane)
    each = min(triton.next_power_of_2(height), 4)
    across = min(triton.next_power_of_2(height) // each, 4, threads * lane // cols)
    blocks = threads * lane // (cols * across)
    # A thread has no registers for more weights and sums.
    each = min(each, 2) if tokens > 4 and lane > 8 else each
    return GemvTile(blocks, across, each, cols, lane, warps)


def _lane(width: int, element: int, k: int) -> int:
    lane = 16 // element
    while width % lane or k % lane:
        lane //= 2
    return lane


def _gemv_launch(given: dict[str, Any], block: tuple[int, int], device: Device) -> Launch:
    x, values, code = given["x"], given["values"], given["CODE"]
    lane = _lane(block[1], values.element_size(), given["K"])
    tile = gemv_tile(block, lane, given["M"])
    math = arithmetic(code, x.dtype, lane == 16)
    per = 4 if math == "pairs" else 1
    if per == 4:
        given |= {"x": x.view(torch.int64), "values": values.view(torch.int32)}
    given |= {"K": given["K"] // per, "C": block[1] // per, "COLS": tile.cols // per}
    given |= {"LANE": lane // per, "MATH": math, "UNIT": unit(code, math), **tile.constants}
    return launch(
        _gemv, tile.grid(given["N"], block), device, tile.warps, tile.each * lane, **given
    )


def _int4_launch(given: dict[str, Any], block: tuple[int, int], device: Device) -> Launch:
    x, words, m = given["x"], given["values"].shape[-1], given["M"]
    lane = 8 * min(words, 4)
    tile = gemv_tile(block, lane, m)
    del given["CODE"]
    given |= {"PER_ROW": tile.cols // lane, "BM": triton.next_power_of_2(m), "LANE": lane}
    given |= {"VECTORS": 8 * words // lane, **tile.constants}
    given["PAIRS"] = "words" if device.asm and x.dtype == torch.float16 else ""
    grid = tile.grid(given["N"], block)
    return launch(_gemv_int4, grid, device, tile.warps, tile.each * lane, **given)


def _gemm_launch(given: dict[str, Any], block: tuple[int, int], device: Device) -> Launch:
    operand, code = operand_type(given["x"].dtype, device), given["CODE"]
    widest = 32 if operand == torch.float32 else 128
    rows = min(max(16, triton.next_power_of_2(block[0])), 64)
    bm = min(max(16, triton.next_power_of_2(given["M"])), widest)
    given |= {"ROWS": rows, "COLS": min(max(16, triton.next_power_of_2(block[1])), widest, 64)}
    given |= {"BM": bm, "PER": 8 if code == "int4" else 1, "STRIDE": given["values"].shape[-1]}
    given |= {"UNIT": unit(code, "pairs"), "OPERAND": TL_TYPES[operand]}
    block_rows = triton.cdiv(given["N"], block[0])
    grid = (triton.cdiv(given["M"], bm), block_rows, triton.cdiv(block[0], rows))
    return launch(_gemm, grid, device, **given)


def bsr_linear(
    *, x: Tensor, w: DeviceTensor, y: Tensor, device: Device, **after: Any
) -> list[Launch]:
    """Lower `ops.linear.bsr_linear`; up to `MOST_SLICED` tokens a token's sum has one order."""
    assert isinstance(w.format, Bsr)
    block, n = w.format.block, w.shape[0]
    code = w.format.inner if w.format.inner in ("int8", "int4") else "float"
    stored = {name: w.planes.get(name) for name in ("row_ptr", "col_idx", "scales")}
    stored["values"] = w.planes["values" if code == "float" else "codes"]
    stored |= {"CODE": code, "N": n, "K": x.shape[1], "R": block[0], "C": block[1]}
    few = len(x) <= MOST_SLICED
    lower = _gemm_launch if not few else _int4_launch if code == "int4" else _gemv_launch
    launches = []
    for tokens, tail in Tail(**after).parts(len(x), MAX_TOKENS if few else len(x)):
        given = {"x": x[tokens], "M": len(x[tokens]), **stored}
        given |= tail.given("bsr_linear", y[tokens], n)
        launches.append(lower(given, block, device))
    return launches
