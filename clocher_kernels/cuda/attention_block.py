"""One block of keys and values for a tile of rows: the step of online softmax.

Keys and values are multiplied as exact bf16 or fp16; the fp32 operand is split in two of these, or
rounded to one where activations are no more exact.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.codes import to_f16
from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.scalar import or_nan, tanh, within

NEVER = tl.constexpr(0x7FFFFFFF)


def work_type(kv: str, device: Device) -> tl.dtype:
    """Return the type that holds keys and values exactly in matmuls; fp32 in the interpreter."""
    if kv in ("f16", "e4m3", "e5m2"):
        return tl.float16
    return tl.bfloat16 if kv in ("bf16", "i8") and device.asm else tl.float32


def needs_two(y: torch.dtype, work: tl.dtype) -> bool:
    """Return whether queries and weights must be two numbers to be as exact as y's type."""
    if y == torch.bfloat16 or work == tl.float32:
        return False
    return y == torch.float32 or work == tl.bfloat16


def most_splits(heads: int) -> int:
    """Return the most splits of a token's keys: two programs per multiprocessor of a large GPU."""
    return min(max(triton.next_power_of_2(256 // heads + 1) // 2, 8), 64)


def block_of(width: int, kv: str) -> int:
    """Return the keys of a block: fewer splits are combined where there are more."""
    return min(128, max(16, (4096 if kv == "f32" else 16384) // width))


def prompt_tile(width: int, kv: str, heads: int, device: Device) -> tuple[int, int, int, int]:
    """Return (rows, keys per block, warps, stages) for a chunk: what fits in 255 registers.

    `heads`: query heads of all tokens. If they are few, programs are smaller.
    """
    if width > 128:
        return 32, 32, 8, 1
    if device.capability in (90, 100):
        warps, block = (4 if heads < 64 * device.sms else 8), 64 if kv in ("bf16", "f16") else 32
        return 16 * warps, block, warps, 2 if kv == "i8" else 3
    return (64, 32, 4, 1) if width <= 64 else (64, 16, 8, 1)


@triton.jit
def load_query(q, at, live, C: tl.constexpr):
    """Load rows of the query [ROWS, WIDTH], fp32."""
    dim = tl.arange(0, C.WIDTH)
    inside = live[:, None] & (dim < C.DIM)[None, :]
    return tl.load(q + at[:, None] + dim[None, :], inside, other=0.0).to(tl.float32)


@triton.jit
def in_two(x, WORK: tl.constexpr):
    """Split fp32 into WORK and the remainder."""
    if tl.constexpr(tl.bfloat16) == WORK:
        # Cut, not rounded: the remainder has what is missing, and both convert in pairs.
        cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        return cut.to(WORK), (x - cut).to(WORK)
    else:
        high = x.to(WORK)
        return high, (x - high.to(tl.float32)).to(WORK)


@triton.jit
def _product(high, rest, b, acc):
    """Return (high + rest) @ b + acc in fp32."""
    if high.dtype == tl.float32:
        return tl.dot(high, b, acc, input_precision="tf32x3")
    elif rest is None:
        return tl.dot(high, b, acc)
    else:
        return tl.dot(high, b, tl.dot(rest, b, acc))


@triton.jit
def cells_at(pages, cell0, cell, seen, head, C: tl.constexpr, ONE_PAGE: tl.constexpr):
    """Return the index of (page, head, cell in page) of cells, int32; ONE_PAGE: all in one.

    Registers hold many of them; that of a number in the cache, DIM times as large, needs int64.
    """
    if ONE_PAGE:
        page = tl.load(pages + cell0 // C.PAGE)
    else:
        page = tl.load(pages + cell // C.PAGE, seen, other=0)
    return (within(page, C.POOL) * C.HEADS + head) * C.PAGE + cell % C.PAGE


@triton.jit
def fetch_cells(cache, at, C: tl.constexpr):
    """Bring cells of a cache into L2."""
    LINE: tl.constexpr = 128 // (cache.dtype.element_ty.primitive_bitwidth // 8)
    COUNT: tl.constexpr = C.WIDTH // LINE if C.WIDTH > LINE else 1
    line = tl.minimum(tl.arange(0, COUNT) * LINE, C.DIM - 1)
    to = (cache + at[:, None].to(tl.int64) * C.DIM + line[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [to], tl.int32, False, 1
    )


@triton.jit
def path_cells(place, end, tree, length):
    """Return cells in position order: committed ones, then the path's nodes in `length` bits."""
    cell, node = place, end
    for bit in range(0, length):
        there = ((tree >> bit) & 1).to(tl.int32)
        cell = tl.where((place == node) & (there != 0), end + bit, cell)
        node += there
    return cell


@triton.jit
def load_cells(cache, at, seen, C: tl.constexpr, other=0):
    """Load cells [B, WIDTH] of a cache; `other` where they are not seen."""
    dim = tl.arange(0, C.WIDTH)
    inside = seen[:, None] & (dim < C.DIM)[None, :]
    return tl.load(cache + at[:, None].to(tl.int64) * C.DIM + dim[None, :], inside, other=other)


@triton.jit
def _widen(stored, C: tl.constexpr):
    """Convert stored keys or values to WORK; fp8 is divided by its unit."""
    if C.KV == "e4m3" or C.KV == "e5m2":
        return to_f16(stored, C.KV, C.ASM)
    elif C.KV == "i8":
        return stored.to(tl.float32).to(C.WORK)
    else:
        return stored.to(C.WORK)


@triton.jit
def attend_block(state, query, k_stored, at, seen, visible, cache, C: tl.constexpr):
    """Update a tile's online softmax with a block of keys and values.

    State: the largest logit in units of log 2 (top) and the sum of weights (total), both [ROWS],
    and the weighted sum of values (acc) [ROWS, WIDTH]. `query` is in two. `at` are cells of the
    cache (keys, values and the scales of both) [B], and `k_stored` their keys; `visible` [ROWS, B]
    implies `seen`. A row that sees none of the block keeps its state, bit for bit.
    """
    (top, total, acc), (query, rest), (_, v_cache, k_scale, v_scale) = state, query, cache
    v_stored = load_cells(v_cache, at, seen, C)
    keys = _widen(k_stored, C)
    logits = tl.zeros((acc.shape[0], at.shape[0]), tl.float32)
    logits = _product(query, rest, tl.trans(keys), logits) * C.SCALE
    if C.KV == "i8":
        logits *= tl.load(k_scale + at, seen, other=0.0)[None, :]
    if C.SOFTCAP > 0:
        logits = C.SOFTCAP * tanh(or_nan(logits) * (1.0 / C.SOFTCAP))
    logits = tl.where(visible, logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    # If nothing was seen yet, infinity minus infinity would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - base)
    weight = tl.exp2(logits - base[:, None])
    total = total * fade + tl.sum(weight, 1)
    if C.KV == "i8":
        weight *= tl.load(v_scale + at, seen, other=0.0)[None, :]
    values, acc = _widen(v_stored, C), acc * fade[:, None]
    if rest is None:
        return higher, total, _product(weight.to(C.WORK), None, values, acc)
    high, low = in_two(weight, C.WORK)
    return higher, total, _product(high, low, values, acc)


@triton.jit
def in_table(tree, end, CELLS: tl.constexpr):
    """Drop ancestor bits of cells beyond the page table; 0 <= end <= CELLS."""
    room = tl.minimum(CELLS - end, 63).to(tl.int64)
    return tl.where(CELLS - end < 64, tree & ((tl.full((), 1, tl.int64) << room) - 1), tree)


@triton.jit
def sees_tree(cell, end, tree, position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return whether a row sees cells by its ancestor mask; later bits count as distance."""
    bit = cell - end
    inside = (bit >= 0) & (bit < 64)
    later = tree.to(tl.uint64, bitcast=True) >> tl.where(inside, bit, 0).to(tl.uint64)
    seen = inside & ((later & 1) != 0)
    if WINDOW > 0:
        seen = seen & (count_bits(later >> 1) < WINDOW)
    if CHUNK > 0:
        seen = seen & (count_bits(later >> 1) <= position % CHUNK)
    return seen


@triton.jit
def count_bits(x):
    """Return the number of set bits of 64-bit integers."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def write_heads(out, top, total, acc, sinks, query_head, live, C: tl.constexpr):
    """Divide by the sum of weights, sink included; write the live rows, 0 if nothing seen."""
    if sinks is not None:
        sink = tl.load(sinks + query_head, live, other=0.0) * 1.4426950408889634
        highest = tl.maximum(top, sink)
        fade = tl.exp2(top - highest)
        acc = acc * fade[:, None]
        total = total * fade + tl.exp2(sink - highest)
    acc = acc * (C.UNIT / tl.where(total > 0, total, 1.0))[:, None]
    dim = tl.arange(0, acc.shape[1])
    inside = live[:, None] & (dim < C.DIM)[None, :]
    tl.store(out[:, None] + dim[None, :], acc.to(out.dtype.element_ty), inside)


@triton.jit
def combine_splits(base, splits, partial, tops, totals, sinks, head0, out, C: tl.constexpr):
    """Combine the splits' partial results, read from L2, and write the heads of a group.

    Splits are the second axis, so that a thread has all those of an element. A loop, because code
    that runs once comes from L2, too.
    """
    lane, dim = tl.arange(0, C.LANES), tl.arange(0, C.WIDTH)
    live = lane < C.GROUP
    top = tl.full((C.LANES,), float("-inf"), tl.float32)
    total = tl.zeros((C.LANES,), tl.float32)
    acc = tl.zeros((C.LANES, C.WIDTH), tl.float32)
    for split0 in range(0, splits, C.TAKE):
        split = split0 + tl.arange(0, C.TAKE)[None, :]
        at, done = base + split * C.LANES + lane[:, None], (split < splits) & live[:, None]
        tops_of = tl.load(tops + at, done, other=float("-inf"), cache_modifier=".cg")
        totals_of = tl.load(totals + at, done, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial + at[:, :, None] * C.WIDTH + dim[None, None, :],
            done[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, tl.max(tops_of, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - anchor), tl.exp2(tops_of - anchor[:, None])
        total = total * fade + tl.sum(totals_of * weight, 1)
        acc = acc * fade[:, None] + tl.sum(values * weight[:, :, None], 1)
        top = higher
    write_heads(out + lane * C.DIM, top, total, acc, sinks, head0 + lane, live, C)


@triton.jit
def pages_seen(ends, ancestors, token, CELLS: tl.constexpr, PAGE: tl.constexpr):
    """Return how many pages a token sees."""
    end = within(tl.load(ends + token), CELLS + 1)
    tree = in_table(tl.load(ancestors + token), end, CELLS)
    return tl.cdiv(end + count_bits(tree.to(tl.uint64, bitcast=True)), PAGE)


@triton.jit
def _below(count):
    few = tl.minimum(tl.maximum(count, 0), 63).to(tl.uint64)
    ones = (few * 0 + 1 << few) - 1
    return ones | (tl.where(count > 63, 1, 0).to(tl.uint64) << 63)


@triton.jit
def run_of(begin, end, word):
    """Return the bits of pages begin .. end - 1 in words by index, uint64."""
    return _below(end - 64 * word) & ~_below(begin - 64 * word)


@triton.jit
def load_words(words, word, begin, end, WORDS: tl.constexpr):
    """Return list words by index, uint64, cut to pages begin .. end - 1."""
    stored = tl.load(words + word, word < WORDS, other=0)
    return stored.to(tl.uint64, bitcast=True) & run_of(begin, end, word)


@triton.jit
def lowest(bits):
    """Return the index of the lowest set bit of a non-zero word."""
    return count_bits(~bits & (bits - 1))


@triton.jit
def listed_cell(words, current, left, place, C: tl.constexpr):
    """Return the first cell of a listed block, and the list behind it: a word and what is left."""
    PARTS: tl.constexpr = C.PAGE // C.BLOCK
    # Unseen pages come last and are not reached.
    while (left == 0) & (current < C.WORDS - 1):
        current += 1
        left = tl.load(words + current).to(tl.uint64, bitcast=True)
    cell0 = (current * 64 + lowest(left)) * C.PAGE + place % PARTS * C.BLOCK
    if place % PARTS == PARTS - 1:
        left &= left - 1
    return tl.minimum(cell0, C.CELLS - 1), current, left  # an empty list has no first cell


@triton.jit
def block_at(cell0, branch, sight, pages, head, C: tl.constexpr):
    """Return the cache cells of a block of places, int32, and which of them the token sees.

    `sight`: its first and last place and its end, the nearest place that a window has, its tree.
    """
    first, last, end, nearest, tree, length = sight
    ONE_PAGE: tl.constexpr = C.PAGE % C.BLOCK == 0
    place = cell0 + tl.arange(0, C.BLOCK)
    seen = (place >= first) & (place < last)
    if C.WINDOW > 0 or C.CHUNK > 0:
        seen = seen & ((place < end) | (place >= nearest))
    if cell0 + C.BLOCK > branch:
        cell = path_cells(place, end, tree, length)
        at = cells_at(pages, cell0, cell, seen, head, C, False)
    else:
        at = cells_at(pages, cell0, place, seen, head, C, ONE_PAGE)
    return at, seen
