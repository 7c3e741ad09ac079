"""The inputs of a step: what the host writes into a Plan's buffers before it runs."""

from collections.abc import Sequence

import numpy as np

from clocher_runtime.engine.backends import Executor, stager
from clocher_runtime.engine.diffusing import Denoise
from clocher_runtime.engine.requests import Request

_TOKENS = ("ids", "slots", "positions", "ends", "ancestors")
_ROWS = ("rows", "masked", "temperature", "top_k", "top_p", "seeds", "draws")


Part = tuple[Request, int]
"""A request, and how many of its tokens a step computes."""


class StepInputs:
    """The live input buffers of an executor, but for the page tables."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._arrays = {name: executor.array(name) for name in (*_TOKENS, *_ROWS, "allowed")}
        self._write = stager()(self._arrays).write

    def stage(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Write a step; return its tokens and output rows."""
        start = row = masks = 0
        for request, count in parts:
            written = 0
            if request.constraint is not None and request.rows(count):
                written = request.restrict(self._arrays["allowed"][masks:])
            cells, draft, sampling = request.cells, request.draft, request.sampling
            masks_behind = request.masks if count == request.waiting_tokens else ()
            drafted, rows = len(draft.tokens) + len(masks_behind), request.rows(count)
            self._write(
                (*request.ids[cells : cells + count], *draft.tokens, *masks_behind),
                range(-1, drafted - 1),
                start,
                count,
                drafted,
                row,
                rows,
                request.slot,
                cells,
                request.made,
                masks + 1 if written else 0,
                sampling.top_k,
                sampling.seed,
                0.0 if sampling.on_host else sampling.temperature,
                sampling.top_p,
            )
            if masks_behind or isinstance(request, Denoise):
                self._show(request, start, count, drafted, row)
            start, row, masks = start + count + drafted, row + rows, masks + written
        self._executor.upload(masks)
        return start, row

    def _show(self, request: Request, start: int, count: int, drafted: int, row: int) -> None:
        """Let the masks of a request see each other, and the tokens of a block if they do so."""
        ends, total = self._arrays["ends"], count + drafted
        if isinstance(request, Denoise):
            if request.canvas.whole_blocks:
                size = request.canvas.size
                places = request.cells + np.arange(count)
                ends[start : start + count] = (places // size + 1) * size
            self._arrays["draws"][row : row + request.rows(count)] = 0  # the host draws
        if drafted:
            behind = len(request.masks)
            ends[start + total - behind : start + total] = request.cells + total
