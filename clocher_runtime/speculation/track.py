"""What is drafted for one sequence, and the classes of draft tokens."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

from clocher_runtime.models.builder import DRAWN
from clocher_runtime.speculation.draft import NO_DRAFT, AcceptanceRates, Draft, Drafter, Reader
from clocher_runtime.speculation.gate import rate_of

MAX_DRAFT = DRAWN - 1
"""Draft tokens of a sequence in a forward: many kernels do eight tokens at the cost of one."""
PRIORS = MappingProxyType(
    {"suffix": (0.15, 0.3, 0.45, 0.6, 0.75, 0.9), "draft": (0.6,) * MAX_DRAFT}
)
"""Source -> the acceptance rate of each of its classes before anything is known."""
SOURCES = [source for source, rates in PRIORS.items() for _ in rates]


def first_class(source: str) -> int:
    """Return the first class of a source; the others follow it."""
    return SOURCES.index(source)


class Track:
    """What is drafted for one sequence.

    Attributes:
        offer: the draft that expects most; it is judged, `sent` or not, as `asides` are.
        tried: how many of its tokens are sent whatever they promise, to learn what they are worth.
        reader: what a draft model knows of the sequence; None without one.
    """

    __slots__ = ("asides", "drafters", "offer", "rates", "reader", "sent", "tried")

    def __init__(self, drafters: Sequence[Drafter], rates: AcceptanceRates) -> None:
        self.drafters, self.rates = drafters, rates
        self.offer = self.sent = NO_DRAFT
        self.tried = 0
        self.asides: list[Draft] = []
        self.reader: Reader | None = None

    def draft(self, ids: Sequence[int], most: int, ns: Sequence[float]) -> list[float]:
        """Offer the draft that pays most; return the chance of each of its tokens."""
        self.offer, self.asides = NO_DRAFT, []
        best, highest = list[float](), 0.0
        for drafter in self.drafters:
            draft = drafter.draft(ids, most)
            chances = self.rates.along(draft.classes)
            rate = rate_of(chances, ns)
            if rate > highest:
                draft, self.offer, best, highest = self.offer, draft, chances, rate
            if draft.tokens:
                self.asides.append(draft)
        return best


class Pending(NamedTuple):
    """A sequence that drafts are wanted for: its tokens so far, and how many may be sent."""

    track: Track
    ids: Sequence[int]
    most: int
