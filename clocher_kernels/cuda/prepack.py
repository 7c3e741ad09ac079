"""Rearrange stored planes into the layout that the kernels read, on the device, at load.

Only bytes that lie within the same 16 change places, so a plane keeps its size and its rows.
"""

from collections.abc import Callable

import torch

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.tensors import DeviceTensor, planes_as_torch
from clocher_kernels.formats.base import Format
from clocher_kernels.quant_tensor import QuantTensor

Planes = dict[str, torch.Tensor]

# Format class -> what rearranges its planes; the others are read as they are stored.
REARRANGE: dict[type[Format], Callable[[Planes, tuple[int, ...]], Planes]] = {}


def prepack(tensor: QuantTensor, device: Device) -> DeviceTensor:
    """Copy a stored tensor to the device and rearrange its planes there."""
    planes = {n: p.to(device.torch_device) for n, p in planes_as_torch(tensor).items()}
    return rearrange(tensor.format, tensor.shape, planes)


def rearrange(fmt: Format, shape: tuple[int, ...], planes: Planes) -> DeviceTensor:
    """Return a tensor whose canonical planes are already on the device, in the kernels' layout.

    The planes given may be overwritten.
    """
    change = REARRANGE.get(type(fmt))
    return DeviceTensor(shape, fmt, planes if change is None else change(planes, shape))
