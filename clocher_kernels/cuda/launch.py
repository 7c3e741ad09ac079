"""A kernel launch as data, and the device it is made for.

Lowering returns launches and runs nothing. The same list is executed (on a GPU, or interpreted on
CPU tensors), captured into a CUDA graph, or compiled ahead of time from meta tensors (`aot`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Arg = Tensor | int | float | None

TL_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}
"""Types of matmul operands."""

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
"""That of Triton. With 3.4 gdc_wait does not compile, nor a product of fewer than 16 columns."""
LEAST_TOKENS = 8 if VERSION >= (3, 5) else 16
"""Tokens of a matmul on tensor cores."""


@dataclass(frozen=True, slots=True)
class Device:
    """The target of launches.

    `torch_device` is "cuda", "cpu" (interpreter) or "meta" (compile only); `capability` is 80, 86,
    89, 90, 100, 120, or 0 for the interpreter. `fast_batch`: a token's sums may have another order
    beside others than alone; those of int4 in bricks never have.
    """

    torch_device: str
    capability: int
    sms: int
    fast_batch: bool = False
    _scratch: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def asm(self) -> bool:
        """Whether kernels may use inline assembly."""
        return self.capability > 0

    @property
    def pdl(self) -> bool:
        """Whether programmatic dependent launch is available."""
        return self.capability >= 90 and VERSION >= (3, 5)

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a zeroed array that lives as long as the device object.

        Calls with the same name, shape and type share it: launches of one stream do not overlap. A
        kernel that relies on zeros (counters) leaves zeros behind.
        """
        key = (name, shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros(shape, dtype=dtype, device=self.torch_device)
        return self._scratch[key]


INTERPRETER = Device("cpu", 0, 4)


def current_device() -> Device:
    """Return the current GPU; RuntimeError if torch finds none."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = properties.major * 10 + properties.minor
    return Device("cuda", capability, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: a `triton.jit` function, its grid, its arguments.

    `args` are run-time arguments (None: absent tensor); the kernel is compiled for `constants`,
    attributes of its last parameter C. `pdl`: the kernel waits for its predecessor itself
    (`gdc_wait`). `weights` read per thread and turn of the main loop bound instruction budgets; 0:
    not a weight-streaming kernel. `stages`: turns of the main loop whose loads are in flight,
    through shared memory if more than one. `registers`: the most of a thread; 0: what it needs.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Arg]
    constants: Mapping[str, Any]
    num_warps: int = 4
    pdl: bool = False
    weights: int = 0
    stages: int = 1
    registers: int = 0

    @property
    def given(self) -> dict[str, Any]:
        """All arguments of the kernel by name, in order."""
        compiled = isinstance(self.kernel, triton.JITFunction)
        return {**self.args, "C": _Constants(repr(self.constants), compiled, self.constants)}


@dataclass(frozen=True)
class _Constants:
    """A kernel's constants as attributes: the compiler gets constexprs, the interpreter values.

    Equal ones, by their text, share what Triton has compiled.
    """

    text: str
    compiled: bool
    values: Mapping[str, Any] = field(compare=False, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(f"the launch has no constant {name}")
        return tl.constexpr(self.values[name]) if self.compiled else self.values[name]


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: Device,
    num_warps: int = 4,
    weights: int = 0,
    stages: int = 1,
    /,
    **given: Any,
) -> Launch:
    """Return a launch; arguments in capitals are constants, None is an absent tensor."""
    constants = {name: value for name, value in given.items() if name.isupper()}
    constants |= {"ASM": device.asm, "PDL": device.pdl, "WGMMA": device.capability == 90}
    args = {name: given.get(name) for name in kernel.arg_names if name != "C"}
    if unknown := {n for n in given if given[n] is not None} - args.keys() - constants.keys():
        raise TypeError(f"{kernel} has no parameter {', '.join(sorted(unknown))}")
    return Launch(kernel, grid, args, constants, num_warps, device.pdl, weights, stages)


def options(launch: Launch) -> dict[str, Any]:
    """Return the compiler options of a launch, the same at run time and ahead of time.

    In kernels that stream weights, two stages or more would turn 16-byte loads into cp.async and
    lose their eviction policy. The budgets need a * b + c fused; Triton 3.10 does not by default.
    """
    chosen: dict[str, Any] = {
        "num_warps": launch.num_warps,
        "num_stages": launch.stages,
        "enable_fp_fusion": True,
    }
    if launch.pdl:
        chosen["launch_pdl"] = True
    if launch.registers:
        chosen["maxnreg"] = launch.registers
    return chosen


def execute(launches: Iterable[Launch]) -> None:
    """Run launches in order on the current stream."""
    for launch in launches:
        launch.kernel[launch.grid](**launch.given, **options(launch))
