"""Matrix products on the shapes of published models: checked, then raced in every format.

Every format and every peer are in one race; peers that compile or tune at each new shape race
afterwards, alone with what they are compared to. Block-sparse products race beside dense cuBLAS and
torch's block-sparse Triton kernel, and some launches in other ways: without early launches, with
more stages of loads in flight.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from bench.gpu import peers, shapes, weights
from bench.gpu.machine import state_item
from bench.gpu.parity import judge
from bench.gpu.record import Row
from bench.gpu.setting import Item, Prepare, Setting, ready
from bench.gpu.shapes import Matrix, formats_at, matrices
from bench.gpu.weights import contender, product
from clocher_kernels.cuda.launch import Device, Launch, execute, options
from clocher_kernels.cuda.timer import Call, reason
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import Bsr, Ternary, parse_format
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import EXACT

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
# Shapes on which a token must give the same bits whatever batch of up to eight it is in.
_INVARIANT = ((4096, 4096), (2880, 4096), (2560, 2560), (12, 128))

_FULL_CURVE = 64
_SHORT_CURVE = (0.5, 0.3, 0.1)
# torch's kernel multiplies by a dense matrix of at least this many columns.
_TORCH_COLUMNS = 16

_STAGES = (2, 3, 4)
_VARIED = (
    (_INT4, 4096, 4096, 1),
    (_INT4, 4096, 4096, 16),
    ("mxfp4", 5760, 2880, 1),
    ("bf16", 4096, 2880, 1),
    (_INT4, 4096, 4096, 128),
)
_TINY_VARIED = ((_TINY, 12, 128, 1),)

Sparse = tuple[Bsr, weights.Planes]


def items(dry: bool) -> list[Item]:
    """Return one race for each shape and number of tokens."""
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


def checked_items(dry: bool) -> list[Item]:
    """Return the items that check what is raced: these launches, so Triton's cache holds them."""
    found = []
    for matrix in matrices(dry):
        for name in matrix.formats:
            stem = f"{matrix.model}-{matrix.n}x{matrix.k}-{name}"
            found.append(Item(stem, partial(_check, matrix=matrix, name=name)))
            if (matrix.n, matrix.k) in _INVARIANT:
                most = 3 if dry else 8
                run = partial(_check_batches, matrix=matrix, name=name, most=most)
                found.append(Item(f"{stem}-batches", run))
    return found


def sparse_items(dry: bool) -> list[Item]:
    """Return one race for each shape, block and density."""
    if dry:
        races = [(shapes.TINY_SPARSE[0], shapes.TINY_BLOCKS[0], shapes.TINY_DENSITIES[0], 1)]
    else:
        small, large = shapes.SPARSE
        races = [
            (small, block, density, 1)
            for block in shapes.BLOCKS
            for density in (shapes.DENSITIES if block == _FULL_CURVE else _SHORT_CURVE)
        ]
        races += [(small, _FULL_CURVE, density, 8) for density in _SHORT_CURVE]
        races += [(large, _FULL_CURVE, density, 1) for density in _SHORT_CURVE]
    return [
        Item(
            f"{shape[0]}x{shape[1]}-b{block}-d{density}-m{m}",
            partial(_sparse_race, shape=shape, block=block, density=density, m=m),
        )
        for shape, block, density, m in races
    ]


def variant_items(dry: bool) -> list[Item]:
    """Return one race for each weight."""
    return [
        Item(f"{name}-{n}x{k}-m{m}", partial(_variants, name=name, n=n, k=k, m=m))
        for name, n, k, m in (_TINY_VARIED if dry else _VARIED)
    ]


def launches(setting: Setting, matrix: Matrix, name: str) -> list[Launch]:
    """Return what checking a weight in a format launches."""
    w = weights.random_tensor(parse_format(name), (matrix.n, matrix.k), setting)
    trials = _trials(matrix, name, 8)
    if (matrix.n, matrix.k) in _INVARIANT:
        trials += [(m, "f16", False) for m in range(2, 8)]
    made = (product(setting, w.format, w, *trial) for trial in trials)
    return [launch for p in made for launch in p.launches]


