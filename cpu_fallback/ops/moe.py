"""Mixture of experts: the gated hidden layer and the weighted down projection.

Work is split over output rows, so there are no atomics and every thread walks the chosen experts
in the same order. `moe_tiles` has what int8 activations need, and what is done with all sums.
"""

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops import moe_tiles as tiles
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.linear import Tiled, has_codes
from cpu_fallback.ops.product import ROWS, SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.ops.stream import Stored, stored
from cpu_fallback.team.tape import Launch

_CHOSEN, _SOFTMAX, _SIGMOID = range(3)
_SCORES = {"chosen": _CHOSEN, "softmax": _SOFTMAX, "sigmoid": _SIGMOID}
_INFINITY, _NAN = np.float32(np.inf), np.float32(np.nan)
_LEAST = np.float32(1e-20)
_SUMS_BYTES = 64 * TOKENS


@executes("route", score_kind=int, normal=int)
def route(a, rank, size, scratch):
    """Choose experts for each token, and weigh them; each thread has a range of tokens.

    `score_kind`: how scores are made; `normal`: whether weights are divided by their sum.
    A NaN is not chosen; if too few others are left, expert 0 is chosen again. All weights are NaN
    then.
    """
    wide = (a.E + 15) & -16
    scores, ranks = scratch, scratch + 4 * wide
    first, last = share(a.M, rank, size)
    for t in range(first, last):
        _score(a.logits + 4 * t * a.E, a.E, a.score_kind, scores)
        odd = _rank(a, a.logits + 4 * t * a.E, scores, ranks)
        if a.groups:
            _close_groups(a, ranks, ranks + 4 * wide, ranks + 8 * wide)
        _choose(a, t, scores, ranks, a.factor + odd)


@device
def _score(logits, experts, kind, scores):
    """Write the scores of all experts, and up to a whole vector those of a logit -inf."""
    whole, wide = experts & -16, (experts + 15) & -16
    if whole < wide:
        v.store_f32(scores + 4 * whole, v.splat(-_INFINITY))
    for i in range(0, wide, 16):
        n = min(16, experts - i)
        v.store_f32_n(scores + 4 * i, v.load_f32_n(logits + 4 * i, n), n)
    if kind == _SOFTMAX:
        _softmax(scores, wide)
    if kind == _SIGMOID:
        one = v.splat(np.float32(1))
        for i in range(0, wide, 16):
            score = v.div(one, v.add(one, v.exp(v.neg(v.load_f32(scores + 4 * i)))))
            v.store_f32(scores + 4 * i, score)


@device
def _top(x, count):
    """Return the largest value, in every lane."""
    top = v.splat(-_INFINITY)
    for i in range(0, count, 16):
        top = v.maximum(v.load_f32(x + 4 * i), top)
    return v.splat(v.hmax(top))


@device
def _softmax(x, count):
    top, total = _top(x, count), v.zero()
    for i in range(0, count, 16):
        value = v.exp(v.sub(v.load_f32(x + 4 * i), top))
        total = v.add(total, value)
        v.store_f32(x + 4 * i, value)
    total = v.splat(v.hsum(total))
    for i in range(0, count, 16):
        v.store_f32(x + 4 * i, v.div(v.load_f32(x + 4 * i), total))


@device
def _rank(a, logits, scores, ranks):
    """Write what experts are chosen by, NaN beyond the last; return 0, NaN if something is odd."""
    odd, nan = v.zero(), v.splat(_NAN)
    for i in range(0, a.E, 16):
        n = min(16, a.E - i)
        rank = v.load_f32(scores + 4 * i)
        if a.bias:
            rank = v.add(rank, v.load_f32_n(a.bias + 4 * i, n))
        odd = v.select(v.eq(rank, rank), odd, nan)
        odd = v.select(v.lt(v.load_f32_n(logits + 4 * i, n), v.splat(_INFINITY)), odd, nan)
        v.store_f32(ranks + 4 * i, nan)
        v.store_f32_n(ranks + 4 * i, rank, n)
    return v.hsum(odd)


@device
def _close_groups(a, ranks, some, best):
    """Set the ranks of all groups but the best ones to minus infinity."""
    size = a.E // a.groups
    v.store_f32(best + 4 * (a.groups & -16), v.splat(_NAN))
    for g in range(a.groups):
        of_group = ranks + 4 * g * size
        for i in range(0, size, 16):
            n = min(16, size - i)
            v.store_f32(some + 4 * i, v.splat(_NAN))
            v.store_f32_n(some + 4 * i, v.load_f32_n(of_group + 4 * i, n), n)
        total = np.float32(0)
        for _ in range(a.group_best):
            total += v.read_f32(of_group + 4 * _take(some, size))
        if total != total:  # infinities of both signs
            total = -_INFINITY
        v.write_f32(best + 4 * g, total)
    for _ in range(a.group_top):
        _take(best, a.groups)
    for g in range(a.groups):
        left = v.read_f32(best + 4 * g)
        if left == left:
            for i in range(g * size, (g + 1) * size):
                v.write_f32(ranks + 4 * i, -_INFINITY)


