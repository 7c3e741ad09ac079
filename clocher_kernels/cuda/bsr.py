"""The `bsr_linear` op: y = x W^T over the stored blocks of block-sparse rows."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import dot, token_factors, unit, weight_factors
from clocher_kernels.cuda.dots import split4, vector_dot
from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, MOST_SLICED, arithmetic, stack
from clocher_kernels.cuda.launch import TL_TYPES, Device, Launch, launch
from clocher_kernels.cuda.linear import decoded, operand_type
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.cuda.scalar import Tail, finish, start
from clocher_kernels.formats.bsr import Bsr


@triton.jit
def _gemv(x, row_ptr, col_idx, values, scales, bias, times, residual, y, C: tl.constexpr):
    """Multiply floats or int8: a turn takes BLOCKS blocks, ACROSS * EACH rows, COLS columns.

    A thread reads LANE columns of EACH rows. All columns count weights, or words of four.
    """
    PER_ROW: tl.constexpr = C.COLS // C.LANE
    CHUNKS: tl.constexpr = C.BLOCKS * C.ACROSS * PER_ROW
    FACTORS: tl.constexpr = 8 if C.MATH == "pairs" else 1
    chunk = tl.arange(0, CHUNKS)
    column = ((chunk % PER_ROW) * C.LANE)[:, None] + tl.arange(0, C.LANE)[None, :]
    row = tl.program_id(1) * (C.ACROSS * C.EACH) + (chunk // PER_ROW) % C.ACROSS
    nth = chunk // (PER_ROW * C.ACROSS)

    block_row = tl.program_id(0)
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(C.PDL)

    totals = ()
    for _i in tl.static_range(C.M * C.EACH):
        totals = totals + (tl.zeros((CHUNKS,), tl.float32),)
    for turn in range(first, last, C.BLOCKS):
        block = turn + nth
        live = block < last
        k_first = tl.load(col_idx + block, live, 0) * C.WIDTH
        for c0 in range(0, C.WIDTH, C.COLS):
            c = c0 + column
            inside = live[:, None] & (c < C.WIDTH)
            w, factors = (), ()
            for r in tl.static_range(C.EACH):
                at = block * C.HEIGHT + row + r * C.ACROSS
                stored = live & (row + r * C.ACROSS < C.HEIGHT)
                held = values + (at * C.WIDTH)[:, None] + c
                held = tl.load(held, inside & stored[:, None], 0, eviction_policy="evict_first")
                w = w + weight_factors(held, CHUNKS, C.CODE, C.MATH, C.ASM)
                if scales is not None:
                    factors = factors + (tl.load(scales + at, stored, 0).to(tl.float32) * C.UNIT,)
            k = k_first[:, None] + c
            out = ()
            for m in tl.static_range(C.M):
                token = tl.load(x + m * C.K + k, inside & (k < C.K), 0)
                token = token_factors(token, CHUNKS, C.MATH)
                for r in tl.static_range(C.EACH):
                    part = dot(w, token, FACTORS * r, CHUNKS, C.LANE, C.MATH, C.ASM)
                    if scales is not None:
                        part *= factors[r]
                    out = out + (totals[m * C.EACH + r] + part,)
            totals = out

    own = tl.program_id(1) * (C.ACROSS * C.EACH) + tl.arange(0, C.ACROSS)
    own = own[:, None] + tl.arange(0, C.EACH)[None, :] * C.ACROSS
    n = block_row * C.HEIGHT + own
    kept = (own < C.HEIGHT) & (n < C.N)
    for m in tl.static_range(C.M):
        parts = tl.reshape(stack(totals, m * C.EACH, C.EACH), (C.BLOCKS, C.ACROSS, PER_ROW, C.EACH))
        total = tl.sum(tl.sum(parts, 2), 0)
        finish(total, bias, times, residual, y, m, n, kept, C)


@triton.jit
def _gemv_int4(x, row_ptr, col_idx, values, scales, bias, times, residual, y, C: tl.constexpr):
    """Multiply prepacked int4, in tiles [lanes, BM, EACH] and vectors of WEIGHTS."""
    LANES: tl.constexpr = C.BLOCKS * C.ACROSS * C.PER_ROW
    WORDS: tl.constexpr = C.WEIGHTS // 8
    lane = tl.arange(0, LANES)[:, None, None]
    m = tl.arange(0, C.BM)[None, :, None]
    row = tl.program_id(1) * (C.ACROSS * C.EACH) + lane // C.PER_ROW % C.ACROSS * C.EACH
    row += tl.arange(0, C.EACH)[None, None, :]
    nth = lane // (C.PER_ROW * C.ACROSS)
    zero = tl.full((1, 1, 1), 8, tl.int32)

    block_row = tl.program_id(0)
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(C.PDL)

    total = tl.zeros((LANES, C.BM, C.EACH), tl.float32)
    for turn in range(first, last, C.BLOCKS):
        block = turn + nth
        live = block < last
        k_first = tl.load(col_idx + block, live, 0) * C.WIDTH
        # Rows beyond the block repeat its last one and are not stored.
        at = block * C.HEIGHT + tl.minimum(row, C.HEIGHT - 1)
        scale = tl.load(scales + at, live, 0).to(tl.float32)
        for v0 in range(0, C.VECTORS, C.PER_ROW):
            v = v0 + lane % C.PER_ROW
            inside = live & (v < C.VECTORS)
            word = ((at * C.VECTORS + v) * WORDS)[:, :, :, None] + tl.arange(0, WORDS)
            to = values + word
            if WORDS == 4:
                to = tl.max_contiguous(to, (2, 1, 1, 4))
            held = tl.load(to, inside[:, :, :, None], 0, eviction_policy="evict_first")
            words = split4(held) if WORDS == 4 else tl.split(held)
            total += scale * vector_dot(
                x + m * C.K, (m < C.M) & inside, k_first + v * C.WEIGHTS, words, None, None, zero, C
            )

    total = tl.reshape(total, (C.BLOCKS, C.ACROSS, C.PER_ROW, C.BM, C.EACH))
    own = tl.program_id(1) * (C.ACROSS * C.EACH) + tl.arange(0, C.ACROSS)[:, None, None] * C.EACH
    own += tl.arange(0, C.EACH)[None, None, :]
    n = block_row * C.HEIGHT + own
    kept = (own < C.HEIGHT) & (n < C.N) & (m < C.M)
    total = tl.sum(tl.sum(total, 2), 0)
    finish(total, bias, times, residual, y, m, n, kept, C)


@triton.jit
def _gemm(x, row_ptr, col_idx, values, scales, bias, times, residual, y, C: tl.constexpr):
    """Multiply tiles: ROWS rows of a row of blocks by BM tokens, COLS columns at a time."""
    m = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    block_row = tl.program_id(1)
    row = tl.program_id(2) * C.ROWS + tl.arange(0, C.ROWS)
    column = tl.arange(0, C.COLS)
    x_rows = x + tl.minimum(m, C.M - 1)[None, :] * C.K
    first = tl.load(row_ptr + block_row).to(tl.int64)
    last = tl.load(row_ptr + block_row + 1).to(tl.int64)
    start(C.PDL)

    total = tl.zeros((C.ROWS, C.BM), tl.float32)
    for block in range(first, last):
        k_first = tl.load(col_idx + block) * C.WIDTH
        if scales is not None:
            scale = tl.load(scales + block * C.HEIGHT + row, row < C.HEIGHT, 0).to(tl.float32)
            scale = scale[:, None] * C.UNIT
        for c0 in range(0, C.WIDTH, C.COLS):
            c = c0 + column
            element = c0 // C.PER + tl.arange(0, C.COLS // C.PER)
            at = values + ((block * C.HEIGHT + row) * C.STRIDE)[:, None] + element[None, :]
            held = tl.load(at, (row < C.HEIGHT)[:, None] & (element < C.STRIDE)[None, :], 0)
            w = decoded(held, C)
            if C.CODE == "int4":
                w -= 8
            k = k_first + c
            xt = tl.load(x_rows + k[:, None], ((c < C.WIDTH) & (k < C.K))[:, None], 0).to(C.OPERAND)
            if scales is None:
                total = tl.dot(w, xt, total, input_precision="ieee")
            else:
                total += tl.dot(w, xt, input_precision="ieee") * scale

    n = (block_row * C.HEIGHT + row)[:, None]
    m = m.to(tl.int64)[None, :]
    kept = (row < C.HEIGHT)[:, None] & (n < C.N) & (m < C.M)
    finish(total, bias, times, residual, y, m, n, kept, C)


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
    given |= {"K": given["K"] // per, "WIDTH": block[1] // per, "COLS": tile.cols // per}
    given |= {"LANE": lane // per, "MATH": math, "UNIT": unit(code, math), **tile.constants}
    return launch(
        _gemv, tile.grid(given["N"], block), device, tile.warps, tile.each * lane, **given
    )


def _int4_launch(given: dict[str, Any], block: tuple[int, int], device: Device) -> Launch:
    x, words, m = given["x"], given["values"].shape[-1], given["M"]
    lane = 8 * min(words, 4)
    tile = gemv_tile(block, lane, m)
    given |= {"PER_ROW": tile.cols // lane, "BM": triton.next_power_of_2(m)}
    given |= {"WEIGHTS": lane, "SPAN": 0}
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
    stored |= {"CODE": code, "N": n, "K": x.shape[1], "HEIGHT": block[0], "WIDTH": block[1]}
    few = len(x) <= MOST_SLICED
    lower = _gemm_launch if not few else _int4_launch if code == "int4" else _gemv_launch
    launches = []
    for tokens, tail in Tail(**after).parts(len(x), MAX_TOKENS if few else len(x)):
        given = {"x": x[tokens], "M": len(x[tokens]), **stored}
        given |= tail.given("bsr_linear", y[tokens], n)
        launches.append(lower(given, block, device))
    return launches
