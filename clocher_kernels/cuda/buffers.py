"""The Plan's buffers on the device: types, memory, and the block shared by inputs."""

from collections.abc import Mapping

import numpy as np
import torch

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.tensors import TORCH_DTYPES
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.ops import OPS
from clocher_kernels.plan import Buffer, Plan

_ALIGNMENT = 256
_MASKS = "allowed"


def activation_types(plan: Plan, act: str) -> dict[str, str]:
    """Return the element type of each buffer for activations "f16", "bf16" or "f32".

    The residual stream, q, k, v, logits and inputs of quantisers stay fp32.
    """
    wide, read = set(), set()
    for call in plan.calls:
        for param in OPS[call.op].params:
            name = call.args.get(param.name, "")
            if not param.narrow:
                wide.add(name)
            if param.kind != "out":
                read.add(name)
    return {
        name: act if b.role == "scratch" and b.dtype == "f32" and name in read - wide else b.dtype
        for name, b in plan.buffers.items()
    }


def buffer_bytes(plan: Plan, types: Mapping[str, str]) -> int:
    """Return the bytes of all buffers."""
    return sum(_nbytes(b, types[name]) for name, b in plan.buffers.items())


def allocate(plan: Plan, types: Mapping[str, str], device: Device) -> dict[str, torch.Tensor]:
    """Return zeroed device memory for every non-input buffer."""
    return {
        name: torch.zeros(buffer.shape, dtype=TORCH_DTYPES[types[name]], device=device.torch_device)
        for name, buffer in plan.buffers.items()
        if buffer.role != "input"
    }


class InputBlock:
    """The inputs of a Plan in one block, uploaded by one copy; the large sampling masks come last.

    The host writes the NumPy arrays `host`; kernels read and advance `tensors`.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        given = {n: b for n, b in plan.buffers.items() if b.role == "input"}
        inputs = dict(sorted(given.items(), key=lambda item: item[0] == _MASKS))
        offsets, size = {}, 0
        for name, buffer in inputs.items():
            offsets[name] = size
            size += -(-_nbytes(buffer, buffer.dtype) // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        self._size, self._masks_at, self._mask_bytes = size, size, 0
        if masks := inputs.get(_MASKS):
            self._masks_at = offsets[_MASKS]
            self._mask_bytes = _nbytes(masks, masks.dtype) // masks.shape[0]
        self._block = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self._bytes = np.zeros(size, np.uint8)
        self.host: dict[str, np.ndarray] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, buffer in inputs.items():
            piece = slice(offsets[name], offsets[name] + _nbytes(buffer, buffer.dtype))
            storage = STORAGE[buffer.dtype]
            self.host[name] = self._bytes[piece].view(storage).reshape(buffer.shape)
            dtype = TORCH_DTYPES[buffer.dtype]
            self.tensors[name] = self._block[piece].view(dtype).view(buffer.shape)
        # Two pinned copies: one may still be in flight while the host fills the other.
        self._pinned: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        if device.torch_device == "cuda":
            self._pinned = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
            self._sent = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    def upload(self, masks: int | None = None) -> None:
        """Copy the inputs, with the first `masks` masks or all, on the current stream."""
        end = self._size if masks is None else self._masks_at + masks * self._mask_bytes
        if not self._pinned:
            self._block[:end].copy_(torch.from_numpy(self._bytes[:end]))
            return
        pinned, sent = self._pinned[self._turn], self._sent[self._turn]
        sent.synchronize()
        pinned.numpy()[:end] = self._bytes[:end]
        self._block[:end].copy_(pinned[:end], non_blocking=True)
        sent.record()
        self._turn ^= 1


def _nbytes(buffer: Buffer, dtype: str) -> int:
    return int(np.prod(buffer.shape, dtype=np.int64)) * STORAGE[dtype].itemsize
