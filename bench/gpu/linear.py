"""Matrix products on the shapes of published models: every format and every peer in one race."""

from functools import partial

from bench.gpu import peers
from bench.gpu.ceilings import measure_copy
from bench.gpu.environment import state_item
from bench.gpu.ours import contender
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.shapes import Matrix, matrices
from bench.gpu.timer import Call, reason
from clocher_kernels.formats import parse_format

_COMPILED_SHAPES = ((4096, 4096), (4096, 14336))
# The models whose shapes the peers are compared on; elsewhere only cuBLAS runs beside us.
_COMPARED = ("llama-8b", "gpt-oss-20b", "none", "tiny")


def items(dry: bool) -> list[Item]:
    """Return one item for each shape and number of tokens."""
    races = [
        Item(f"{x.model}-{x.n}x{x.k}-m{m}", partial(_race, matrix=x, m=m))
        for x in matrices(dry)
        for m in x.tokens
    ]
    return [*races, state_item()]


def _race(setting: Setting, matrix: Matrix, m: int) -> list[Row]:
    n, k = matrix.n, matrix.k
    if not setting.copy_gbs:
        measure_copy(setting)
    calls, sizes, absent = peers.contenders(setting, _peers_of(setting, matrix, m), n, k, m)
    formats = {}
    for name in matrix.formats:
        fmt = parse_format(name)
        own = f"clocher {name}"
        formats[own] = name
        try:
            calls[own] = contender(setting, name, n, k, m, "f16")
        except Exception as error:
            absent[own] = reason(error)
        activations = 1 if name.startswith("ternary") else 2
        sizes[own] = fmt.nbytes((n, k)) + m * (activations * k + 2 * n)
    facts: Row = {"kind": "linear", "model": matrix.model, "n": n, "k": k, "m": m}
    timings: dict[str, object] = {**absent, **setting.timer.race(_ordered(calls))}
    rows = []
    for name, timing in timings.items():
        who: Row = {**facts, "who": name, "format": formats.get(name, "")}
        rows.append(setting.measured(timing, sizes.get(name, 0), **who))  # type: ignore[arg-type]
    return rows


def _ordered(calls: dict[str, list[Call]]) -> dict[str, list[Call]]:
    """Return ours and the peers' in turn, so that no group runs in one stretch."""
    return dict(sorted(calls.items(), key=lambda entry: entry[0][::-1]))


def _peers_of(setting: Setting, matrix: Matrix, m: int) -> list[str]:
    if matrix.model not in _COMPARED:
        return ["cuBLAS bf16"]
    compiled = (matrix.n, matrix.k) in _COMPILED_SHAPES and m == 1
    return [name for name in peers.PEERS if compiled or name not in peers.COMPILED]
