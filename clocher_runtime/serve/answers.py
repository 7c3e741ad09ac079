"""Answers of chats and completions, whole or streamed: one pipeline, two translations.

Source: OpenAI API reference, chat completions and completions; reasoning fields as in vLLM.
"""

import datetime
import secrets
from abc import ABC, abstractmethod
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
from typing import Any, ClassVar

from clocher_runtime.serve.errors import to_json
from clocher_runtime.serve.jobs import Job, News
from clocher_runtime.serve.messages import Made, Scored, Top, Unsure
from clocher_runtime.text.answers import AnswerReader, Delta
from clocher_runtime.text.deltas import StopStrings
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

DONE = b"data: [DONE]\n\n"


def now_s() -> int:
    """Return the seconds since 1970: for clients, not for measurements."""
    return int(datetime.datetime.now(datetime.UTC).timestamp())


@dataclass(slots=True)
class Answer:
    """The identity and the usage of an answer."""

    kind: str  # begins its id
    model: str  # as clients call it
    prompt_tokens: int  # of all prompts
    made: int = 0  # tokens, of all choices
    cached: int = 0  # of `prompt_tokens`, found in the cache
    guessed: int = 0  # of `made`, accepted draft tokens
    nfe: int = 0  # number of function evaluations: forwards of denoised texts
    id: str = field(init=False)
    created: int = field(default_factory=now_s)

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{secrets.token_hex(12)}"

    def count(self, made: Made, is_first: bool) -> None:
        """Count a token; the first choice of a prompt says how much of it was in the cache."""
        self.made += 1
        self.guessed += made.guessed
        self.nfe += made.passes
        if is_first:
            self.cached += made.cached

    def usage(self) -> dict[str, Any]:
        """Return the tokens it took so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **self.denoised(),
        }

    def denoised(self) -> dict[str, Any]:
        """Return what usage has of denoised blocks; nothing if there were none."""
        return {"nfe": self.nfe, "tokens_per_nfe": self.made / self.nfe} if self.nfe else {}


class TokenTexts:
    """The texts of single tokens, where log probabilities are reported."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token alone; bytes of an unfinished character become U+FFFD."""
        return self._tokenizer.decode([token])

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token as chats report it."""
        raw = list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": raw}

    def unsure(self, tokens: Sequence[int | None]) -> list[str | None]:
        """Return the texts of uncommitted tokens, with their spaces; None for a mask."""
        raw = self._tokenizer.token_bytes
        return [
            None if token is None else raw(token).decode("utf-8", "replace") for token in tokens
        ]

    def table(self, top: Top) -> dict[str, float]:
        """Return top tokens as completions report them; of equal texts the most likely."""
        table: dict[str, float] = {}
        for token, logprob in top:
            table.setdefault(self.text(token), finite(logprob))
        return table


def finite(logprob: float) -> float:
    """Return a log probability that JSON has a number for; OpenAI's stands for 0."""
    return max(logprob, -9999.0)


@dataclass(slots=True)
class _Choice:
    """One answer as it is made; `finish` is why it ended, "" before that."""

    finish: str = field(default="", kw_only=True)
    unsure: Unsure | None = field(default=None, kw_only=True)  # uncommitted, not reported yet


