"""Sample the next tokens in a few launches of fixed size.

A row takes four: the largest logit (enough for greedy rows), the bins, the cuts, the draw.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.sampling_cuts import (
    BINS,
    KEEP_ALL,
    bin_of,
    find_bins,
    find_cut,
    load_logits,
    rank_of,
    share_of,
    unit_for,
    weight_of,
    without_forbidden,
)
from clocher_kernels.cuda.scalar import or_nan, start
from clocher_kernels.ops.sampling import NO_TOKEN as NOTHING
from clocher_kernels.ops.sampling import NONE_ALLOWED as FORBIDDEN

# Tokens of a program.
_BLOCK = 2048
NO_TOKEN = tl.constexpr(NOTHING)
NONE_ALLOWED = tl.constexpr(FORBIDDEN)

# What a row keeps between launches, int64: kept ranks are at least CUT; the rest says in which bins
# the cuts are, what is before them, and how many tokens are in these bins.
CUT = tl.constexpr(0)
K_BIN = tl.constexpr(1)
K_NEED = tl.constexpr(2)
K_ABOVE = tl.constexpr(3)
P_LOW = tl.constexpr(4)
P_HIGH = tl.constexpr(5)
P_ABOVE = tl.constexpr(6)
LISTED = tl.constexpr(7)
STATE = tl.constexpr(8)


@triton.jit
def _uniform(seed, draw):
    """Return `ops.sampling.uniform` of int64 seeds, fp64."""
    z = seed.to(tl.uint64, bitcast=True) + (draw + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def is_last(arrivals, PROGRAMS: tl.constexpr):
    """Return whether all other programs of the row have finished writing."""
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == PROGRAMS - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def _largest(
    logits, allowed, masked, largest, tops, firsts, ids, arrivals,
    V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find a row's largest logit and its lowest id, the greedy token; NaN if not finite."""
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, row, token, V, ROW)
    odd = (token < V) & ((tl.abs(x) < float("inf")) == 0)
    x = without_forbidden(x, allowed, masked, row, token, V, C, W)
    top, index = tl.max(tl.where(odd, float("inf"), x), 0, return_indices=True)
    tl.store(tops + row * PROGRAMS + part, top)
    tl.store(firsts + row * PROGRAMS + part, part * BLOCK + index)
    if is_last(arrivals + row, PROGRAMS):
        each = tl.arange(0, WIDTH)
        at, inside = row * PROGRAMS + each, each < PROGRAMS
        top_of = tl.load(tops + at, inside, other=float("-inf"), cache_modifier=".cg")
        first_of = tl.load(firsts + at, inside, other=V - 1, cache_modifier=".cg")
        best = tl.max(top_of)
        found = tl.min(tl.where(top_of == best, first_of, V - 1))
        found = tl.where(best == float("-inf"), NONE_ALLOWED, found)
        found = tl.where(best == float("inf"), NO_TOKEN, found)
        tl.store(largest + row, or_nan(best))
        tl.store(ids + row, found)


