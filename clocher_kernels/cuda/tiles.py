"""How the work of weight-streaming kernels is cut into programs: tables, else a closed formula."""

from dataclasses import dataclass

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.tile_tables import tuned

_RESIDENT_WARPS = 12
"""Warps that a multiprocessor is given: each has 8 loads of 512 bytes in flight, twice. Registers
have room for 16 of them or more."""

_LANES = (16, 8, 32, 64, 128)
"""Vectors that are read side by side. The fewer, the more lanes share the activations they load;
but a row must be read in pieces of 128 bytes at least, and more of them make more warps."""

_WORTH = {8: 1.0, 4: 0.9, 2: 0.75}
"""Rows of a lane -> what it is worth: the fewer, the less often loaded activations are used."""

_MOST_ROWS = {1: 8, 2: 8, 4: 2, 8: 4}
"""Tokens -> rows of a lane: what its registers have room for, and what keeps 40 KB in flight."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of a program of a GEMV.

    Attributes:
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

    @property
    def constants(self) -> dict[str, int]:
        """What kernels call its lanes, vectors and rows of a lane."""
        return {"L": 32 * self.warps, "BV": self.vectors, "R": self.rows_of_lane}


def gemv_tile(
    *,
    rows: int,
    vectors: int,
    tokens: int,
    copies: int,
    device: Device,
    key: str = "",
    most: int = 8,
) -> GemvTile:
    """Cut y = x W^T for few tokens. `vectors` decides the order of sums; no tokens change it.

    Args:
        rows: rows of W.
        vectors: 16-byte vectors of a row.
        tokens: tokens that share the weights in a program, 1 to 8.
        copies: matrices that one token is multiplied by at a time (experts).
        device: what they run on.
        key: of the weight in the user's table; "" if it has none.
        most: rows of a lane that the formula may choose.
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
        turns = -(-vectors // lanes)
        busy = vectors / (turns * lanes)
        # With a single turn there is no second one in flight.
        warps = rows * copies * lanes / (32 * of_lane) * min(turns, 2) / 2
        return busy * min(1.0, warps / (device.sms * _RESIDENT_WARPS)) * _WORTH[of_lane]

    lanes, of_lane = max(((b, r) for b in _LANES for r in _WORTH), key=score)
    of_lane = min(of_lane, _MOST_ROWS[together], most)
    return GemvTile(max(1, lanes // 32), lanes, together, of_lane)
