"""One matmul by several engines, each over more copies of the weight than a cache holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bench.ops.experiment import NotMeasured, Subject
from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Bsr, Float, Fp8, Int4, Int8, Ternary, parse_format
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import quantize_activations, quantize_for_ternary
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert.synthetic import normal_matrix
from clocher_runtime.engine.footprint import ACT_GROUP
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.team.hints import Hints

_MAX_COPIES = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """Y = X W^T for X [M, K] and `copies` of W [N, K] in a format."""

    format: str
    n: int
    k: int
    m: int
    copies: int

    @classmethod
    def filling(cls, fmt: str, n: int, k: int, m: int, nbytes: int) -> "Problem":
        """Return a problem whose matrices have about this many bytes."""
        one = parse_format(fmt).nbytes((n, k))
        return cls(fmt, n, k, m, max(1, min(_MAX_COPIES, -(-nbytes // one))))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.copies * parse_format(self.format).nbytes((self.n, self.k))

    def weights(self) -> list[QuantTensor]:
        """Return the matrices."""
        fmt, std = parse_format(self.format), self.k**-0.5
        shape = (self.n, self.k)
        if not isinstance(fmt, Fp8):
            return [normal_matrix(f"w{i}", shape, 0, std, fmt) for i in range(self.copies)]
        values = np.random.default_rng(0).standard_normal(shape, np.float32) * np.float32(std)
        return copies_of(encode(values, fmt), self.copies)

    def x(self) -> np.ndarray:
        """Return X, fp32."""
        return np.random.default_rng(1).standard_normal((self.m, self.k), np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Subject):
    """An engine; `first` is X W^T of the first matrix, fp32, within relative RMS `tolerance`."""

    first: Callable[[], np.ndarray]
    tolerance: float
    products: int
    nbytes: int
    note: str = ""

    def correct(self, exact: np.ndarray) -> bool:
        """Multiply once and compare."""
        self.run()
        error = self.first().astype(np.float64) - exact
        return bool(np.sqrt((error**2).mean()) <= self.tolerance * np.sqrt((exact**2).mean()))


def copies_of(weight: QuantTensor, count: int) -> list[QuantTensor]:
    """Return tensors with the same values, each in memory of its own."""
    return [
        replace(weight, planes={name: plane.copy() for name, plane in weight.planes.items()})
        for _ in range(count)
    ]


def exact_product(problem: Problem, weights: list[QuantTensor]) -> np.ndarray:
    """Return the product with the first matrix, fp64 [M, N]."""
    return np.asarray(problem.x().astype(np.float64) @ weights[0].decode().T.astype(np.float64))


def clocher(
    problem: Problem, weights: list[QuantTensor], threads: int, act_group: int | None = ACT_GROUP
) -> Engine:
    """Return Clocher's CPU back end; `act_group` None keeps activations fp32."""
    buffers = {"x": Buffer((problem.m, problem.k), "f32", "M", "input")}
    calls = []
    op = "bsr_linear" if isinstance(weights[0].format, Bsr) else "linear"
    tolerance, note = 1e-3, ""
    if isinstance(weights[0].format, Ternary):
        tolerance, note = 0.03, "int8 activations"
    tensors = {f"w{i}": weight for i, weight in enumerate(weights)}
    for i in range(len(weights)):
        buffers[f"y{i}"] = Buffer((problem.m, problem.n), "f32", "M", "output")
        calls.append(Call(op, {"x": "x", "w": f"w{i}", "y": f"y{i}"}))
    formats = {name: weight.format for name, weight in tensors.items()}
    plan = Plan(problem.m, 1, buffers, {}, tuple(tensors), tuple(calls))
    plan = quantize_for_ternary(plan, formats)
    if act_group is not None and not has_codes(plan.calls[-1]):
        plan = quantize_activations(plan, formats, act_group)
        if has_codes(plan.calls[-1]):
            tolerance, note = 0.03, f"int8 activations, groups of {act_group}"
    # A dynamic team could use fewer threads than the result says.
    executor = CpuExecutor(plan, tensors, threads, hints=Hints(adaptive=False))
    executor.array("x")[...] = problem.x()
    return Engine(
        run=partial(executor.step, problem.m, 1),
        awake=executor.running,
        close=executor.close,
        first=partial(executor.array, "y0"),
        tolerance=tolerance,
        products=len(weights),
        nbytes=sum(weight.nbytes for weight in weights),
        note=note,
    )


