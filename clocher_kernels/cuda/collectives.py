"""What the ranks of a model exchange, by NCCL inside the CUDA graph, and what is a rank's own."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start
from clocher_kernels.ops.collectives import Ranks

_BLOCK = 1024


class Exchange:
    """Stands where a kernel does in a launch, and lets ranks speak to each other.

    What it does is put on the current stream, so a graph captures it like any kernel.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._function: Callable[..., None] = getattr(ranks, name)
        self.__name__ = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(**args: Any) -> None:
            self._function(**{name: args[name] for name in ("x", "y", "unit") if name in args})

        return launched

    def warmup(self, **_: Any) -> None:
        """Do nothing: there is nothing to compile."""


def all_reduce(*, x: torch.Tensor, device: Device) -> list[Launch]:
    """Lower `ops.collectives.all_reduce`."""
    return [Launch(Exchange(device.ranks, "all_reduce"), (1,), {"x": x}, {})]


def all_gather(*, x: torch.Tensor, y: torch.Tensor, unit: int, device: Device) -> list[Launch]:
    """Lower `ops.collectives.all_gather`."""
    exchange = Exchange(device.ranks, "all_gather")
    return [Launch(exchange, (1,), {"x": x, "y": y}, {"unit": unit})]


@triton.jit
def _own_columns(
    x,
    y,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    X_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * X_ROW + START + at, at < SIZE)
    tl.store(y + row * Y_ROW + at, value.to(y.dtype.element_ty), at < SIZE)


def own_columns(*, x: torch.Tensor, y: torch.Tensor, start: int, device: Device) -> list[Launch]:
    """Lower `ops.collectives.own_columns`."""
    constants = {
        "SIZE": y.shape[1],
        "START": start,
        "X_ROW": x.stride(0),
        "Y_ROW": y.stride(0),
        "BLOCK": _BLOCK,
        "PDL": device.pdl,
    }
    grid = (triton.cdiv(y.shape[1], _BLOCK), len(y))
    return [Launch(_own_columns, grid, {"x": x, "y": y}, constants, pdl=device.pdl)]


@triton.jit
def _own_experts(
    ids,
    weights,
    own_ids,
    own_weights,
    A: tl.constexpr,
    BA: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    choice = tl.arange(0, BA)
    at = tl.program_id(0) * A + choice
    local = tl.load(ids + at, choice < A, other=-1) - FIRST
    weight = tl.load(weights + at, choice < A, other=0.0)
    is_own = (choice < A) & (local >= 0) & (local < COUNT)
    # The first that is here: of all pairs (place, number) the least.
    place = tl.min(tl.where(is_own, choice, BA), axis=0)
    stand_in = tl.sum(tl.where(is_own & (choice == place), local, 0), axis=0)
    tl.store(own_ids + at, tl.where(is_own, local, stand_in), choice < A)
    tl.store(own_weights + at, tl.where(is_own, weight, 0.0), choice < A)


def own_experts(
    *,
    ids: torch.Tensor,
    weights: torch.Tensor,
    own_ids: torch.Tensor,
    own_weights: torch.Tensor,
    first: int,
    count: int,
    device: Device,
) -> list[Launch]:
    """Lower `ops.collectives.own_experts`."""
    chosen = ids.shape[1]
    constants = {
        "A": chosen,
        "BA": triton.next_power_of_2(chosen),
        "FIRST": first,
        "COUNT": count,
        "PDL": device.pdl,
    }
    args = {"ids": ids, "weights": weights, "own_ids": own_ids, "own_weights": own_weights}
    return [Launch(_own_experts, (len(ids),), args, constants, 1, device.pdl)]


LOWER = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "own_columns": own_columns,
    "own_experts": own_experts,
}
