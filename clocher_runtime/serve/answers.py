"""Answers of chats and completions. Source: OpenAI API reference; reasoning fields as in vLLM."""

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

from clocher_runtime.serve.choices import ChatChoice, TextChoice, TokenTexts
from clocher_runtime.serve.errors import to_json
from clocher_runtime.serve.jobs import Job, News
from clocher_runtime.serve.messages import Made, Scored, Unsure
from clocher_runtime.text.answers import Delta
from clocher_runtime.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def now_s() -> int:
    """Return the Unix time in seconds: for clients, not for measurements."""
    return int(datetime.datetime.now(datetime.UTC).timestamp())


@dataclass(slots=True)
class Answer:
    """The identity and the usage of a response."""

    kind: str  # begins its id
    model: str  # as clients call it
    prompt_tokens: int  # tokens of all prompts
    made: int = 0  # tokens of all choices
    cached: int = 0  # cached tokens of `prompt_tokens`
    guessed: int = 0  # accepted draft tokens of `made`
    nfe: int = 0  # number of function evaluations: forwards of denoised texts
    id: str = field(init=False)
    created: int = field(default_factory=now_s)

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{secrets.token_hex(12)}"

    def count(self, made: Made, is_first: bool) -> None:
        """Count a token; the first choice of a prompt also reports its cached tokens."""
        self.made += 1
        self.guessed += made.guessed
        self.nfe += made.passes
        if is_first:
            self.cached += made.cached

    def usage(self) -> dict[str, Any]:
        """Return the `usage` object so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.made,
            "total_tokens": self.prompt_tokens + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **self.denoised(),
        }

    def denoised(self) -> dict[str, Any]:
        """Return the `usage` fields of denoised blocks; {} if there were none."""
        return {"nfe": self.nfe, "tokens_per_nfe": self.made / self.nfe} if self.nfe else {}


Piece = tuple[int, Any, str]
"""Index of the choice, deltas or text, finish reason or ""."""


@dataclass
class _Pipeline(ABC):
    """The response to one request: both formats share it."""

    answer: Answer
    job: Job
    choices: list[Any]
    names: TokenTexts

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    async def steps(self) -> AsyncIterator[Iterable[Piece]]:
        """Yield the pieces of each step, to be iterated once: a token counts when it is reached."""
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
        head = self._head(self.chunk_object)

        def event(*choices: dict[str, Any]) -> bytes:
            chunk: dict[str, Any] = {**head, "choices": choices}
            if include_usage or continuous:
                chunk["usage"] = self.answer.usage() if continuous or not choices else None
            if continuous:  # to watch the speed; otherwise drafts leave no trace
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
        nothing: tuple[Piece, ...] = ()
        for piece in nothing:
            yield piece

    async def _echo(self, index: int, scored: Scored | None) -> Piece:
        return index, (), ""

    def _is_first(self, index: int) -> bool:
        return index == 0

    @abstractmethod
    def _result(self, choice: Any, said: list[Any]) -> dict[str, Any]:
        """Return a choice of a whole response."""

    @abstractmethod
    def _parts(self, choice: Any, added: Any) -> list[Any]:
        """Return the chunk parts of a piece."""

    @abstractmethod
    def _chunk(self, choice: Any, part: Any) -> dict[str, Any]:
        """Return a choice of a chunk; None is an empty part."""


_ROLE = {"role": "assistant", "content": ""}


@dataclass
class ChatAnswer(_Pipeline):
    """The response to one chat; `top` is -1 without log probabilities."""

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
    """The completions of one request, `each` of a prompt; `scores`: report prompt tokens first."""

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
