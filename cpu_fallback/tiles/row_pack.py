"""int4 weights by input channel, so that the channels which a token does not have are not read.

Output channels come in chunks of 128, chunks in panels. A panel is a run of records, one for each
block of columns that share a scale:

    scales  of the block, as stored, one for each output channel of the panel
    rows    one for each column: 64 bytes a chunk

In the 64 bytes of a chunk byte 16 q + 4 a + i holds in its low half the code of channel
16 a + 4 q + i, in its high half that of the channel 64 further. Four rows whose bytes are
interleaved within quarters are then operands of dot products, in the order of the channels.
"""

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from clocher_kernels.formats import Int4
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.team.large_pages import allocate, give_back
from cpu_fallback.team.placement import usable_cpus

CHUNK = 128  # Output channels of a chunk
LINE = CHUNK // 2
MOST_BLOCK = 128  # Most columns of a block
_MOST_CHUNKS = 16
_PART = 2048

_BYTE = np.arange(LINE)
_LOW = 16 * (_BYTE // 4 % 4) + 4 * (_BYTE // 16) + _BYTE % 4


@dataclass(frozen=True)
class Rows:
    """A packed matrix."""

    data: np.ndarray  # u8, the panels one after the other
    scale: str  # element type of the scales
    block: int  # columns that share a scale: 32, 64 or 128
    blocks: int  # of a row
    chunks: int  # of a panel
    panels: int  # how many
    record: int  # bytes of a block of a panel


_packed: dict[int, Rows] = {}


def are_packed(tensor: QuantTensor) -> bool:
    """Return whether the rows of a tensor are in memory."""
    return id(tensor.planes.get("codes")) in _packed


def nbytes_of(tensor: QuantTensor) -> int:
    """Return the bytes that a matrix takes by input channel."""
    fmt, (n, k) = tensor.format, tensor.shape
    assert isinstance(fmt, Int4) and isinstance(fmt.group, int)
    chunks = _chunks(n)
    record = _head(chunks, tensor) + fmt.group * chunks * LINE
    return -(-n // (chunks * CHUNK)) * -(-k // fmt.group) * record


def _chunks(n: int) -> int:
    """Return the chunks of a panel: two panels or more, but rows as long as may be."""
    return min(_MOST_CHUNKS, -(-n // (2 * CHUNK)))


def _head(chunks: int, tensor: QuantTensor) -> int:
    return chunks * CHUNK * tensor.planes["scales"].itemsize


def rows_of(tensor: QuantTensor) -> Rows:
    """Return a matrix by input channel, packed when it is first asked for, kept as long as it."""
    codes = tensor.planes["codes"]
    key = id(codes)
    if key not in _packed:
        refuse_in_window("pack weights by input channel")
        _packed[key] = pack(tensor)
        weakref.finalize(codes, _packed.pop, key, None)
        for plane in tensor.planes.values():
            give_back(plane)
    return _packed[key]


def pack(tensor: QuantTensor) -> Rows:
    """Pack a matrix [N, K] of symmetric int4 with a scale for 32, 64 or 128 columns."""
    fmt, (n, k) = tensor.format, tensor.shape
    assert isinstance(fmt, Int4) and isinstance(fmt.group, int)
    chunks, blocks = _chunks(n), -(-k // fmt.group)
    panels = -(-n // (chunks * CHUNK))
    scales = np.ascontiguousarray(tensor.planes["scales"]).reshape(n, blocks)
    head = _head(chunks, tensor)
    record = head + fmt.group * chunks * LINE
    data = allocate(nbytes_of(tensor))
    cells = data.reshape(panels, blocks, record)
    at_once = max(1, _PART // fmt.group)

    def fill(place: tuple[int, int]) -> None:
        panel, first = place
        rows = slice(panel * chunks * CHUNK, min(n, (panel + 1) * chunks * CHUNK))
        last = min(blocks, first + at_once)
        count, columns = rows.stop - rows.start, min(k, last * fmt.group) - first * fmt.group
        start = first * fmt.group // 2
        pairs = tensor.planes["codes"][rows, start : start + -(-columns // 2)]
        codes = np.zeros(((last - first) * fmt.group, chunks * CHUNK), np.uint8)
        codes[0:columns:2, :count] = (pairs & 15).T
        codes[1:columns:2, :count] = (pairs >> 4).T[: columns // 2]
        codes = codes.reshape(len(codes), chunks, CHUNK)
        lines = codes[..., _LOW] | codes[..., _LOW + LINE] << 4
        part = cells[panel, first:last]
        part[:, head:] = lines.reshape(last - first, -1)
        stored = np.zeros((last - first, chunks * CHUNK), scales.dtype)
        stored[:, :count] = scales[rows, first:last].T
        part[:, :head] = stored.view(np.uint8)

    places = [(panel, first) for panel in range(panels) for first in range(0, blocks, at_once)]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(fill, places))
    return Rows(data, fmt.scale_dtype, fmt.group, blocks, chunks, panels, record)