@triton.jit
def _block_of(
    logits, allowed, masked, row, part,
    V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tokens of a part of a row and their logits, minus infinity if not allowed."""
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, row, at, V, ROW)
    return at, without_forbidden(x, allowed, masked, row, at, V, C, W)


@triton.jit
def _fill_bins(
    logits, allowed, masked, largest, temperature, top_k, top_p, counts, bin_masses, state,
    arrivals,
    V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    state += row * STATE
    top = tl.load(largest + row)
    if (heat == 0) | (top != top):
        return
    by_count = (k > 0) & (k < V)
    if (by_count == 0) & (p >= 1):
        if part == 0:
            tl.store(state + CUT, KEEP_ALL)
            tl.store(state + K_BIN, -1)
            tl.store(state + P_LOW, 0)
            tl.store(state + P_HIGH, -1)
        return
    at, x = _block_of(logits, allowed, masked, row, part, V, C, W, ROW, BLOCK)
    counts += row * BINS
    bin_masses += row * BINS
    # An invalid temperature may give a negative bin: keep it within bounds.
    which = tl.maximum(bin_of(x, top, heat), 0)
    # Most tokens are in the last bin: they weigh nothing, and no cut needs their count.
    weighs = (at < V) & (which < BINS - 1)
    tl.atomic_add(counts + which, 1, weighs, sem="relaxed")
    tl.atomic_add(bin_masses + which, weight_of(x, top, heat, UNIT), weighs, sem="relaxed")
    if is_last(arrivals + row, PROGRAMS):
        k_bin, k_need, k_above, p_low, p_high, p_above = find_bins(
            counts, bin_masses, tl.where(by_count, k, 0), p
        )
        tl.store(state + CUT, KEEP_ALL)
        tl.store(state + K_BIN, k_bin)
        tl.store(state + K_NEED, k_need)
        tl.store(state + K_ABOVE, k_above)
        tl.store(state + P_LOW, p_low)
        tl.store(state + P_HIGH, p_high)
        tl.store(state + P_ABOVE, p_above)
        tl.store(state + LISTED, 0)


@triton.jit
def _cut(
    logits, allowed, masked, largest, temperature, top_p, ranks, state, arrivals,
    V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the tokens of the cuts' bins, in any order, and find the cuts there."""
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, top = tl.load(temperature + row), tl.load(largest + row)
    state += row * STATE
    if (heat == 0) | (top != top):
        return
    k_bin = tl.load(state + K_BIN)
    p_low, p_high = tl.load(state + P_LOW), tl.load(state + P_HIGH)
    if (k_bin < 0) & (p_high < p_low):
        return
    at, x = _block_of(logits, allowed, masked, row, part, V, C, W, ROW, BLOCK)
    which = bin_of(x, top, heat)
    listed = (at < V) & ((which == k_bin) | ((which >= p_low) & (which <= p_high)))
    nth = tl.cumsum(listed.to(tl.int32), 0)
    begin = tl.atomic_add(state + LISTED, tl.sum(listed.to(tl.int64)), sem="relaxed")
    ranks += row.to(tl.int64) * V
    tl.store(ranks + begin + nth - 1, rank_of(x, at), listed)
    if is_last(arrivals + row, PROGRAMS):
        count = tl.load(state + LISTED, cache_modifier=".cg")
        mass = tl.load(state + K_ABOVE)
        cut = mass * 0 + KEEP_ALL
        if k_bin >= 0:
            need = tl.load(state + K_NEED)
            cut, inside = find_cut(ranks, count, k_bin, k_bin, need, top, heat, False, UNIT)
            mass += inside
        if p_high >= p_low:
            need = share_of(tl.load(top_p + row), mass) - tl.load(state + P_ABOVE)
            p_cut, _ = find_cut(ranks, count, p_low, p_high, need, top, heat, True, UNIT)
            cut = tl.maximum(cut, p_cut)
        tl.store(state + CUT, cut)


@triton.jit
def _draw(
    logits, allowed, masked, largest, temperature, seeds, draws, masses, state, ids, arrivals,
    V: tl.constexpr, C: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum kept weights by ascending id, and find where the drawn share is reached."""
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, top = tl.load(temperature + row), tl.load(largest + row)
    if (heat == 0) | (top != top):
        return
    cut = tl.load(state + row * STATE + CUT)
    at, x = _block_of(logits, allowed, masked, row, part, V, C, W, ROW, BLOCK)
    kept = tl.where(rank_of(x, at) >= cut, weight_of(x, top, heat, UNIT), 0)
    masses += row * PROGRAMS
    tl.store(masses + part, tl.sum(kept))
    if is_last(arrivals + row, PROGRAMS):
        each = tl.arange(0, WIDTH)
        mass = tl.load(masses + each, each < PROGRAMS, other=0, cache_modifier=".cg")
        total = tl.sum(mass)
        share = _uniform(tl.load(seeds + row), tl.load(draws + row)) * total.to(tl.float64)
        target = tl.minimum(share.to(tl.int64), total - 1)
        chosen = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32))
        target -= tl.sum(tl.where(each < chosen, mass, 0))
        at, x = _block_of(logits, allowed, masked, row, chosen, V, C, W, ROW, BLOCK)
        kept = tl.where(rank_of(x, at) >= cut, weight_of(x, top, heat, UNIT), 0)
        inside = tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32))
        tl.store(ids + row, tl.minimum(chosen * BLOCK + inside, V - 1))


def sample(
    *, logits: torch.Tensor, allowed: torch.Tensor, device: Device, **rows: torch.Tensor
) -> list[Launch]:
    """Lower `ops.sampling.sample`.

    Draws equal the reference's up to its rounding: weights are integers of 2^-44 of the largest
    (fewer bits beyond 2^18 tokens), so sums are exact in any order.
    """
    count, vocabulary = logits.shape
    programs, bins = triton.cdiv(vocabulary, _BLOCK), BINS.value
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    sizes = {"V": vocabulary, "C": allowed.shape[0], "W": allowed.shape[1]}
    sizes |= {"ROW": logits.stride(0), "BLOCK": _BLOCK, "PROGRAMS": programs}
    sizes |= {"WIDTH": triton.next_power_of_2(programs), "UNIT": unit_for(vocabulary)}

    def scratch(name: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return device.scratch(f"sample_{name}", (count, columns), dtype)

    given = {**rows, **sizes, "logits": logits, "allowed": allowed}
    given |= {
        "largest": scratch("largest", 1, f32),
        "state": scratch("state", STATE.value, i64),
        "arrivals": scratch("arrivals", 1, i32),
        "tops": scratch("tops", programs, f32),
        "firsts": scratch("firsts", programs, i32),
        "counts": scratch("counts", bins, i32),
        "bin_masses": scratch("bin_masses", bins, i64),
        "ranks": scratch("ranks", vocabulary, i64),
        "masses": scratch("masses", programs, i64),
    }
    launches = []
    for kernel in (_largest, _fill_bins, _cut, _draw):
        own = {name: value for name, value in given.items() if name in kernel.arg_names}
        launches.append(launch(kernel, (programs, count), device, **own))
    return launches


def sample_greedy(**given: Any) -> list[Launch]:
    """Lower `ops.sampling.sample` for rows of temperature 0, with the first launch only."""
    return sample(**given)[:1]


@triton.jit
def _best(x, token, V: tl.constexpr):
    top = tl.max(x)
    return top, tl.min(tl.where(x == top, token, V))


@triton.jit
def _top_tokens(
    logits, candidates, tops, firsts, arrivals,
    V: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, row, token, V, ROW)
    odd = (token < V) & ((tl.abs(x) < float("inf")) == 0)
    x = tl.where(odd, float("inf"), x)
    found = (row * PROGRAMS + part) * K
    for k in tl.static_range(K):
        top, first = _best(x, token, V)
        tl.store(tops + found + k, top)
        tl.store(firsts + found + k, first)
        x = tl.where(token == first, float("-inf"), x)
    if is_last(arrivals + row, PROGRAMS):
        each = tl.arange(0, WIDTH)
        at, inside = row * PROGRAMS * K + each, each < PROGRAMS * K
        best = tl.load(tops + at, inside, other=float("-inf"), cache_modifier=".cg")
        best_of = tl.load(firsts + at, inside, other=V, cache_modifier=".cg")
        faulty = tl.max(best) == float("inf")
        for k in tl.static_range(K):
            top, first = _best(best, best_of, V)
            none = faulty | (top == float("-inf"))
            tl.store(candidates + row * K + k, tl.where(none, NO_TOKEN, first))
            best = tl.where(best_of == first, float("-inf"), best)


def top_tokens(*, logits: torch.Tensor, candidates: torch.Tensor, device: Device) -> list[Launch]:
    """Lower `ops.top_tokens.top_tokens` in one launch; none if a logit is not finite."""
    (rows, vocabulary), kept = logits.shape, candidates.shape[1]
    programs = triton.cdiv(vocabulary, _BLOCK)
    shape = (rows, programs * kept)
    given = {
        "logits": logits,
        "candidates": candidates,
        "tops": device.scratch("top_tokens_tops", shape, torch.float32),
        "firsts": device.scratch("top_tokens_firsts", shape, torch.int32),
        "arrivals": device.scratch("top_tokens_arrivals", (rows, 1), torch.int32),
    }
    sizes = {"V": vocabulary, "K": kept, "ROW": logits.stride(0), "BLOCK": _BLOCK}
    sizes |= {"PROGRAMS": programs, "WIDTH": triton.next_power_of_2(programs * kept)}
    return [launch(_top_tokens, (programs, rows), device, **given, **sizes)]


LOWER = {"sample": sample, "top_tokens": top_tokens}
LOWER_GREEDY = {"sample": sample_greedy}
