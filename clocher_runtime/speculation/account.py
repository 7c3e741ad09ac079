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
        cost_of_8: the time of a forward of `FULL` tokens over that of one; NaN if it is not known.
        cost_of_draft: the same of a token of the draft model; NaN without one.
    """

    counts: Counts
    cost_of_8: float = math.nan
    cost_of_draft: float = math.nan

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
        """Why drafts were verified, or were not."""
        counts, passes = self.counts, self.counts.passes
        if not passes:
            return "no forward only decoded"
        drafted, accepted = counts.by_source.get("draft", (0, 0))
        if drafted:
            found = (
                f"; draft model: {accepted} of {drafted} tokens accepted, each costs "
                f"{self.cost_of_draft:.2f} of a forward"
            )
        else:
            found = "; the draft model was not asked" if self.cost_of_draft > 0 else ""
        if counts.sent:
            return f"{100 * counts.sent / passes:.0f} % of forwards verified drafts{found}"
        if not counts.unworthy:
            return (
                "no draft available" if counts.unguessed else "the text was almost over"
            ) + found
        if self.cost_of_8 >= FULL / 2:
            return f"a forward of {FULL} tokens costs {self.cost_of_8:.1f} of one{found}"
        return f"drafts not worth verifying: acceptance expected too low{found}"


def account(
    costs: PassCosts, now: Counts, before: Counts | None = None, draft_ns: float = 0.0
) -> Account:
    """Return the figures of what was counted.

    Args:
        costs: of passes.
        draft_ns: time of a token of the draft model; 0 without one.
        now: so far.
        before: what not to count, an earlier state of the same.
    """
    ns = costs.ns
    known = len(ns) > FULL and ns[1] > 0
    since = now.since(before or Counts())
    if not known:
        return Account(since)
    return Account(since, ns[FULL] / ns[1], draft_ns / ns[1] if draft_ns else math.nan)
