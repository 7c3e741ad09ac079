"""The guesses of all texts of a session: who guesses, what is sent, what came true."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple, Protocol

from clocher_runtime.models.builder import DRAWN
from clocher_runtime.speculation.chances import Chances
from clocher_runtime.speculation.draft import NO_DRAFT, ROOT, Draft, Drafter, Reader
from clocher_runtime.speculation.gate import PassCosts, Trial, choose, rate_of
from clocher_runtime.speculation.recycle import RecycledTokens

WITH_DRAFT_MODEL = ("auto", "draft")
"""Those that ask a draft model, if there is one."""
SHARING = ("auto", "suffix", "draft")
"""Those that guess from finished texts of others, where that is asked for."""
MOST_GUESSES = DRAWN - 1
"""Of a sequence in a pass: many kernels do eight tokens at the cost of one."""
_PATIENCE = 16  # passes with nothing but guesses that do not pay, until the costs are doubted
_ROWS = 32  # of a pass, if there are not more sequences

PRIORS = MappingProxyType(
    {
        "suffix": (0.15, 0.3, 0.45, 0.6, 0.75, 0.9),
        "shared": (0.05, 0.2, 0.35, 0.55, 0.7, 0.85),
        "recycle": (0.3, 0.35, 0.4, 0.4, 0.1, 0.05, 0.1),
        "draft": (0.6,) * MOST_GUESSES,
    }
)
"""Source -> the chance of each of its classes before anything is known."""


def first_class(source: str) -> int:
    """Return the first class of a source; the others follow it."""
    before = list(PRIORS).index(source)
    return sum(len(means) for means in list(PRIORS.values())[:before])


def rows_for(sequences: int) -> int:
    """Return the output rows of a pass that verifies guesses of so many sequences."""
    return min((1 + MOST_GUESSES) * sequences, max(sequences, _ROWS))


@dataclass(slots=True)
class Counts:
    """What guessing came to.

    Attributes:
        passes: a sequence in a pass counts as one.
        tokens: that these passes made.
        sent: passes that verified guesses.
        drafted, accepted: guesses that were verified, and that came true.
        by_source: the same of each source.
        unguessed: passes for which nothing was guessed.
        unworthy: passes whose guesses were not worth their time, or guessing was not.
    """

    passes: int = 0
    tokens: int = 0
    sent: int = 0
    drafted: int = 0
    accepted: int = 0
    unguessed: int = 0
    unworthy: int = 0
    by_source: dict[str, list[int]] = field(default_factory=dict)

    def since(self, before: "Counts") -> "Counts":
        """Return what was counted after an earlier state."""
        sources = {
            source: [
                now - then
                for now, then in zip(counts, before.by_source.get(source, (0, 0)), strict=True)
            ]
            for source, counts in self.by_source.items()
        }
        numbers = [each.name for each in fields(self) if each.name != "by_source"]
        less = {name: getattr(self, name) - getattr(before, name) for name in numbers}
        return Counts(**less, by_source=sources)


class Finished(Protocol):
    """Texts that came to their end, for drafters of others."""

    def add(self, salt: bytes, ids: Sequence[int]) -> None:
        """Add one, for texts of the same salt."""


class Text(NamedTuple):
    """A text that is to be guessed at.

    Attributes:
        track: what is known of it.
        ids: its tokens so far.
        most: guesses that may be sent.
    """

    track: "Track"
    ids: Sequence[int]
    most: int


class Track:
    """What is guessed about one text.

    Args:
        drafters: that guess it.
        chances: what others had.

    Attributes:
        offer: the guesses that expect most; they are judged whether they are sent or not.
        tried: how many of them are sent whatever they promise, to learn what they are worth.
        asides: other guesses that are judged too.
        sent: what of the offer is verified.
        reader: what a draft model knows of the text; None without one.
        recycled: learns what the model ranks first in the text; None: nothing does.
    """

    __slots__ = ("asides", "chances", "drafters", "offer", "reader", "recycled", "sent", "tried")

    def __init__(self, drafters: Sequence[Drafter], chances: Chances) -> None:
        self.drafters, self.chances = drafters, chances
        self.offer = self.sent = NO_DRAFT
        self.tried = 0
        self.asides: list[Draft] = []
        self.reader: Reader | None = None
        self.recycled: RecycledTokens | None = None

    def guess(self, ids: Sequence[int], most: int, ns: Sequence[float]) -> list[float]:
        """Make the offer of the drafter whose guesses pay most; return the chance of each node.

        Args:
            ids: the text so far.
            most: guesses.
            ns: time of a pass by how many guesses it has.
        """
        self.offer, asides = NO_DRAFT, []
        best: list[float] = []
        highest = 0.0
        for drafter in self.drafters:
            draft = drafter.draft(ids, most)
            if not draft.tokens:
                continue
            chances = self.chances.along(draft.parents, draft.classes)
            rate = rate_of(chances, ns)
            if rate > highest:
                draft, self.offer, best, highest = self.offer, draft, chances, rate
            if draft.tokens:
                asides.append(draft)
        self.asides = asides
        return best

    def offered(self) -> list[float]:
        """Return the chance of each node of the offer."""
        return self.chances.along(self.offer.parents, self.offer.classes)


class Asker(Protocol):
    """Gets guesses for many texts at once, where that pays; see `asking.Asking`.

    Attributes:
        step_ns: time of a step of one token of the draft model; 0 if it is not known.
    """

    @property
    def step_ns(self) -> float:
        """See the class."""

    def ask(
        self,
        texts: Sequence[Text],
        taken: Sequence[Sequence[float]],
        base: int,
        ns: Sequence[float],
    ) -> bool:
        """Give texts a better offer; return whether any may have got one."""

    def reset(self) -> None:
        """Forget all texts."""


class Speculator:
    """Guesses for the sequences of a session.

    Args:
        make: returns the drafters of a new text.
        rows: output rows of a pass.
        finished: gets texts that came to their end; None: nobody does.
        asker: of a draft model, if there is one.

    Attributes:
        costs: of a pass.
        counts: so far.
        trial: whether guessing wins.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[Drafter]],
        rows: int,
        finished: Finished | None = None,
        asker: Asker | None = None,
    ) -> None:
        self.costs, self.counts, self.trial = PassCosts(rows), Counts(), Trial()
        self._finished, self._asker = finished, asker
        self._make, self._refused = make, 0
        self._mean = Chances([mean for means in PRIORS.values() for mean in means])
        self._sources = [source for source, means in PRIORS.items() for _ in means]

    @property
    def draft_ns(self) -> float:
        """Time of a token of the draft model in nanoseconds; 0 without one."""
        return 0.0 if self._asker is None else self._asker.step_ns

    def track(self, *others: Drafter) -> Track:
        """Return what is known of a new text that others guess at too."""
        return Track([*self._make(), *others], self._mean.copy())

    def finish(self, salt: bytes, ids: Sequence[int]) -> None:
        """Let texts of a salt be guessed from one that came to its end."""
        if self._finished is not None:
            self._finished.add(salt, ids)

    def draft(self, texts: Sequence[Text], base: int, rows: int) -> list[Draft]:
        """Return what to send for each text.

        Args:
            texts: of the sequences of a step.
            base: tokens of the step without guesses.
            rows: guesses that it has room for.
        """
        ns = self.costs.ns[: base + rows + 1]
        offers = [track.guess(ids, most, ns[base:]) for track, ids, most in texts]
        ranked = [sorted(offer, reverse=True) for offer in offers]
        counts = choose(ranked, base, ns)
        if self._asker is not None:
            taken = [chances[:count] for chances, count in zip(ranked, counts, strict=True)]
            if self._asker.ask(texts, taken, base, ns):
                offers = [text.track.offered() for text in texts]
                ranked = [sorted(offer, reverse=True) for offer in offers]
                counts = choose(ranked, base, ns)
                for at, text in enumerate(texts):
                    room = counts[at] + rows - sum(counts)
                    counts[at] = max(counts[at], min(text.track.tried, room))
        if any(offers) and not any(counts):
            self._refused += 1
            if self._refused % _PATIENCE == 0:
                self.costs.doubt(base)
        sent = []
        for text, offer, count in zip(texts, offers, counts, strict=True):
            if not offer:
                self.counts.unguessed += 1
            elif not count:
                self.counts.unworthy += 1
            text.track.sent = _likeliest(text.track.offer, offer, count)
            sent.append(text.track.sent)
        return sent

    def judge(self, sequences: int, tokens: int, ns: int) -> None:
        """Learn what a pass took that only decoded.

        Args:
            sequences: that it had.
            tokens: that they made.
            ns: with all that guessing took.
        """
        if not self.trial.is_on:
            self.counts.passes += sequences
            self.counts.tokens += tokens
            self.counts.unworthy += sequences
        known = self.costs.known and sequences < len(self.costs.ns)
        self.trial.note(ns, tokens / sequences, self.costs.ns[sequences] if known else 0.0)

    def reset(self) -> None:
        """Forget all texts, when what was noted of them may be half of it."""
        if self._asker is not None:
            self._asker.reset()

    def learn(self, track: Track, tokens: Sequence[int], verified: int) -> None:
        """Compare what was guessed with what came.

        Args:
            track: of a text.
            tokens: that came, one at least.
            verified: how many of them had been sent.
        """
        counts, sent = self.counts, track.sent
        counts.passes += 1
        counts.tokens += len(tokens)
        if sent.tokens:
            counts.sent += 1
            counts.drafted += len(sent.tokens)
            counts.accepted += verified
            of = counts.by_source.setdefault(self._sources[sent.classes[0]], [0, 0])
            of[0] += len(sent.tokens)
            of[1] += verified
        for guessed in (track.offer, *track.asides):
            self._judge(track, guessed, tokens)
        track.offer = track.sent = NO_DRAFT
        track.tried, track.asides = 0, []

    def _judge(self, track: Track, guessed: Draft, tokens: Sequence[int]) -> None:
        """Learn which guesses of a text were right, as far as those before them were."""
        node = ROOT
        for token in tokens:
            found = None
            for each in range(node + 1, len(guessed.tokens)):
                if guessed.parents[each] == node:  # siblings of a hit are misses
                    hit = guessed.tokens[each] == token
                    found = each if hit and found is None else found
                    track.chances.note(guessed.classes[each], hit)
                    self._mean.note(guessed.classes[each], hit)
            if found is None:
                break
            node = found


def _likeliest(draft: Draft, chances: Sequence[float], count: int) -> Draft:
    """Return the draft of the `count` likeliest nodes."""
    if count == len(chances):
        return draft
    if draft.is_chain:
        return Draft(draft.tokens[:count], draft.parents[:count], draft.classes[:count])
    ranked = sorted(range(len(chances)), key=lambda node: -chances[node])
    return draft.kept(sorted(ranked[:count]))
