"""Copy weights to the device: pinned double buffering, memory checked before the first byte."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.prepack import rearrange
from clocher_kernels.cuda.tensors import DeviceTensor, as_torch, planes_as_torch
from clocher_kernels.errors import OutOfMemory
from clocher_kernels.quant_tensor import QuantTensor

Weight = np.ndarray | QuantTensor | DeviceTensor | torch.Tensor
Placed = DeviceTensor | torch.Tensor
Progress = Callable[[int, int], None]

_STAGING_BYTES = 32 << 20
# Reserved for Triton's modules, the CUDA context and rearrangement temporaries.
_RESERVE_BYTES = 512 << 20


def host_bytes(weights: Mapping[str, Weight]) -> int:
    """Return the bytes of the weights that are not on the device yet."""
    return sum(w.nbytes for w in weights.values() if isinstance(w, np.ndarray | QuantTensor))


def check_memory(weights: int, buffers: int, free: int) -> None:
    """Raise OutOfMemory if a model does not fit; sizes in bytes."""
    needed = weights + buffers + _RESERVE_BYTES
    if needed > free:
        raise OutOfMemory(
            f"the GPU has {free >> 20} MiB free; weights need {weights >> 20} MiB, KV cache and "
            f"buffers {buffers >> 20} MiB, the runtime {_RESERVE_BYTES >> 20} MiB; lower "
            "--context or --batch, or choose a smaller --kv-dtype or --precision"
        )


def place(
    weights: Mapping[str, Weight], device: Device, progress: Progress | None = None
) -> dict[str, Placed]:
    """Return the weights on the device, in the kernels' layout; `progress` gets (bytes, total)."""
    copier = _Copier(device, host_bytes(weights), progress)
    placed: dict[str, Placed] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantTensor):
            planes = {n: copier.copy(p) for n, p in planes_as_torch(weight).items()}
            placed[name] = rearrange(weight.format, weight.shape, planes)
        elif isinstance(weight, np.ndarray):
            placed[name] = copier.copy(as_torch(weight, "f32"))
        else:
            placed[name] = weight
    return placed


class _Copier:
    def __init__(self, device: Device, total: int, progress: Progress | None) -> None:
        self._device, self._total, self._progress = device, total, progress
        self._done = 0
        self._staging: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event] = []
        if device.torch_device == "cuda" and total:
            shape = (_STAGING_BYTES,)
            self._staging = [torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
            self._free = [torch.cuda.Event() for _ in "ab"]

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device.torch_device)
        if not self._staging:
            target.copy_(source)
            self._report(source.nbytes)
            return target
        # Planes may be scalar or of odd size: bytes fit all.
        pieces = zip(
            source.reshape(-1).view(torch.uint8).split(_STAGING_BYTES),
            target.reshape(-1).view(torch.uint8).split(_STAGING_BYTES),
            strict=True,
        )
        for index, (piece, destination) in enumerate(pieces):
            buffer, free = self._staging[index % 2], self._free[index % 2]
            free.synchronize()
            pinned = buffer[: piece.numel()]
            pinned.copy_(piece)
            destination.copy_(pinned, non_blocking=True)
            free.record()
            self._report(piece.numel())
        return target

    def _report(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
