"""Which back ends exist, which one a run gets and why. The one door to cpu_fallback and cuda."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from clocher_kernels.errors import DeviceError, UsageError
from clocher_kernels.plan import Call, Plan
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.arguments import one_of
from clocher_runtime.engine.tuning import Tuning

DEVICES = ("auto", "cpu", "cuda", "ze")
KV_DEFAULT = {"cpu": "f16", "reference": "f16", "cuda": "bf16"}
"""Back end -> storage of the KV cache unless a run asks for another."""
CHUNK_DEFAULT = {"cpu": 128, "reference": 128, "cuda": 512}
"""Back end -> tokens of a prefill step unless a run asks for another number."""
ACTIVATIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"int8": "i8", "fp32": "f32"},
    "reference": {"fp32": "f32", "int8": "i8"},
    "cuda": {"fp16": "f16", "bf16": "bf16", "fp32": "f32"},
}
"""Back end -> precision of activations that a run may ask for -> type; the first is the default.

On the CPU int8 is for products with integer weights; what meets float weights stays fp32.
"""
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

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call and yield each that was executed, to look for a fault."""

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of any fp32 buffer as they are now."""

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
    one_of("device", device, DEVICES)
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


def require_gpu(purpose: str) -> None:
    """Fail if the CUDA back end cannot run here.

    Args:
        purpose: what needs it, as an error names it.

    Raises:
        DeviceError: there is no GPU that it can use.
    """
    from clocher_kernels.cuda.probe import unusable

    reason = unusable()
    if reason:
        raise DeviceError(f"{purpose} needs a GPU: {reason}; run it on a machine that has one")


def tune_tiles(weights: Iterable[tuple[str, int, int]], progress: Progress) -> dict[str, Any]:
    """Return the table of the fastest tiles of the current GPU.

    Args:
        weights: format name, N and K of each weight that is multiplied by.
        progress: called with (weights done, weights in all).
    """
    from clocher_kernels.cuda.tune import tune_model

    table: dict[str, Any] = tune_model(weights, progress)
    return table


def acted_on(executor: Executor) -> frozenset[str]:
    """Return the fields of a `Tuning` that change what an executor does."""
    names: frozenset[str] = getattr(executor, "acted_on", frozenset())
    return names


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
    tuning: Tuning | None = None,
    packing: Progress | None = None,
) -> Executor:
    """Bind a Plan to a back end.

    Args:
        name: "cpu", "cuda" or "reference".
        plan: what to execute.
        weights: tensors by name.
        threads: threads of the CPU team.
        progress: called with (done, total) while kernels compile, or weights are copied to the GPU.
        act_prec: one of `ACTIVATIONS[name]`; None: its first.
        tuning: placement and memory access of the CPU team.
        packing: called with (done, total) while the CPU back end packs weights, if they are many.
    """
    if name == "reference":
        from clocher_kernels.reference import ReferenceExecutor

        return ReferenceExecutor(plan, weights)
    if name == "cpu":
        from cpu_fallback.executor import CpuExecutor
        from cpu_fallback.team.hints import Hints
        from cpu_fallback.team.placement import Placement

        tuning = tuning or Tuning()
        hints = Hints(
            prefetch_distance=tuning.prefetch_distance,
            stream_block_bytes=tuning.stream_block_bytes,
            placement=Placement(tuning.cpus, tuning.sockets),
            hot_replicate=tuning.hot_replicate,
            hot_limit=tuning.hot_limit,
            copied=tuning.copied,
            adaptive=not tuning.stamped,  # a thread that sits out has no times
            stamped=tuning.stamped,
        )
        executor: Executor = CpuExecutor(plan, weights, threads, progress, hints, packing)
        return executor
    if name == "cuda":
        from clocher_kernels.cuda.executor import CudaExecutor

        activations = ACTIVATIONS["cuda"][act_prec or default_act_prec("cuda")]
        on_gpu: Executor = CudaExecutor(plan, weights, activations=activations, progress=progress)
        return on_gpu
    raise UsageError(f"back end is {name!r}; known: cpu, cuda, reference")
