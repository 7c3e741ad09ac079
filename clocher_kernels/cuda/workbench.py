"""Where kernels are timed: the device, the timer, and random weights made on the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clocher_kernels.cuda.launch import Device, current_device
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.cuda.timer import GpuTimer
from clocher_kernels.formats import Float, Fp8, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Format

Planes = dict[str, torch.Tensor]
Shape = tuple[int, ...]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# RMS of uniformly drawn codes, so that weights come out with an RMS of about K^-0.5.
_INT4_RMS, _INT8_RMS, _E2M1_RMS, _TERNARY_RMS = 4.6, 73.0, 2.9, 0.82
# Rotating copies come to more than this many times the L2 cache.
_COLD_FACTOR = 5
_MOST_COPIES = 256


@dataclass
class Workbench:
    """Where kernels are timed.

    Attributes:
        device: what launches are made for.
        timer: what times them; `timer.dry` says that its times mean nothing.
        l2_bytes: size of the L2 cache.
        random: generator on the device.
    """

    device: Device
    timer: Any
    l2_bytes: int
    random: torch.Generator

    @property
    def dry(self) -> bool:
        """Whether there is no GPU: tiny shapes, and no number is a speed."""
        return bool(self.timer.dry)

    @property
    def place(self) -> str:
        """Where tensors live, as torch spells it."""
        return self.device.torch_device

    def copies(self, nbytes: int) -> int:
        """Return how many copies of a weight a race rotates through to stay cold."""
        if self.dry:
            return 1
        return min(max(1, -(-_COLD_FACTOR * self.l2_bytes // max(nbytes, 1))), _MOST_COPIES)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return fresh normal numbers on the device."""
        values = torch.randn(shape, generator=self.random, device=self.place)
        return values.to(dtype)


def gpu_workbench() -> Workbench:
    """Return the workbench of the current GPU."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    generator = torch.Generator("cuda")
    return Workbench(current_device(), GpuTimer(), properties.L2_cache_size, generator)


def random_planes(fmt: Format, shape: Shape, bench: Workbench) -> Planes:
    """Return canonical planes of random weights with an RMS of about K^-0.5, on the device."""
    target = shape[-1] ** -0.5
    names = fmt.planes(shape)
    if isinstance(fmt, Float):
        return {"data": (bench.randn(*shape) * target).to(TORCH_DTYPES[fmt.dtype])}
    if isinstance(fmt, Int4):
        planes = {"codes": _integers(bench, names["codes"].shape, 0, 256, torch.uint8)}
        planes["scales"] = _scales(
            bench, fmt.scale_dtype, names["scales"].shape, target / _INT4_RMS
        )
        if not fmt.symmetric:
            planes["zeros"] = _integers(bench, names["zeros"].shape, 6, 11, torch.uint8)
        return planes
    if isinstance(fmt, Int8):
        scales = _scales(bench, fmt.scale_dtype, names["scales"].shape, target / _INT8_RMS)
        return {"codes": _integers(bench, shape, -127, 128, torch.int8), "scales": scales}
    if isinstance(fmt, Fp8):
        codes = bench.randn(*shape).to(_FLOAT8[fmt.code_dtype]).view(torch.uint8)
        scales = _scales(bench, fmt.scale_dtype, names["scales"].shape, target)
        return {"codes": codes, "scales": scales}
    if isinstance(fmt, Mxfp4):
        middle = 127 + round(math.log2(target / _E2M1_RMS))
        return {
            "blocks": _integers(bench, names["blocks"].shape, 0, 256, torch.uint8),
            "scales": _integers(bench, names["scales"].shape, middle - 1, middle + 2, torch.uint8),
        }
    assert isinstance(fmt, Ternary)
    codes = torch.zeros(names["codes"].shape, dtype=torch.uint8, device=bench.place)
    for place in range(4):
        codes |= _integers(bench, codes.shape, 0, 3, torch.uint8) << 2 * place
    scale = target / _TERNARY_RMS
    value = torch.full((1,), 1 / scale if fmt.inverse else scale, device=bench.place)
    return {"codes": codes, "scale": value.to(TORCH_DTYPES[fmt.scale_dtype])}


def random_copies(fmt: Format, shape: Shape, bench: Workbench) -> list[DeviceTensor]:
    """Return enough different weights of a shape for a race that finds none in the cache.

    They are complete when this returns: a kernel that starts before its predecessor has ended reads
    weights without waiting for what wrote them.
    """
    copies = bench.copies(fmt.nbytes(shape))
    made = [rearrange(fmt, shape, random_planes(fmt, shape, bench)) for _ in range(copies)]
    bench.timer.synchronize()
    return made


def _integers(
    bench: Workbench, shape: Sequence[int], low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.randint(
        low, high, tuple(shape), generator=bench.random, device=bench.place, dtype=dtype
    )


def _scales(bench: Workbench, dtype: str, shape: Shape, middle: float) -> torch.Tensor:
    draw = torch.rand(shape, generator=bench.random, device=bench.place)
    return ((0.5 + draw) * middle).to(TORCH_DTYPES[dtype])
