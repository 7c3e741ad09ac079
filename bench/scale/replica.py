"""A replica: the scheduler and the pages of `clocher_runtime.engine`, with times from a table.

It composes steps as `engine.scheduler` does (who decodes first, then pieces of prompts, oldest
first, within `itl_ms`), and names, shares and evicts pages as `engine.pages` does. It knows lengths
instead of tokens.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bench.scale.costs import StepCosts
from bench.scale.load import PAGE, Conversation
from clocher_runtime.engine.timing import StepSums

_WITH_PROMPTS, _LEAST_PIECE = 1.5, 4  # as in engine.scheduler


@dataclass(slots=True, eq=False)
class Ask:
    """A question on its way, and what became of it.

    Attributes:
        who: of whom, and `turn` which of theirs.
        arrived: seconds; that of the first try.
        prompt: tokens, all of the conversation before included.
        new: tokens to make.
        where: replica that has it; -1: none.
        found: tokens of the prompt that were in the cache of the last replica.
        first: when the first token was made; nan: not yet.
        fate: "served", "cut" (its replica was lost after the first token), "refused"; "": open.
        tries: replicas that it was given to.
    """

    who: Conversation
    turn: int
    arrived: float
    prompt: int
    new: int
    where: int = -1
    cells: int = 0
    made: int = 0
    found: int = 0
    tries: int = 0
    first: float = float("nan")
    ended: float = float("nan")
    fate: str = ""
    held: list[int | None] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        """Tokens that have to be computed before the next one."""
        return self.prompt + self.made - self.cells

    @property
    def decodes(self) -> bool:
        """Whether the next step makes a token from the last one."""
        return self.made > 0 and self.waiting == 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of `clocher serve`, under its names; `chunk` is the tokens of a step."""

    batch: int
    chunk: int
    kv_pages: int
    itl_ms: float
    queue: int


