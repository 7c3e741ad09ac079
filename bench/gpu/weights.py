"""Random weights made on the device, in any format, and what they decode to.

A model's bytes are never on the host here. `decode` repeats the formats' NumPy decoders in torch,
so that a reference product over 200,000 rows takes a moment; a test holds the two equal.
"""

import torch

from bench.gpu.setting import Setting
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.cuda.workbench import Planes, Shape, random_copies, random_planes
from clocher_kernels.dtypes import E2M1_VALUES
from clocher_kernels.formats import Bsr, Float, Fp8, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.fp8 import BLOCK

__all__ = [
    "Planes",
    "Shape",
    "decode",
    "digits",
    "expert",
    "on_device",
    "random_blocks",
    "random_copies",
    "random_planes",
    "random_tensor",
]

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
            return values * _spread(scales, fmt.scope, shape)
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
