"""The back ends, and the choice among them. The only module that imports cpu_fallback and cuda."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import DeviceError, UsageError
from clocher_kernels.guards import available, no_driver
from clocher_kernels.plan import Executor, Plan
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import every
from clocher_runtime.engine.load import Weights
from clocher_runtime.engine.topology import pinned_cpus, threads_of

_DEVICES = dict(every(EngineConfig))["device"].takes
_MOST_READ = 256 << 20  # bytes, to measure bandwidth; more than most caches hold
Progress = Callable[[int, int], None]


def choose(device: str) -> tuple[str, str]:
    """Return the back end of `--device`, and why. Raises DeviceError, UsageError."""
    _DEVICES.check("device", device)
    if device == "cpu":
        return "cpu", "asked for by --device cpu"
    if device == "ze":
        raise DeviceError(
            "device 'ze': Clocher has no Level Zero back end; use --device cpu or --device auto"
        )
    reason = no_driver()
    if not reason:
        from clocher_kernels.cuda import unusable

        reason = unusable()
    if not reason:
        return "cuda", "asked for by --device cuda" if device == "cuda" else "auto: a GPU is here"
    if device == "auto":
        return "cpu", f"auto: {reason}"
    raise DeviceError(f"device 'cuda': {reason}; use --device cpu or --device auto")


def hand_on(isa: str | None) -> None:
    """Apply an instruction set to the CPU back end; None changes nothing.

    Child processes inherit it. UsageError: kernels were compiled for another.
    """
    if isa is None:
        return
    compiled = sys.modules.get("cpu_fallback.lanes.isa")
    if compiled is not None and isa != compiled.CURRENT.name:
        raise UsageError(
            f"isa {isa}: this process has compiled kernels for {compiled.CURRENT.name} already; "
            f"start another with CLOCHER_ISA={isa}"
        )
    os.environ["CLOCHER_ISA"] = isa


def gpu() -> dict[str, str | int]:
    """Return name, driver, clocks and memory of the current GPU."""
    from clocher_kernels.cuda import describe

    found: dict[str, str | int] = describe()
    return found


def memory_reader(nbytes: int, backend: str) -> Any:
    """Return a `bandwidth.Reader` of a working set; None without one, or if memory is low."""
    nbytes, left = min(nbytes, _MOST_READ), available()
    if backend != "cpu" or (left is not None and left < 2 * nbytes):
        return None
    from cpu_fallback.team.bandwidth import Reader

    try:
        return Reader("2m", nbytes)
    except (OSError, MemoryError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEnd:
    """A way to execute Plans.

    `activations`: precision -> type, the default first; `rounds`: precisions to which matmul inputs
    are rounded but kept in fp32; `on_host`: whether buffers are in host memory.
    """

    activations: Mapping[str, str]
    cache_dtype: str = "f16"
    chunk: int = 128
    on_host: bool = True
    rounds: frozenset[str] = frozenset()

    @property
    def default_act_prec(self) -> str:
        """The precision of activations unless a run sets another."""
        return next(iter(self.activations))


_ROUNDED = {"bf16": "bf16", "fp16": "f16", "fp8": "e4m3"}
_ROUNDS = frozenset({"int8", *_ROUNDED})

BACK_ENDS: Mapping[str, BackEnd] = {
    # By default int8 is for integer weights only; activations of float weights stay fp32.
    "cpu": BackEnd(activations={"int8": "i8", "fp32": "f32", **_ROUNDED}, rounds=_ROUNDS),
    "reference": BackEnd(activations={"fp32": "f32", "int8": "i8", **_ROUNDED}, rounds=_ROUNDS),
    "cuda": BackEnd(
        activations={"fp16": "f16", "bf16": "bf16", "fp32": "f32", "fp8": "f16"},
        cache_dtype="bf16",
        chunk=2048,
        on_host=False,
        rounds=frozenset({"fp8"}),
    ),
    "stub": BackEnd(activations={"none": "f32"}, chunk=4096, on_host=False),
}


def make_executor(
    plan: Plan,
    weights: Weights,
    config: EngineConfig,
    *,
    copied: frozenset[str] = frozenset(),
    progress: Progress | None = None,
    packing: Progress | None = None,
    beside: Executor | None = None,
) -> Executor:
    """Bind a Plan to the back end of a configuration.

    `copied`: unpacked weights to copy into large pages; `progress`, `packing`: called with (done,
    total) while kernels compile or weights are uploaded, and while many weights are packed;
    `beside`: shares its threads or stream, and is closed after this one.
    """
    executor: Executor
    if config.backend == "cpu":
        from cpu_fallback.executor import CpuExecutor

        hints, host = _hints(config, copied), beside if isinstance(beside, CpuExecutor) else None
        threads = threads_of(config)
        executor = CpuExecutor(plan, weights, threads, progress, hints, packing, host)
    elif config.backend == "cuda":
        from clocher_kernels.cuda.executor import CudaExecutor

        cuda = BACK_ENDS["cuda"]
        executor = CudaExecutor(
            plan,
            weights,
            activations=cuda.activations[config.act_prec or cuda.default_act_prec],
            fast_batch=config.fast_batch,
            progress=progress,
            beside=beside if isinstance(beside, CudaExecutor) else None,
        )
    elif config.backend == "stub":
        from clocher_runtime.engine.stub import StubExecutor

        executor = StubExecutor(plan)
    else:
        from clocher_kernels.ops import ReferenceExecutor

        executor = ReferenceExecutor(plan, weights)
    return executor


def _hints(config: EngineConfig, copied: frozenset[str]) -> Any:
    from cpu_fallback.team.placement import Hints, Placement

    cpus, ahead = pinned_cpus(config), config.prefetch_distance
    return Hints(
        prefetch_distance=ahead if isinstance(ahead, int) else None,
        stream_block_bytes=config.stream_block_bytes,
        placement=Placement(tuple(cpu.id for cpu in cpus), tuple(cpu.socket for cpu in cpus)),
        hot_replicate=config.hot_replicate,
        hot_limit=config.hot_repl_limit_mb << 20,
        copied=copied,
        adaptive=not config.stamped,  # a thread that sits out has no times
        stamped=config.stamped,
    )


def fetch_ahead(nbytes: int) -> None:
    """Let the CPU back end allocate memory for packed weights in the background."""
    from cpu_fallback.team.large_pages import fetch_ahead

    fetch_ahead(nbytes)


def trellis_rounder() -> Callable[..., None]:
    """Return what rounds columns of a matrix to trellises, `encode_trellis.round_columns`."""
    from cpu_fallback.ops.encode_trellis import round_columns

    found: Callable[..., None] = round_columns
    return found
