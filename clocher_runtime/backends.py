"""Which back ends exist, which one a run gets and why. The one door to cpu_fallback and cuda."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from clocher_kernels.errors import DeviceError, UsageError
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor

DEVICES = ("auto", "cpu", "cuda", "ze")
Progress = Callable[[int, int], None]


class Executor(Protocol):
    """What executes a Plan."""

    plan: Plan
    isa: str

    def array(self, name: str) -> np.ndarray:
        """Return the live host array of an input or output buffer, at capacity."""

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for the first `tokens` tokens and `rows` output rows."""

    def running(self) -> AbstractContextManager[object]:
        """Keep what executes steps awake between them, while the context is open."""

    def close(self) -> None:
        """Stop threads and release memory."""


def choose(device: str) -> tuple[str, str]:
    """Return the back end for a device flag, and the reason for the choice.

    Args:
        device: "auto", "cpu", "cuda" or "ze".

    Raises:
        DeviceError: a device asked for by name is not available.
        UsageError: the name is not known.
    """
    if device not in DEVICES:
        raise UsageError(f"device is {device!r}; known: {', '.join(DEVICES)}")
    if device == "cpu":
        return "cpu", "asked for by --device cpu"
    if device == "auto":
        return "cpu", "auto: this version has no CUDA back end yet"
    missing = {
        "cuda": "this version of Clocher has no CUDA back end yet",
        "ze": "Clocher has no Level Zero back end",
    }
    raise DeviceError(f"device {device!r}: {missing[device]}; use --device cpu or --device auto")


def make_executor(
    name: str,
    plan: Plan,
    weights: Mapping[str, np.ndarray | QuantTensor],
    threads: int,
    progress: Progress | None = None,
) -> Executor:
    """Bind a Plan to a back end.

    Args:
        name: "cpu" or "reference".
        plan: what to execute.
        weights: tensors by name.
        threads: threads of the CPU team.
        progress: called with (done, total) while kernels compile.
    """
    if name == "reference":
        from clocher_kernels.reference import ReferenceExecutor

        return ReferenceExecutor(plan, weights)
    if name == "cpu":
        from cpu_fallback.executor import CpuExecutor

        executor: Executor = CpuExecutor(plan, weights, threads=threads, progress=progress)
        return executor
    raise UsageError(f"back end is {name!r}; known: cpu, reference")
