"""Block-sparse products beside dense cuBLAS and torch's block-sparse Triton kernel."""

from functools import partial

import torch

from bench.gpu import shapes
from bench.gpu.ceilings import measure_copy
from bench.gpu.peers import PEERS
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.timer import Call, reason
from bench.gpu.weights import on_device, random_blocks
from clocher_kernels.cuda.launch import execute
from clocher_kernels.formats import Bsr

_FULL_CURVE = 64
_SHORT_CURVE = (0.5, 0.3, 0.1)
# torch's kernel multiplies by a dense matrix of at least this many columns.
_TORCH_COLUMNS = 16


def items(dry: bool) -> list[Item]:
    """Return one item for each shape, block and density."""
    if dry:
        return [_item(shapes.TINY_SPARSE[0], shapes.TINY_BLOCKS[0], shapes.TINY_DENSITIES[0], 1)]
    found = []
    for block in shapes.BLOCKS:
        curve = shapes.DENSITIES if block == _FULL_CURVE else _SHORT_CURVE
        found += [_item(shapes.SPARSE[0], block, density, 1) for density in curve]
    found += [_item(shapes.SPARSE[0], _FULL_CURVE, density, 8) for density in _SHORT_CURVE]
    return found + [_item(shapes.SPARSE[1], _FULL_CURVE, density, 1) for density in _SHORT_CURVE]


def _item(shape: tuple[int, int], block: int, density: float, m: int) -> Item:
    name = f"{shape[0]}x{shape[1]}-b{block}-d{density}-m{m}"
    return Item(name, partial(_race, shape=shape, block=block, density=density, m=m))


def _race(
    setting: Setting, shape: tuple[int, int], block: int, density: float, m: int
) -> list[Row]:
    if not setting.copy_gbs:
        measure_copy(setting)
    n, k = shape
    calls: dict[str, list[Call]] = {}
    sizes, absent = {"cuBLAS f16": 2 * n * k}, {}
    dense = PEERS["cuBLAS f16"](setting, n, k, m)
    calls["cuBLAS f16"] = list(dense.calls)
    ours, theirs = "clocher bsr", "torch bsr_dense_addmm"
    sizes[ours] = sizes[theirs] = nbytes = int(2 * n * k * density)
    x = setting.randn(m, k, dtype=torch.float16)
    made = [
        random_blocks(Bsr((block, block), "f16"), shape, density, setting)
        for _ in range(setting.copies(nbytes))
    ]
    for name, make in ((ours, _ours), (theirs, _theirs)):
        try:
            calls[name] = [make(setting, fmt, planes, x, n) for fmt, planes in made]
        except Exception as error:
            absent[name] = reason(error)
    timings = {**absent, **setting.timer.race(calls)}
    facts: Row = {"kind": "sparse", "n": n, "k": k, "m": m, "block": block, "density": density}
    rows = [
        setting.measured(timing, sizes[name], **facts, who=name) for name, timing in timings.items()
    ]
    return [*rows, _agreement(setting, made[0], x, n)]


def _agreement(
    setting: Setting, made: tuple[Bsr, dict[str, torch.Tensor]], x: torch.Tensor, n: int
) -> Row:
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
    call = setting.lower("bsr_linear", x=x, w=on_device(fmt, (n, k), planes), y=y)
    execute(call)
    rms = float((y.double() - want).norm() / want.norm())
    return {"op": "bsr_linear", "rms": rms, "status": "ok" if rms <= 1e-3 else "failed"}


def _ours(
    setting: Setting, fmt: Bsr, planes: dict[str, torch.Tensor], x: torch.Tensor, n: int
) -> Call:
    y = torch.empty((len(x), n), dtype=torch.float16, device=setting.place)
    w = on_device(fmt, (n, x.shape[1]), planes)
    return partial(execute, setting.lower("bsr_linear", x=x, w=w, y=y))


def _theirs(
    setting: Setting, fmt: Bsr, planes: dict[str, torch.Tensor], x: torch.Tensor, n: int
) -> Call:
    from torch.sparse._triton_ops import bsr_dense_addmm

    columns = max(_TORCH_COLUMNS, len(x))
    right = torch.zeros((x.shape[1], columns), dtype=x.dtype, device=setting.place)
    right[:, : len(x)] = x.T
    bsr = torch.sparse_bsr_tensor(
        planes["row_ptr"], planes["col_idx"], planes["values"], (n, x.shape[1])
    )
    out = torch.empty((n, columns), dtype=x.dtype, device=setting.place)
    added = torch.zeros_like(out)
    return partial(bsr_dense_addmm, added, bsr, right, beta=0, alpha=1, out=out)