@dataclass(slots=True)
class ChatChoice(_Choice):
    """One answer of a chat: `stops` end its content, `one_call` ends it before a second call."""

    reader: AnswerReader
    stops: StopStrings
    one_call: bool = False
    begun: bool = False
    calls: dict[int, str] = field(default_factory=dict)  # index -> id
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # not reported yet

    def push(self, made: Made) -> list[Delta]:
        """Return what a token adds to the answer."""
        deltas = self.reader.push(made.token)
        if made.finish:
            deltas += self.reader.finish()
        deltas = self._until_stop(deltas)
        if made.finish and not self.finish:
            if rest := self.stops.flush():
                deltas.append(Delta("content", rest))
            called = self.calls and made.finish == "stop"
            self.finish = "tool_calls" if called else made.finish
        return deltas

    def _until_stop(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if delta.kind == "content":
                if text := self.stops.push(delta.text):
                    kept.append(Delta("content", text))
                if self.stops.found is not None:
                    self.finish = "stop"
                    break
                continue
            if rest := self.stops.flush():
                kept.append(Delta("content", rest))
            if delta.kind == "tool_call":
                if self.one_call and self.calls:
                    self.finish = "tool_calls"
                    break
                self.calls[delta.index] = f"call_{secrets.token_hex(12)}"
            kept.append(delta)
        return kept


@dataclass(slots=True)
class TextChoice(_Choice):
    """One continuation of a prompt; `prompt` has its ids if they are echoed."""

    prompt: list[int]
    decoder: TextStream
    stops: StopStrings
    ends: frozenset[int]  # tokens that end it and have no text
    names: TokenTexts | None  # where log probabilities are reported
    only_scored: bool = False
    length: int = 0  # characters so far, for the offsets of tokens
    logprobs: list[tuple[str, float | None, dict[str, float] | None, int]] = field(
        default_factory=list
    )  # not reported yet: token, log probability, top tokens, offset

    def echo(self, tokenizer: Tokenizer, scored: Scored | None) -> str:
        """Return the text of the prompt, and note the log probabilities of its tokens."""
        if self.names is not None and scored is not None:
            pieces = tokenizer.stream()
            scores = [(None, ()), *scored.tokens]
            for token, (logprob, top) in zip(self.prompt, scores, strict=True):
                self._note(token, logprob, top)
                self.length += len(pieces.push(token))
        text = tokenizer.decode(self.prompt)
        self.length = len(text)
        return text

    def push(self, made: Made) -> list[str]:
        """Return what a token adds to the text."""
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
        return [text]

    def _note(self, token: int, logprob: float | None, top: Top) -> None:
        if self.names is not None:
            told = (None, None) if logprob is None else (finite(logprob), self.names.table(top))
            self.logprobs.append((self.names.text(token), *told, self.length))

    def taken(self) -> dict[str, Any] | None:
        """Return the log probabilities that were not reported yet; None: they are not wanted."""
        if self.names is None:
            return None
        noted, self.logprobs = self.logprobs, []
        columns = zip(*noted, strict=True) if noted else ((), (), (), ())
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(keys, columns, strict=True))


Piece = tuple[int, Any, str]
"""What a token adds: index of the choice, deltas or text, why it ended if it did."""


