"""How many draft tokens pay: expected gain against the cost of a larger forward.

A draft model is asked where the expected gain exceeds its cost, and goes on as long as it is sure
enough of its tokens. Else it is asked for single tokens: `_TRIES` times, if it could pay at all,
and then for 1 % of the time at most. An unread prompt is read in pieces, if drafts repay it.
"""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from clocher_runtime.speculation.draft import MAX_DRAFT, UNSEEN, Draft, Pending

MARGIN = 1.05
"""Minimum gain of drafts, which covers errors of the cost table."""
_TRUST = 0.85
"""Discount on chances: those chosen for being high were partly lucky."""
_HELD_UP = 4.0  # times as long as expected; a forward that took longer counts no more
_CREDIT, _DEBT = 16.0, 8.0  # forwards' time that drafts may have won at most, and lost
_LOSS = 0.03  # of the time, what drafts that lose may take
_SIZES = (1, 4, 8, 2, 16, 6, 3, 32, 64)
"""Tokens of the forwards that are measured, the most telling first."""
_ROUNDS = 3
_LONGEST_NS = 100_000_000  # after so long no further forward is measured, but for the second
_NEW = 0.1  # weight of the newest time
_DOUBT = 0.992  # what a time shrinks by each time that it is doubted
_HORIZON = 16
"""Forwards within which an unread prompt's drafts have to repay reading it."""
_LOOKS = 0.01  # of the time; what is not used of it is kept for so many forwards' worth
_LEAST_PIECE = 16  # tokens
_TRIES, _HOPE = 8, 0.9
"""Tokens verified unconditionally, if drafts of this acceptance rate would pay."""
_LONGEST_READ = 16  # forwards that reading a prompt for these may take
_ASSUMED = 0.03  # of a token's time, what a further one costs until it is measured


class ForwardCosts:
    """Times `ns` of forwards of 0 to `most` tokens, interpolated between the `known` ones."""

    def __init__(self, most: int) -> None:
        self.known: dict[int, float] = {}
        self.ns = [0.0] * (most + 1)

    def measure(self, work: Callable[[int], int]) -> None:
        """Measure forwards of some sizes in rounds; `work` runs one and returns nanoseconds.

        What there is no time for follows from the others, until such a forward runs.
        """
        sizes, spent = [size for size in _SIZES if size < len(self.ns)], 0
        for size in _ROUNDS * sizes:
            if spent > _LONGEST_NS and len(self.known) > 1:
                break
            ns = work(size)
            spent += ns
            self.known[size] = min(float(ns), self.known.get(size, inf))
        self._interpolate()

    def note(self, tokens: int, ns: int) -> float:
        """Record the time of a forward; return how much of it counts."""
        if not 0 < tokens < len(self.ns):
            return ns
        before = self.known.get(tokens)
        if before is None:
            self.known[tokens] = float(ns)
            self._interpolate()
            return ns
        # Other load on the machine makes some forwards many times slower.
        counts = min(float(ns), 2 * before)
        now = self.known[tokens] = before + _NEW * (counts - before)
        if abs(now - self.ns[tokens]) > 0.02 * now:
            self._interpolate()
        return counts

    def doubt(self, base: int) -> None:
        """Lower the times above `base` tokens a little, since no such forward ran."""
        least = self.ns[base]
        for tokens, ns in self.known.items():
            if tokens > base:
                self.known[tokens] = max(_DOUBT * ns, min(ns, least))
        if self.known:
            self._interpolate()

    def _interpolate(self) -> None:
        # Fewer tokens are never more work: a slower time was an outlier.
        sizes = sorted(self.known, reverse=True)
        times = itertools.accumulate((self.known[size] for size in sizes), min)
        points = list(zip(sizes, times, strict=True))[::-1]
        size, least = points[0]
        slope = _ASSUMED * least
        for tokens in range(size):
            self.ns[tokens] = max(least - slope * (size - tokens), 0.5 * least)
        for (low, low_ns), (high, high_ns) in itertools.pairwise(points):
            slope = (high_ns - low_ns) / (high - low)
            for tokens in range(low, high):
                self.ns[tokens] = low_ns + slope * (tokens - low)
        last, most = points[-1]
        slope = max(slope, _ASSUMED * least)
        for tokens in range(last, len(self.ns)):
            self.ns[tokens] = most + slope * (tokens - last)


class Trial:
    """Whether speculation wins time; if it loses, pauses it until that is made up for."""

    def __init__(self) -> None:
        self.is_on = True
        self._balance, self._left = 0.0, 0

    def note(self, ns: float, made: float, bare_ns: float) -> None:
        """Record a forward: `made` tokens per sequence; `bare_ns` without drafts, 0 if unknown."""
        if not self.is_on:
            self._left -= 1
            self.is_on = self._left <= 0
        elif bare_ns:
            took = min(ns / bare_ns, _HELD_UP * made)
            self._balance = min(self._balance + made - took, _CREDIT)
            if self._balance < -_DEBT:
                self.is_on, self._left = False, int(-self._balance / _LOSS)
                self._balance = 0.0


def choose(offers: Sequence[Sequence[float]], base: int, ns: Sequence[float]) -> list[int]:
    """Return how many draft tokens of each sequence maximise tokens per time.

    `offers`: descending chances by sequence; `ns`: time of a forward by its tokens.
    """
    counts = [0] * len(offers)
    if not 0 < base < len(ns) or not ns[base]:
        return counts
    ranked = [(chance, i) for i, offer in enumerate(offers) for chance in offer]
    if len(offers) > 1:
        ranked.sort(key=lambda pair: -pair[0])
    made, best, taken = float(len(offers)), MARGIN * len(offers) / ns[base], 0
    for number, (chance, _) in enumerate(ranked[: len(ns) - 1 - base], 1):
        made += _TRUST * chance
        rate = made / ns[base + number]
        if rate > best:
            best, taken = rate, number
    for _, i in ranked[:taken]:
        counts[i] += 1
    return counts


