"""Tiles that were found by timing: a JSON table for each architecture, and the user's own.

A table is {"schema": 1, "capability": 90, "tiles": {KEY: {"tiles": {TOKENS: TILE, ...}}, ...}};
other members say where it comes from. KEY is "int4_sym_g128_f16/4096x4096", the format, N and K of
a weight. TOKENS are "1", "2", "4" and "8". A TILE has two fields of the kernel's tile:

    vectors, rows_of_lane    weights of less than a byte, `tiles.gemv_tile`
    warps, rows              weights of whole bytes, `gemv_bytes.tile_for`

The first of them decides the order of summation, so it is the same for all tokens of a key: a
token's result does not depend on its batch.

`python -m bench.tune` and `clocher-run --tune` write tables. Tables are data: nothing is timed when
they are read.
"""

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import ClocherError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int8 import Int8

VARIABLE = "CLOCHER_TILE_TABLE"
"""Environment variable that names the user's table; its entries come before the shipped ones."""

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
_KEY = re.compile(r"([a-z0-9_]+)/([1-9][0-9]*)x([1-9][0-9]*)", re.ASCII)

Tile = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TileTable:
    """A table that has been checked.

    Attributes:
        capability: architecture that it was timed on, 90 for sm_90.
        tiles: key -> tokens -> tile.
    """

    capability: int
    tiles: Mapping[str, Mapping[int, Tile]]


def key_of(fmt: str, n: int, k: int) -> str:
    """Return the key of a weight [N, K] in a format."""
    return f"{fmt}/{n}x{k}"


def fields_of(fmt: str) -> tuple[str, str]:
    """Return the fields of the tile that weights in a format have; the first decides the order."""
    whole_bytes = isinstance(parse_format(fmt), Float | Int8 | Fp8)
    return ("warps", "rows") if whole_bytes else ("vectors", "rows_of_lane")


def tuned(key: str, tokens: int, capability: int) -> Tile | None:
    """Return the tile that a table has for a weight, None if there is none.

    Args:
        key: of the weight.
        tokens: 1 to 8.
        capability: of the GPU; 0, the interpreter, has no tables.

    Raises:
        UsageError: the user's table cannot be read, or was made for another architecture.
    """
    if not capability:
        return None
    together = next(count for count in TOKENS if count >= tokens)
    own = os.environ.get(VARIABLE)
    for table in (_users(own, capability) if own else None, _shipped(capability)):
        if table is not None and key in table.tiles:
            return table.tiles[key][together]
    return None


@contextmanager
def users_table_aside() -> Iterator[None]:
    """Leave the user's table out, which may be the file that is being made."""
    own = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if own is not None:
            os.environ[VARIABLE] = own


def load(path: Path) -> TileTable:
    """Read a table.

    Raises:
        UsageError: there is no such file, or it is no table.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; no table of tiles is")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; expected a JSON table of tiles") from None
    return parse(text, str(path))


def parse(text: str, source: str) -> TileTable:
    """Check the text of a table.

    Args:
        text: JSON.
        source: what errors call it.

    Raises:
        UsageError: it is no table, or one that would break what kernels promise.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source}: no JSON: {error}") from None
    _expect(isinstance(table, dict), source, "not an object")
    schema, capability = table.get("schema"), table.get("capability")
    _expect(schema == SCHEMA, source, f"schema is {schema!r}; expected {SCHEMA}")
    _expect(
        isinstance(capability, int) and 80 <= capability < 1000,
        source,
        f"capability is {capability!r}; expected 80 or more, 90 for sm_90",
    )
    _expect(not table.get("dry"), source, "made by a dry run, whose times mean nothing")
    tiles = table.get("tiles")
    _expect(isinstance(tiles, dict), source, "no object 'tiles'")
    return TileTable(capability, {k: _entry(f"{source}: {k}", k, v) for k, v in tiles.items()})


def _entry(where: str, key: str, entry: Any) -> dict[int, Tile]:
    """Check what a table says about one weight."""
    match = _KEY.fullmatch(key)
    _expect(match is not None, where, "expected FORMAT/NxK, as in int8_row_f32/4096x4096")
    assert match is not None
    try:
        fields = fields_of(match[1])
    except ClocherError as error:
        raise UsageError(f"{where}: {error}") from None
    tiles = entry.get("tiles") if isinstance(entry, dict) else None
    expected = [str(count) for count in TOKENS]
    _expect(
        isinstance(tiles, dict) and sorted(tiles) == expected,
        where,
        f"expected 'tiles' for {', '.join(expected)} tokens",
    )
    assert isinstance(tiles, dict)
    for count, tile in tiles.items():
        _expect(
            isinstance(tile, dict) and sorted(tile) == sorted(fields),
            f"{where}, {count} tokens",
            f"expected the fields {fields[0]} and {fields[1]}",
        )
        for name in fields:
            _expect(
                type(tile[name]) is int and tile[name] in _SIZES[name],
                f"{where}, {count} tokens",
                f"{name} is {tile[name]!r}; expected one of {_SIZES[name]}",
            )
    orders = {tile[fields[0]] for tile in tiles.values()}
    _expect(
        len(orders) == 1,
        where,
        f"{fields[0]} is {sorted(orders)}; it decides the order of summation and must be the "
        "same for all tokens, or a token's result would depend on its batch",
    )
    return {int(count): dict(tile) for count, tile in tiles.items()}


def _expect(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise UsageError(f"{where}: {what}; make the table with clocher-run --tune")


@functools.cache
def _shipped(capability: int) -> TileTable | None:
    path = Path(__file__).with_name(f"sm_{capability}.json")
    return load(path) if path.exists() else None


@functools.cache
def _users(path: str, capability: int) -> TileTable:
    try:
        table = load(Path(path))
    except UsageError as error:
        raise UsageError(f"{VARIABLE}: {error}") from None
    if table.capability != capability:
        raise UsageError(
            f"{VARIABLE}: {path} was made on sm_{table.capability}, this GPU is sm_{capability}; "
            "unset it, or make a table with clocher-run --tune"
        )
    return table
