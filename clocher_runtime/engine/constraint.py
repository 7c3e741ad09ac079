"""Constraints: which tokens are allowed next, after each token that was made."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import listed


class Constraint(Protocol):
    """Follows one sequence. It belongs to one prompt of one call, from the first made token on.

    It is called in a step of the session, and all others wait meanwhile. What it raises ends its
    call, and no other.
    """

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may come next; calling it twice gives the same.

        Args:
            mask: [W] u32 as `ops.sampling.sample` takes it, written as a whole.
        """

    def take(self, token: int) -> None:
        """Go on with a token that was drawn, be it one that ends the sequence."""

    def undo(self, count: int) -> None:
        """Take back the last tokens, which were only tried."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the sequence ends without a token that says so."""


def one_for_each(
    given: Sequence[Constraint | None] | None, prompts: int, masks: np.ndarray
) -> list[Constraint | None]:
    """Return the constraint of each prompt of a call, None for all if none are given.

    Args:
        masks: [C, W] u32, where they are to write; empty: the back end takes no masks.

    Raises:
        UsageError: there are more or fewer, or the back end takes none.
    """
    if given is None:
        return [None] * prompts
    found: list[Constraint | None] = listed(given, "a list of constraints, one for each prompt")
    if len(found) != prompts:
        raise UsageError(f"{len(found)} constraints for {prompts} prompts; give one for each")
    if not masks.size and any(each is not None for each in found):
        raise UsageError("this back end draws what it wants; leave constraints out")
    return found
