"""Replicas behind a router, event by event: who gets which question, and what happens if one dies.

A router knows how many questions each replica has and which of them answer its probes, and nothing
else. Policies:

- random, round_robin, least_loaded;
- prefix: the replica that a hash of the first pages of the prompt names, by rendezvous hashing, so
  that a lost replica moves only its own share (Thaler and Ravishankar 1998);
- spill: the same, unless it has more than `bound` times the mean of all; then the least loaded
  (after Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from bench.scale.costs import StepCosts
from bench.scale.load import PAGE, Conversation
from bench.scale.replica import Ask, Limits, Replica

POLICIES = ("random", "round_robin", "least_loaded", "prefix", "spill")
FAILURES = ("none", "replica", "zone", "rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated.

    Attributes:
        replicas: how many.
        zones: replica i is in zone i mod `zones`.
        policy: of `POLICIES`.
        hash_pages: first pages that are hashed, or as many as a prompt fills.
        bound: of "spill": times the mean number of questions that a replica may have.
        start_s: from the start of a replica to its first answer.
        failure: of `FAILURES`.
        fails_s: when.
        down_s: how long the machine is away before it starts again.
        probe_s: until the router knows; what it sends there before comes back then.
        drain_s: a roll-out waits as long for answers that are being made.
        at_once: replicas that a roll-out restarts side by side.
        tries: replicas that a question is given to at most.
        seed: of the random policy and of hashes.
    """

    replicas: int
    zones: int = 1
    policy: str = "spill"
    hash_pages: int = 4
    bound: float = 1.25
    start_s: float = 0.0
    failure: str = "none"
    fails_s: float = 0.0
    down_s: float = 0.0
    probe_s: float = 1.0
    drain_s: float = 30.0
    at_once: int = 1
    tries: int = 3
    seed: int = 0