@device
def _take(x, count):
    """Return where the first of the largest values is, and make it NaN; 0 if all are NaN."""
    top = _top(x, count)
    for i in range(0, count, 16):
        found = v.mask_bits(v.eq(v.load_f32(x + 4 * i), top))
        if found:
            index = i + v.lowest_bit(found)
            v.write_f32(x + 4 * index, _NAN)
            return index
    return 0


@device
def _choose(a, t, scores, ranks, factor):
    """Write the ids of a token's experts and their weights, times a factor."""
    ids, weights = a.ids + 4 * t * a.A, a.weights + 4 * t * a.A
    top, total = -_INFINITY, np.float32(0)
    for i in range(a.A):
        index = _take(ranks, a.E)
        score = v.read_f32(scores + 4 * index)
        top = max(top, score)
        v.write_i32(ids + 4 * i, index)
        v.write_f32(weights + 4 * i, score)
    for i in range(a.A):
        weight = v.read_f32(weights + 4 * i)
        if a.score_kind == _CHOSEN:
            weight = v.lane(v.exp(v.sub(v.splat(weight), v.splat(top))), 0)
            v.write_f32(weights + 4 * i, weight)
        total += weight
    if a.normal:
        total += _LEAST
    else:
        total = np.float32(1)
    for i in range(a.A):
        v.write_f32(weights + 4 * i, v.read_f32(weights + 4 * i) / total * factor)


def _route(call: BoundCall) -> list[Launch]:
    kind, experts = call.choice("score", _SCORES), call.dim("E")
    if call.dim("A") > experts:
        raise ShapeError(f"route: {call.dim('A')} experts of {experts} are to be chosen")
    groups, top, best = (int(call.attr(n)) for n in ("groups", "group_top", "group_best"))
    if groups and not (
        groups > 0 and experts % groups == 0 and 0 < top <= groups and 0 < best <= experts // groups
    ):
        raise ShapeError(
            f"route: the {best} best of each of {groups} groups of {experts} experts, and {top} "
            "groups are to be chosen; expected groups of one size, and no more than there are"
        )
    normal = kind == _CHOSEN or bool(call.attr("normalise"))
    # Scores, ranks, those of a group, and one of each group: each up to a whole vector more.
    scratch = 4 * (4 * ((experts + 15) & -16) + 16)
    return [call.launch(route, (kind, int(normal)), scratch)]


@device
def _each_tile(a, scratch, first, last, rows, k, per_row, write):
    """Multiply a range of 16 rows of every expert [rows, k]; `write` takes the sums of some pairs.

    Scratch memory is that of a product, the sums, the ends of the experts' pairs, and the pairs.
    """
    sums = scratch + SCRATCH
    ends = sums + _SUMS_BYTES
    order = ends + 4 * a.E
    tiles.sort_by_expert(a.ids, a.M * a.A, a.E, ends, order)
    for e in range(a.E):
        begin, end = tiles.begin_of(ends, e), v.read_i32(ends + 4 * e)
        if begin == end:
            continue
        for tile in range(first, last):
            for start in range(begin, end, TOKENS):
                tokens, pairs = min(TOKENS, end - start), order + 4 * start
                for t in range(tokens):
                    token = v.read_i32(pairs + 4 * t) // per_row
                    v.write_i64(scratch + XS + 8 * t, a.x + 4 * token * k)
                for row in range(16 * tile, min(16 * tile + 16, rows), ROWS):
                    multiply(a.product, a.weight, e, row, min(ROWS, rows - row), tokens, scratch)
                    for t in range(tokens):
                        some = v.load_f32_n(scratch + SUMS + 4 * t * ROWS, ROWS)
                        v.store_f32_n(sums + 64 * t + 4 * (row & 15), some, ROWS)
                write(a, (pairs, e), sums, 0, tokens, tile)


_GATE_UP = {
    name: (
        tiles.gate_up(f"{name}_gate_up", act, _each_tile, Stored),
        tiles.gate_up(f"{name}_gate_up_of_codes", act, tiles.each_tile_of_codes, Tiled),
    )
    for name, act in (("clamped", tiles.clamped_pairs), ("silu", tiles.silu_pairs))
}
_DOWN = (
    tiles.down("moe_down", _each_tile, Stored),
    tiles.down("down_of_codes", tiles.each_tile_of_codes, Tiled),
)


def _lower(call: BoundCall, kernels: tuple[Kernel, Kernel], columns: str) -> list[Launch]:
    of_floats, of_tiles = kernels
    if has_codes(call):
        return tiles.of_codes(call, of_tiles, columns)
    order = 4 * (call.dim("E") + call.dim("M") * call.dim("A"))
    return [call.launch(of_floats, stored(call), SCRATCH + _SUMS_BYTES + order)]


LOWER = {
    "route": _route,
    "moe_gate_up": lambda call: _lower(call, call.choice("act", _GATE_UP), "K"),
    "moe_down": lambda call: _lower(call, _DOWN, "I"),
}
