"""CUDA C++ kernels, compiled by NVRTC through CuPy, which is imported on use: the work-touch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clocher_kernels.errors import DeviceError, ModelError
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.plan import Touch

OPTIONS = ("--std=c++14",)

_THREADS = 256


def source() -> str:
    """Return the text of work_touch.cu."""
    return Path(__file__).with_name("work_touch.cu").read_text(encoding="utf-8")


class DeviceWorkTouch(Touch):
    """Reads device memory with a stride for every generated token; see `probes.WorkTouch`.

    Counters live on the device, so CUDA graph replays continue them. DeviceError without CuPy,
    ModelError if there is nothing to touch or a buffer is not contiguous.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        bytes_per_token: int,
        stride: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(bytes_per_token, stride)
        self._on = stream
        if not bytes_per_token:
            return
        self._parts = [buffer for buffer in buffers if buffer.nbytes]
        if not self._parts:
            raise ModelError("work-touch: the model has no weights on the device to touch")
        if not all(part.is_contiguous() for part in self._parts):
            raise ModelError("work-touch: a buffer is not contiguous; pass it as it was allocated")
        refuse_in_window("compile a CUDA kernel")
        self._cupy = _import_cupy()
        module = self._cupy.RawModule(code=source(), options=OPTIONS)
        self._kernel = module.get_function("work_touch")

        ends, end = [], 0
        for part in self._parts:
            end += part.nbytes
            ends.append(end)
        device = self._parts[0].device
        bases = [part.data_ptr() for part in self._parts]
        self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)
        # Tokens, checksum, position, blocks that arrived.
        self._state = torch.zeros(4, dtype=torch.int64, device=device)
        # Readers of the counters must synchronise with this stream.
        self._stream = stream or torch.cuda.current_stream(device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        reads = -(-bytes_per_token // stride)
        self._blocks = min(-(-reads // _THREADS), 8 * sms)

    def __call__(self, tokens: int) -> None:
        """Launch the touch for tokens just generated on the stream."""
        if not self.bytes_per_token or not tokens:
            return
        u32, u64 = self._cupy.uint32, self._cupy.uint64
        arguments = (
            u64(self._bases.data_ptr()),
            u64(self._ends.data_ptr()),
            u32(len(self._parts)),
            u64(self.bytes_per_token),
            u64(self.stride),
            u32(tokens),
            u64(self._state.data_ptr()),
        )
        self._stream = self._on or torch.cuda.current_stream()
        with self._cupy.cuda.ExternalStream(self._stream.cuda_stream):
            self._kernel((self._blocks,), (_THREADS,), arguments)

    def counters(self) -> tuple[int, int]:
        """Return the tokens touched so far, and the checksum. Waits for the device."""
        if not self.bytes_per_token:
            return 0, 0
        with torch.cuda.stream(self._stream):
            return int(self._state[0]), int(self._state[1]) % (1 << 64)


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"the work-touch on a GPU needs CuPy, which cannot be imported ({error}); install "
            "clocher[cuda] or clocher[cuda13], or switch the touch off"
        ) from None
    return cupy
