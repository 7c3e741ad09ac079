"""Tensors on the device, and views of stored planes as torch tensors."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clocher_kernels.formats.base import Format
from clocher_kernels.quant_tensor import QuantTensor

# fp8 and e8m0 codes travel as bytes: what they mean is the kernel's business, on every
# architecture alike.
TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "e4m3": torch.uint8,
    "e5m2": torch.uint8,
    "e8m0": torch.uint8,
    "i32": torch.int32,
    "u32": torch.int32,
    "u64": torch.int64,
    "i64": torch.int64,
}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTensor:
    """A QuantTensor on the device; planes that `prepack` rearranges have the kernels' layout."""

    shape: tuple[int, ...]
    format: Format
    planes: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())


def as_torch(array: np.ndarray, dtype: str) -> Tensor:
    """View a NumPy array as torch type `dtype`, on the CPU, without a copy."""
    array = np.ascontiguousarray(array)
    if dtype in ("bf16", "f16"):
        array = array.view(np.int16)
    elif dtype in ("u32", "u64"):
        array = array.view(f"i{array.itemsize}")
    with warnings.catch_warnings():
        # torch has no read-only tensors; the view of a mapped file is never written.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(TORCH_DTYPES[dtype])


def planes_as_torch(tensor: QuantTensor) -> dict[str, Tensor]:
    """View a tensor's planes as torch tensors on the CPU, without a copy."""
    expected = tensor.format.planes(tensor.shape)
    return {name: as_torch(tensor.planes[name], p.dtype) for name, p in expected.items()}
