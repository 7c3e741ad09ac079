"""Matrix products on the shapes of published models: every format and every peer in one race.

Peers that compile or tune at each new shape race afterwards, alone with what they are compared to.
"""

from functools import partial

from bench.gpu import peers
from bench.gpu.ceilings import measure_copy
from bench.gpu.environment import state_item
from bench.gpu.ours import contender
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.shapes import Matrix, formats_at, matrices
from bench.gpu.timer import Call, reason
from clocher_kernels.formats import parse_format

_INT4, _INT8, _TINY = "int4_sym_g128_f16", "int8_row_f32", "int4_sym_g64_f16"
# A slow peer, the format that it is compared with, and the products: the most telling one first.
_SLOW: tuple[tuple[str, str, tuple[tuple[int, int, int], ...]], ...] = (
    ("gemlite int4", _INT4, ((4096, 4096, 1), (4096, 4096, 8), (4096, 4096, 4))),
    ("torch.compile int8", _INT8, ((4096, 4096, 1), (4096, 14336, 1))),
    ("torchao int8", _INT8, ((4096, 4096, 1),)),
    ("gemlite int4", _INT4, ((14336, 4096, 1), (4096, 14336, 1), (4096, 4096, 2))),
)
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


def slow_items(dry: bool) -> list[Item]:
    """Return one item for each peer that is slow to start and each product."""
    slow = (
        [(peer, f, (12, 128, 1)) for peer, f, _ in _SLOW[:3]]
        if dry
        else [(peer, f, product) for peer, f, products in _SLOW for product in products]
    )
    found = []
    for peer, fmt, (n, k, m) in slow:
        matrix = Matrix("tiny" if dry else "llama-8b", "", n, k, (_TINY if dry else fmt,), (m,))
        run = partial(_slow_race, matrix=matrix, m=m, peer=peer)
        found.append(Item(f"{peer}-{n}x{k}-m{m}", run))
    return found


def _slow_race(setting: Setting, matrix: Matrix, m: int, peer: str) -> list[Row]:
    rows = peers.check(setting, peers.PEERS[peer], peer)
    good = all(row["status"] == "ok" for row in rows)
    return [*rows, *(_race(setting, matrix, m, ["cuBLAS bf16", peer]) if good else ())]


def _race(setting: Setting, matrix: Matrix, m: int, against: list[str] | None = None) -> list[Row]:
    n, k = matrix.n, matrix.k
    if not setting.copy_gbs:
        measure_copy(setting)
    names = _peers_of(matrix) if against is None else against
    calls, sizes, absent = peers.contenders(setting, names, n, k, m)
    formats = {}
    for name in formats_at(matrix, m):
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


def _peers_of(matrix: Matrix) -> list[str]:
    if matrix.model not in _COMPARED:
        return ["cuBLAS bf16"]
    return [name for name in peers.PEERS if name not in peers.SLOW]
