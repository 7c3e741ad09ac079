"""Random weights made on the device, our products with them, and what those must give.

A model's bytes are never on the host here. `decode` repeats the formats' NumPy decoders in torch,
so that a reference product over 200,000 rows takes a moment; a test holds the two equal.
"""

from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu.setting import Setting
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.cuda.timer import Call
from clocher_kernels.cuda.workbench import Planes, Shape, random_copies, random_planes
from clocher_kernels.dtypes import E2M1_VALUES
from clocher_kernels.formats import Bsr, Float, Fp8, Int4, Int8, Mxfp4, Ternary, parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.fp8 import BLOCK

__all__ = ["Planes", "Shape", "random_copies", "random_planes"]

_ROWS_AT_ONCE = 8192
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def random_blocks(fmt: Bsr, shape: Shape, density: float, setting: Setting) -> tuple[Bsr, Planes]:
    """Return a block-sparse format that counts its blocks, and its planes.

    Sides that the block does not divide are not made here.
    """
    height, width = fmt.block
    grid = shape[0] // height, shape[1] // width
    kept = torch.rand(grid, generator=setting.random, device=setting.place) < density
    counts = torch.cat([torch.zeros(1, device=setting.place), kept.sum(1).cumsum(0)])
    col_idx = kept.nonzero()[:, 1].to(torch.int32).contiguous()
    values = setting.randn(len(col_idx), height, width) * shape[1] ** -0.5
    planes = {
        "row_ptr": counts.to(torch.int32),
        "col_idx": col_idx,
        "values": values.to(TORCH_DTYPES[fmt.inner]),
    }
    return Bsr(fmt.block, fmt.inner, len(col_idx)), planes


def on_device(fmt: Format, shape: Shape, planes: Planes) -> DeviceTensor:
    """Return the tensor in the kernels' layout; the planes given stay as they are."""
    return rearrange(fmt, shape, {name: plane.clone() for name, plane in planes.items()})


def random_tensor(fmt: Format, shape: Shape, setting: Setting) -> DeviceTensor:
    """Return a random weight in the kernels' layout."""
    return rearrange(fmt, shape, random_planes(fmt, shape, setting))


def expert(planes: Planes, index: int) -> Planes:
    """Return the planes of one expert."""
    return {name: plane[index] for name, plane in planes.items()}


def decode(fmt: Format, shape: Shape, planes: Planes) -> torch.Tensor:
    """Return the values of canonical planes, fp32 [*shape]; equals `fmt.decode`."""
    if isinstance(fmt, Float):
        return planes["data"].float()
    if isinstance(fmt, Int4):
        codes = planes["codes"]
        steps = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., : shape[-1]].float()
        zeros = planes["zeros"].float() if "zeros" in planes else None
        steps -= 8 if zeros is None else _spread(zeros, fmt.group, shape)
        return steps * _spread(planes["scales"].float(), fmt.group, shape)
    if isinstance(fmt, Int8):
        return planes["codes"].float() * _spread(planes["scales"].float(), fmt.group, shape)
    if isinstance(fmt, Fp8):
        values = planes["codes"].view(_FLOAT8[fmt.code_dtype]).float()
        scales = planes["scales"].float()
        if fmt.scope != "b128":
            return values * _spread(scales, BLOCK if fmt.scope == "g128" else fmt.scope, shape)
        rows = scales.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
        return values * rows.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    if isinstance(fmt, Mxfp4):
        blocks = planes["blocks"]
        table = torch.from_numpy(E2M1_VALUES.copy()).to(blocks.device)
        values = table[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
        exponents = planes["scales"].to(torch.int32) - 127
        return torch.ldexp(values, exponents[..., None]).reshape(shape)
    assert isinstance(fmt, Ternary)
    scale = planes["scale"].float()
    return digits(planes).float() * (1 / scale if fmt.inverse else scale)


def digits(planes: Planes) -> torch.Tensor:
    """Return the digits -1, 0, 1 of a ternary weight, i8 [N, K]."""
    rows = [(planes["codes"] >> 2 * place) & 3 for place in range(4)]
    return torch.cat(rows).to(torch.int8) - 1


def _spread(scales: torch.Tensor, group: int | str, shape: Shape) -> torch.Tensor:
    """Return scales as a tensor that broadcasts against [*shape]."""
    if not isinstance(group, int):
        return scales[..., None]
    return scales.repeat_interleave(group, -1)[..., : shape[-1]]


@dataclass
class Product:
    """One launchable y = x W^T (+ residual); activations of ternary weights are int8."""

    fmt: Format
    x: torch.Tensor
    scale: torch.Tensor | None
    y: torch.Tensor
    launches: list[Launch]

    @property
    def run(self) -> Call:
        """A function that launches it."""
        return partial(execute, self.launches)


def product(
    setting: Setting,
    fmt: Format,
    w: DeviceTensor,
    m: int,
    act: str,
    residual: bool = False,
    x: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Product:
    """Lower a product of M tokens.

    Args:
        setting: where.
        fmt: format of the weight.
        w: the weight [N, K].
        m: tokens.
        act: how activations are stored.
        residual: y is fp32 and holds the residual that is added.
        x: activations [M, K] (int8 for ternary weights); None draws them.
        scale: of int8 activations [M, 1].
    """
    n, k = w.shape
    y = torch.empty((m, n), dtype=TORCH_DTYPES["f32" if residual else act], device=setting.place)
    args: dict[str, object] = {"w": w, "y": y}
    if residual:
        y.copy_(setting.randn(m, n))
        args["residual"] = y
    if isinstance(fmt, Ternary):
        if x is None:
            draw = partial(torch.randint, -127, 128, (m, k), generator=setting.random)
            x = draw(dtype=torch.int8, device=setting.place)
        if scale is None:
            scale = setting.randn(m, 1).abs() * 0.01
        args["x_scale"] = scale
    elif x is None:
        x = setting.randn(m, k, dtype=TORCH_DTYPES[act])
    launches = setting.lower("linear", x=x, **args)
    return Product(fmt, x, scale, y, launches)


def contender(setting: Setting, name: str, n: int, k: int, m: int) -> tuple[int, list[Call]]:
    """Return what a product of M tokens does before a race: its traffic, and its calls."""
    fmt = parse_format(name)
    activations = 1 if isinstance(fmt, Ternary) else 2
    copies = random_copies(fmt, (n, k), setting)
    calls = [product(setting, fmt, w, m, "f16").run for w in copies]
    return fmt.nbytes((n, k)) + m * (activations * k + 2 * n), calls


def expected(product: Product, planes: Planes, shape: tuple[int, int]) -> torch.Tensor:
    """Return x decode(w)^T in fp64 [M, N]; for ternary weights exactly what the contract says."""
    fmt = product.fmt
    if isinstance(fmt, Ternary):
        assert product.scale is not None
        total = _matmul(product.x.double(), digits(planes)).float()
        factor = planes["scale"].float()
        factor = 1 / factor if fmt.inverse else factor
        return (total * (product.scale * factor)).double()
    return _matmul(product.x.double(), decode(fmt, shape, planes))


def _matmul(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    parts = [x @ rows.double().T for rows in dense.split(_ROWS_AT_ONCE)]
    return torch.cat(parts, 1)
