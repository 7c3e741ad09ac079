"""The Plan: a forward pass as a flat list of op calls over named, statically shaped buffers.

A Plan has a capacity of M tokens and R output rows. A step may use fewer: of a buffer whose leading
dimension is "M" or "R", the step's token or row count. Decode, chunked prefill and batches share
one Plan; no op's result for a token depends on the others.

Each token has four integers (inputs of every Plan):
    slots      its sequence: a row of the page table
    positions  its position: the RoPE angle, and the cache cell unless it is a tree node
    ends       keys 0 .. end-1 of its slot are committed and visible (subject to the window)
    ancestors  64-bit mask over cells end .. end+63: bit i set makes cell end+i visible
A causal token has end = position + 1 and no ancestors; a token of a block-diffusion block has end =
end of the block. A node of a speculative tree has end = number of committed keys and a bit for each
ancestor and for itself; its own bit is its highest, and that cell stores its key.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Literal, Protocol

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import UnsupportedOp

Rows = Literal["", "M", "R"]
Role = Literal["input", "state", "scratch", "output"]
Attr = int | float | str | bool

TOKEN_INPUTS = {"ids": "i32", "slots": "i32", "positions": "i32", "ends": "i32", "ancestors": "u64"}
"""Inputs of a Plan with an element for each token -> type."""
DRAW_INPUTS = {
    **dict.fromkeys(("masked", "edit_begin", "edit_end", "top_k", "draws"), "i32"),
    **dict.fromkeys(("temperature", "top_p", "min_p"), "f32"),
    "seeds": "u64",
}
"""Those of the sampling op with an element for each output row."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array of the Plan; `shape` is its capacity.

    `rows` is "M" or "R" if the leading dimension counts tokens or output rows. Role "input" is
    written by the host before a step, "state" survives steps, "scratch" does not, "output" is read
    after.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: Rows = ""
    role: Role = "scratch"

    @property
    def nbytes(self) -> int:
        """Size at capacity."""
        return prod(self.shape) * STORAGE[self.dtype].itemsize

    def allocate(self) -> np.ndarray:
        """Return a zeroed array for the buffer."""
        return np.zeros(self.shape, STORAGE[self.dtype])


@dataclass(frozen=True, slots=True)
class Call:
    """An op of `ops.OPS`: present parameter -> buffer, weight or constant; scalar attributes."""

    op: str
    args: Mapping[str, str]
    attrs: Mapping[str, Attr] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A forward pass for up to `tokens` (M) tokens and `rows` (R) output rows per step.

    `consts` are fp32 tables computed with the Plan (RoPE), `weights` names; `calls` are in order.
    """

    tokens: int
    rows: int
    buffers: Mapping[str, Buffer]
    consts: Mapping[str, np.ndarray]
    weights: tuple[str, ...]
    calls: tuple[Call, ...]

    def scratch_bytes(self) -> int:
        """Bytes of all buffers, state (KV cache) included."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


class Executor(Protocol):
    """What executes a Plan. The defaults suit host buffers and synchronous steps."""

    plan: Plan
    isa: str

    def array(self, name: str) -> np.ndarray:
        """Return the live host array of a buffer, at capacity."""

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for the first `tokens` tokens and `rows` output rows."""

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call, yielding each executed call; for host buffers only."""
        raise UnsupportedOp(f"{self.isa}: a step is executed as a whole; walk it on the CPU")

    def upload(self, masks: int | None = None, edits: int | None = None) -> None:
        """Send changed inputs, with the first masks and edits of logits, or all, to the device."""
        return

    def upload_tables(self) -> None:
        """Send changed page tables only; the other inputs stay as the last step left them."""
        return

    def fetch(
        self, name: str, count: int, meanwhile: Callable[[], None] | None = None
    ) -> np.ndarray:
        """Return the first rows of an output buffer; the next step overwrites them.

        Where steps are asynchronous `meanwhile` is called first. It may launch the next step.
        """
        return self.array(name)[:count]

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return the current first rows of any fp32 buffer."""
        return self.array(name)[:count]

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        return

    def warm(self) -> None:
        """Compile and capture for steps of any size."""
        return

    def running(self) -> AbstractContextManager[object]:
        """Keep the threads that execute steps awake between them."""
        return nullcontext()

    def close(self) -> None:
        """Stop threads and release memory."""
        return


LINE_BYTES = 64


class Touch:
    """A work-touch: reads weights with a stride for every generated token (`probes.WorkTouch`)."""

    def __init__(self, bytes_per_token: int, stride: int) -> None:
        self.bytes_per_token, self.stride = bytes_per_token, stride
        self._counters = 0, 0

    def __call__(self, tokens: int) -> None:
        """Touch the weights for some tokens that were just made."""

    def counters(self) -> tuple[int, int]:
        """Return the tokens touched so far, and the sum of all bytes read, modulo 2^64."""
        return self._counters

    @property
    def tokens(self) -> int:
        """Tokens touched so far."""
        return self.counters()[0]

    @property
    def checksum(self) -> int:
        """Sum of all bytes read, modulo 2^64."""
        return self.counters()[1]

    @property
    def bytes_touched(self) -> int:
        """Bytes walked over so far."""
        return self.tokens * self.bytes_per_token

    @property
    def bytes_read(self) -> int:
        """Bytes that had to move: one cache line of 64 bytes per read, or all of a finer walk."""
        if self.stride <= LINE_BYTES:
            return self.bytes_touched
        return self.tokens * -(-self.bytes_per_token // self.stride) * LINE_BYTES