class Replica:
    """One server. Time is given to it.

    Attributes:
        running, waiting: its work.
        sums: what its steps add up to, all of them.
        preempted: how often a sequence had to give its pages back.
    """

    def __init__(self, costs: StepCosts, limits: Limits) -> None:
        self._costs, self._limits = costs, limits
        self.running: list[Ask] = []
        self.waiting: deque[Ask] = deque()
        self.preempted, self.sums = 0, StepSums()
        self._parts: list[tuple[Ask, int]] = []
        self._empty()

    def _empty(self) -> None:
        self._blank = self._limits.kv_pages
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def load(self) -> int:
        """Questions that it has."""
        return len(self.running) + len(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether it would say 429."""
        return self.load >= self._limits.batch + self._limits.queue

    def begin(self) -> float:
        """Compose the next step; return how many seconds it takes, 0 without work."""
        self._parts = self._choose()
        if not self._parts:
            return 0.0
        decodes = decode_keys = prompt = prompt_keys = ends = 0
        for ask, count in self._parts:
            if ask.decodes:
                decodes, decode_keys = decodes + 1, decode_keys + ask.cells
            else:
                prompt += count
                prompt_keys += count * ask.cells + count * (count - 1) // 2
                ends += count == ask.waiting
        ns = round(1e6 * self._costs.ms(decodes, decode_keys, prompt, prompt_keys, ends))
        self.sums.add(prompt, decodes, ns)
        return ns / 1e9

    def finish(self, now: float) -> list[Ask]:
        """End the step; return who has all tokens."""
        over = []
        for ask, count in self._parts:
            whole = count == ask.waiting
            self._commit(ask, ask.cells + count)
            if whole:
                ask.made += 1
                if ask.made == 1:
                    ask.first = now
                if ask.made == ask.new:
                    ask.ended, ask.fate = now, "served"
                    self._retire(ask)
                    over.append(ask)
        self._parts = []
        return over

    def lose(self) -> list[Ask]:
        """Forget everything; return who was there."""
        lost = [*self.running, *self.waiting]
        for ask in lost:
            ask.held, ask.cells = [], 0
        self.running, self._parts = [], []
        self.waiting.clear()
        self._empty()
        return lost

    def _choose(self) -> list[tuple[Ask, int]]:
        decoding = [ask for ask in self.running if ask.decodes]
        room = max(self._limits.chunk, self._limits.batch) - len(decoding)
        if decoding and (self.waiting or len(decoding) < len(self.running)):
            room = min(room, self._room(decoding))
        parts: list[tuple[Ask, int]] = []
        preempted = self.preempted
        for ask in list(self.running):
            if not ask.held and ask.cells == 0 and ask not in self.running:
                continue  # it just lost its pages
            count = 1 if ask.decodes else _piece(ask, room)
            if count and self._reserve(ask, ask.cells + count):
                parts.append((ask, count))
                room -= 0 if ask.decodes else count
        while (
            self.waiting
            and len(self.running) < self._limits.batch
            and room
            and self.preempted == preempted
            and self._admit(self.waiting[0])
        ):
            ask = self.waiting.popleft()
            self.running.append(ask)
            count = _piece(ask, room)
            if not count:
                break
            if self._reserve(ask, ask.cells + count):
                parts.append((ask, count))
                room -= count
        return parts

    def _room(self, decoding: list[Ask]) -> int:
        """Return the tokens of prompts that fit into a step in which others decode."""
        costs, count = self._costs, len(decoding)
        alone = costs.ms(count, sum(ask.cells for ask in decoding), 0, 0, 0)
        limit = max(self._limits.itl_ms, _WITH_PROMPTS * alone)
        left = limit - max(0.0, alone - float(costs.prompt[count]))
        most = int(np.searchsorted(costs.prompt, left, "right")) - 1
        return max(most - count, _LEAST_PIECE)

    # Pages.

    def _available(self) -> int:
        return self._blank + len(self._unused)

    def _admit(self, ask: Ask) -> bool:
        """Give it the pages of its beginning that are there, if the rest has room too."""
        length, known = ask.prompt + ask.made, list[int | None]()
        for block in range((length - 1) // PAGE):
            key = ask.who.key(block, ask.turn)
            if key not in self._users and key not in self._unused:
                break
            known.append(key)
        revived = sum(key in self._unused for key in known)
        if -(-length // PAGE) - len(known) > self._available() - revived:
            return False
        for key in known:
            assert key is not None
            self._users[key] = self._users.get(key, 0) + 1
            self._unused.pop(key, None)
        ask.held, ask.cells = known, len(known) * PAGE
        if not ask.made:
            ask.found = ask.cells
        return True

    def _reserve(self, ask: Ask, cells: int) -> bool:
        """Get pages for its first cells, from the newest if there are none; False: it waits."""
        while len(ask.held) < -(-cells // PAGE):
            if self._available():
                if self._blank:
                    self._blank -= 1
                else:
                    self._unused.popitem(last=False)
                ask.held.append(None)
                continue
            newest = self.running[-1]
            self._retire(newest)
            self.waiting.appendleft(newest)
            self.preempted += 1
            if newest is ask:
                return False
        return True

    def _commit(self, ask: Ask, cells: int) -> None:
        for block in range(ask.cells // PAGE, cells // PAGE):
            key = ask.who.key(block, ask.turn)
            if key not in self._users and key not in self._unused:
                ask.held[block], self._users[key] = key, 1
        ask.cells = cells

    def _retire(self, ask: Ask) -> None:
        self.running.remove(ask)
        for key in reversed(ask.held):  # a beginning is kept longer
            if key is None:
                self._blank += 1
                continue
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._unused[key] = None
        ask.held, ask.cells = [], 0


def _piece(ask: Ask, room: int) -> int:
    """Return how many of its tokens a step with this room computes; the last one needs a row."""
    return ask.waiting if ask.waiting <= room else max(0, min(ask.waiting - 1, room))


def mean_steps(sums: Iterable[StepSums]) -> dict[str, float | None]:
    """Return the mean of steps that only decode, and of those with tokens of prompts."""
    whole = StepSums()
    for each in sums:
        for name in StepSums.__slots__:
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
    decode, prompt = whole.decode_steps, whole.prompt_steps
    return {
        "decode_step_ms": whole.decode_ns / decode / 1e6 if decode else None,
        "prompt_step_ms": whole.prompt_ns / prompt / 1e6 if prompt else None,
        "prompt_step_tokens": whole.prompt_tokens / prompt if prompt else None,
    }
