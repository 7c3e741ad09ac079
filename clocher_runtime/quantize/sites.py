"""Where the linears of a layer get their inputs, and what is told of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clocher_kernels.plan import Call

PRODUCTS = ("linear", "linear_i8")
"""Ops that multiply every token by a matrix."""
EXPERTS = ("moe_gate_up", "moe_down")
"""Ops that multiply tokens by the matrices of the experts they chose."""


@dataclass(frozen=True, slots=True)
class Site:
    """Linears that read the same input.

    Attributes:
        layer: index of the layer; -1 for the head.
        weights: names of the linears' tensors; of the experts', those that read all tokens' input.
    """

    layer: int
    weights: tuple[str, ...]


class Observer(Protocol):
    """What is told of the inputs while a layer is computed."""

    def linear(self, site: Site, x: np.ndarray, rows: slice) -> None:
        """Take the inputs [m, K] of the tokens in `rows`."""

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: "ExpertInputs", rows: np.ndarray
    ) -> None:
        """Take the inputs of the next tokens (numbers `rows`) that chose an expert."""

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: "Hidden") -> None:
        """Learn that an expert has seen all its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertInputs:
    """Inputs of an expert's two products: x [m, K], gated [m, I], router weights [m]."""

    x: np.ndarray
    gated: np.ndarray
    router: np.ndarray


Hidden = Callable[[np.ndarray], ExpertInputs]
"""Compute an expert's hidden layer for any tokens of its layer, numbers [m]; router weights 1."""


def source_of(call: Call) -> str:
    """Return the buffer with the float input of a product."""
    return call.args["x"] if "x" in call.args else call.args["q"].removesuffix(".codes")


def sites_of(layer: int, calls: Sequence[Call]) -> dict[int, Site]:
    """Return, for the first product of each input, the products that share it."""
    first: dict[str, int] = {}
    members: dict[int, list[str]] = {}
    for number, call in enumerate(calls):
        if call.op in (*PRODUCTS, "moe_gate_up"):
            start = first.setdefault(source_of(call), number)
            members.setdefault(start, []).append(call.args["w"])
        if call.op not in ("kv_append", "quantize_act"):
            first.pop(call.args["x"] if call.op == "rope" else call.args.get("y", ""), None)
    return {start: Site(layer, tuple(names)) for start, names in members.items()}
