"""Writing one plane into the three files, a piece at a time."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from clocher_runtime.checkpoints.dedup.codec import RANK_STRIDE, Stream, pack, pack_trits
from clocher_runtime.checkpoints.dedup.index import Region
from clocher_runtime.checkpoints.dedup.planes import SPLITS, Part, Split
from clocher_runtime.convert.dedup.choice import PIECE_ITEMS, Choice, Source, block, filled

_COPY_BYTES = 1 << 24


class Sink(Protocol):
    """A file that grows."""

    def write(self, array: np.ndarray) -> object:
        """Append the bytes of an array."""

    def pad(self, nbytes: int) -> None:
        """Append zeros up to a size."""


def encode(
    choice: Choice, source: Source, files: Mapping[str, Sink], regions: tuple[Region, ...]
) -> None:
    """Append the parts of a plane to the files.

    Args:
        choice: how it is stored.
        source: its bytes, XOR the base if the choice says so.
        files: the three files, by kind.
        regions: where its parts belong: each file is padded up to there.
    """
    plane = choice.plane
    for region in regions:
        if region.nbytes and plane.mode != "streams":
            files[region.kind].pad(region.offset)
    if plane.mode == "raw":
        for piece in source.pieces(_COPY_BYTES):
            files["exceptions"].write(piece)
    elif plane.mode == "blocks":
        assert choice.index is not None and choice.unique is not None
        files["masks"].write(choice.index)
        for start in range(0, len(choice.unique), 256):
            numbers = choice.unique[start : start + 256].tolist()
            files["exceptions"].write(np.concatenate([filled(block(source, n)) for n in numbers]))
    elif plane.mode == "streams":
        split = SPLITS[plane.split]
        for number, stream in enumerate(plane.streams):
            parts = regions[4 * number : 4 * number + 4]
            table = choice.tables[number]
            _StreamWriter(stream, table, files, parts).write(source, split, split.parts[number])


class _StreamWriter:
    def __init__(
        self,
        stream: Stream,
        table: np.ndarray,
        files: Mapping[str, Sink],
        regions: tuple[Region, ...],
    ) -> None:
        self._stream, self._table, self._files = stream, table, files
        self._regions = regions
        self._ranks: list[np.ndarray] = []
        self._left = np.zeros(0, np.uint8)
        self._places = np.zeros(1 << stream.bits, np.uint8)
        self._places[table] = np.arange(len(table))

    def write(self, source: Source, split: Split, part: Part) -> None:
        table, codes, rank, literals = self._regions
        self._begin(table)
        self._files["defaults"].write(self._table)
        self._begin(codes)
        self._begin(literals)
        if self._stream.mode != "const":
            for piece in source.pieces(PIECE_ITEMS * split.item.itemsize):
                self._piece(part.cut(piece.view(split.item)))
        self._literals(np.zeros(0, np.uint8), last=True)
        self._begin(rank)
        if rank.nbytes:
            before = np.cumsum(np.concatenate(self._ranks))[:-1]
            self._files["masks"].write(before.astype("<u4"))

    def _begin(self, region: Region) -> None:
        if region.nbytes:
            self._files[region.kind].pad(region.offset)

    def _piece(self, symbols: np.ndarray) -> None:
        stream = self._stream
        if stream.mode == "raw":
            self._files["exceptions"].write(pack(symbols, stream.bits))
            return
        places = self._places[symbols]
        if stream.mode == "trits":
            self._files["masks"].write(pack_trits(places))
            return
        escape = (1 << stream.width) - 1
        self._files["masks"].write(pack(np.minimum(places, escape), stream.width))
        if stream.escapes:
            rare = places >= escape
            self._ranks.append(
                np.add.reduceat(rare, np.arange(0, len(rare), RANK_STRIDE), dtype=int)
            )
            self._literals(places[rare] - np.uint8(escape), last=False)

    def _literals(self, found: np.ndarray, last: bool) -> None:
        """Append exceptions, whole bytes of them; the rest waits."""
        found = np.concatenate([self._left, found])
        whole = len(found) if last else len(found) // 8 * 8
        self._left = found[whole:]
        if whole:
            self._files["exceptions"].write(pack(found[:whole], self._stream.exception_bits))
