"""Which back ends exist, which one a run gets and why. The one door to cpu_fallback and cuda."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Protocol

import numpy as np

from clocher_kernels.errors import DeviceError, UsageError
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor

DEVICES = ("auto", "cpu", "cuda", "ze")
KV_DEFAULT = {"cpu": "f32", "reference": "f32", "cuda": "bf16"}
"""Back end -> storage of the KV cache unless a run asks for another."""
ACTIVATIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"fp32": "f32"},
    "reference": {"fp32": "f32"},
    "cuda": {"fp16": "f16", "bf16": "bf16", "fp32": "f32"},
}
"""Back end -> precision of activations that a run may ask for -> type; the first is the default."""
Progress = Callable[[int, int], None]


class Executor(Protocol):
    """What executes a Plan."""

    plan: Plan
    isa: str

    def array(self, name: str) -> np.ndarray:
        """Return the host array of an input buffer, at capacity."""

    def upload(self) -> None:
        """Hand the inputs that were written over to the device, before the next step."""

    def step(self, tokens: int, rows: int) -> None:
        """Execute the Plan for the first `tokens` tokens and `rows` output rows."""

    def fetch(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of an output buffer after the steps so far."""

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""

    def warm(self) -> None:
        """Compile and capture what steps of any size need."""

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
    if device == "ze":
        raise DeviceError(
            "device 'ze': Clocher has no Level Zero back end; use --device cpu or --device auto"
        )
    from clocher_kernels.cuda.probe import unusable

    reason = unusable()
    if not reason:
        return "cuda", "asked for by --device cuda" if device == "cuda" else "auto: a GPU is here"
    if device == "auto":
        return "cpu", f"auto: {reason}"
    raise DeviceError(f"device 'cuda': {reason}; use --device cpu or --device auto")


def gpu() -> dict[str, str | int]:
    """Return what is known about the current GPU: name, driver, clocks, memory."""
    from clocher_kernels.cuda.probe import describe

    return asdict(describe())


def default_act_prec(name: str) -> str:
    """Return the precision of activations that a back end takes unless told otherwise."""
    return next(iter(ACTIVATIONS[name]))


def make_executor(
    name: str,
    plan: Plan,
    weights: Mapping[str, np.ndarray | QuantTensor],
    threads: int,
    progress: Progress | None = None,
    act_prec: str | None = None,
) -> Executor:
    """Bind a Plan to a back end.

    Args:
        name: "cpu", "cuda" or "reference".
        plan: what to execute.
        weights: tensors by name.
        threads: threads of the CPU team.
        progress: called with (done, total) while kernels compile, or weights are copied to the GPU.
        act_prec: one of `ACTIVATIONS[name]`; None: its first.
    """
    if name == "reference":
        from clocher_kernels.reference import ReferenceExecutor

        return ReferenceExecutor(plan, weights)
    if name == "cpu":
        from cpu_fallback.executor import CpuExecutor

        executor: Executor = CpuExecutor(plan, weights, threads=threads, progress=progress)
        return executor
    if name == "cuda":
        from clocher_kernels.cuda.executor import CudaExecutor

        activations = ACTIVATIONS["cuda"][act_prec or default_act_prec("cuda")]
        on_gpu: Executor = CudaExecutor(plan, weights, activations=activations, progress=progress)
        return on_gpu
    raise UsageError(f"back end is {name!r}; known: cpu, cuda, reference")
