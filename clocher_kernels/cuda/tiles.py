"""How the work of weight-streaming kernels is cut into programs: tables, else a closed formula."""

from dataclasses import dataclass

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.tile_tables import tuned

_RESIDENT_WARPS = 6
"""Warps that a multiprocessor needs: each has 8 loads of 512 bytes in flight, twice."""

_LANES = (16, 8, 32, 64, 128)
"""Vectors that are read side by side. The fewer, the more lanes share the activations they load;
but a row must be read in pieces of 128 bytes at least, and more of them make more warps."""

_WORTH = {8: 1.0, 4: 0.95, 2: 0.85}
"""Rows of a lane -> what it is worth: the fewer, the less often loaded activations are used."""

_MOST_ROWS = {1: 8, 2: 8, 4: 2, 8: 2}
"""Tokens -> rows that the registers of a lane have room for."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of a program of a matrix-vector product.

    Attributes:
        warps: warps of the program.
        vectors: lanes that stand side by side in the same rows, reading a 16-byte vector each.
        tokens: rows of x, a power of two.
        rows_of_lane: rows of W that a lane works on.
    """

    warps: int
    vectors: int
    tokens: int
    rows_of_lane: int

    @property
    def rows(self) -> int:
        """Rows of W of the program."""
        return 32 * self.warps // self.vectors * self.rows_of_lane


def gemv_tile(
    *, rows: int, vectors: int, tokens: int, copies: int, device: Device, key: str = ""
) -> GemvTile:
    """Cut y = x W^T for few tokens.

    `vectors` decides the order of summation, so it does not depend on the tokens.

    Args:
        rows: rows of W.
        vectors: 16-byte vectors of a row.
        tokens: tokens that share the weights in a program, 1 to 8.
        copies: matrices that one token is multiplied by at a time (experts).
        device: what they run on.
        key: of the weight in the tables of tiles; "" if it has none.
    """
    together = 1 << (tokens - 1).bit_length()
    if device.capability == 0:
        # Triton's interpreter pays for programs, not for their size.
        return GemvTile(1, 8, together, 16)
    found = tuned(key, tokens, device.capability)
    if found is not None:
        lanes = found["vectors"]
        return GemvTile(max(1, lanes // 32), lanes, together, found["rows_of_lane"])

    def score(cut: tuple[int, int]) -> float:
        lanes, of_lane = cut
        busy = vectors / (-(-vectors // lanes) * lanes)
        warps = rows * copies * lanes / (32 * of_lane)
        return busy * min(1.0, warps / (device.sms * _RESIDENT_WARPS)) * _WORTH[of_lane]

    lanes, of_lane = max(((b, r) for b in _LANES for r in _WORTH), key=score)
    return GemvTile(max(1, lanes // 32), lanes, together, min(of_lane, _MOST_ROWS[together]))
