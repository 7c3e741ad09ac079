"""Constraints: which tokens are allowed next."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import listed


class Constraint(Protocol):
    """Follows the generated tokens of one prompt; its exceptions end that call only."""

    def fill(self, mask: np.ndarray) -> None:
        """Write the allowed tokens to `mask` [W] u32, all of it; see `ops.sampling.sample`."""

    def take(self, token: int) -> None:
        """Advance by a token that was drawn, which may be one that ends the sequence."""

    def undo(self, count: int) -> None:
        """Take back the last tokens, which were only tried."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the sequence ends without a stop token."""


def one_for_each(
    given: Sequence[Constraint | None] | None, prompts: int, masks: np.ndarray
) -> list[Constraint | None]:
    """Return a constraint or None per prompt; `masks` [C, W] u32. Raises UsageError."""
    if given is None:
        return [None] * prompts
    found: list[Constraint | None] = listed(given, "a list of constraints, one for each prompt")
    if len(found) != prompts:
        raise UsageError(f"{len(found)} constraints for {prompts} prompts; give one for each")
    if not masks.size and any(each is not None for each in found):
        raise UsageError("this back end draws what it wants; leave constraints out")
    return found
