"""What products of int8 activations and integer weights in tiles have in common.

A panel holds the codes of up to 16 tokens as a tile wants them. Tokens come in blocks whose panels
stay in a thread's second-level cache.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.finish import activation_of
from cpu_fallback.ops.quantize import check_groups
from cpu_fallback.team.sync import EPOCH
from cpu_fallback.tiles import panels
from cpu_fallback.tiles.layout import BlockLayout, Layout
from cpu_fallback.tiles.panels import Form
from cpu_fallback.tiles.tile_pack import Tiles, tiles_of
from cpu_fallback.tiles.tile_product import product_of

_PANELS_BYTES = 384 << 10
_MOST_TOKENS = 128
_KEPT_BYTES = 64 << 20

TILE_SUMS = 64  # In the scratch of a product, after what `is_filled` keeps: the sums, fp32 [16, 16]
PANELS = TILE_SUMS + 4 * 16 * 16  # In the scratch of a product: the panels
SHARES = 4  # Shares per thread of a product whose weights are worth it
_LONGEST = 1 << 17

AHEAD = 8192
"""Bytes of weights to ask for ahead of use: what a core's own prefetcher does not keep up with.

Products of a `BlockLayout` do not ask.
"""


@device
def is_filled(rec, ctl, scratch, start):
    """Return whether this thread has made the panels from token or pair `start` on in this launch.

    From now on it has. A launch may be divided into several shares for a thread, whose scratch
    memory is its own until the launch ends.
    """
    step = v.read_i64(ctl + 8 * EPOCH)
    same = v.read_i64(scratch) == rec and v.read_i64(scratch + 8) == step
    filled = same and v.read_i64(scratch + 16) == start
    v.write_i64(scratch, rec)
    v.write_i64(scratch + 8, step)
    v.write_i64(scratch + 16, start)
    return filled


class Tiled(NamedTuple):
    """A weight in tiles, and how the panels that it is multiplied by are made."""

    product: int  # address of the kernel that multiplies a tile by a panel
    tiles: int  # address of the tiles
    tile_bytes: int  # of one
    scales: int  # activation scales of a row of q
    per_block: int  # tokens or pairs whose panels stay in cache while the tiles are read
    kept: int  # tokens or pairs whose panels are in the scratch memory at once
    per_token: int  # bytes of a panel for each
    ahead: int  # bytes of weights to ask for ahead of use
    form: Form  # how panels are filled
    activate: int  # address of the activation of the sums, of ops that have one; 0 for none


def panel_sizes(
    layout: Layout | BlockLayout, group: int, k: int, most: int
) -> tuple[int, int, int]:
    """Return tokens per block, tokens whose panels are kept, and the bytes of a panel per token.

    `most` is the tokens or pairs of a step, at capacity.

    Raises:
        ShapeError: K is so large that a sum might not fit in int32.
    """
    if k > _LONGEST:
        raise ShapeError(f"K = {k}; the integer products take at most {_LONGEST} columns")
    per_token = panels.panel_bytes(layout, group, k)
    block = max(16, min(_MOST_TOKENS, _PANELS_BYTES // per_token // 16 * 16))
    kept = max(block, min(-(-most // 16) * 16, _KEPT_BYTES // per_token // block * block))
    return block, kept, per_token


def has_codes(call: BoundCall) -> bool:
    """Return whether the activations of a call are int8 codes.

    Raises:
        ShapeError: they are, and have no scales; or the other way round.
    """
    codes, scaled = call.array("x").dtype == np.int8, call.has("x_scale")
    if codes != scaled:
        raise ShapeError(
            f"{call.spec.name}: 'x' is {call.array('x').dtype} and 'x_scale' is "
            f"{'there' if scaled else 'absent'}; expected int8 with scales, or float32 without"
        )
    return codes


def tiled(call: BoundCall, columns: str, most: int, weight: str = "w") -> tuple[Tiled, Tiles]:
    """Return what a kernel needs to multiply int8 activations by a weight in tiles, and the tiles.

    `columns` is the letter of a row of activations, `most` the tokens or pairs of a step.
    """
    group, k = check_groups(call, columns), call.dim(columns)
    tiles = tiles_of(call.spec.name, call.tensor(weight))
    block, kept, per_token = panel_sizes(tiles.layout, group, k, most)
    params = {param.name for param in call.spec.params}
    in_blocks = isinstance(tiles.layout, BlockLayout)
    return Tiled(
        product=product_of(tiles.layout, group),
        tiles=int(tiles.data.ctypes.data),
        tile_bytes=tiles.tile_bytes,
        scales=-(-k // group) if group else 1,
        per_block=block,
        kept=kept,
        per_token=per_token,
        ahead=0 if in_blocks else call.hints.prefetch_distance(AHEAD),
        form=panels.form_of(tiles.layout, group, tiles.factor),
        activate=activation_of(call) if "times" in params else 0,  # type: ignore[arg-type]
    ), tiles
