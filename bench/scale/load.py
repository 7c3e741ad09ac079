"""Who asks what, and when: conversations that begin alike and grow."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PAGE = 64
"""Tokens of a page, as in `models.build.PAGE_CELLS`."""
_WINDOW_S = 10.0
_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load, before anything is drawn.

    Attributes:
        users: in conversation at a time: they read an answer and write the next question.
        think_s: mean seconds of that, drawn from an exponential distribution.
        turns: mean questions of a conversation, drawn from a geometric distribution.
        question: median tokens of a question; log-normal, sigma 0.8.
        answer: median tokens of an answer; log-normal, sigma 0.6.
        systems: system prompts; the k-th is used in proportion to 1 / k.
        system_tokens: of each; 0: there are none.
        context: tokens of a conversation at most; it ends before that.
        bursts: the rate of conversations is drawn anew for each 10 s: its mean times a gamma
            variable of shape 1/2. Otherwise they are a Poisson process.
        forgets: answers do not come back as they were made, as with reasoning that a chat template
            leaves out: what was made is of no use to the next question.
        seconds: that conversations begin in.
        seed: of all draws. Two loads of the same seed are the same.
    """

    users: float
    think_s: float
    turns: float
    question: int
    answer: int
    systems: int
    system_tokens: int
    context: int
    bursts: bool
    forgets: bool
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one user asks.

    Attributes:
        number: of the conversation; its own pages are named by it.
        system: number of its system prompt.
        shared: tokens of it.
        starts: seconds.
        turns: tokens of a question, of its answer, seconds of thought before the next one.
        forgets: as of a `Load`.
    """

    number: int
    system: int
    shared: int
    starts: float
    turns: tuple[tuple[int, int, float], ...]
    forgets: bool = False

    def prompt(self, turn: int) -> int:
        """Return the tokens of a question and of all before it."""
        before = sum(question + answer for question, answer, _ in self.turns[:turn])
        return self.shared + before + self.turns[turn][0]

    def key(self, block: int, turn: int) -> int:
        """Return the name of a page; the same for all texts that begin with the same tokens."""
        end = (block + 1) * PAGE
        if end <= self.shared:
            return -(((self.system + 1) << _BITS) + block)
        made = self.forgets and end > self.prompt(turn)
        return (((self.number + 1) << _BITS) + (turn + 1) * made << _BITS) + block


def conversations(load: Load) -> list[Conversation]:
    """Return who comes, in the order of their starts."""
    rng = np.random.default_rng(load.seed)
    popular = 1.0 / np.arange(1, load.systems + 1)
    popular /= popular.sum()
    rate = load.users / (load.think_s * load.turns)
    found: list[Conversation] = []
    for starts in _arrivals(rng, rate, load):
        draws = np.random.default_rng((load.seed, len(found)))  # whatever others draw
        system = int(draws.choice(load.systems, p=popular))
        turns, used = [], load.system_tokens
        for _ in range(int(draws.geometric(1 / load.turns))):
            question = 1 + int(draws.lognormal(np.log(load.question), 0.8))
            answer = 2 + int(draws.lognormal(np.log(load.answer), 0.6))
            used += question + answer
            if used > load.context:
                break
            turns.append((question, answer, float(draws.exponential(load.think_s))))
        if turns:
            words = (len(found), system, load.system_tokens, starts, tuple(turns), load.forgets)
            found.append(Conversation(*words))
    return found


def _arrivals(rng: np.random.Generator, rate: float, load: Load) -> Iterator[float]:
    """Yield starts: a Poisson process, or one whose rate changes every window."""
    begins = 0.0
    while begins < load.seconds:
        width = min(_WINDOW_S, load.seconds - begins)
        here = rate * float(rng.gamma(0.5, 2.0)) if load.bursts else rate
        count = rng.poisson(here * width)
        yield from sorted((begins + width * rng.random(count)).tolist())
        begins += width
