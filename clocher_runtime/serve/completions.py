"""POST /v1/completions: how texts go on, whole or in chunks, with log probabilities of all tokens.

Source: OpenAI API reference, completions. `echo` with `logprobs` is what evaluations of likelihood
need: the first token of a prompt has none.
"""

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.serve.jobs import Job, News
from clocher_runtime.serve.json_text import to_json
from clocher_runtime.serve.messages import Made, Scored, Top, Unsure
from clocher_runtime.serve.usage import Answer, Chunks, TokenTexts, canvas, finite
from clocher_runtime.text.stops import StopStrings
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

Piece = tuple[int, str, str]
"""What a token adds: index of the choice, text, why it ended if it did."""


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of tokens, as completions tell them: four lists of one length."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def taken(self) -> dict[str, Any]:
        """Return what was noted and not returned yet."""
        found = {name: getattr(self, name) for name in self.__slots__}
        for name in self.__slots__:
            setattr(self, name, [])
        return found


@dataclass(slots=True)
class TextChoice:
    """How one text goes on, as it is made.

    Attributes:
        prompt: its ids, if they are echoed; else none.
        decoder: tokens to text.
        stops: strings that end it.
        ends: tokens that end it and have no text.
        names: of tokens, if log probabilities are told; else None.
        only_scored: whether nothing is to be made.
        finish: why it ended; "" before that.
        length: characters so far, for the offsets of tokens.
        logprobs: what no chunk has told of.
        unsure: what stands behind it, if no chunk has told of that.
    """

    prompt: list[int]
    decoder: TextStream
    stops: StopStrings
    ends: frozenset[int]
    names: TokenTexts | None
    only_scored: bool = False
    finish: str = ""
    length: int = 0
    logprobs: Logprobs = field(default_factory=Logprobs)
    unsure: Unsure | None = None

    def echo(self, tokenizer: Tokenizer, scored: Scored | None) -> str:
        """Return the text of the prompt, and note how likely its tokens were."""
        if self.names is not None and scored is not None:
            pieces = tokenizer.stream()
            scores = [(None, ()), *scored.tokens]
            for token, (logprob, top) in zip(self.prompt, scores, strict=True):
                self._note(token, logprob, top)
                self.length += len(pieces.push(token))
        text = tokenizer.decode(self.prompt)
        self.length = len(text)
        return text

    def push(self, made: Made) -> str:
        """Return what a token adds to the text."""
        if self.names is not None:
            self._note(made.token, made.logprob, made.top)
        is_end = made.finish == "stop" and made.token in self.ends
        text = "" if is_end else self.decoder.push(made.token)
        if made.finish:
            text += self.decoder.flush()
        self.length += len(text)
        text = self.stops.push(text)
        if self.stops.found is not None:
            self.finish = "stop"
        elif made.finish:
            text += self.stops.flush()
            self.finish = made.finish
        return text

    def _note(self, token: int, logprob: float | None, top: Top) -> None:
        assert self.names is not None
        self.logprobs.tokens.append(self.names.text(token))
        self.logprobs.token_logprobs.append(None if logprob is None else finite(logprob))
        self.logprobs.top_logprobs.append(None if logprob is None else self.names.table(top))
        self.logprobs.text_offset.append(self.length)


@dataclass(slots=True)
class CompletionAnswer:
    """How the texts of one request go on.

    Attributes:
        answer: what is common to its parts.
        job: makes the tokens.
        choices: by their index.
        each: choices of a prompt.
        scores: whether the tokens of prompts are told of, before anything is made.
        tokenizer: of the model.
        apart: does some work in the thread for text.
    """

    answer: Answer
    job: Job
    choices: list[TextChoice]
    each: int
    scores: bool
    tokenizer: Tokenizer
    apart: Callable[[Callable[[], str]], Awaitable[str]]

    async def pieces(self) -> AsyncIterator[Iterable[Piece]]:
        """Yield what each step adds, to be gone through once: a token counts when it is reached.

        Raises:
            ApiError: the engine cannot go on.
        """
        try:
            if not self.scores:
                for index, choice in enumerate(self.choices):
                    if choice.prompt:
                        yield [(index, await self._echo(choice, None), "")]
            while news := await self.job.read():
                scored = {
                    index: await self._scored(index, what)
                    for index, what in news
                    if isinstance(what, Scored)
                }
                yield self._step(news, scored)
        finally:
            self.job.close()

    def _step(self, news: Sequence[News], scored: Mapping[int, Piece]) -> Iterator[Piece]:
        for index, what in news:
            if isinstance(what, Scored):
                yield scored[index]
            elif not self.choices[index].finish:  # else it came before the engine knew
                yield self._made(index, what)

    async def _echo(self, choice: TextChoice, scored: Scored | None) -> str:
        return await self.apart(lambda: choice.echo(self.tokenizer, scored))

    async def _scored(self, index: int, scored: Scored) -> Piece:
        choice = self.choices[index]
        if choice.only_scored:
            choice.finish = "length"
        return index, await self._echo(choice, scored), choice.finish

    def _made(self, index: int, made: Made | Unsure) -> Piece:
        choice = self.choices[index]
        if isinstance(made, Unsure):
            choice.unsure = made
            return index, "", ""
        self.answer.count(made, index % self.each == 0)
        text = choice.push(made)
        if choice.finish:
            self.job.end(index)
        return index, text, choice.finish

    async def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed."""
        texts: list[list[str]] = [[] for _ in self.choices]
        async for step in self.pieces():
            for index, text, _ in step:
                texts[index].append(text)
        return {
            "id": self.answer.id,
            "object": "text_completion",
            "created": self.answer.created,
            "model": self.answer.model,
            "choices": [
                {
                    "index": index,
                    "text": "".join(texts[index]),
                    "logprobs": None if choice.names is None else choice.logprobs.taken(),
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(self.choices)
            ],
            "usage": self.answer.usage(),
        }

    async def chunks(self, include_usage: bool, continuous: bool) -> AsyncIterator[bytes]:
        """Yield the events of the response that is streamed.

        Args:
            include_usage: tell the usage in a last chunk without choices.
            continuous: and in every chunk.
        """
        chunks = Chunks(self.answer, "text_completion", include_usage, continuous)
        names = TokenTexts(self.tokenizer)
        async for step in self.pieces():
            events = []
            for index, text, finish in step:
                choice = self.choices[index]
                if text or choice.logprobs.tokens:
                    events.append(chunks.event(_choice(index, text, choice, "")))
                if choice.unsure is not None:
                    told, choice.unsure = names.unsure(choice.unsure.ids), None
                    events.append(chunks.event(_choice(index, "", choice, "", told)))
                if finish:
                    events.append(chunks.event(_choice(index, "", choice, finish)))
            if events:
                yield b"".join(events)
        yield chunks.last()


def _choice(
    index: int, text: str, choice: TextChoice, finish: str, unsure: list[str | None] | None = None
) -> bytes:
    told = to_json(choice.logprobs.taken()) if choice.logprobs.tokens else b"null"
    return b'{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s%s}' % (
        index,
        to_json(text),
        told,
        to_json(finish or None),
        canvas(unsure),
    )
