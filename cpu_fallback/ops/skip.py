"""Products of an MLP with a squared ReLU that leave out its dead neurons.

A step of one or two tokens reads only the rows and columns of neurons that live, if they are few
enough for that to pay; any other step reads all tiles. Sums are of integers, so both give the same
bits, and the choice depends on the tokens alone.

A neuron lives if the gate, or the code, of any token of the step is not zero.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from clocher_kernels.formats import Int4
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.epilogue import expect, relu2, write_rows
from cpu_fallback.ops.linear import (
    AHEAD,
    PANELS,
    SHARES,
    TILE_SUMS,
    Tiled,
    multiply_tiles,
    panels_room,
    tiled,
)
from cpu_fallback.ops.row_skip import by_column, lower_drop_small
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.neurons import (
    AT_ONCE,
    SHIFTED,
    add_columns,
    arrange,
    lines_of,
    nonzero,
    row_dot,
)
from cpu_fallback.tiles.panels import fill_token
from cpu_fallback.tiles.tile_product import call_product

MOST_TOKENS = 2  # Tokens of a step that skips: more have too few dead neurons in common
LIVING = 2  # One neuron in so many may live where skipping pays

_PARTS = 256  # Columns of a part, at least; each part has sums of its own
_HEADER = 64
_LOWEST = -(1 << 23) - 1
"""The bits of minus the largest fp32, as an int32: the bits of finite negative numbers are at most
that."""

_OWN = {
    "neurons": "address of the lines of neurons (`tiles.neurons`)",
    "stride": "bytes of one",
    "apart": "how many neurons ahead to ask for memory; 0 for not at all",
    "room": "where in the scratch memory that of skipping begins",
    "parts": "of the columns, at most",
    "kept_sums": "memory of the team for the sums of parts",
}
Lines = NamedTuple(  # a weight in tiles, and by neuron
    "Lines",
    [*Tiled.__annotations__.items(), ("factor", float), *((name, int) for name in _OWN)],
)


@device
def _ask(address, stride):
    for i in range(0, stride, 64):
        v.prefetch(address + i)


@device
def _code_sum(x, count):
    total = v.izero()
    for i in range(0, count, 16):
        total = v.iadd(total, v.load_i8_n(x + i, min(16, count - i)))
    return v.ihsum(total)


@executes("relu2_gate_up", Lines)
def gate_and_rows(a, rank, size, scratch):
    """Compute y = relu2(gate) * (x w^T), or, of many tokens, the gate; each thread has some tiles.

    Scratch: panels; the neurons that live; their gates; arranged activations.
    """
    first, last = share((a.I + 15) >> 4, rank, size)
    if a.M > MOST_TOKENS:
        multiply_tiles(a, scratch, first, last, _nothing, _write_gate)
        return
    found, panel = scratch + a.room, scratch + PANELS
    gates = found + 8 * a.I
    xs = gates + 4 * MOST_TOKENS * a.I
    surplus = (np.int64(0), np.int64(0))
    for t in range(a.M):
        fill_token(a.form, a.x + t * a.K, a.x_scale + 4 * t, a.K, panel, t, a.M)
        _arrange(a.x + t * a.K, a.K, xs + 4 * a.stride * t, a.stride >> 6)
        total = _code_sum(a.x + t * a.K, a.K)
        surplus = (surplus[0], total) if t else (total, surplus[1])
    largest = np.float32(0)
    for t in range(a.M):
        largest += abs(v.read_f32(a.x_scale + 4 * t) * a.factor * np.float32(128 * a.K))
    bounded = largest - largest == np.float32(0)  # no product can overflow, which would be seen
    living = np.int64(0)
    for tile in range(first, last):
        at, sums = a.tiles + tile * a.tile_bytes, scratch + TILE_SUMS
        call_product(a.product, at, panel, sums, (a.K + 31) >> 5, a.M, a.ahead)
        for i in range(16 * tile, min(16 * tile + 16, a.I)):
            lives = not bounded
            for t in range(a.M):
                bits = v.read_i32(sums + 64 * t + 4 * (i & 15))
                lives |= (bits > 0) | ((bits < 0) & (bits > _LOWEST))
                v.write_i32(gates + 4 * (t * a.I + living), bits)
                v.write_i32(a.y + 4 * (t * a.I + i), 0)
            v.write_i64(found + 8 * living, i)
            living += lives
    apart = np.int64(0)
    if LIVING * living <= 16 * (last - first):
        apart = np.int64(a.apart)
    _rows(a, living, apart, found, gates, xs, surplus)


# Return relu2(gate) * up, zero always positive: skipped or not, the bits are the same.
_hidden = device(lambda gate, up: v.add(v.mul(relu2(gate), up), v.zero()))


@device
def _rows(a, living, apart, found, gates, xs, surplus):
    """Write the neurons of a list; their rows are asked for `apart` neurons ahead, if not 0."""
    for i in range(living):
        index = v.read_i64(found + 8 * i)
        if apart:
            _ask(
                a.neurons + v.read_i64(found + 8 * min(i + apart, living - 1)) * a.stride, a.stride
            )
        for t in range(a.M):
            row = a.neurons + index * a.stride
            total = row_dot(row, xs + 4 * a.stride * t, a.stride >> 6)
            total -= surplus[1] if t else surplus[0]
            up = v.splat(np.float32(total) * (v.read_f32(a.x_scale + 4 * t) * a.factor))
            gate = v.splat(v.read_f32(gates + 4 * (t * a.I + i)))
            v.write_f32(a.y + 4 * (t * a.I + index), v.lane(_hidden(gate, up), 0))


@executes("relu2_gate_up", Tiled)
def all_rows(a, rank, size, scratch):
    """Multiply the gates of many tokens, which are in y, by all rows."""
    if a.M > MOST_TOKENS:
        first, last = share((a.I + 15) >> 4, rank, size)
        multiply_tiles(a, scratch, first, last, _nothing, _write_gated)


@device
def _nothing(a, token, tokens, row):
    """Ask for nothing ahead of a product."""


@device
def _write_gate(a, sums, first, tokens, row):
    for t in range(tokens):
        value = v.load_f32(sums + 64 * t)
        v.store_f32_n(a.y + 4 * ((first + t) * a.I + row), value, min(16, a.I - row))


@device
def _write_gated(a, sums, first, tokens, row):
    """Write 16 rows of up to 16 tokens, each times its activated gate, which is in y."""
    count = min(16, a.I - row)
    for t in range(tokens):
        at = a.y + 4 * ((first + t) * a.I + row)
        v.store_f32_n(at, _hidden(v.load_f32_n(at, count), v.load_f32(sums + 64 * t)), count)


@device
def _arrange(x, k, target, lines):
    """Arrange the codes of a token for `row_dot`, zeros behind them."""
    for i in range(k >> 8):
        arrange(x + 256 * i, target + 256 * i)
    if k & 255:
        room = target + 256 * lines
        for i in range(0, 256, 64):
            left = max(0, min(64, k - 256 * (lines - 1) - i))
            v.store_bytes(room + i, v.load_bytes_n(x + 256 * (lines - 1) + i, left))
        arrange(room, target + 256 * (lines - 1))


@device
def _are_few(a):
    """Return whether this step skips: it has few tokens, and few codes that are not zero."""
    if a.M > MOST_TOKENS:
        return False
    living, last, i = np.int64(0), (a.M - 1) * a.K, np.int64(0)
    while i + 64 <= a.K:
        living += nonzero(a.x + i, a.x + last + i)
        i += 64
    while i < a.K:
        living += (v.read_i8(a.x + i) | v.read_i8(a.x + last + i)) != 0
        i += 1
    return LIVING * living <= a.K


@executes("skip_linear", Lines)
def add_parts(a, rank, size, scratch):
    """Sum the columns that codes multiply which are not zero; each thread has a part of them.

    Scratch: panels, which `write_parts` needs; addresses of columns; their codes, token by token.
    """
    parts = min(size, a.parts)
    if rank >= parts or not _are_few(a):
        return
    lines, found = a.stride >> 6, scratch + a.room
    low, high = share(a.K, rank, parts)
    codes, room = found + 8 * (a.K + AT_ONCE), a.K + AT_ONCE
    living, last = np.int64(0), (a.M - 1) * a.K
    for i in range(low, high):
        one, other = v.read_i8(a.x + i), v.read_i8(a.x + last + i)
        v.write_i64(found + 8 * living, a.neurons + i * a.stride)
        v.write_u8(codes + living, one)
        v.write_u8(codes + room + living, other)
        living += (one | other) != 0
    for i in range(living, (living + AT_ONCE - 1) // AT_ONCE * AT_ONCE):
        v.write_i64(found + 8 * i, a.neurons)
        v.write_u8(codes + i, 0)
        v.write_u8(codes + room + i, 0)
    for t in range(a.M):
        sums = _part(a, rank, t)
        v.write_i64(sums - _HEADER, _code_sum(a.x + t * a.K + low, high - low))
        for i in range(0, 1024 * lines, 64):
            v.store_i32(sums + i, v.izero())
    for i in range(0, living, AT_ONCE):
        if a.apart:
            for ahead in range(i + a.apart, min(i + a.apart + AT_ONCE, living)):
                _ask(v.read_i64(found + 8 * ahead), a.stride)
        for t in range(a.M):
            add_columns(found + 8 * i, codes + t * room + i, _part(a, rank, t), lines)


@device
def _part(a, part, token):
    """Return the address of the sums of a part."""
    return a.kept_sums + (MOST_TOKENS * part + token) * (_HEADER + 16 * a.stride) + _HEADER


@executes("skip_linear", Lines)
def write_parts(a, rank, size, scratch):
    """Add up the sums of the parts, or multiply all tiles; each thread has a range of rows."""
    first, last = share((a.N + 15) >> 4, rank, size)
    if first == last:
        return
    if not _are_few(a):
        multiply_tiles(a, scratch, first, last, expect, write_rows)
        return
    parts = min(size, a.parts)
    for t in range(a.M):
        surplus = np.int64(0)
        for part in range(parts):
            surplus += v.read_i64(_part(a, part, t) - _HEADER)
        scale = v.splat(v.read_f32(a.x_scale + 4 * t) * a.factor)
        for unit in range(first, last):
            total = v.izero()
            for part in range(parts):
                total = v.iadd(total, v.load_i32(_part(a, part, t) + 64 * unit))
            total = v.isub(v.sra(total, SHIFTED * (unit & 3)), v.isplat(surplus))
            v.store_f32(scratch + TILE_SUMS, v.mul(v.to_f32(total), scale))
            write_rows(a, scratch + TILE_SUMS, t, 1, 16 * unit)


def _lines(call: BoundCall, own: Tiled, columns: bool) -> Lines:
    """Return what a kernel needs that reads `w` by neuron, beside the tiles of a weight."""
    tensor = call.tensor("w")
    data = lines_of(call.spec.name, tensor, columns)
    stride = data.shape[1]
    return Lines(
        *own,
        neurons=int(data.ctypes.data),
        stride=stride,
        apart=-(-call.hints.prefetch_distance(AHEAD) // stride),
        factor=float(tensor.format.multiplier(tensor.planes)),
        room=-(-panels_room(own) // LINE) * LINE,
        parts=max(1, call.dim("K") // _PARTS),
        kept_sums=0,
    )


def _relu2_gate_up(call: BoundCall) -> list[Launch]:
    tokens = call.array("x").shape[0]
    gate, _ = tiled(call, "K", tokens, "gate")
    own = _lines(call, gate, columns=False)
    up, _ = tiled(call, "K", tokens)
    scratch = own.room + (8 + 4 * MOST_TOKENS) * call.dim("I") + 4 * own.stride * (MOST_TOKENS + 1)
    return [
        call.launch(gate_and_rows, own, scratch, SHARES),
        call.launch(all_rows, up, panels_room(up), SHARES),
    ]


def _skip_linear(call: BoundCall) -> list[Launch]:
    if isinstance(call.tensor("w").format, Int4):
        return by_column(call)
    # Stored pages go with the tiles: columns are packed first.
    columns = len(lines_of(call.spec.name, call.tensor("w"), columns=True))
    dense, _ = tiled(call, "K", call.array("x").shape[0])
    own = _lines(call, dense, columns=True)
    scratch = own.room + (8 + MOST_TOKENS) * (columns + AT_ONCE)
    kept = own.parts * MOST_TOKENS * (_HEADER + 16 * own.stride)
    both = [call.launch(kernel, own, scratch, SHARES) for kernel in (add_parts, write_parts)]
    return [replace(launch, shared=kept) for launch in both]


LOWER = {
    "relu2_gate_up": _relu2_gate_up,
    "skip_linear": _skip_linear,
    "drop_small": lower_drop_small,
}
