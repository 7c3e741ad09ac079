"""Tokens to results: text, stop strings, finish reason, log probabilities."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.config.values import integer, refuse_unknown, shown
from clocher_runtime.engine.arguments import AT_LEAST_ONE, Constraint, Sampling, listed
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.requests import Token
from clocher_runtime.engine.session import Session
from clocher_runtime.text.answers import StopStrings
from clocher_runtime.text.grammar import KINDS
from clocher_runtime.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]
MAX_NEW = 64
MAX_LOGPROBS = 20
_LOGPROBS = integer(0, MAX_LOGPROBS)
_BLOCK = 64
_LENGTHS = ("max_new", "max_tokens", "max_new_tokens")
_SAMPLING = tuple(field.name for field in fields(Sampling))
OPTIONS = frozenset((*_LENGTHS, "stop", "logprobs", "adapter", *KINDS, *_SAMPLING))


class TokenLogprob(NamedTuple):
    """The log probability of a token at temperature 1, before any sampling setting."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # top tokens and their log probabilities, most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A generated text; `finish_reason` is "stop" or "length" (max_new, or the context is full)."""

    text: str  # without the stop token or stop string
    ids: tuple[int, ...]  # the stop token included
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None  # per token; None unless requested

    @property
    def completion_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.ids)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a generation."""

    max_new: int  # tokens to generate at most
    stop: tuple[str, ...]  # stop strings
    logprobs: int | None  # number of top tokens per token; None: no log probabilities
    sampling: Sampling
    structure: Mapping[str, Any] | None = None  # as `grammar.GrammarMaker` takes it
    adapter: str = ""  # name of a LoRA adapter

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Parse keyword arguments; raises UsageError."""
        refuse_unknown(given, OPTIONS, "generate")
        lengths = [name for name in _LENGTHS if name in given]
        if len(lengths) > 1:
            raise UsageError(f"{' and '.join(lengths)} mean the same; give one of them")
        kinds = [kind for kind in KINDS if given.get(kind) is not None]
        if len(kinds) > 1:
            raise UsageError(f"{' and '.join(kinds)} cannot both be obeyed; give one of them")
        name = lengths[0] if lengths else "max_new"
        logprobs = given.get("logprobs")
        return cls(
            AT_LEAST_ONE.check(name, given.get(name, MAX_NEW)),
            _stops(given.get("stop")),
            None if logprobs is None else _LOGPROBS.check("logprobs", logprobs),
            Sampling(**{key: given[key] for key in _SAMPLING if key in given}),
            {"kind": kinds[0], "value": given[kinds[0]]} if kinds else None,
            given.get("adapter", ""),
        )


class TextGeneration(Iterator[str]):
    """A text in pieces, as it is generated. Closing or dropping it ends the generation."""

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        options: Options,
        constraint: Constraint | None = None,
    ) -> None:
        self._options, self._prompt_tokens = options, len(ids)
        self._ends = frozenset(session.model.spec.eos_ids)
        self._tokens: Generation = session.generate(
            [ids],
            options.max_new,
            options.sampling,
            logits=options.logprobs is not None,
            constraints=[constraint],
            adapter=options.adapter,
        )
        self._decoder = tokenizer.stream()
        self._stops = StopStrings(options.stop)
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._finish: FinishReason | None = None

    def __next__(self) -> str:
        if self._finish is not None:
            raise StopIteration
        piece = self._take(next(self._tokens))
        self._text.append(piece)
        return piece

    def close(self) -> None:
        """End the generation."""
        self._tokens.close()

    def begin(self) -> None:
        """Join the session's steps now, not at the first piece."""
        self._tokens.begin()

    def result(self) -> Completion:
        """Return the completion, once the last piece was read."""
        for _ in self:
            pass
        if self._finish is None:
            raise UsageError("this generation was closed before its end; it has no result")
        return Completion(
            text="".join(self._text),
            ids=tuple(self._ids),
            finish_reason=self._finish,
            prompt_tokens=self._prompt_tokens,
            logprobs=tuple(self._logprobs) if self._options.logprobs is not None else None,
        )

    def _take(self, token: Token) -> str:
        self._ids.append(token.id)
        if token.logits is not None:
            count = self._options.logprobs or 0
            self._logprobs.append(logprob_of(token.logits, token.id, count))
        text = "" if token.id in self._ends else self._decoder.push(token.id)
        if token.finish:
            text += self._decoder.flush()
        text = self._stops.push(text)
        if self._stops.found is not None:
            self._finish = "stop"
            self._tokens.close()
        elif token.finish:
            self._finish = token.finish
            text += self._stops.flush()
        return text


def side_by_side(texts: Sequence[TextGeneration], batch: int) -> Iterator[tuple[int, Completion]]:
    """Yield (index, completion) of texts generated as a batch, in the order they finish."""
    waiting = deque(enumerate(texts))
    running: list[tuple[int, TextGeneration]] = []
    try:
        while waiting or running:
            while waiting and len(running) < batch:
                running.append(waiting.popleft())
                running[-1][1].begin()
            # One token each is one step; a stop string ends its text at once.
            left = []
            for number, text in running:
                if next(text, None) is None:
                    yield number, text.result()
                else:
                    left.append((number, text))
            running = left
    finally:
        for text in texts:
            text.close()


def _low(logits: np.ndarray, count: int) -> np.floating[Any]:
    """Return a number that at least `count` logits reach, and not many more."""
    whole = logits[: logits.size // _BLOCK * _BLOCK]
    largest = whole.reshape(_BLOCK, -1).max(axis=0)
    source = largest if largest.size >= count else logits
    return np.sort(source)[-min(count, source.size)]  # type: ignore[no-any-return]


def logprob_of(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Return the log probability of a token, and the top `count`, by logits [V] fp32.

    Exponentials in fp32, the sum in fp64: within about 1e-6, at an eighth of the time of fp64.
    """
    largest = logits.max()
    total = np.log(np.exp(logits - largest).sum(dtype=np.float64)) + np.float64(largest)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        among = np.flatnonzero(logits >= _low(logits, count))
        # Ties rank by id, as in sampling.
        order = among[np.argsort(-logits[among], kind="stable")][:count]
        top = tuple((int(i), float(np.float64(logits[i]) - total)) for i in order)
    return TokenLogprob(token, float(np.float64(logits[token]) - total), top)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else listed(value, "stop as a string or several")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UsageError(f"stop has {shown(stop)}; expected strings that are not empty")
    return tuple(stops)
