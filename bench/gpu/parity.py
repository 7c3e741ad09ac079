"""One case of an op on a device against its reference: for `pytest -m gpu`, smoke and timing.

Outputs are NaN before each run. A second run and a graph's replays must give the same bits; so must
a token alone and in a batch of up to 32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.setting import Row, Setting
from bench.ops import OpRun, judge
from clocher_kernels.cuda.executor import LOWER
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.prepack import TORCH_DTYPES, as_torch, prepack
from clocher_kernels.ops import ReferenceExecutor
from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Value
from clocher_kernels.quant_tensor import QuantTensor

ACTIVATIONS = ("f32", "f16", "bf16")
_MOST_ALONE = 32
_REPLAYS = 20
"""A missing barrier shows only now and then."""

Tensors = dict[str, Any]


def activations(spec: OpSpec, case: Case) -> list[str]:
    """Return the activation types to try; bf16 only for small batches."""
    if "cuda" in case.missing or not spec.narrow:
        return [] if "cuda" in case.missing else ["f32"]
    few = case.sizes.get("M", 1) in (1, 2)
    return [act for act in ACTIVATIONS if act != "bf16" or few]


class Trial(OpRun):
    """One case with one activation type."""

    def __init__(self, setting: Setting, spec: OpSpec, case: Case, act: str) -> None:
        self.setting, self.act = setting, act
        self.types = dict.fromkeys(spec.narrow, TORCH_DTYPES[act])
        self.limit = spec.allowed(case, "cuda", act)
        super().__init__(spec, case, f"-{act}", self._rounded)

    def launches(self, tensors: Tensors | None = None) -> list[Launch]:
        """Return the launches, on arguments of their own if none are given."""
        arguments = (tensors or self.tensors()) | dict(self.case.attrs)
        lower: Callable[..., list[Launch]] = LOWER[self.spec.name]
        return lower(**arguments, device=self.setting.device)

    def check(self) -> Row:
        """Run the kernels; compare outputs with the reference and with a second run."""
        tensors = self.tensors()
        kept = {name: tensors[name].clone() for name in self.written}
        launches = self.launches(tensors)

        def outputs(run: Callable[[], object]) -> dict[str, torch.Tensor]:
            for name in self.written:
                tensors[name].copy_(kept[name])
            run()
            self.setting.synchronize()
            return {name: tensors[name].clone() for name in self.written}

        once = partial(execute, launches)
        first = outputs(once)
        expected = self.run(ReferenceExecutor)
        row = judge(self.limit, {n: self._comparable(n, first[n], expected[n]) for n in expected})
        replay = self.setting.replay([once])
        replays = [("the graph's replay", replay)] * (1 if self.setting.dry else _REPLAYS)
        for what, run in (("a second run", once), *replays):
            again = outputs(run)
            if any(not _same(first[name], again[name]) for name in self.written):
                row |= {"status": "failed", "reason": f"{what} gave other bits"}
        return row | self._alone(tensors, kept, first)

    def _alone(self, tensors: Tensors, kept: Tensors, batch: Tensors) -> Row:
        """Compare each token of a small batch with the same token alone, bit by bit."""
        buffers, count = self.plan.buffers, self.plan.tokens
        few = 1 < count <= _MOST_ALONE and self.act != "bf16"
        if not few or {buffers[name].rows for name in self.written} != {"M"}:
            return {}
        rows = [name for name in tensors if name in buffers and buffers[name].rows == "M"]
        one = {name: tensors[name][:1].clone() for name in rows}
        launches = self.launches({**tensors, **one})
        given = {**tensors, **kept}
        for index in range(count):
            for name in rows:
                one[name].copy_(given[name][index : index + 1])
            execute(launches)
            for name in self.written:
                if not _same(one[name], batch[name][index : index + 1]):
                    why = f"{name}: token {index} alone gives other bits"
                    return {"status": "failed", "reason": why}
        return {"alone": True}

    def tensors(self) -> Tensors:
        """Return the arguments on the device; outputs are poisoned."""
        made: Tensors = {name: self._tensor(name, value) for name, value in self.values.items()}
        for name in self.written:
            if name not in made:
                buffer = self.plan.buffers[name]
                dtype = self.types.get(name, TORCH_DTYPES[buffer.dtype])
                place = self.setting.device.torch_device
                made[name] = torch.empty(buffer.shape, dtype=dtype, device=place)
                poison(made[name])
        return made

    def _comparable(
        self, name: str, got: torch.Tensor, expected: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return both as fp32 or stored integers; under `EXACT` the reference is rounded first."""
        got = got.cpu()
        if expected.dtype.kind != "f":  # includes bf16 caches
            wide = got.view(torch.int16) if got.is_floating_point() else got
            return wide.numpy().view(expected.dtype), expected
        if name in self.types and self.limit == EXACT:
            expected = torch.from_numpy(expected).to(self.types[name]).float().numpy()
        return got.float().numpy(), expected.astype(np.float32)

    def _rounded(self, name: str, value: Value) -> Value:
        if name not in self.types or isinstance(value, QuantTensor):
            return value
        if value.dtype == np.int8:  # codes need no rounding
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
        return tensor.to(self.setting.device.torch_device)


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with 0x7f bytes."""
    tensor.view(torch.uint8).fill_(0xFF if tensor.is_floating_point() else 0x7F)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
