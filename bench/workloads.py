"""Texts that guesses are measured on: what stands in the prompt, and what answers it.

Models small enough to be shipped do not copy: given a text twice they read it the second time as
if it were new. So an answer can be given, as in measurements by teacher forcing: each pass computes
all that it would, and then the next token of the answer counts as the one that was drawn. Nobody
sees the answer before. A workload without an answer goes on as the model likes.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clocher_runtime.engine.arguments import Sampling

PIECE = 6500
"""Characters of the source that one case is made of; each case has others, until they run out."""
_GREEDY, _SAMPLED = Sampling(), Sampling(temperature=1.0, seed=1)
_RANDOM_PROMPT = 256
_CONTINUED, _EDITED, _SUMMED = 512, 700, 800
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]{4,}")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and how it is answered.

    Attributes:
        prompt: token ids.
        answer: token ids that are told to the model; empty: it goes on by itself.
        sampling: of what it does by itself.
    """

    prompt: list[int]
    answer: list[int]
    sampling: Sampling = _GREEDY


@dataclass(frozen=True, slots=True)
class Source:
    """Held-out code, and the tokens it is made of.

    Attributes:
        text: of it.
        encode: returns the ids of a text.
        vocab_size: ids are below.
        new: tokens of an answer.
        prompt: tokens of a prompt whose answer is not given, at most.
    """

    text: str
    encode: Encode
    vocab_size: int
    new: int
    prompt: int = 512

    def piece(self, number: int) -> str:
        """Return whole lines of the text, others for each number until they run out."""
        start = number * PIECE % max(1, len(self.text) - PIECE)
        return self.text[self.text.find("\n", start) + 1 : start + PIECE]

    def lines(self, text: str, tokens: int) -> str:
        """Return the first lines of a text, as many as have so many tokens."""
        end = 0
        while end >= 0 and len(self.encode(text[:end])) < tokens:
            end = text.find("\n", end) + 1 or len(text)
            if end == len(text):
                break
        return text[:end]


def go_on(source: Source, number: int) -> Case:
    """Return code, and how its author went on."""
    ids = source.encode(source.piece(number))
    return Case(ids[:_CONTINUED], ids[_CONTINUED : _CONTINUED + source.new])


def edit(source: Source, number: int) -> Case:
    """Return a file and the same with a name changed, a line added and a line taken out."""
    file = source.lines(source.piece(number), _EDITED)
    names = Counter(_WORD.findall(file))
    old = next((name for name, count in names.most_common() if 4 <= count <= 12), "self")
    new = f"new_{old}"
    lines = re.sub(rf"\b{old}\b", new, file).split("\n")
    for at in range(len(lines) - 1, 0, -1):
        if at % 20 == 10:
            lines.insert(at, f"# {number + at}: checked")
        elif at % 20 == 0:
            del lines[at]
    prompt = f"# The file\n{file}\n# The file, with {new} for {old}\n"
    return Case(source.encode(prompt), source.encode("\n".join(lines))[: source.new])


def summarise(source: Source, number: int) -> Case:
    """Return a file and passages of it, two to four lines each, in another order with new text."""
    random = np.random.default_rng(number)
    file = source.lines(source.piece(number), _SUMMED)
    lines = [line for line in file.split("\n") if line.strip()]
    said = [line for line in source.piece(number + 1).split("\n") if len(line.strip()) > 20]
    answer: list[str] = []
    for turn, start in enumerate(random.permutation(max(1, len(lines) // 4)) * 4):
        answer.append(f"# {said[turn % len(said)].strip()}")
        answer += lines[start : start + int(random.integers(2, 5))]
    prompt = f"{file}\n# What matters in it\n"
    return Case(source.encode(prompt), source.encode("\n".join(answer))[: source.new])


def own(source: Source, number: int) -> Case:
    """Return code that the model goes on with as it likes best."""
    return Case(source.encode(source.piece(number))[: source.prompt], [])


def own_sampled(source: Source, number: int) -> Case:
    """Return code that the model goes on with by chance."""
    return Case(own(source, number).prompt, [], _SAMPLED)


def random_ids(source: Source, number: int) -> Case:
    """Return ids without sense, which the model goes on with as it likes best."""
    count = min(_RANDOM_PROMPT, source.prompt)
    ids = np.random.default_rng(number).integers(1, source.vocab_size, count)
    return Case(ids.tolist(), [])


def random_sampled(source: Source, number: int) -> Case:
    """Return ids without sense, which the model goes on with by chance."""
    return Case(random_ids(source, number).prompt, [], _SAMPLED)


WORKLOADS: dict[str, Callable[[Source, int], Case]] = {
    "continue": go_on,
    "edit": edit,
    "summarise": summarise,
    "own": own,
    "own-sampled": own_sampled,
    "random": random_ids,
    "random-sampled": random_sampled,
}
"""Name -> makes the case of a number."""
GIVEN = ("continue", "edit", "summarise")
"""Those whose answer is given."""
