"""Every op on every case of its contract: the kernels against the references, on this device.

The weights are quantised, the reference computes in fp64 on what they decode to. Outputs are NaN
before each run; a second run and the replay of a CUDA graph must give the same bits; a token alone
must give the bits that it gives in a batch of up to eight.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.ops.op_run import OpRun, error
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.cuda.prepack import prepack
from clocher_kernels.cuda.tensors import TORCH_DTYPES, as_torch
from clocher_kernels.cuda.timer import reason
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Tolerance, Value
from clocher_kernels.quant_tensor import QuantTensor
from clocher_kernels.reference import ReferenceExecutor

ACTIVATIONS = ("f32", "f16", "bf16")
_DRY_CASES = ("rms_norm-heads-m2-d20", "gather_rows-r5-k37")
_MOST_ALONE = 8


def items(dry: bool) -> list[Item]:
    """Return one item for each case, and one for the ops that no kernel or no contract names."""
    cases = [(spec, case) for spec in OPS.values() for case in spec.cases]
    found = [Item(f"{s.name}-{c.id}", partial(_check_case, spec=s, case=c)) for s, c in cases]
    if dry:
        found = [item for item in found if item.id in _DRY_CASES]
    return [Item("coverage", _coverage), *found]


def run_once(setting: Setting, spec: OpSpec, case: Case) -> list[Row]:
    """Run a case without comparing it, for tools that watch the kernels."""
    trial = Trial(setting, spec, case, "f16" if spec.narrow else "f32")
    trial.launch()
    return [{"op": spec.name, "case": case.id}]


def judge(limit: Tolerance, got: np.ndarray, expected: np.ndarray) -> Row:
    """Compare an output with its reference; NaN never passes.

    Args:
        limit: what is accepted.
        got: fp32, or the stored integers.
        expected: the same, of the same shape.
    """
    if limit == EXACT or got.dtype.kind != "f":
        wrong = int(np.count_nonzero(got != expected))
        if wrong:
            return {"wrong": wrong, "status": "failed", "reason": f"{wrong} values differ"}
        return {"wrong": 0, "status": "ok"}
    rms, largest = error(got, expected)
    if rms <= limit.rms and largest <= limit.max:
        return {"rms": rms, "max": largest, "status": "ok"}
    # Not a number would not be JSON either.
    row: Row = {"status": "failed", "reason": f"rms {rms:.3g}, largest error {largest:.3g}"}
    return row | ({"rms": rms, "max": largest} if math.isfinite(rms) else {})


def _coverage(setting: Setting) -> list[Row]:
    """Report ops without a kernel, and kernels that no contract describes."""
    missing = {
        (spec.name, case.missing["cuda"])
        for spec in OPS.values()
        for case in spec.cases
        if "cuda" in case.missing
    }
    missing |= {(op, "there is no kernel") for op in OPS if op not in LOWER}
    rows: list[Row] = [
        {"op": op, "status": "not measured", "reason": why} for op, why in sorted(missing)
    ]
    extra = sorted(set(LOWER) - set(OPS))
    return [*rows, {"ops": len(OPS), "kernels": len(LOWER), "without_contract": extra}]


def activations(spec: OpSpec, case: Case) -> list[str]:
    """Return how the activations of a case may be stored; bf16 is tried on small batches."""
    if "cuda" in case.missing:
        return []
    if not spec.narrow:
        return ["f32"]
    few = case.sizes.get("M", 1) in (1, 2)
    return [act for act in ACTIVATIONS if act != "bf16" or few]


def launches(setting: Setting) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """Return what checking the op table launches, by the name of the case."""
    for spec in OPS.values():
        for case in spec.cases:
            for act in activations(spec, case):
                trial = partial(Trial, setting, spec, case, act)
                yield f"{spec.name}-{case.id}", lambda make=trial: make().launches()


def _check_case(setting: Setting, spec: OpSpec, case: Case) -> list[Row]:
    rows = []
    for act in activations(spec, case):
        row: Row = {"op": spec.name, "case": case.id, "act": act}
        try:
            rows.append(row | Trial(setting, spec, case, act).check())
        except (UnsupportedOp, ShapeError) as error:
            rows.append({**row, "status": "refused", "reason": reason(error)})
    return rows


class Trial(OpRun):
    """One case with its activations stored in one type."""

    def __init__(self, setting: Setting, spec: OpSpec, case: Case, act: str) -> None:
        self.setting, self.act = setting, act
        self.types = dict.fromkeys(spec.narrow, TORCH_DTYPES[act])
        self.limit = spec.allowed(case, "cuda", act)
        super().__init__(spec, case, f"-{act}", self._rounded)

    def launches(self) -> list[Launch]:
        """Return the launches, on arguments of their own."""
        return self.setting.lower(self.spec.name, **self._tensors(), **self.case.attrs)

    def launch(self) -> None:
        """Run the kernels once."""
        execute(self.launches())
        self.setting.timer.synchronize()

    def check(self) -> Row:
        """Run the kernels and compare what they write with the reference and with itself."""
        tensors = self._tensors()
        kept = {n: tensors[n].clone() for n in self.written if n in self.values}
        launches = self.setting.lower(self.spec.name, **tensors, **self.case.attrs)
        first = self._launched(partial(execute, launches), tensors, kept)
        row: Row = {"status": "ok"}
        for name, expected in self.run(ReferenceExecutor).items():
            part = judge(self.limit, *self._comparable(name, first[name], expected))
            row["rms"] = max(row.get("rms", 0.0), part.get("rms", 0.0))
            row["max"] = max(row.get("max", 0.0), part.get("max", 0.0))
            if part["status"] != "ok":
                row |= {"status": "failed", "reason": f"{name}: {part['reason']}"}
        again = self._launched(partial(execute, launches), tensors, kept)
        replay = self.setting.timer.replay([partial(execute, launches)])
        graph = self._launched(replay, tensors, kept)
        for what, other in (("a second run", again), ("the graph's replay", graph)):
            if any(not _same(first[n], other[n]) for n in self.written):
                row |= {"status": "failed", "reason": f"{what} gave other bits"}
        return self._check_alone(row, tensors, first)

    def _check_alone(self, row: Row, tensors: dict[str, Any], batch: dict[str, Any]) -> Row:
        """Compare each token of a small batch with the same token alone, bit by bit."""
        leads = {self.plan.buffers[name].rows for name in self.written}
        count = self.plan.tokens
        if leads != {"M"} or not 1 < count <= _MOST_ALONE or self.act == "bf16":
            return row
        shared = {n: t for n, t in tensors.items() if self._rows(n) != "M"}
        one = {n: tensors[n][:1].clone() for n in tensors if self._rows(n) == "M"}
        launches = self.setting.lower(self.spec.name, **shared, **one, **self.case.attrs)
        for index in range(count):
            for name, tensor in one.items():
                if name in self.values:
                    source = self._tensor(name, self.values[name])
                    tensor.copy_(source[index : index + 1])
                else:
                    poison(tensor)
            execute(launches)
            for name in self.written:
                if not _same(one[name], batch[name][index : index + 1]):
                    return row | {
                        "status": "failed",
                        "reason": f"{name}: token {index} alone gives other bits",
                    }
        return row | {"alone": True}

    def _tensors(self) -> dict[str, Any]:
        """Return the arguments on the device; outputs are poisoned."""
        tensors = {name: self._tensor(name, value) for name, value in self.values.items()}
        for name in self.written:
            if name not in tensors:
                tensors[name] = self._empty(name, self.plan.buffers[name].shape)
                poison(tensors[name])
        return tensors

    def _launched(
        self, run: Any, tensors: dict[str, Any], kept: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        for name in self.written:
            if name in kept:
                tensors[name].copy_(kept[name])
            else:
                poison(tensors[name])
        run()
        self.setting.timer.synchronize()
        return {name: tensors[name].clone() for name in self.written}

    def _comparable(
        self, name: str, got: torch.Tensor, expected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as fp32 or as stored integers; equality is asked of rounded references."""
        got = got.cpu()
        if expected.dtype == np.uint16:  # a cache of bf16
            return got.view(torch.int16).numpy().view(np.uint16), expected
        if expected.dtype.kind != "f":
            return got.numpy().view(expected.dtype), expected
        if name in self.types and self.limit == EXACT:
            expected = torch.from_numpy(expected).to(self.types[name]).float().numpy()
        return got.float().numpy(), expected.astype(np.float32)

    def _rows(self, name: str) -> str:
        return self.plan.buffers[name].rows if name in self.plan.buffers else ""

    def _rounded(self, name: str, value: Value) -> Value:
        if name not in self.types or isinstance(value, QuantTensor):
            return value
        if value.dtype == np.int8:  # codes are what they are
            del self.types[name]
            return value
        return torch.from_numpy(value.copy()).to(self.types[name]).float().numpy()

    def _tensor(self, name: str, value: Value) -> Any:
        if isinstance(value, QuantTensor):
            return prepack(value, self.setting.device)
        if name in self.plan.buffers:
            tensor = as_torch(value.copy(), self.plan.buffers[name].dtype)
            tensor = tensor.to(self.types.get(name, tensor.dtype))
        else:
            tensor = as_torch(value.copy(), "f32" if value.dtype.kind == "f" else "i32")
        return tensor.to(self.setting.place)

    def _empty(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = self.types.get(name, TORCH_DTYPES[self.plan.buffers[name].dtype])
        return torch.empty(shape, dtype=dtype, device=self.setting.place)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with 0x7f bytes."""
    tensor.view(torch.uint8).fill_(0xFF if tensor.is_floating_point() else 0x7F)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
