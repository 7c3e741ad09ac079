"""What a step runs on: weights and buffers in device memory, the sizes and graphs of steps."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from clocher_kernels.cuda.launch import Device, Launch, execute, options
from clocher_kernels.cuda.prepack import (
    TORCH_DTYPES,
    DeviceTensor,
    as_torch,
    planes_as_torch,
    rearrange,
)
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import OutOfMemory
from clocher_kernels.ops import OPS
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor

Weight = np.ndarray | QuantTensor | DeviceTensor | Tensor
Placed = DeviceTensor | Tensor
Progress = Callable[[int, int], None]

_STAGING_BYTES = 32 << 20
# Reserved for Triton's modules, the CUDA context, scratch and rearrangement temporaries.
_RESERVE_BYTES = 512 << 20
_NODE_BYTES = 4 << 10
"""Device memory of a kernel in a CUDA graph, an estimate."""


def host_bytes(weights: Mapping[str, Weight]) -> int:
    """Return the bytes of the weights that are not on the device yet."""
    return sum(w.nbytes for w in weights.values() if isinstance(w, np.ndarray | QuantTensor))


def check_memory(weights: int, buffers: int, nodes: int, free: int) -> None:
    """Raise OutOfMemory if a model does not fit; bytes, and the launches of all graphs."""
    runtime = _RESERVE_BYTES + nodes * _NODE_BYTES
    needed = weights + buffers + runtime
    if needed > free:
        raise OutOfMemory(
            f"the GPU has {free >> 20} MiB free; weights need {weights >> 20} MiB, KV cache and "
            f"buffers {buffers >> 20} MiB, the runtime {runtime >> 20} MiB; lower "
            "--context or --batch, or choose a smaller --kv-dtype or --precision"
        )


class _Pinned:
    """Two pinned buffers: one may still be in flight while the host fills the other."""

    def __init__(self, nbytes: int) -> None:
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._sent = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes of the host to the device, on the current stream."""
        pinned, sent = self._buffers[self._turn][: source.numel()], self._sent[self._turn]
        sent.synchronize()
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)
        sent.record()
        self._turn ^= 1


def place(
    weights: Mapping[str, Weight], device: Device, progress: Progress | None = None
) -> dict[str, Placed]:
    """Return the weights on the device, in the kernels' layout; `progress` gets (bytes, total)."""
    total, done = host_bytes(weights), 0
    on_gpu = device.torch_device == "cuda"
    send = _Pinned(_STAGING_BYTES).send if on_gpu and total else lambda s, t: t.copy_(s)

    def copied(source: Tensor) -> Tensor:
        nonlocal done
        target = torch.empty(source.shape, dtype=source.dtype, device=device.torch_device)
        if not source.numel():  # its strides may be 0, which are no bytes
            return target
        # Planes may be scalar or of odd size: bytes fit all.
        pieces = (
            each.reshape(-1).view(torch.uint8).split(_STAGING_BYTES) for each in (source, target)
        )
        for piece, destination in zip(*pieces, strict=True):
            send(piece, destination)
            done += piece.numel()
            if progress is not None:
                progress(done, total)
        return target

    placed: dict[str, Placed] = {}
    for name, weight in weights.items():
        if isinstance(weight, QuantTensor):
            planes = {n: copied(p) for n, p in planes_as_torch(weight).items()}
            placed[name] = rearrange(weight.format, weight.shape, planes)
        elif isinstance(weight, np.ndarray):
            placed[name] = copied(as_torch(weight, "f32"))
        else:
            placed[name] = weight
    return placed


_ALIGNMENT = 256
_TABLES = ("pages", "window_pages")
"""Inputs that change alone; they come first."""
_LAST = ("edit_ids", "edits", "allowed")
"""Large inputs, of which few elements are new."""


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
    return sum(prod(b.shape) * STORAGE[types[name]].itemsize for name, b in plan.buffers.items())


def allocate(plan: Plan, types: Mapping[str, str], device: Device) -> dict[str, Tensor]:
    """Return zeroed device memory for every non-input buffer."""
    return {
        name: torch.zeros(buffer.shape, dtype=TORCH_DTYPES[types[name]], device=device.torch_device)
        for name, buffer in plan.buffers.items()
        if buffer.role != "input"
    }