def _trials(matrix: Matrix, name: str, most: int) -> list[tuple[int, str, bool]]:
    """Return tokens, storage of activations and whether there is a residual."""
    tokens = [m for m in sorted({*matrix.tokens, most}) if name in formats_at(matrix, m)]
    return [(m, "f16", False) for m in tokens] + [(1, "bf16", False), (1, "f16", True)]


def _check(setting: Setting, matrix: Matrix, name: str) -> list[Row]:
    fmt, shape = parse_format(name), (matrix.n, matrix.k)
    planes = weights.random_planes(fmt, shape, setting)
    w = weights.on_device(fmt, shape, planes)
    trials = _trials(matrix, name, 2 if setting.dry else 8)
    if setting.dry and isinstance(fmt, Ternary):
        # The interpreter truncates where it should round to bf16, and equality is asked for.
        trials.remove((1, "bf16", False))
    rows = []
    for m, act, residual in trials:
        limit = EXACT if isinstance(fmt, Ternary) else OPS["linear"].allowed(None, "cuda", act)
        row: Row = {
            "op": "linear",
            "case": f"{name} {shape} m{m}",
            "act": act,
            "residual": residual,
        }
        try:
            p = product(setting, fmt, w, m, act, residual)
        except (UnsupportedOp, ShapeError) as error:
            rows.append({**row, "status": "refused", "reason": reason(error)})
            continue
        before = p.y.double() if residual else 0.0
        if not residual:
            p.y.fill_(float("nan"))
        p.run()
        want = weights.expected(p, planes, shape) + before
        if isinstance(fmt, Ternary):
            want = want.float().to(p.y.dtype)
        got, right = p.y.float().cpu().numpy(), want.float().cpu().numpy()
        rows.append(row | judge(limit, got, right))
    return rows


def _check_batches(setting: Setting, matrix: Matrix, name: str, most: int) -> list[Row]:
    """Compare the rows of batches of 1 .. most tokens, in shifted order, bit by bit."""
    fmt, shape = parse_format(name), (matrix.n, matrix.k)
    w = weights.random_tensor(fmt, shape, setting)
    whole = product(setting, fmt, w, most, "f16")
    whole.run()
    rows = []
    for m in range(1, most):
        order = [(index + 1) % most for index in range(m)]
        scale = None if whole.scale is None else whole.scale[order].contiguous()
        part = product(setting, fmt, w, m, "f16", x=whole.x[order].contiguous(), scale=scale)
        part.y.fill_(float("nan"))
        part.run()
        same = torch.equal(part.y.view(torch.int16), whole.y[order].view(torch.int16))
        row: Row = {"op": "linear", "case": f"{name} {shape} batch {m} of {most}", "act": "f16"}
        rows.append({**row, "status": "ok" if same else "failed"})
        if not same:
            rows[-1]["reason"] = "a token's bits depend on its batch"
    return rows


def _slow_race(setting: Setting, matrix: Matrix, m: int, peer: str) -> list[Row]:
    rows = peers.check(setting, peers.PEERS[peer], peer)
    good = all(row["status"] == "ok" for row in rows)
    return [*rows, *(_race(setting, matrix, m, ["cuBLAS bf16", peer]) if good else ())]


def _race(
    setting: Setting, matrix: Matrix, m: int, against: Sequence[str] | None = None
) -> list[Row]:
    n, k = matrix.n, matrix.k
    if against is None:
        against = peers.QUICK if matrix.model in _COMPARED else ["cuBLAS bf16"]
    racing = {name: peers.contender(setting, name, n, k, m) for name in against}
    ours = {f"clocher {name}": name for name in formats_at(matrix, m)}
    racing |= {own: partial(contender, setting, name, n, k, m) for own, name in ours.items()}
    # Ours and the peers' in turn, so that no group runs in one stretch.
    racing = dict(sorted(racing.items(), key=lambda entry: entry[0][::-1]))
    rows = setting.race(racing, kind="linear", model=matrix.model, n=n, k=k, m=m)
    return [{**row, "format": ours.get(row["who"], "")} for row in rows]


def _sparse_race(
    setting: Setting, shape: tuple[int, int], block: int, density: float, m: int
) -> list[Row]:
    n, k = shape
    nbytes = int(2 * n * k * density)
    x = setting.randn(m, k, dtype=torch.float16)
    made = [
        weights.random_blocks(Bsr((block, block), "f16"), shape, density, setting)
        for _ in range(setting.copies(nbytes))
    ]

    def prepared(call_of: Callable[[Setting, Sparse, torch.Tensor, int], Call]) -> Prepare:
        return lambda: (nbytes, [call_of(setting, one, x, n) for one in made])

    racing = {
        "cuBLAS f16": lambda: (2 * n * k, peers.contender(setting, "cuBLAS f16", n, k, m)()[1]),
        "clocher bsr": prepared(_ours),
        "torch bsr_dense_addmm": prepared(_theirs),
    }
    facts: Row = {"kind": "sparse", "n": n, "k": k, "m": m, "block": block, "density": density}
    return [*setting.race(racing, **facts), _agreement(setting, made[0], x, n)]


def _agreement(setting: Setting, made: Sparse, x: torch.Tensor, n: int) -> Row:
    """Compare our product with the dense one in fp64."""
    fmt, planes = made
    height, width = fmt.block
    k = x.shape[1]
    dense = torch.zeros((n // height, k // width, height, width), device=x.device)
    counts = planes["row_ptr"].diff().long()
    rows = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
    dense[rows, planes["col_idx"].long()] = planes["values"].float()
    want = x.double() @ dense.transpose(1, 2).reshape(n, k).double().T
    y = torch.full((len(x), n), float("nan"), dtype=torch.float16, device=x.device)
    call = setting.lower("bsr_linear", x=x, w=weights.on_device(fmt, (n, k), planes), y=y)
    execute(call)
    rms = float((y.double() - want).norm() / want.norm())
    return {"op": "bsr_linear", "rms": rms, "status": "ok" if rms <= 1e-3 else "failed"}


def _ours(setting: Setting, made: Sparse, x: torch.Tensor, n: int) -> Call:
    y = torch.empty((len(x), n), dtype=torch.float16, device=setting.place)
    w = weights.on_device(made[0], (n, x.shape[1]), made[1])
    return partial(execute, setting.lower("bsr_linear", x=x, w=w, y=y))


def _theirs(setting: Setting, made: Sparse, x: torch.Tensor, n: int) -> Call:
    from torch.sparse._triton_ops import bsr_dense_addmm

    columns = max(_TORCH_COLUMNS, len(x))
    right = torch.zeros((x.shape[1], columns), dtype=x.dtype, device=setting.place)
    right[:, : len(x)] = x.T
    planes = [made[1][name] for name in ("row_ptr", "col_idx", "values")]
    bsr = torch.sparse_bsr_tensor(*planes, (n, x.shape[1]))
    out = torch.empty((n, columns), dtype=x.dtype, device=setting.place)
    added = torch.zeros_like(out)
    return partial(bsr_dense_addmm, added, bsr, right, beta=0, alpha=1, out=out)


class _Plain(Device):
    """A device whose kernels wait until their predecessor has ended."""

    __slots__ = ()

    @property
    def pdl(self) -> bool:
        return False


def without_pdl(setting: Setting) -> Setting:
    """Return a setting whose launches are not programmatic."""
    d = setting.device
    return replace(setting, device=_Plain(d.torch_device, d.capability, d.sms))


def _variants(setting: Setting, name: str, n: int, k: int, m: int) -> list[Row]:
    fmt = parse_format(name)
    copies = weights.random_copies(fmt, (n, k), setting)
    made = [product(setting, fmt, w, m, "f16").launches for w in copies]
    plain = [product(without_pdl(setting), fmt, w, m, "f16").launches for w in copies]
    calls: dict[str, list[Call]] = {
        "clocher": [partial(_execute, launches) for launches in made],
        "clocher without PDL": [partial(_execute, launches) for launches in plain],
    }
    for stages in _STAGES:
        calls[f"stages {stages}"] = [partial(_execute, launches, stages) for launches in made]
    nbytes = fmt.nbytes((n, k)) + 2 * m * (n + k)
    racing = {who: ready(nbytes, own) for who, own in calls.items()}
    return setting.race(racing, kind="variant", weight=name, n=n, k=k, m=m)


def _execute(launches: Sequence[Launch], stages: int = 0) -> None:
    for launch in launches:
        chosen = options(launch) | ({"num_stages": stages} if stages else {})
        launch.kernel[launch.grid](**launch.args, **launch.constants, **chosen)
