"""The CUDA back end's ranks: its kernels, in Triton's interpreter, on the parts of two ranks.

NCCL needs GPUs. Here both ranks walk their Plans in one thread, call by call, and the last to reach
an exchange does it for both.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import make, make_mxfp4

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.cuda.launch import Device
from clocher_kernels.ops.collectives import Alone, Ranks, part
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.footprint import sizes_of
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.models.build import build_plan
from clocher_runtime.models.division import Division

COUNT, TOKENS = 2, 3


class InStep:
    """A rank whose exchange waits until the last one arrives, which is before its next call."""

    def __init__(self, rank: int, laid: list[tuple[torch.Tensor, ...]]) -> None:
        self.rank, self.count, self._laid = rank, COUNT, laid

    def _arrive(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        self._laid.append(tensors)
        if len(self._laid) < COUNT:
            return []
        found = list(self._laid)
        self._laid.clear()
        return found

    def all_reduce(self, x: torch.Tensor) -> None:
        if found := self._arrive(x):
            total = sum((each.clone() for (each,) in found), start=torch.zeros_like(x))
            for (each,) in found:
                each.copy_(total)

    def all_gather(self, x: torch.Tensor, y: torch.Tensor, unit: int) -> None:
        found = self._arrive(x, y)
        for _, whole in found:
            for rank, (columns, _) in enumerate(found):
                first, last = part(whole.shape[-1], unit, rank, COUNT)
                whole[..., first:last] = columns


def executor_of(model: Model, ranks: Ranks) -> CudaExecutor:
    sizes = sizes_of(model.spec, "cuda", context=64, kv_dtype="f32", chunk=4, all_logits=True)
    share = None
    if ranks.count > 1:
        share = Division(model.spec, model.formats, ranks.rank, ranks.count)
    plan = build_plan(model.spec, model.formats, **asdict(sizes), share=share)
    weights = dict(model.weights)
    if share is not None:
        weights = {name: share.part_of(weights, name) for name in plan.weights}
    device = Device("cpu", 0, 4, ranks)
    return CudaExecutor(plan, weights, activations="f32", device=device)


def logits(executors: list[CudaExecutor]) -> list[np.ndarray]:
    for executor in executors:
        for name, values in {
            "ids": [5, 9, 2],
            "positions": range(TOKENS),
            "ends": range(1, TOKENS + 1),
            "rows": range(TOKENS),
        }.items():
            executor.array(name)[:TOKENS] = list(values)
        for name, buffer in executor.plan.buffers.items():
            if name.endswith("pages"):
                executor.array(name)[...] = np.arange(np.prod(buffer.shape)).reshape(buffer.shape)
        executor.upload()
    walks = [executor.walk(TOKENS, TOKENS) for executor in executors]
    for _ in zip(*walks, strict=True):
        pass
    return [executor.fetch("logits", TOKENS).copy() for executor in executors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "ops"),
    [
        (lambda folder: make("qwen2", 3, folder), {"all_reduce", "all_gather"}),
        (lambda folder: make("olmo2", 3, folder), {"all_reduce", "all_gather", "own_columns"}),
        (lambda folder: make_mxfp4(0, folder), {"all_reduce", "all_gather", "own_experts"}),
    ],
    ids=["qwen2", "olmo2", "mxfp4"],
)
def test_two_ranks_equal_one(made: Callable[[Path], Any], ops: set[str], tmp_path: Path) -> None:
    made(tmp_path / "model")
    model = load_model(open_checkpoint(tmp_path / "model"))
    (expected,) = logits([executor_of(model, Alone())])
    laid: list[tuple[torch.Tensor, ...]] = []
    ranks = [executor_of(model, InStep(rank, laid)) for rank in range(COUNT)]
    assert ops <= {call.op for call in ranks[0].plan.calls}
    first, second = logits(ranks)
    assert np.array_equal(first, second)
    scale = np.sqrt(np.mean(expected.astype(np.float64) ** 2))
    assert np.abs(first - expected).max() <= 1e-4 * scale
