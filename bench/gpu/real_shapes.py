"""Parity on the shapes of published models, with weights made on the device.

These are the launches that `linear`, `moe` and `attention` time later, so what is timed has been
checked, and Triton's cache already holds it.
"""

from functools import partial

import torch

from bench.gpu import moe, weights
from bench.gpu.attention import attention_items
from bench.gpu.ours import expected, product
from bench.gpu.parity import judge
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.shapes import Matrix, experts, formats_at, matrices
from bench.gpu.timer import reason
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import Ternary, parse_format

# Shapes on which a token must give the same bits whatever batch of up to eight it is in.
_INVARIANT = ((4096, 4096), (2880, 4096), (2560, 2560), (12, 128))


def items(dry: bool) -> list[Item]:
    """Return the items: products first, they take longest to compile."""
    found = []
    for matrix in matrices(dry):
        for name in matrix.formats:
            stem = f"{matrix.model}-{matrix.n}x{matrix.k}-{name}"
            found.append(Item(stem, partial(_check, matrix=matrix, name=name)))
            if (matrix.n, matrix.k) in _INVARIANT:
                most = 3 if dry else 8
                run = partial(_check_batches, matrix=matrix, name=name, most=most)
                found.append(Item(f"{stem}-batches", run))
    for shape in experts(dry):
        for m in shape.tokens:
            found.append(Item(f"{shape.model}-moe-m{m}", partial(moe.check, shape=shape, m=m)))
    return [*found, *attention_items(dry, check=True)]


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
        kind = "linear_i8" if isinstance(fmt, Ternary) else "linear"
        row: Row = {"op": kind, "case": f"{name} {shape} m{m}", "act": act, "residual": residual}
        try:
            p = product(setting, fmt, w, m, act, residual)
        except (UnsupportedOp, ShapeError) as error:
            rows.append({**row, "status": "refused", "reason": reason(error)})
            continue
        before = p.y.double() if residual else 0.0
        if not residual:
            p.y.fill_(float("nan"))
        p.run()
        want = expected(p, planes, shape) + before
        if kind == "linear_i8":
            want = want.float().to(p.y.dtype)
        got, right = p.y.float().cpu().numpy(), want.float().cpu().numpy()
        rows.append(row | judge(kind, act, got, right))
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