@dataclass
class _Pipeline(ABC):
    """The answers to one request, as the job makes them."""

    answer: Answer
    job: Job
    choices: list[Any]
    names: TokenTexts

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    async def steps(self) -> AsyncIterator[Iterable[Piece]]:
        """Yield what each step adds, to be iterated once: a token counts when it is reached."""
        try:
            async for piece in self._before():
                yield [piece]
            while news := await self.job.read():
                scored = {at: await self._echo(at, w) for at, w in news if isinstance(w, Scored)}
                yield self._step(news, scored)
        finally:
            self.job.close()

    def _step(self, news: Sequence[News], scored: Mapping[int, Piece]) -> Iterator[Piece]:
        for index, what in news:
            choice = self.choices[index]
            if isinstance(what, Scored):
                yield scored[index]
            elif choice.finish:  # it was made before the engine knew
                continue
            elif isinstance(what, Unsure):
                choice.unsure = what
                yield index, (), ""
            else:
                self.answer.count(what, self._is_first(index))
                added = choice.push(what)
                if choice.finish:
                    self.job.end(index)
                yield index, added, choice.finish

    async def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed."""
        said: list[list[Any]] = [[] for _ in self.choices]
        async for step in self.steps():
            for index, added, _ in step:
                said[index] += added
        choices = [
            {"index": index, **self._result(choice, said[index]), "finish_reason": choice.finish}
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head(self.object), "choices": choices, "usage": self.answer.usage()}

    async def chunks(self, include_usage: bool, continuous: bool) -> AsyncIterator[bytes]:
        """Yield the events of the response that is streamed."""
        head = self._head(self.chunk_object)

        def event(*choices: dict[str, Any]) -> bytes:
            chunk: dict[str, Any] = {**head, "choices": choices}
            if include_usage or continuous:
                chunk["usage"] = self.answer.usage() if continuous or not choices else None
            if continuous:  # for who watches the speed; otherwise all answers look alike
                guessed = {"accepted_prediction_tokens": self.answer.guessed}
                chunk["usage"]["completion_tokens_details"] = guessed
            return b"data: " + to_json(chunk) + b"\n\n"

        async for step in self.steps():
            events = []
            for index, added, finish in step:
                choice = self.choices[index]
                parts: list[tuple[Any, Mapping[str, Any]]]
                parts = [(part, {}) for part in self._parts(choice, added)]
                if choice.unsure is not None:
                    parts.append((None, {"canvas": self.names.unsure(choice.unsure.ids)}))
                    choice.unsure = None
                if finish:
                    parts.append((None, {"finish_reason": finish}))
                for part, more in parts:
                    told = {"finish_reason": None, **more}
                    events.append(event({"index": index, **self._chunk(choice, part), **told}))
            if events:
                yield b"".join(events)
        yield event() + DONE if include_usage else DONE

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}

    async def _before(self) -> AsyncIterator[Piece]:
        """Yield what comes before any token."""
        nothing: tuple[Piece, ...] = ()
        for piece in nothing:
            yield piece

    async def _echo(self, index: int, scored: Scored | None) -> Piece:
        """Return what the scores of a prompt add; only completions ask for them."""
        return index, (), ""

    def _is_first(self, index: int) -> bool:
        """Whether a choice is the first one of its prompt."""
        return index == 0

    @abstractmethod
    def _result(self, choice: Any, said: list[Any]) -> dict[str, Any]:
        """Return a choice of a whole response."""

    @abstractmethod
    def _parts(self, choice: Any, added: Any) -> list[Any]:
        """Return what chunks have of what a token adds, a part each."""

    @abstractmethod
    def _chunk(self, choice: Any, part: Any) -> dict[str, Any]:
        """Return a choice of a chunk; None is an empty part."""


_ROLE = {"role": "assistant", "content": ""}


@dataclass
class ChatAnswer(_Pipeline):
    """The answers to one chat; `top` -1: log probabilities are not wanted."""

    top: int

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _step(self, news: Sequence[News], scored: Mapping[int, Piece]) -> Iterator[Piece]:
        if self.top < 0:
            yield from super()._step(news, scored)
            return
        for each in news:
            choice, made = self.choices[each.sequence], each.what
            if isinstance(made, Made) and not choice.finish:
                assert made.logprob is not None
                top = [self.names.named(*token) for token in made.top]
                told = self.names.named(made.token, made.logprob) | {"top_logprobs": top}
                choice.logprobs.append(told)
            yield from super()._step([each], scored)

    def _result(self, choice: ChatChoice, said: list[Delta]) -> dict[str, Any]:
        def joined(kind: str, index: int = 0) -> str:
            return "".join(d.text for d in said if d.kind == kind and d.index == index)

        content, reasoning = joined("content"), joined("reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if choice.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call,
                    "type": "function",
                    "function": {
                        "name": joined("tool_call", at),
                        "arguments": joined("arguments", at),
                    },
                }
                for at, call in choice.calls.items()
            ]
        logprobs = {"content": choice.logprobs} if self.top >= 0 else None
        return {"message": message, "logprobs": logprobs}

    def _parts(self, choice: ChatChoice, added: list[Delta]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [] if choice.begun else [_ROLE]
        choice.begun = True
        for delta in added:
            match delta.kind:
                case "content":
                    parts.append({"content": delta.text})
                case "reasoning":
                    parts.append({"reasoning_content": delta.text, "reasoning": delta.text})
                case "tool_call":
                    function = {"name": delta.text, "arguments": ""}
                    call = {"index": delta.index, "id": choice.calls[delta.index]}
                    call |= {"type": "function", "function": function}
                    parts.append({"tool_calls": [call]})
                case "arguments":
                    call = {"index": delta.index, "function": {"arguments": delta.text}}
                    parts.append({"tool_calls": [call]})
        return parts

    def _chunk(self, choice: ChatChoice, part: dict[str, Any] | None) -> dict[str, Any]:
        told = None
        if choice.logprobs and part is not _ROLE:
            told, choice.logprobs = {"content": choice.logprobs}, []
        return {"delta": part or {}, "logprobs": told}


@dataclass
class CompletionAnswer(_Pipeline):
    """The continuations of one request's prompts, `each` of a prompt.

    `scores`: the tokens of prompts are reported, before anything is generated. `apart` runs work in
    the thread for text.
    """

    each: int
    scores: bool
    tokenizer: Tokenizer
    apart: Callable[[Callable[[], str]], Awaitable[str]]

    object = chunk_object = "text_completion"

    async def _before(self) -> AsyncIterator[Piece]:
        if not self.scores:
            for index, choice in enumerate(self.choices):
                if choice.prompt:
                    yield await self._echo(index, None)

    async def _echo(self, index: int, scored: Scored | None) -> Piece:
        choice = self.choices[index]
        if choice.only_scored and scored is not None:
            choice.finish = "length"
        text = await self.apart(lambda: choice.echo(self.tokenizer, scored))
        return index, [text], choice.finish

    def _is_first(self, index: int) -> bool:
        return index % self.each == 0

    def _result(self, choice: TextChoice, said: list[str]) -> dict[str, Any]:
        return {"text": "".join(said), "logprobs": choice.taken()}

    def _parts(self, choice: TextChoice, added: Sequence[str]) -> list[str]:
        text = "".join(added)
        return [text] if text or choice.logprobs else []

    def _chunk(self, choice: TextChoice, part: str | None) -> dict[str, Any]:
        return {"text": part or "", "logprobs": choice.taken() if choice.logprobs else None}
