"""The inputs of a step: what the host writes into a Plan's buffers before it runs."""

from collections.abc import Sequence

import numpy as np

from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import Executor
from clocher_runtime.models.build import page_table

_NAMES = (
    "ids",
    "slots",
    "positions",
    "ends",
    "ancestors",
    "pages",
    "rows",
    "temperature",
    "top_k",
    "top_p",
    "seeds",
    "draws",
)


class StepInputs:
    """The live input buffers of an executor; slot s owns the pages of its own row of the table.

    Args:
        executor: its Plan has the inputs of every Plan (`plan`).
        slots: sequences side by side.
    """

    def __init__(self, executor: Executor, slots: int) -> None:
        self._executor = executor
        self._arrays = {name: executor.array(name) for name in _NAMES}
        pages = self._arrays["pages"]
        pages[...] = page_table(slots, pages.shape[1])

    def stage(
        self,
        ids: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        rows: Sequence[int],
        draws: Sequence[int],
    ) -> tuple[int, int]:
        """Write a step of causal tokens; return its tokens and output rows.

        Args:
            ids: of each token.
            slots: sequence of each token.
            positions: of each token in its sequence.
            rows: tokens whose logits are wanted.
            draws: number of the random draw of each row.
        """
        count, arrays = len(ids), self._arrays
        arrays["ids"][:count] = ids
        arrays["slots"][:count] = slots
        arrays["positions"][:count] = positions
        arrays["ends"][:count] = arrays["positions"][:count] + 1
        arrays["rows"][: len(rows)] = rows
        arrays["draws"][: len(rows)] = draws
        self._executor.upload()
        return count, len(rows)

    def choose(self, sampling: Sampling) -> None:
        """Write how every row's token is chosen."""
        self._arrays["temperature"][...] = sampling.temperature
        self._arrays["top_k"][...] = sampling.top_k
        self._arrays["top_p"][...] = sampling.top_p
        self._arrays["seeds"][...] = np.uint64(sampling.seed)
