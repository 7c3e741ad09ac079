"""Find the tiles of GEMV kernels for this GPU by timing them, offline, for `tile_tables`.

Each weight is timed with at most eight tiles, cold and in turns, beside the tile that the kernels
choose by themselves; a tile enters the table if it is clearly faster. One field of a tile decides
the order of summation; it is chosen once, for one token, and the other numbers of tokens only
choose how many rows a program has.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clocher_kernels.cuda.launch import execute
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tile_tables import SCHEMA, TOKENS, fields_of, key_of, users_table_aside
from clocher_kernels.cuda.timer import Timing
from clocher_kernels.cuda.workbench import Workbench, gpu_workbench, random_copies
from clocher_kernels.formats import Ternary, parse_format

Weight = tuple[str, int, int]
"""Name of a format, N and K."""

# Gains below this are noise.
_WORTH = 0.98
# Another order of summation moves results by less than this.
_OFF = 2e-3
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


_KINDS = (
    Kind(
        "vectors",
        "rows_of_lane",
        ((8, 8), (16, 8), (16, 4), (32, 8), (32, 4), (64, 4), (64, 2), (128, 2)),
    ),
    Kind("warps", "rows", ((1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4))),
)


def tune_model(
    weights: Iterable[Weight], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Return the table of tiles of some weights for the current GPU.

    Args:
        weights: those that a model multiplies by; repeated ones are timed once.
        progress: called with (weights done, weights in all).
    """
    torch.set_grad_enabled(False)
    bench = gpu_workbench()
    every = sorted(set(weights))
    table = new_table(bench)
    with users_table_aside():
        for done, weight in enumerate(every, start=1):
            add(table, bench, weight)
            if progress is not None:
                progress(done, len(every))
    return table


def new_table(bench: Workbench) -> dict[str, Any]:
    """Return a table without entries."""
    name = "none" if bench.dry else torch.cuda.get_device_name()
    return {
        "schema": SCHEMA,
        "capability": bench.device.capability,
        "dry": bench.dry,
        "gpu": name,
        "tiles": {},
    }


def add(table: dict[str, Any], bench: Workbench, weight: Weight) -> dict[str, Any]:
    """Tune a weight and add what was found to a table; returns it, empty if nothing was."""
    bench.random.manual_seed(1)
    found = tune(bench, *weight)
    if found:
        table["tiles"][key_of(*weight)] = found
    return found


def kind_of(name: str) -> Kind:
    """Return the kind of tile that weights in a format have."""
    return next(kind for kind in _KINDS if (kind.order, kind.rows) == fields_of(name))


def tune(bench: Workbench, name: str, n: int, k: int) -> dict[str, Any]:
    """Return the tiles of a weight by number of tokens, and the gain for one token.

    Returns:
        Empty if the kernel's own choice is as good, or if the tile found fails for more tokens.
    """
    kind = kind_of(name)
    weight = name, n, k
    times = race(bench, weight, 1, kind, kind.choices[: 2 if bench.dry else None])
    best = better(times)
    if best is None:
        return {}
    tiles = {"1": {kind.order: best[0], kind.rows: best[1]}}
    if bench.dry:
        return {"tiles": tiles, "gain": 0.0}
    rows = sorted({r for _, r in kind.choices} | {1})
    for m in TOKENS[1:]:
        others = race(bench, weight, m, kind, [(best[0], r) for r in rows])
        fastest = min((c for c in others if c), key=lambda c: others[c], default=None)
        if fastest is None:
            return {}
        tiles[str(m)] = {kind.order: fastest[0], kind.rows: fastest[1]}
    gain = times[None] / times[best] if times.get(None) else 0.0
    return {"tiles": tiles, "gain": round(gain, 3)}


def race(
    bench: Workbench, weight: Weight, m: int, kind: Kind, choices: Sequence[Choice]
) -> dict[Choice | None, float]:
    """Time tiles of one weight; None is the kernel's own choice. Those that fail are left out."""
    name, n, k = weight
    copies = random_copies(parse_format(name), (n, k), bench)
    inputs = _activations(bench, copies[0], m)
    own = [_Product(bench, w, m, inputs) for w in copies]
    own[0].run()
    contenders: dict[str, list[Callable[[], object]]] = {"own": [p.run for p in own]}
    names: dict[str, Choice | None] = {"own": None}
    for choice in choices:
        with forced(partial(kind.change, choice=choice)):
            made = [_Product(bench, w, m, inputs) for w in copies]
        try:
            made[0].run()
        except Exception:  # a tile that does not compile or run is no candidate
            continue
        off = (made[0].y - own[0].y).double().norm() / own[0].y.double().norm()
        if off < _OFF:
            names[str(choice)] = choice
            contenders[str(choice)] = [p.run for p in made]
    results = bench.timer.race(contenders)
    return {names[n]: t.us for n, t in results.items() if isinstance(t, Timing)}


def _activations(bench: Workbench, w: DeviceTensor, m: int) -> dict[str, torch.Tensor]:
    """Return random activations for a weight, int8 with scales if it is ternary."""
    k = w.shape[1]
    if not isinstance(w.format, Ternary):
        return {"x": bench.randn(m, k, dtype=torch.float16)}
    q = torch.randint(
        -127, 128, (m, k), generator=bench.random, device=bench.place, dtype=torch.int8
    )
    return {"x": q, "x_scale": bench.randn(m, 1).abs() * 0.01}


class _Product:
    """A launchable product y [M, N]."""

    def __init__(
        self, bench: Workbench, w: DeviceTensor, m: int, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        self.y = torch.empty((m, w.shape[0]), dtype=torch.float16, device=bench.place)
        self._launches = LOWER["linear"](**inputs, w=w, y=self.y, device=bench.device)

    def run(self) -> None:
        """Execute it."""
        execute(self._launches)


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
