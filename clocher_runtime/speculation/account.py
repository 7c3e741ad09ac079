"""What guessing came to, for people: figures, and one phrase that says why."""

import math
from dataclasses import dataclass

from clocher_runtime.speculation.gate import PassCosts
from clocher_runtime.speculation.speculator import MOST_GUESSES, Counts

FULL = 1 + MOST_GUESSES
"""Tokens of the largest pass of a sequence."""


@dataclass(frozen=True, slots=True)
class Account:
    """Figures of the guesses of a session, or of a part of its life.

    Attributes:
        counts: of guesses and passes.
        cost_of_8: the time of a pass of `FULL` tokens over that of one; NaN if it is not known.
    """

    counts: Counts
    cost_of_8: float = math.nan

    @property
    def acceptance(self) -> float:
        """Share of the guesses that came true; NaN without any."""
        counts = self.counts
        return counts.accepted / counts.drafted if counts.drafted else math.nan

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a sequence got from a pass; NaN without passes."""
        return self.counts.tokens / self.counts.passes if self.counts.passes else math.nan

    @property
    def reason(self) -> str:
        """Why guesses were sent, or were not."""
        counts, passes = self.counts, self.counts.passes
        if not passes:
            return "no pass only decoded"
        if counts.sent:
            return f"{100 * counts.sent / passes:.0f} % of passes verified guesses"
        if not counts.unworthy:
            return "nobody had a guess" if counts.unguessed else "the text was all but over"
        if self.cost_of_8 >= FULL / 2:
            return f"{FULL} tokens cost {self.cost_of_8:.1f} passes of one"
        return "guesses came true too seldom"


def account(costs: PassCosts, now: Counts, before: Counts | None = None) -> Account:
    """Return the figures of what was counted.

    Args:
        costs: of passes.
        now: so far.
        before: what not to count, an earlier state of the same.
    """
    ns = costs.ns
    known = len(ns) > FULL and ns[1] > 0
    return Account(now.since(before or Counts()), ns[FULL] / ns[1] if known else math.nan)