class Simulation:
    """One run. Everything that happens is in `asks`.

    Args:
        fleet: what runs.
        costs: of a step.
        limits: of a replica.
        load: who comes.
        until_s: nobody asks from then on; what was asked is answered.

    Attributes:
        asks: all questions, by arrival.
        replicas: as they are in the end.
        busy_s: of each replica, seconds in steps that began before `until_s`.
        ended: seconds, when the last thing happened.
    """

    def __init__(
        self,
        fleet: Fleet,
        costs: StepCosts,
        limits: Limits,
        load: Sequence[Conversation],
        until_s: float = math.inf,
    ) -> None:
        self.fleet = fleet
        self.replicas = [Replica(costs, limits) for _ in range(fleet.replicas)]
        self.asks: list[Ask] = []
        self.busy_s = [0.0] * fleet.replicas
        self.ended, self._until = 0.0, until_s
        self._noticed = [0.0] * fleet.replicas  # when the router knows of a loss
        self._alive = [True] * fleet.replicas
        self._taking = [True] * fleet.replicas  # as the router believes
        self._has = [0] * fleet.replicas  # questions, as the router counts them
        self._steps = [0] * fleet.replicas  # number of the step that runs; 0: none does
        self._serial = count(1)
        self._turn = count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._rng = np.random.default_rng(fleet.seed)
        self._salts = self._rng.integers(1 << 63, size=fleet.replicas, dtype=np.uint64)
        for who in load:
            self._at(who.starts, self._arrive, who, 0)
        self._plan_failure()

    def run(self) -> "Simulation":
        """Let everything happen."""
        while self._events:
            self.ended, _, happen, words = heapq.heappop(self._events)
            happen(*words)
        return self

    def _at(self, when: float, happen: Callable[..., None], *words: Any) -> None:
        heapq.heappush(self._events, (when, next(self._serial), happen, words))

    # Questions.

    def _arrive(self, who: Conversation, turn: int) -> None:
        if self.ended >= self._until:
            return
        ask = Ask(who, turn, self.ended, who.prompt(turn), who.turns[turn][1])
        self.asks.append(ask)
        self._route(ask)

    def _route(self, ask: Ask) -> None:
        can = [
            i for i, taking in enumerate(self._taking) if taking and not self.replicas[i].is_full
        ]
        if not can or ask.tries == self.fleet.tries:
            ask.fate = "refused"
            return
        ask.tries += 1
        ask.where = where = self._choose(ask, can)
        self._has[where] += 1
        if self._alive[where]:
            self.replicas[where].waiting.append(ask)
            self._go_on(where)
        else:  # nobody answers
            self._at(self._noticed[where], self._again, ask)

    def _again(self, ask: Ask) -> None:
        self._has[ask.where] -= 1
        self._route(ask)

    def _choose(self, ask: Ask, can: list[int]) -> int:
        policy = self.fleet.policy
        if policy == "random":
            return can[int(self._rng.integers(len(can)))]
        if policy == "round_robin":
            return can[next(self._turn) % len(can)]
        least = min(can, key=lambda i: self._has[i])
        if policy == "least_loaded":
            return least
        home = self._home(ask, can)
        if policy == "prefix":
            return home
        mean = (sum(self._has[i] for i in can) + 1) / len(can)
        return home if self._has[home] < math.ceil(self.fleet.bound * mean) else least

    def _home(self, ask: Ask, can: list[int]) -> int:
        pages = min(self.fleet.hash_pages, ask.prompt // PAGE)
        # A page's name stands for all before it. Without a whole page: whoever it is.
        name = ask.who.key(pages - 1 if pages else 0, ask.turn)
        mixed = _mix(self._salts[can] ^ np.uint64(name & (1 << 64) - 1))
        return can[int(np.argmax(mixed))]

    # Steps.

    def _go_on(self, where: int) -> None:
        """Begin a step if there is work and none runs."""
        if self._steps[where] or not self._alive[where]:
            return
        took = self.replicas[where].begin()
        if took:
            self.busy_s[where] += took if self.ended < self._until else 0.0
            self._steps[where] = step = next(self._serial)
            self._at(self.ended + took, self._step, where, step)

    def _step(self, where: int, step: int) -> None:
        if self._steps[where] != step:
            return  # it died meanwhile
        self._steps[where] = 0
        for ask in self.replicas[where].finish(self.ended):
            self._has[where] -= 1
            if ask.turn + 1 < len(ask.who.turns):
                thought = ask.who.turns[ask.turn][2]
                self._at(self.ended + thought, self._arrive, ask.who, ask.turn + 1)
        self._go_on(where)

    # Failures.

    def _plan_failure(self) -> None:
        fleet = self.fleet
        if fleet.failure == "replica":
            self._at(fleet.fails_s, self._die, [0])
        elif fleet.failure == "zone":
            self._at(fleet.fails_s, self._die, list(range(0, fleet.replicas, fleet.zones)))
        elif fleet.failure == "rollout":
            self._at(fleet.fails_s, self._drain, 0)

    def _die(self, lost: list[int], down_s: float | None = None) -> None:
        """End replicas; who has seen a token is cut off, others are asked again elsewhere."""
        fleet, noticed = self.fleet, self.ended + self.fleet.probe_s
        self._at(noticed, self._leave, lost)  # before anybody is sent there again
        for where in lost:
            self._alive[where], self._steps[where], self._noticed[where] = False, 0, noticed
            for ask in self.replicas[where].lose():
                if ask.made:
                    ask.fate, ask.ended = "cut", self.ended
                    self._has[where] -= 1
                else:
                    self._at(noticed, self._again, ask)
        away = fleet.down_s if down_s is None else down_s
        self._at(max(self.ended + away + fleet.start_s, noticed), self._return, lost)

    def _leave(self, lost: list[int]) -> None:
        for where in lost:
            self._taking[where] = False

    def _return(self, lost: list[int]) -> None:
        for where in lost:
            self._alive[where] = self._taking[where] = True

    def _drain(self, first: int) -> None:
        """Let some replicas end what they have, then restart them, then the next ones."""
        group = list(range(first, min(first + self.fleet.at_once, self.fleet.replicas)))
        if group:
            self._leave(group)
            self._drained(group, self.ended + self.fleet.drain_s)

    def _drained(self, group: list[int], until: float) -> None:
        if any(self._has[where] for where in group) and self.ended < until:
            self._at(min(until, self.ended + 0.1), self._drained, group, until)
            return
        self._die(group, 0.0)
        back = max(self.fleet.start_s, self.fleet.probe_s)
        self._at(self.ended + back, self._drain, group[-1] + 1)


def _mix(value: np.ndarray) -> np.ndarray:
    """Return well-mixed 64 bits of each value; the finaliser of splitmix64 (Steele 2014)."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Window:
    """When questions count, in seconds, and what a good answer is, in milliseconds."""

    begins: float
    ends: float
    first_ms: float
    token_ms: float

    def figures(self, asks: Sequence[Ask]) -> dict[str, Any]:
        """Return what questions amount to; None where there is nothing to take a figure of.

        Times to the first token count from the first try; times per token are means of an answer.
        """
        asks = [ask for ask in asks if self.begins <= ask.arrived < self.ends]
        served = [ask for ask in asks if ask.fate == "served"]
        first = np.array([1e3 * (ask.first - ask.arrived) for ask in served])
        token = np.array([1e3 * (a.ended - a.first) / max(1, a.new - 1) for a in served])
        good = int(np.sum((first <= self.first_ms) & (token <= self.token_ms)))
        prompt = sum(ask.prompt for ask in served)
        return {
            "asked": len(asks),
            **{fate: sum(a.fate == fate for a in asks) for fate in ("served", "cut", "refused")},
            "retried": sum(ask.tries > 1 for ask in asks),
            **_percentiles("ttft", first),
            **_percentiles("tpot", token),
            "goodput": good / len(asks) if asks else None,
            "tok_s": sum(ask.new for ask in served) / (self.ends - self.begins),
            "prefix_hits": sum(ask.found for ask in served) / prompt if prompt else None,
        }


def _percentiles(name: str, values: np.ndarray) -> dict[str, float | None]:
    found = np.percentile(values, [50, 99]).tolist() if values.size else [None, None]
    return dict(zip((f"{name}_p50_ms", f"{name}_p99_ms"), found, strict=True))


def fewest(goodput: Callable[[int], float], least: float, most: int) -> int:
    """Return the fewest replicas with a goodput of at least `least`; 0: `most` are too few.

    Goodput is taken to rise with replicas.
    """
    low, high = 0, 1
    while goodput(high) < least:
        if high == most:
            return 0
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if goodput(middle) >= least else (middle, high)
    return high
