"""Cases of the op table, at real sizes too, run on a back end and compared."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from clocher_kernels.formats.ggml import GGML_KINDS, Ggml
from clocher_kernels.ops import OPS, OpSpec, cases
from clocher_kernels.ops.contract import EXACT, Case, Cost, Real, Tolerance, Value
from clocher_kernels.ops.quantize import groups_of
from clocher_kernels.plan import Plan

_PAGE = 16  # cells of a page in every case
_KIND = {"aligned", "wide"}  # words of case ids about replaced sizes

Arrays = dict[str, np.ndarray]
Row = dict[str, Any]


def name_of(spec: OpSpec, case: Case) -> str:
    """Return the name of a case; the seed of its inputs is the name's CRC."""
    return f"{spec.name}-{case.id}"


class OpRun:
    """The inputs and the Plan of one case; `salt` varies the seed, `change` an input's value."""

    def __init__(
        self,
        spec: OpSpec,
        case: Case,
        salt: str = "",
        change: Callable[[str, Value], Value] = lambda name, value: value,
    ) -> None:
        self.spec, self.case = spec, case
        seed = zlib.crc32(f"{name_of(spec, case)}{salt}".encode())
        made = cases.inputs(spec, case, np.random.default_rng(seed))
        self.values: Mapping[str, Value] = {n: change(n, value) for n, value in made.items()}
        self.plan: Plan = cases.case_plan(spec, case, self.values)
        self.weights = {name: self.values[name] for name in self.plan.weights}
        self.written = [
            p.name
            for p in spec.params
            if p.name in self.plan.buffers and p.kind in ("out", "inout")
        ]

    def cost(self) -> Cost:
        """Return the cost of one call."""
        outputs = {name: self.plan.buffers[name].allocate() for name in self.written}
        return cases.cost(self.spec, {**outputs, **self.values}, self.case.attrs)

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
        """Make an executor, run the whole case on it, and return its outputs."""
        executor = make(self.plan, self.weights)
        try:
            self.fill(executor)
            executor.step(self.plan.tokens, self.plan.rows)
            return self.outputs(executor)
        finally:
            executor.close()


def error(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the RMS and the largest error, relative to the RMS of the expected values."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    scale = float(np.sqrt(np.mean(b * b))) or 1.0
    return float(np.sqrt(np.mean((a - b) ** 2))) / scale, float(np.abs(a - b).max()) / scale


def judge(limit: Tolerance, outputs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Row:
    """Compare outputs (fp32 or stored integers) with their references; NaN always fails."""
    row: Row = {"status": "ok", "rms": 0.0, "max": 0.0}
    for name, (got, expected) in outputs.items():
        why = ""
        if limit == EXACT or got.dtype.kind != "f":
            if wrong := int(np.count_nonzero(got != expected)):
                why = f"{wrong} values differ"
        else:
            found = dict(zip(("rms", "max"), error(got, expected), strict=True))
            if math.isfinite(found["rms"]):  # NaN is not JSON
                row |= {key: max(row[key], value) for key, value in found.items()}
            if not (found["rms"] <= limit.rms and found["max"] <= limit.max):
                why = f"rms {found['rms']:.3g}, largest error {found['max']:.3g}"
        if why:
            row |= {"status": "failed", "reason": f"{name}: {why}"}
    return row


def real_cases() -> list[tuple[OpSpec, Case]]:
    """Return every op with its cases at real sizes."""
    found = []
    for spec in OPS.values():
        sized = [
            resized(spec, case, real)
            for real in spec.real
            for case in spec.cases
            if fnmatchcase(case.id, real.cases)
        ]
        by_id = {case.id: case for case in (sized if spec.real else spec.cases)}
        found += [(spec, case) for case in by_id.values()]
    return found


def resized(spec: OpSpec, case: Case, real: Real) -> Case:
    """Return a case with other sizes, of whole blocks, and the attributes that depend on them."""
    attrs, sizes = dict(case.attrs), dict(real.sizes)
    fmt = case.formats.get(spec.matrix.name, "") if spec.matrix else ""
    if spec.matrix and fmt in GGML_KINDS:
        columns, block = spec.matrix.letters[-1], Ggml(fmt).block
        sizes[columns] = -(-sizes[columns] // block) * block
    if "group" in attrs:
        sizes["B"] = groups_of(sizes[spec.param("x").letters[-1]], int(attrs["group"]))
    if "cache_dtype" in attrs:
        sizes |= {"F": sizes["N"] * sizes["D"], "T": _PAGE, "P": sizes["S"] * sizes["B"]}
        if "scale" in attrs:
            attrs["scale"] = sizes["D"] ** -0.5
    words = case.id.split("-") if real.label is None else [real.label]
    kept = [word for word in words if word and word not in _KIND and not _is_size(word, case)]
    spelled = [f"{letter.lower()}{sizes[letter]}" for letter in real.sizes]
    return replace(case, id="-".join(kept + spelled), sizes=sizes, attrs=attrs)


def _is_size(word: str, case: Case) -> bool:
    return word[1:].isdigit() and case.sizes.get(word[0].upper()) == int(word[1:])
