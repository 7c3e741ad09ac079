"""Scores of many rows of queries: the keys of a block lie turned, so lanes are cells.

Keys that many rows look at are decoded once and turned once. A score is then what `attention_tiles`
makes of it, bit by bit, without a sum across lanes: 16 chains, of which chain l multiplies the
values l, l + 16, .. of a head in their order, added by the tree of `simd.hsum`. CHAINS of them are
in registers for TALL rows and 16 cells; they are next to each other in the tree, which leaves one
vector of them, so nothing is put aside in memory.

    score(queries, rows, columns, _, size, begin, end, scores, _)

Columns are, of 16 cells, `size` vectors in the order in which they are multiplied; then those of
the next 16. The code is as long as a head: loops over the values would put sums aside.
"""

from functools import cache
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.neon import join
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import F32, FLOAT, INT32, LANES, constant, number, op, pick, spread
from cpu_fallback.ops.attention_tiles import SCORES

TALL, CHAINS = (4, 4) if CURRENT.avx512 else (2, 2) if CURRENT.registers == 8 else (1, 2)
"""Rows and chains whose sums are in registers."""
LONGEST = 256  # Values of a head, of which there is still code

_VECTOR = 4 * LANES
_TREE = [int(f"{leaf:04b}"[::-1], 2) for leaf in range(LANES)]
"""The chains in the order in which the tree adds them."""


def _emit_chains(b: Any, rows: list[Any], columns: Any, size: int, leaf: int) -> list[Any]:
    """Emit, for each row and 16 cells, the sum of the chains leaf .. leaf + CHAINS - 1."""
    sums = [[constant(F32, 0.0)] * CHAINS for _ in rows]
    steps = size // LANES
    for step in range(steps):
        first = _VECTOR * (leaf * steps + step * CHAINS)
        keys = [
            emit_load(b, F32.llvm, b.add(columns, number(first + _VECTOR * c)))
            for c in range(CHAINS)
        ]
        for row, own in zip(rows, sums, strict=True):
            for c, key in enumerate(keys):
                at = b.add(row, number(_VECTOR * step + 4 * _TREE[leaf + c]))
                own[c] = emit_fma(b, key, spread(b, F32, emit_load(b, FLOAT, at)), own[c])
    return _emit_done(b, [_emit_tree(b, own) for own in sums])


def _emit_done(b: Any, values: list[Any]) -> list[Any]:
    """Emit nothing but an order: what follows loads nothing before these values are computed.

    LLVM would put the additions off to the end, and all that they add into memory.
    """
    if not (CURRENT.avx2 or CURRENT.neon):
        return values
    lanes, register = (LANES, "v") if CURRENT.avx512 else (LANES // 2, "x")
    if CURRENT.neon:
        lanes, register = LANES // 4, "w"
    kind = ir.VectorType(FLOAT, lanes)
    same = ir.FunctionType(kind, [kind])
    found = []
    for value in values:
        parts = [pick(b, value, list(range(at, at + lanes))) for at in range(0, LANES, lanes)]
        parts = [b.asm(same, "", f"={register},0,~{{memory}}", [part], True) for part in parts]
        found.append(join(b, parts))
    return found


def _emit_tree(b: Any, vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(x, y) for x, y in pairs]
    return vectors[0]


def _scores(size: int, tall: int) -> Any:
    """Make the operation that scores `tall` rows and 16 cells."""

    @op(void, i64, i64, i64)
    def scores(b, queries, columns, out):
        rows = [b.add(queries, number(4 * size * r)) for r in range(tall)]
        waiting: list[tuple[int, list[Any]]] = []
        for leaf in range(0, LANES, CHAINS):
            count, sums = CHAINS, _emit_chains(b, rows, columns, size, leaf)
            while waiting and waiting[-1][0] == count:
                sums = [b.fadd(x, y) for x, y in zip(waiting.pop()[1], sums, strict=True)]
                count *= 2
            waiting.append((count, sums))
        for r, total in enumerate(waiting[0][1]):
            emit_store(b, total, b.add(out, number(SCORES * r)))

    return scores


@cache
def score_columns(size: int) -> Kernel:
    """Return the kernel that scores cells for heads of `size` values, whole vectors."""
    some, one = _scores(size, TALL), _scores(size, 1)
    pitch = 4 * size

    def score(queries, rows, columns, _stride, _size, begin, end, scores, _ahead):
        r = begin - begin
        while r + TALL <= rows:
            for c in range(begin & -16, end, 16):
                some(queries + r * pitch, columns + c * pitch, scores + SCORES * r + 4 * c)
            r += TALL
        while r < rows:
            for c in range(begin & -16, end, 16):
                one(queries + r * pitch, columns + c * pitch, scores + SCORES * r + 4 * c)
            r += 1

    return Kernel(score, name=f"attention.score_columns_{size}")


@op(void, i64, i64, i64, i64)
def _turn(b, source, pitch, target, steps):
    """Turn 16 values of 16 cells; `steps` is how many such parts a head has.

    Each of four rounds interleaves the upper half of the vectors with the lower one.
    """
    vectors = [emit_load(b, F32.llvm, b.add(source, b.mul(pitch, number(i)))) for i in range(LANES)]
    half = LANES // 2
    parts = [[lane for i in range(at, at + half) for lane in (i, LANES + i)] for at in (0, half)]
    masks = [ir.Constant(ir.VectorType(INT32, LANES), lanes) for lanes in parts]
    for _ in range(4):
        pairs = list(zip(vectors[:half], vectors[half:], strict=True))
        vectors = [b.shuffle_vector(x, y, mask) for x, y in pairs for mask in masks]
    for leaf, value in enumerate(_TREE):
        group, chain = leaf & -CHAINS, leaf % CHAINS
        at = b.add(b.mul(steps, number(_VECTOR * group)), number(_VECTOR * chain))
        emit_store(b, vectors[value], b.add(target, at))


@device
def turn(panel, size, begin, end, columns):
    """Turn the keys of cells begin .. end - 1 of a panel, and those around them to whole 16."""
    pitch, steps = 4 * size, size // LANES
    for c in range(begin & -16, end, 16):
        for step in range(steps):
            target = columns + pitch * c + _VECTOR * CHAINS * step
            _turn(panel + pitch * c + _VECTOR * step, pitch, target, steps)
