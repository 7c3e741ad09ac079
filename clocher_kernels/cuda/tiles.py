"""How the work of weight-streaming kernels is cut into programs: a table, else a closed formula.

The table is the user's, JSON, for shapes that the formulas cut badly; nothing is timed here.

    {"schema": 1, "capability": 90, "tiles": {KEY: {"tiles": {TOKENS: TILE, ...}}, ...}}

Other members are ignored. KEY is "int4_sym_g128_f16/4096x4096": format, N and K of a weight.
TOKENS are "1", "2", "4" and "8". A TILE has vectors and rows_of_lane (weights of less than a byte,
`gemv_tile`) or warps and rows (weights of whole bytes, `gemv_bytes.tile_for`). The first field
decides the order of summation, so it is the same for all tokens of a key: a token's result does not
depend on its batch.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.cuda.launch import Device
from clocher_kernels.errors import ClocherError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int8 import Int8

VARIABLE = "CLOCHER_TILE_TABLE"
SCHEMA = 1
TOKENS = (1, 2, 4, 8)
"""Numbers of tokens that an entry has a tile for; those between use the next one."""

_MAX_BYTES = 16 << 20
_SIZES: Mapping[str, tuple[int, ...]] = {
    "vectors": (8, 16, 32, 64, 128),
    "rows_of_lane": (1, 2, 4, 8),
    "warps": (1, 2, 4, 8),
    "rows": (1, 2, 4, 8),
}
_KEY = re.compile(r"([a-z0-9_]+)/[1-9][0-9]*x[1-9][0-9]*", re.ASCII)

Tile = Mapping[str, int]
Table = dict[str, dict[int, Tile]]


def tuned(key: str, tokens: int, capability: int) -> Tile | None:
    """Return the tile that the user's table has for a weight, None if there is none.

    Args:
        key: of the weight; "" has none.
        tokens: 1 to 8.
        capability: of the GPU; 0, the interpreter, has no table.

    Raises:
        UsageError: the table cannot be read, or was made for another architecture.
    """
    path = os.environ.get(VARIABLE)
    if not capability or not path:
        return None
    entry = _users(path, capability).get(key)
    return entry[next(count for count in TOKENS if count >= tokens)] if entry else None


@functools.cache
def _users(path: str, capability: int) -> Table:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        _expect(len(text) <= _MAX_BYTES, path, f"larger than {_MAX_BYTES >> 20} MiB")
        made_on, table = parse(text, path)
    except OSError as error:
        raise UsageError(f"{VARIABLE}: {path}: {error}; expected a JSON table of tiles") from None
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from None
    if made_on != capability:
        raise UsageError(
            f"{VARIABLE}: {path} was made on sm_{made_on}, this GPU is sm_{capability}; unset it"
        )
    return table


def parse(text: bytes, source: str) -> tuple[int, Table]:
    """Check a table; return the architecture it was made for (90 for sm_90) and its tiles.

    Raises:
        UsageError: it is no table, or one that would make a result depend on its batch.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: no JSON: {error}") from None
    _expect(isinstance(table, dict), source, "not an object")
    schema, capability, tiles = (table.get(name) for name in ("schema", "capability", "tiles"))
    _expect(schema == SCHEMA, source, f"schema is {schema!r}; expected {SCHEMA}")
    known = isinstance(capability, int) and 80 <= capability < 1000
    _expect(known, source, f"capability is {capability!r}; expected 80 or more, 90 for sm_90")
    _expect(isinstance(tiles, dict), source, "no object 'tiles'")
    return capability, {key: _entry(f"{source}: {key}", key, tiles[key]) for key in tiles}


def _entry(where: str, key: str, entry: Any) -> dict[int, Tile]:
    match = _KEY.fullmatch(key)
    _expect(match is not None, where, "expected FORMAT/NxK, as in int8_row_f32/4096x4096")
    try:
        whole_bytes = isinstance(parse_format(match[1]), Float | Int8 | Fp8)
    except ClocherError as error:
        raise UsageError(f"{where}: {error}") from None
    order, rows = ("warps", "rows") if whole_bytes else ("vectors", "rows_of_lane")
    tiles = entry.get("tiles") if isinstance(entry, dict) else None
    counts = [str(count) for count in TOKENS]
    complete = isinstance(tiles, dict) and sorted(tiles) == counts
    _expect(complete, where, f"expected 'tiles' for {', '.join(counts)} tokens")
    for count, tile in tiles.items():
        at = f"{where}, {count} tokens"
        named = isinstance(tile, dict) and set(tile) == {order, rows}
        _expect(named, at, f"expected the fields {order} and {rows}")
        for name, value in tile.items():
            good = type(value) is int and value in _SIZES[name]
            _expect(good, at, f"{name} is {value!r}; expected one of {_SIZES[name]}")
    orders = {tile[order] for tile in tiles.values()}
    _expect(
        len(orders) == 1,
        where,
        f"{order} is {sorted(orders)}; it decides the order of summation and must be the same for "
        "all tokens, or a token's result would depend on its batch",
    )
    return {int(count): tile for count, tile in tiles.items()}


def _expect(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise UsageError(f"{where}: {what}")


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