class InputBlock:
    """The inputs of a Plan in one block, uploaded by one copy, and one for each of `_LAST`.

    The host writes the NumPy arrays `host`; kernels read and advance `tensors`.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        given = {n: b for n, b in plan.buffers.items() if b.role == "input"}
        names = sorted(given, key=lambda name: (name in _LAST) - (name in _TABLES))
        inputs = {name: given[name] for name in names}
        offsets, size, self._tables = {}, 0, 0
        for name, buffer in inputs.items():
            offsets[name] = size
            size += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._tables = size if name in _TABLES else self._tables
        size = max(size, _ALIGNMENT)
        self._last = {name: (offsets[name], inputs[name]) for name in _LAST if name in inputs}
        self._head = min((at for at, _ in self._last.values()), default=size)
        self._block = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self._bytes = np.zeros(size, np.uint8)
        self.host: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, buffer in inputs.items():
            piece = slice(offsets[name], offsets[name] + buffer.nbytes)
            storage = STORAGE[buffer.dtype]
            self.host[name] = self._bytes[piece].view(storage).reshape(buffer.shape)
            dtype = TORCH_DTYPES[buffer.dtype]
            self.tensors[name] = self._block[piece].view(dtype).view(buffer.shape)
        self._pinned = _Pinned(size) if device.torch_device == "cuda" else None

    def upload(self, masks: int | None = None, edits: int | None = None) -> None:
        """Copy the inputs, with the first masks and edits or all, on the current stream."""
        pieces = [(0, self._head)]
        for name, (at, buffer) in self._last.items():
            count = masks if name == "allowed" else edits
            part = buffer.nbytes if count is None else buffer.nbytes // buffer.shape[0] * count
            pieces += [(at, at + part)] if part else []
        self._send(pieces)

    def upload_tables(self) -> None:
        """Copy the page tables, on the current stream."""
        self._send([(0, self._tables)])

    def _send(self, pieces: Sequence[tuple[int, int]]) -> None:
        for begin, end in pieces:
            source, target = torch.from_numpy(self._bytes[begin:end]), self._block[begin:end]
            if self._pinned is None:
                target.copy_(source)
            else:
                self._pinned.send(source, target)


DECODE_TOKENS = (1, 2, 4, 8, 16, 32)
PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
CONTEXT_CELLS = (512, 2048, 8192, 32768)
_ROWS_AT_ONCE = 8


def bucket(value: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending sizes >= value, or the largest."""
    return next((size for size in sizes if size >= value), sizes[-1])


def token_buckets(tokens: int, rows: int) -> tuple[int, ...]:
    """Return the captured token counts, ascending; a step is padded with copies of its last token.

    Powers of two up to `rows` (batches) and from 16 on (prompt chunks), and the capacity.
    """
    sizes = {m for m in DECODE_TOKENS if m < rows} | {rows, tokens, *PROMPT_TOKENS}
    return tuple(sorted(m for m in sizes if m <= tokens))


def row_buckets(tokens: int, rows: int, most: int) -> tuple[int, ...]:
    """Return the output row counts that a step of `tokens` tokens is captured for, ascending.

    A decode step has about as many rows as tokens, drafts included; one with prompts a row per
    sequence. Up to eight rows the head reads its weight once. Only a full chunk (`most` tokens) can
    end without a row.
    """
    sizes = {min(tokens, rows, _ROWS_AT_ONCE), min(tokens, rows)}
    return tuple(sorted(sizes | {0} if tokens == most else sizes))


def context_buckets(cells: int) -> tuple[int, ...]:
    """Return the cache cell counts that steps are captured for, ascending."""
    return (*(c for c in CONTEXT_CELLS if c < cells), cells)


_MOST_COMPILERS = 16


def compile_side_by_side(launches: Sequence[Launch]) -> None:
    """Compile kernels and what launches them, in threads, or load them from Triton's cache.

    Nothing runs.
    """
    _ask_keys()

    def compile_all(pool: ThreadPoolExecutor) -> list[Any]:
        with triton.AsyncCompileMode(pool):
            return [
                each.kernel.warmup(grid=each.grid, **each.given, **options(each))
                for each in launches
            ]

    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool:
        # A kernel that fails to compile leaves the mode on in its context, so use a copy.
        made = copy_context().run(compile_all, pool)
        # A C compiler makes the launcher of each new signature.
        list(pool.map(_load, {id(kernel): kernel for kernel in made}.values()))


@cache
def _ask_keys() -> None:
    """Ask for every kernel's key in Triton's cache, in one order.

    A function's key lacks the constants of those it calls if theirs were not asked for before, so
    another order, as of another model's kernels, would find nothing in the cache.
    """
    for name in sorted(name for name in sys.modules if name.startswith(__package__)):
        for value in vars(sys.modules[name]).values():
            if isinstance(value, triton.JITFunction):
                value.cache_key  # noqa: B018


def _load(kernel: Any) -> None:
    """Make the launcher of a kernel, or of the future of one, and load it."""
    kernel = getattr(kernel, "result", lambda: kernel)()
    kernel.run  # noqa: B018  loads when it is first asked for


def capture(launches: Sequence[Launch], stream: "torch.cuda.Stream | None") -> Callable[[], None]:
    """Return a function that replays the launches of a step as one CUDA graph.

    They run once first, to load every kernel. Their tensors must stay alive. Without a stream (no
    GPU) they are executed one by one.
    """
    if stream is None:
        return lambda: execute(launches)
    with torch.cuda.stream(stream):
        execute(launches)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # GPU work of other threads of this process must not break the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            execute(launches)

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay
