"""The Plan: a forward pass as a flat list of op calls over named, statically shaped buffers.

A Plan is built once for a capacity of M tokens and R output rows. A step may fill fewer: buffers
whose leading dimension is "M" or "R" are then used up to the step's token or row count. Decode,
chunked prefill and batches are the same Plan with other counts, and no op's result for one token
depends on the others.

Each token carries four integers (inputs of every Plan):
    slots      which sequence it belongs to; selects a row of the page table
    positions  its position: the RoPE angle, and the cache cell unless it is a tree node
    ends       keys 0 .. end-1 of its slot are committed and visible (subject to the window)
    ancestors  64-bit mask over cells end .. end+63: bit i set makes cell end+i visible
A causal token has end = position + 1 and no ancestors. A token of a block-diffusion block has end =
end of the block. A node of a speculative tree has end = number of committed keys and one bit for
each ancestor and for itself; its own bit is its highest bit, and that cell is where its key goes.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Literal, Protocol

import numpy as np

from clocher_kernels.dtypes import STORAGE

Rows = Literal["", "M", "R"]
Role = Literal["input", "state", "scratch", "output"]
Attr = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Buffer:
    """A named array of the Plan.

    Attributes:
        shape: capacity, in elements.
        dtype: name in `dtypes.STORAGE`.
        rows: "M" or "R" when the leading dimension counts the step's tokens or output rows.
        role: "input" is written by the host before a step, "state" survives between steps,
            "scratch" does not, "output" is read by the host after a step.
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
    """One op call.

    Attributes:
        op: name in `ops.OPS`.
        args: formal parameter -> buffer, weight or constant name; absent optional parameters are
            left out.
        attrs: scalar settings.
    """

    op: str
    args: Mapping[str, str]
    attrs: Mapping[str, Attr] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A forward pass.

    Attributes:
        tokens: capacity M in tokens per step.
        rows: capacity R in output rows per step.
        buffers: every buffer by name.
        consts: fp32 tables computed when the Plan was built (RoPE cosines and sines).
        weights: names of the weights it reads; the executor is given the tensors.
        calls: the op calls, in order.
    """

    tokens: int
    rows: int
    buffers: Mapping[str, Buffer]
    consts: Mapping[str, np.ndarray]
    weights: tuple[str, ...]
    calls: tuple[Call, ...]

    def scratch_bytes(self) -> int:
        """Bytes of all buffers, state (KV cache) included."""
        return sum(prod(b.shape) * STORAGE[b.dtype].itemsize for b in self.buffers.values())


class Executor(Protocol):
    """What executes a Plan. As it stands, buffers are the host's and a step returns when done.

    Attributes:
        plan: what is executed.
        isa: instruction set of the kernels.
    """

    plan: Plan
    isa: str

    def array(self, name: str) -> np.ndarray:
        """Return the live host array of a buffer, at capacity."""

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for the first `tokens` tokens and `rows` output rows."""

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call and yield each that was executed, to look for a fault."""

    def upload(self, masks: int | None = None) -> None:
        """Hand the inputs that were written over to the device, before the next step.

        Args:
            masks: how many of the masks of the sampling op, from the first on; None: all.
        """
        return

    def fetch(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of an output buffer; the next step overwrites them."""
        return self.array(name)[:count]

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of any fp32 buffer as they are now."""
        return self.array(name)[:count]

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""
        return

    def warm(self) -> None:
        """Compile and capture what steps of any size need."""
        return

    def running(self) -> AbstractContextManager[object]:
        """Keep what executes steps awake between them, while the context is open."""
        return nullcontext()

    def close(self) -> None:
        """Stop threads and release memory."""
        return
