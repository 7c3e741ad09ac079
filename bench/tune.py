"""Find the tiles of the GEMV kernels for this GPU, offline, and write them as a JSON table.

    python -m bench.tune --out sm_90.json

Each weight of the published models is timed with at most eight tiles, cold and in turns, beside the
tile that the kernels choose by themselves; a tile enters the table if it is clearly faster. One
field of a tile decides the order of summation; it is chosen once, for one token, and the other
numbers of tokens only choose how many rows a program has.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.gpu.record import write_json
from bench.gpu.shapes import Matrix, matrices

if TYPE_CHECKING:
    from bench.gpu.setting import Setting

SCHEMA = 1
# Gains below this are noise.
_WORTH = 0.98
# Another order of summation moves results by less than this.
_OFF = 2e-3
_TOKENS = (2, 4, 8)
_PACKAGE = "clocher_kernels.cuda."
_TILE_FUNCTIONS = ("gemv_tile", "tile_for")

Choice = tuple[int, int]


@dataclass(frozen=True)
class Kind:
    """A kind of tile: which fields are tuned, and with what.

    Attributes:
        order: the field that decides the order of summation.
        rows: the field that says how many rows there are.
        choices: values of both, at most eight so that a table takes minutes.
    """

    order: str
    rows: str
    choices: tuple[Choice, ...]

    def change(self, tile: Any, choice: Choice) -> Any:
        """Return a tile with other values; lanes beyond a warp are further warps."""
        values = {self.order: choice[0], self.rows: choice[1]}
        if self.order == "vectors":
            values["warps"] = max(1, choice[0] // 32)
        return dataclasses.replace(tile, **values)


KINDS = (
    Kind(
        "vectors",
        "rows_of_lane",
        ((8, 8), (16, 8), (16, 4), (32, 8), (32, 4), (64, 4), (64, 2), (128, 2)),
    ),
    Kind("warps", "rows", ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4))),
)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the JSON table")
@click.option("--only", multiple=True, help="only weights whose key contains this")
@click.option("--dry-run", is_flag=True, help="no GPU: tiny shapes, the table means nothing")
def main(out: Path, only: tuple[str, ...], dry_run: bool) -> None:
    """Tune every weight and write the table after each."""
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from bench.gpu.environment import state
    from bench.gpu.setting import make_setting

    setting = make_setting(dry_run)
    capability = setting.device.capability
    table: dict[str, Any] = {"schema": SCHEMA, "capability": capability, "dry": dry_run}
    table |= {"measured_on": state(), "tiles": {}}
    for matrix in matrices(dry_run):
        for name in matrix.formats:
            key = f"{name}/{matrix.n}x{matrix.k}"
            if only and not any(text in key for text in only):
                continue
            setting.random.manual_seed(1)
            found = tune(setting, matrix, name)
            click.echo(f"{key}: {found}", err=True)
            if found:
                table["tiles"][key] = found
            write_json(out, table)


def tune(setting: "Setting", matrix: Matrix, name: str) -> dict[str, Any]:
    """Return the tile of one weight by number of tokens, and the gain for one token.

    Returns:
        Empty if the kernel's own choice is as good, or if it has no tile of a known kind.
    """
    kind = kind_of(setting, matrix, name)
    if kind is None:
        return {}
    times = race(setting, matrix, name, 1, kind, kind.choices[: 2 if setting.dry else None])
    best = better(times)
    if best is None:
        return {}
    tiles = {"1": {kind.order: best[0], kind.rows: best[1]}}
    for m in () if setting.dry else _TOKENS:
        rows = sorted({r for _, r in kind.choices} | {1})
        others = race(setting, matrix, name, m, kind, [(best[0], r) for r in rows])
        fastest = min((c for c in others if c), key=lambda c: others[c], default=None)
        if fastest is not None:
            tiles[str(m)] = {kind.order: fastest[0], kind.rows: fastest[1]}
    gain = times[None] / times[best] if times.get(None) and not setting.dry else 0.0
    return {"tiles": tiles, "gain": round(gain, 3)}


def kind_of(setting: "Setting", matrix: Matrix, name: str) -> Kind | None:
    """Return the kind of tile that a weight's kernel asks for, None if it asks for none."""
    from bench.gpu.ours import contender

    with forced(lambda tile: tile) as used:
        contender(setting, name, matrix.n, matrix.k, 1, "f16")
    fields = {field.name for tile in used for field in dataclasses.fields(tile)}
    return next((kind for kind in KINDS if {kind.order, kind.rows} <= fields), None)


def race(
    setting: "Setting",
    matrix: Matrix,
    name: str,
    m: int,
    kind: Kind,
    choices: Sequence[Choice],
) -> dict[Choice | None, float]:
    """Time tiles of one weight; None is the kernel's own choice. Those that fail are left out."""
    from bench.gpu.ours import product
    from bench.gpu.timer import Timing, reason
    from bench.gpu.weights import random_copies
    from clocher_kernels.formats import parse_format

    fmt = parse_format(name)
    copies = random_copies(fmt, (matrix.n, matrix.k), setting)
    first = product(setting, fmt, copies[0], m, "f16")
    inputs = {"x": first.x, "scale": first.scale}
    first.run()
    own = [first.run, *(product(setting, fmt, w, m, "f16", **inputs).run for w in copies[1:])]
    contenders: dict[str, Any] = {"own": own}
    names: dict[str, Choice | None] = {"own": None}
    for choice in choices:
        with forced(lambda tile, to=choice: kind.change(tile, to)):
            made = [product(setting, fmt, w, m, "f16", **inputs) for w in copies]
        try:
            made[0].run()
        except Exception as error:
            click.echo(f"{name} {choice}: {reason(error)}", err=True)
            continue
        off = (made[0].y - first.y).double().norm() / first.y.double().norm()
        if off < _OFF:
            names[str(choice)] = choice
            contenders[str(choice)] = [p.run for p in made]
    results = setting.timer.race(contenders)
    return {names[n]: t.us for n, t in results.items() if isinstance(t, Timing)}


@contextmanager
def forced(change: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Make the tile functions of the kernels return other tiles; yields those returned."""
    used: list[Any] = []
    kept: list[tuple[Any, str, Callable[..., Any]]] = []
    for module in [m for n, m in list(sys.modules.items()) if n.startswith(_PACKAGE)]:
        for name in _TILE_FUNCTIONS:
            function = vars(module).get(name)
            if callable(function):
                kept.append((module, name, function))
                setattr(module, name, _changing(function, change, used))
    try:
        yield used
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _changing(
    function: Callable[..., Any], change: Callable[[Any], Any], used: list[Any]
) -> Callable[..., Any]:
    def tile(*args: Any, **named: Any) -> Any:
        used.append(change(function(*args, **named)))
        return used[-1]

    return tile


def better(times: dict[Choice | None, float]) -> Choice | None:
    """Return the fastest tile if it is clearly faster than the kernel's own choice."""
    choices = [c for c in times if c is not None]
    if not choices:
        return None
    best = min(choices, key=lambda c: times[c])
    own = times.get(None)
    return best if own is None or times[best] < _WORTH * own else None


if __name__ == "__main__":
    main()
