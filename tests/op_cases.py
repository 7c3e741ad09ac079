"""Run one case of an op on a back end, and compare what it wrote."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec, Value, case_plan
from clocher_kernels.plan import Plan


def _large() -> list[tuple[OpSpec, Case]]:
    """Sizes that cross the blocks of kernels: 64 tokens, 8 rows, 512 columns; odd groups."""
    cases = []
    for fmt, k in (
        ("f32", 1100),
        ("bf16", 1041),
        ("int4_sym_g100_f16", 1100),
        ("int4_asym_g34_f32", 613),
        ("int8_g37_bf16", 600),
        ("int8_tensor_f32", 530),
        ("fp8_e4m3_b128_bf16", 1100),
        ("mxfp4", 1088),
        ("ternary", 1041),
    ):
        sizes = {"M": 70, "N": 148, "K": k}
        name = f"large-{fmt}-m70-n148-k{k}"
        cases.append((OPS["linear"], Case(name, sizes, {}, {"w": fmt}, {"bias": True})))
    for k in (64, 1041):
        sizes = {"M": 70, "N": 20, "K": k}
        case = Case(f"large-m70-n20-k{k}", sizes, {}, {"w": "ternary"}, {"residual": True})
        cases.append((OPS["linear_i8"], case))
    limits = {"limit": 7.0, "alpha": 1.702}
    for fmt in ("mxfp4", "bf16"):
        sizes = {"M": 70, "E": 3, "A": 2, "J": 22, "I": 11, "K": 544}
        case = Case(f"large-{fmt}-m70-e3-a2-i11-k544", sizes, limits, {"w": fmt}, {"bias": True})
        cases.append((OPS["moe_gate_up"], case))
        sizes = {"M": 70, "E": 3, "A": 2, "N": 11, "I": 544}
        case = Case(f"large-{fmt}-m70-e3-a2-n11-i544", sizes, {}, {"w": fmt}, {"bias": True})
        cases.append((OPS["moe_down"], case))
    sizes, options = {"M": 70, "N": 50, "K": 1300}, {"block": (20, 600), "density": 0.7}
    cases.append((OPS["bsr_linear"], Case("large-20x600-m70-n50-k1300", sizes, options=options)))
    return cases


ALL = [*((spec, case) for spec in OPS.values() for case in spec.cases), *_large()]

Arrays = dict[str, np.ndarray]


def name_of(spec: OpSpec, case: Case) -> str:
    """Return the name of a case; the seed of its inputs is the name's CRC."""
    return f"{spec.name}-{case.id}"


class OpRun:
    """The inputs and the Plan of one case."""

    def __init__(self, spec: OpSpec, case: Case) -> None:
        self.spec, self.case = spec, case
        seed = zlib.crc32(name_of(spec, case).encode())
        self.values: Mapping[str, Value] = spec.make(case, np.random.default_rng(seed))
        self.plan: Plan = case_plan(spec, case, self.values)
        self.weights = {name: self.values[name] for name in self.plan.weights}
        self.written = [
            p.name
            for p in spec.params
            if p.name in self.plan.buffers and p.kind in ("out", "inout")
        ]

    def fill(self, executor: Any) -> None:
        """Set every buffer: inputs to their values, outputs to NaN or 0x7f bytes."""
        for name, buffer in self.plan.buffers.items():
            array = executor.array(name)
            if buffer.role == "output":
                array.view(np.uint8)[...] = 0xFF if array.dtype.kind == "f" else 0x7F
            else:
                array[...] = self.values[name]

    def outputs(self, executor: Any) -> Arrays:
        """Return copies of the buffers that the op writes."""
        return {name: executor.array(name).copy() for name in self.written}

    def run(self, make: Callable[[Plan, Mapping[str, Value]], Any]) -> Arrays:
        """Make an executor, run the whole case on it, and return what it wrote."""
        executor = make(self.plan, self.weights)
        try:
            self.fill(executor)
            executor.step(self.plan.tokens, self.plan.rows)
            return self.outputs(executor)
        finally:
            executor.close()

    def alone(self) -> str:
        """Return "M" or "R" if the op's outputs are rows that a step can compute one at a time."""
        leads = {self.plan.buffers[name].rows for name in self.written}
        lead = leads.pop()
        count = {"M": self.plan.tokens, "R": self.plan.rows, "": 1}[lead]
        return lead if not leads and count > 1 else ""

    def run_alone(self, executor: Any, lead: str, index: int) -> Arrays:
        """Run the case for one token or row, moved to the front; return the whole buffers."""
        self.fill(executor)
        for name, buffer in self.plan.buffers.items():
            if buffer.rows == lead and buffer.role != "output":
                executor.array(name)[0] = self.values[name][index]
        tokens = 1 if lead == "M" else self.plan.tokens
        executor.step(tokens, 1 if lead == "R" else self.plan.rows)
        return self.outputs(executor)


def error(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the RMS and the largest error, relative to the RMS of the expected values."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    scale = float(np.sqrt(np.mean(b * b))) or 1.0
    return float(np.sqrt(np.mean((a - b) ** 2))) / scale, float(np.abs(a - b).max()) / scale
