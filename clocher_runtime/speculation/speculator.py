"""The drafts of all sequences of a session: drafter, tokens sent, tokens accepted."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from clocher_runtime.models.builder import DRAWN
from clocher_runtime.speculation.draft import (
    MAX_DRAFT,
    NO_DRAFT,
    PRIORS,
    SOURCES,
    AcceptanceRates,
    Draft,
    Pending,
    SuffixDrafter,
    Track,
)
from clocher_runtime.speculation.gate import DraftModelGate, ForwardCosts, Trial, choose

WITH_DRAFT_MODEL = ("auto", "draft")
"""Values of --speculate that ask a draft model, if there is one."""
_PATIENCE = 16  # forwards whose drafts all did not pay, until the costs are doubted
_ROWS = 32  # of a forward, if there are not more sequences


def rows_for(sequences: int) -> int:
    """Return the output rows of a forward that verifies drafts of so many sequences."""
    return min((1 + MAX_DRAFT) * sequences, max(sequences, _ROWS))


@dataclass(slots=True)
class Counts:
    """Speculation counters, per sequence and forward; `sent`: forwards that verified a draft.

    `without_draft`, `not_worth`: forwards without a draft, or with one not worth verifying.
    """

    forwards: int = 0
    tokens: int = 0
    sent: int = 0
    drafted: int = 0
    accepted: int = 0
    without_draft: int = 0
    not_worth: int = 0
    by_source: dict[str, list[int]] = field(default_factory=dict)

    @property
    def decisions(self) -> dict[str, int]:
        """What was decided -> forwards that could verify a draft."""
        without, not_worth = self.without_draft, self.not_worth
        return {"sent": self.sent, "no_draft": without, "not_worth_verifying": not_worth}

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted after an earlier state."""
        sources = {}
        for source, (drafted, accepted) in self.by_source.items():
            then = before.by_source.get(source, (0, 0))
            sources[source] = [drafted - then[0], accepted - then[1]]
        numbers = [each.name for each in fields(self) if each.name != "by_source"]
        less = {name: getattr(self, name) - getattr(before, name) for name in numbers}
        return Counts(**less, by_source=sources)


@dataclass(frozen=True, slots=True)
class Account:
    """Speculation figures; costs of 8 tokens, and of a draft-model token, in forwards of one."""

    counts: Counts
    cost_of_8: float = math.nan
    cost_of_draft: float = math.nan

    @property
    def acceptance(self) -> float:
        """Acceptance rate; NaN without draft tokens."""
        counts = self.counts
        return counts.accepted / counts.drafted if counts.drafted else math.nan

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per sequence and forward; NaN without forwards."""
        return self.counts.tokens / self.counts.forwards if self.counts.forwards else math.nan

    @property
    def reason(self) -> str:
        """Why drafts were verified, or not."""
        counts = self.counts
        if not counts.forwards:
            return "no forward only decoded"
        drafted, accepted = counts.by_source.get("draft", (0, 0))
        found = ""
        if self.cost_of_draft > 0:
            asked = f"{accepted} of {drafted} tokens accepted" if drafted else "not asked"
            found = f"; draft model: {asked}, a token costs {self.cost_of_draft:.2f} of a forward"
        if counts.sent:
            share = 100 * counts.sent / counts.forwards
            return f"{share:.0f} % of forwards verified drafts{found}"
        if not counts.not_worth:
            almost_over = "the text was almost over"
            return ("no draft available" if counts.without_draft else almost_over) + found
        if self.cost_of_8 >= DRAWN / 2:
            return f"a forward of {DRAWN} tokens costs {self.cost_of_8:.1f} of one{found}"
        return f"drafts not worth verifying: acceptance expected too low{found}"


class Speculator:
    """Drafts for a session's sequences; `make` returns the drafter of a new one.

    It is called with whether the sequence may draft from other sequences' answers.
    """

    def __init__(
        self,
        make: Callable[[bool], SuffixDrafter | None],
        rows: int,
        gate: DraftModelGate | None = None,
    ) -> None:
        self.costs, self.counts, self.trial = ForwardCosts(rows), Counts(), Trial()
        self._make, self._gate, self._refused = make, gate, 0
        self._rates = AcceptanceRates([rate for rates in PRIORS.values() for rate in rates])

    def account(self, counts: Counts) -> Account:
        """Return the figures of some counts, with what forwards cost now."""
        ns, steps = self.costs.ns, self._gate.model.costs.ns if self._gate else []
        if len(ns) <= DRAWN or ns[1] <= 0:
            return Account(counts)
        cost_of_draft = steps[1] / ns[1] if any(steps[1:2]) else math.nan
        return Account(counts, ns[DRAWN] / ns[1], cost_of_draft)

    def track(self, shares: bool = True) -> Track:
        """Return what is drafted for a new sequence; see `make`."""
        return Track(self._make(shares), AcceptanceRates(self._rates.mean))

    def draft(self, pending: Sequence[Pending], base: int, rows: int) -> list[Draft]:
        """Return the draft tokens to send for each sequence of a step."""
        ns = self.costs.ns[: base + rows + 1]
        offers = [track.draft(ids, most, ns[base:]) for track, ids, most in pending]
        counts = choose(offers, base, ns)
        if self._gate is not None:
            taken = [chances[:count] for chances, count in zip(offers, counts, strict=True)]
            if self._gate.ask(pending, taken, base, ns):
                tracks = [each.track for each in pending]
                offers = [track.rates.along(track.offer.classes) for track in tracks]
                counts = choose(offers, base, ns)
                for at, track in enumerate(tracks):
                    room = counts[at] + rows - sum(counts)
                    counts[at] = max(counts[at], min(track.tried, room))
        if any(offers) and not any(counts):
            self._refused += 1
            if self._refused % _PATIENCE == 0:
                self.costs.doubt(base)
        for each, offer, count in zip(pending, offers, counts, strict=True):
            self.counts.without_draft += not offer
            self.counts.not_worth += bool(offer) and not count
            each.track.sent = each.track.offer.first(count)
        return [each.track.sent for each in pending]

    def judge(self, sequences: int, tokens: int, ns: float) -> None:
        """Record the time that counts of a decode-only forward and its drafts."""
        if not self.trial.is_on:
            self.counts.not_worth += sequences
        bare_ns = self.costs.ns[sequences] if self.costs.known else 0.0
        self.trial.note(ns, tokens / sequences, bare_ns)

    def reset(self) -> None:
        """Forget all sequences, as their state may be half-written."""
        if self._gate is not None:
            self._gate.model.pages.reset()

    def learn(self, track: Track, tokens: Sequence[int], verified: int) -> None:
        """Compare drafts with the tokens that came, of which `verified` were sent."""
        counts, sent = self.counts, track.sent
        counts.forwards += 1
        counts.tokens += len(tokens)
        if sent.tokens:
            counts.sent += 1
            counts.drafted += len(sent.tokens)
            counts.accepted += verified
            of = counts.by_source.setdefault(SOURCES[sent.classes[0]], [0, 0])
            of[0] += len(sent.tokens)
            of[1] += verified
        for draft in (track.offer, *track.asides):
            track.rates.judge(draft, tokens)
            self._rates.judge(draft, tokens)
        track.offer = track.sent = NO_DRAFT
        track.tried, track.asides = 0, []
