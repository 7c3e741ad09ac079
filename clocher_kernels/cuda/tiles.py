"""Tiling of weight-streaming kernels: the user's table, else a closed formula.

The table is JSON, for shapes that the formulas tile badly; nothing is timed here.

    {"schema": 1, "capability": 90, "tiles": {KEY: {"tiles": {TOKENS: TILE, ...}}, ...}}

KEY is "int4_sym_g128_f16/4096x4096": format, N and K; TOKENS "1", "2", "4" or "8". A TILE has
vectors and rows_of_lane (weights of less than a byte, `gemv_tile`) or warps and rows (whole bytes,
`gemv_bytes.tile_for`). The first field sets the summation order, so it is the same for all tokens
of a key: a token's result does not depend on its batch. Other members are ignored.
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
"""Token counts of an entry's tiles; those between use the next one."""

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
    """Return the user's tile for a weight and 1 to 8 tokens, else None; UsageError if invalid."""
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
    """Return a table's capability (90 for sm_90) and tiles; UsageError if it is invalid."""
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
"""Warps per multiprocessor (16 would fit), each with 2 x 8 loads of 512 bytes in flight."""

_LANES = (16, 8, 32, 64, 128)
"""Vectors read side by side, at least 128 bytes of a row; fewer reuse activations more."""

_WORTH = {8: 1.0, 4: 0.9, 2: 0.75}
"""Rows of a lane -> relative value: more rows reuse loaded activations more."""

_MOST_ROWS = {1: 8, 2: 8, 4: 2, 8: 4}
"""Tokens -> most rows of a lane: fits registers and keeps 40 KB in flight."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of a GEMV program: `vectors` adjacent lanes share `rows_of_lane` rows of W."""

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
        """The kernels' names of its lanes, vectors and rows of a lane."""
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
    """Choose the tile of y = x W^T for 1 to 8 tokens.

    The tile's `vectors` set the summation order and do not depend on `tokens`. A row of W has
    `vectors` 16-byte vectors; `copies` matrices (experts) meet one token at a time. `key` is the
    weight's in the user's table; `most` limits rows of a lane.
    """
    together = 1 << (tokens - 1).bit_length()
    if device.capability == 0:
        # Triton's interpreter costs time per program, whatever its size.
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