def cached(problem: Problem, weights: list[QuantTensor], threads: int) -> Engine:
    """Return Clocher's back end with weights decoded ahead to fp32."""
    count = Problem.filling("f32", problem.n, problem.k, problem.m, problem.nbytes).copies
    decoded = [encode(weight.decode(), parse_format("f32")) for weight in weights[:count]]
    return clocher(replace(problem, format="f32", copies=count), decoded, threads)


def torch_cpu(problem: Problem, weights: list[QuantTensor], threads: int) -> Engine:
    """Return torch's own CPU kernels for int4, int8, bf16 and fp32 weights."""
    try:
        import torch
    except ImportError as error:
        raise NotMeasured(f"torch cannot be imported: {error}") from None
    fmt = weights[0].format
    ops: Any = torch.ops.aten
    torch.set_num_threads(threads)
    x = torch.from_numpy(problem.x())
    note, tolerance = "activations, scales and results bf16", 0.03
    if isinstance(fmt, Int4) and fmt.symmetric and fmt.group in (32, 64, 128):
        half = x.bfloat16()
        packed = [_torch_int4(torch, weight) for weight in weights]

        def call(i: int) -> Any:
            codes, scales = packed[i]
            return ops._weight_int4pack_mm_for_cpu(half, codes, fmt.group, scales)

    elif isinstance(fmt, Int8) and fmt.group == "row":
        half = x.bfloat16()
        pairs = [
            (
                torch.from_numpy(weight.planes["codes"]),
                torch.from_numpy(to_f32(weight.planes["scales"], fmt.scale_dtype)).bfloat16(),
            )
            for weight in weights
        ]

        def call(i: int) -> Any:
            return ops._weight_int8pack_mm(half, *pairs[i])

    elif isinstance(fmt, Float) and fmt.dtype in ("bf16", "f32"):
        kind = torch.bfloat16 if fmt.dtype == "bf16" else torch.float32
        values = [torch.from_numpy(weight.planes["data"]).view(kind) for weight in weights]
        part = x.to(kind)
        if fmt.dtype == "f32":
            note, tolerance = "", 1e-3

        def call(i: int) -> Any:
            return torch.nn.functional.linear(part, values[i])

    else:
        raise NotMeasured(f"no CPU kernel of torch is known here for {fmt.name}")
    count = len(weights)

    def run() -> None:
        with torch.inference_mode():
            for i in range(count):
                call(i)

    def first() -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(call(0).float().numpy())

    nbytes = sum(weight.nbytes for weight in weights)
    return Engine(
        run=run, first=first, tolerance=tolerance, products=count, nbytes=nbytes, note=note
    )


def _torch_int4(torch: Any, weight: QuantTensor) -> tuple[Any, Any]:
    packed = weight.planes["codes"]
    codes = np.empty((*packed.shape, 2), np.int32)
    codes[..., 0], codes[..., 1] = packed & 15, packed >> 4
    scales = to_f32(weight.planes["scales"], weight.format.scale_dtype)  # type: ignore[attr-defined]
    pairs = torch.zeros(scales.shape[1], scales.shape[0], 2)
    pairs[..., 0] = torch.from_numpy(scales.T.copy())
    flat = torch.from_numpy(codes.reshape(weight.shape))
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(flat, 1), pairs.bfloat16()


ENGINES: Mapping[str, Callable[[Problem, list[QuantTensor], int], Engine]] = {
    "clocher": clocher,
    "cached": cached,
    "torch": torch_cpu,
}
"""Engines by name; the first is compared with the others."""
