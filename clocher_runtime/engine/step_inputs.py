"""The inputs of a step: what the host writes into a Plan's buffers before it runs."""

from collections.abc import Sequence

import numpy as np

from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import Executor
from clocher_runtime.engine.requests import Request

_TOKENS = ("ids", "slots", "positions", "ends", "ancestors")
_ROWS = ("rows", "masked", "temperature", "top_k", "top_p", "seeds", "draws")


class StepInputs:
    """The live input buffers of an executor, but for the page tables.

    Args:
        executor: its Plan has the inputs of every Plan (`plan`).
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._arrays = {name: executor.array(name) for name in (*_TOKENS, *_ROWS, "allowed")}

    def stage(
        self, parts: Sequence[tuple[Request, int]], rows: Sequence[tuple[Request, int]]
    ) -> tuple[int, int]:
        """Write a step of causal tokens; return its tokens and output rows.

        Args:
            parts: requests, and how many tokens of each come next.
            rows: requests, and positions of tokens of theirs whose logits are wanted.
        """
        arrays, first, start = self._arrays, {}, 0
        for request, count in parts:
            cells, stop = request.cells, start + count
            arrays["ids"][start:stop] = request.ids[cells : cells + count]
            arrays["slots"][start:stop] = request.slot
            arrays["positions"][start:stop] = np.arange(cells, cells + count)
            first[request] = start - cells
            start = stop
        arrays["ends"][:start] = arrays["positions"][:start] + 1
        masks = 0
        for row, (request, position) in enumerate(rows):
            sampling = request.sampling
            arrays["rows"][row] = first[request] + position
            arrays["draws"][row] = request.made
            arrays["temperature"][row] = 0 if sampling.on_host else sampling.temperature
            arrays["top_k"][row] = sampling.top_k
            arrays["top_p"][row] = sampling.top_p
            arrays["seeds"][row] = sampling.seed
            masked = request.constraint is not None and request.restrict(arrays["allowed"][masks])
            masks += masked
            arrays["masked"][row] = masks if masked else 0
        self._executor.upload(masks)
        return start, len(rows)

    def choose(self, sampling: Sampling) -> None:
        """Write how every row's token is chosen, for a warm-up that looks at it."""
        self._arrays["temperature"][...] = 0 if sampling.on_host else sampling.temperature
