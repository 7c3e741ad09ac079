"""Weights by input channel, so that the channels which a token does not have are not read.

Tiles interleave 16 rows and have four columns in a dword, so all of them are needed as soon as one
is. Here output channels come in chunks, chunks in panels. A panel is a run of records, one for each
block of columns that share a scale:

    scales   of the block, as stored, one for each output channel of the panel; none of ternary
             weights, all of whose columns are one block
    columns  of the block: 64 bytes a chunk

In the 64 bytes of a chunk byte 16 l + 4 v + d holds the codes of channels 64 p + 16 v + 4 l + d,
the p-th in its bits from p on: two int4 codes, or four of ternary digits plus one. Four columns
whose bytes are interleaved within quarters are then operands of dot products, in the order of the
channels.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.formats import Int4, Ternary
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.team.large_pages import Kept, allocate
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.tile_cache import run

_MOST_CHUNKS = 16  # Of a panel
_PART = 512  # Columns that are packed at once
_WHOLE = 8  # Ternary columns are made up to so many

_BYTE = np.arange(LINE)
_PLACE = 16 * (_BYTE // 4 % 4) + 4 * (_BYTE // 16) + _BYTE % 4


class Columns(NamedTuple):
    """How a matrix is packed."""

    scale: str  # element type of the scales, "" if there are none
    per: int  # codes of a byte; a chunk has 64 times as many output channels
    block: int  # columns that share a scale
    blocks: int  # of a row
    chunks: int  # of a panel
    panels: int  # how many
    head: int  # bytes of the scales of a block of a panel
    record: int  # bytes of a block of a panel

    @property
    def wide(self) -> int:
        """Output channels of a panel."""
        return self.chunks * self.per * LINE

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return self.panels * self.blocks * self.record


def columns_of(tensor: QuantTensor) -> Columns:
    """Return how a matrix is packed: ternary, or symmetric int4 with scales of groups."""
    fmt, (n, k) = tensor.format, tensor.shape
    if isinstance(fmt, Int4):
        assert isinstance(fmt.group, int)
        scale, per, block = fmt.scale_dtype, 2, fmt.group
    else:
        scale, per, block = "", 4, -(-k // _WHOLE) * _WHOLE
    # A panel for each thread, but columns as long as may be.
    chunks = min(_MOST_CHUNKS, -(-n // (per * LINE * max(2, usable_cpus()))))
    panels = -(-n // (chunks * per * LINE))
    head = chunks * per * LINE * tensor.planes["scales"].itemsize if scale else 0
    record = head + block * chunks * LINE
    return Columns(scale, per, block, -(-k // block), chunks, panels, head, record)


_packed: Kept[np.ndarray] = Kept()


def are_packed(tensor: QuantTensor) -> bool:
    """Return whether the columns of a tensor are in memory."""
    return id(tensor.planes.get("codes")) in _packed


def packed(tensor: QuantTensor) -> np.ndarray:
    """Return the panels, u8, packed when they are first asked for, kept as long as the codes."""
    codes = tensor.planes["codes"]
    return _packed.of(codes, "pack weights by input channel", partial(_pack, tensor))


def _pack(tensor: QuantTensor) -> np.ndarray:
    own, (n, k) = columns_of(tensor), tensor.shape
    data = allocate(own.nbytes)
    cells = data.reshape(own.panels, own.blocks, own.record)
    columns = cells[..., own.head :].reshape(own.panels, own.blocks, own.block, -1)
    rows = own.panels * own.wide

    def fill(block: int, start: int) -> None:
        first = block * own.block + start
        some = _codes(tensor, first, min(k, first + _PART, (block + 1) * own.block))
        codes = np.zeros((len(some), rows), np.uint8)
        codes[:, :n] = some
        codes = codes.reshape(len(some), own.panels, -1, own.per, LINE)[..., _PLACE]
        lines = codes[..., 0, :]
        for p in range(1, own.per):
            lines = lines | codes[..., p, :] << 8 // own.per * p
        made = lines.reshape(len(some), own.panels, -1).swapaxes(0, 1)
        columns[:, block, start : start + len(some)] = made

    starts = [(block, at) for block in range(own.blocks) for at in range(0, own.block, _PART)]
    run([partial(fill, b, at) for b, at in starts if b * own.block + at < k])
    if own.scale:
        scales = tensor.planes["scales"].reshape(n, own.blocks)
        wide = np.zeros((own.panels, own.wide, own.blocks), scales.dtype)
        wide.reshape(rows, own.blocks)[:n] = scales
        cells[..., : own.head] = np.ascontiguousarray(wide.swapaxes(1, 2)).view(np.uint8)
    return data


def _codes(tensor: QuantTensor, first: int, last: int) -> np.ndarray:
    """Return the codes of some columns, u8 [columns, N]; the first is even."""
    stored = tensor.planes["codes"]
    if isinstance(tensor.format, Ternary):
        some = stored[:, first:last]
        return np.concatenate([some >> 2 * part & 3 for part in range(4)]).T
    pairs = stored[:, first // 2 : -(-last // 2)].T
    return np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, pairs.shape[1])[: last - first]


def interleaved(b: Any, lines: list[Any]) -> list[Any]:
    """Emit dwords of a byte of each of four lines: the v-th are of bytes 16 l + 4 v + d."""
    pairs = [v.interleave(b, *lines[i : i + 2], half) for half in (0, 1) for i in (0, 2)]
    shorts = [b.bitcast(pair, v.SHORTS) for pair in pairs]
    mixed = [v.interleave(b, *shorts[i : i + 2], half) for i in (0, 2) for half in (0, 1)]
    return [b.bitcast(four, v.BYTES.llvm) for four in mixed]