def draft_depth(
    mine: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    base: int,
    ns: Sequence[float],
    entries: Sequence[float],
    steps: Sequence[float],
) -> int:
    """Return how many tokens of a draft model maximise tokens per time; 0: none pay.

    `mine`, `others`: chances by sequence of the model's tokens, and of those sent otherwise;
    `entries`: this forward's part of one-time costs; `steps`: time by number of sequences.
    """
    if not 0 < base < len(ns) or not ns[base] or not steps[1]:
        return 0
    found, best = 0, 0.0
    for count in range(1 + max(map(len, mine), default=0)):
        asked = worth_asking(mine, others, count)
        sent = [mine[i][:count] if i in asked else other for i, other in enumerate(others)]
        tokens = base + sum(map(len, sent))
        if tokens >= len(ns):
            break
        paid = sum(entries[i] for i in asked) + count * steps[len(asked)] if asked else 0.0
        rate = (len(mine) + sum(map(sum, sent))) / (paid + ns[tokens])
        if rate > best:
            found, best = count, rate if count else MARGIN * rate
    return found


def goes_on(
    drafted: Sequence[Sequence[float]],
    more: Sequence[float],
    base: int,
    ns: Sequence[float],
    steps: Sequence[float],
) -> bool:
    """Return whether one more token of a draft model for each sequence is worth its time.

    `drafted`: chances by sequence of the tokens that it has drafted; `more`: the chance of a
    further one after those; see `draft_depth`.
    """
    count, depth = len(drafted), max(map(len, drafted))
    tokens = base + sum(map(len, drafted))
    if tokens + count >= len(ns):
        return False
    rate = (count + sum(map(sum, drafted))) / (depth * steps[count] + ns[tokens])
    gain = sum(chances[-1] * chance for chances, chance in zip(drafted, more, strict=True))
    return gain > rate * (steps[count] + ns[tokens + count] - ns[tokens])


def worth_asking(
    mine: Sequence[Sequence[float]], others: Sequence[Sequence[float]], count: int
) -> list[int]:
    """Return the sequences where `count` tokens of a draft model beat the others."""
    pairs = zip(mine, others, strict=True)
    return [i for i, (own, other) in enumerate(pairs) if sum(own[:count]) > sum(other)]


class DraftModelGate:
    """Asks an `engine.draft_model.DraftModel` where that pays."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._classes = (UNSEEN,) * MAX_DRAFT
        self._spare = 0.0  # ns for looks
        self._tries = _TRIES

    def ask(
        self,
        pending: Sequence[Pending],
        taken: Sequence[Sequence[float]],
        base: int,
        ns: Sequence[float],
    ) -> bool:
        """Make better offers than the chances `taken`; return whether the model was asked."""
        if base + 1 >= len(ns):
            return False
        steps = self.model.costs.ns
        readers = [each.track.reader for each in pending]
        behind = [
            reader.behind(each.ids) if reader else 0
            for reader, each in zip(readers, pending, strict=True)
        ]
        mine = [
            each.track.rates.along(self._classes[: each.most]) if tokens else []
            for each, tokens in zip(pending, behind, strict=True)
        ]
        entries = [
            max(0.0, _time(steps, tokens) - steps[1])
            / (_HORIZON if each.most == MAX_DRAFT else each.most)
            for each, tokens in zip(pending, behind, strict=True)
        ]
        piece = max(_LEAST_PIECE, 2 * len(pending), bisect_right(steps, ns[base]) - 1)
        count = draft_depth(mine, taken, base, ns, entries, steps)
        asked, depth = worth_asking(mine, taken, count), MAX_DRAFT
        self._spare = min(self._spare + _LOOKS * ns[base], _HORIZON * ns[base])
        tries = False
        if not asked:
            usable = [i for i, tokens in enumerate(behind) if tokens]
            if not usable:
                return False
            one = min(usable, key=behind.__getitem__)
            asked, depth = [one], 1
            # A part of the read would serve a token that cannot be afforded.
            price, hope = _time(steps, behind[one]), (1 + _HOPE) * ns[base]
            tries = self._tries > 0 and pending[one].most == MAX_DRAFT
            tries &= price <= _LONGEST_READ * ns[base] and steps[1] + ns[base + 1] < hope
            if not tries and self._spare < price:
                return False
            if not tries:
                self._spare -= _time(steps, min(behind[one], piece))
        rates = {readers[i]: pending[i].track.rates for i in asked}

        def wanted(drafts: Mapping[Any, Draft]) -> bool:
            chances = [rates[reader].along(draft.classes) for reader, draft in drafts.items()]
            more = [rates[reader].mean[UNSEEN] for reader in drafts]
            return goes_on(chances, more, base, ns, steps)

        depth = min(depth, max(pending[i].most for i in asked))
        drafted = self.model.draft([readers[i] for i in asked], depth, piece, wanted)
        for i, draft in zip(asked, drafted, strict=True):
            self._offer(pending[i], draft, sum(taken[i]), tries)
            self._tries -= bool(draft.tokens)
        return True

    def _offer(self, pending: Pending, draft: Draft, taken: float, tries: bool) -> None:
        count, track = min(len(draft.tokens), pending.most), pending.track
        draft = draft.first(count)
        if tries and count:
            track.tried = count
        if track.tried or sum(track.rates.along(draft.classes)) > taken:
            track.offer, draft = draft, track.offer
        track.asides.append(draft)


def _time(steps: Sequence[float], tokens: int) -> float:
    most = len(steps) - 1
    return steps[tokens] if tokens <= most else steps[most] * tokens / most
