"""Answers of chats and completions. Source: OpenAI API reference; reasoning fields as in vLLM."""

import datetime
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.serve.engine_process import Job, News
from clocher_runtime.serve.errors import ApiError, to_json
from clocher_runtime.serve.messages import Made, Scored, Top, Unsure
from clocher_runtime.serve.prompts import PromptRoom
from clocher_runtime.serve.requests import ChatRequest, CompletionRequest
from clocher_runtime.serve.schemas import function_of
from clocher_runtime.text.answers import AnswerReader, Delta, StopStrings, message_of
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

DONE = b"data: [DONE]\n\n"


def now_s() -> int:
    """Return the Unix time in seconds: for clients, not for measurements."""
    return int(datetime.datetime.now(datetime.UTC).timestamp())


@dataclass(slots=True)
class Answer:
    """The identity and the usage of a response."""

    kind: str  # begins its id, as "chatcmpl-"
    model: str  # as clients call it
    prompt_tokens: int  # tokens of all prompts
    made: int = 0  # tokens of all choices
    cached: int = 0  # cached tokens of `prompt_tokens`
    guessed: int = 0  # accepted draft tokens of `made`
    nfe: int = 0  # number of function evaluations: forwards of denoised texts
    id: str = field(init=False)
    created: int = field(default_factory=now_s)

    def __post_init__(self) -> None:
        self.id = self.kind + secrets.token_hex(12)

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


def named(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """Return a token in the chat format; bytes of an incomplete character become U+FFFD."""
    raw = list(tokenizer.token_bytes(token))
    return {"token": tokenizer.decode([token]), "logprob": finite(logprob), "bytes": raw}


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold; -inf becomes OpenAI's value for 0."""
    return max(logprob, -9999.0)


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One answer as it is made, token by token."""

    stops: StopStrings
    names: Tokenizer | None = None  # of tokens, if log probabilities are requested
    prompt: list[int] = field(default_factory=list)  # its ids if they are echoed
    one_call: bool = False  # whether it ends before a second tool call
    finish: str = ""  # why it ended
    unsure: Unsure | None = None  # uncommitted tokens, not reported yet
    logprobs: list[Any] = field(default_factory=list)  # not reported yet


@dataclass(slots=True, kw_only=True)
class ChatChoice(_Choice):
    """A choice of a chat: `stops` end its content."""

    reader: AnswerReader
    begun: bool = False
    calls: dict[int, str] = field(default_factory=dict)  # index -> id

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def push(self, made: Made) -> list[Delta]:
        """Return what a token adds to the answer."""
        if self.names is not None:
            assert made.logprob is not None
            top = [named(self.names, *token) for token in made.top]
            entry = named(self.names, made.token, made.logprob)
            self.logprobs.append(entry | {"top_logprobs": top})
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

    def whole(self, said: list[Delta]) -> dict[str, Any]:
        """Return the choice of a whole response."""
        message = message_of(said, self.calls)
        if reasoning := message.get("reasoning_content"):
            message["reasoning"] = reasoning
        if self.calls:
            message["content"] = message["content"] or None
        logprobs = None if self.names is None else {"content": self.logprobs}
        return {"message": message, "logprobs": logprobs}

    def chunks(self, added: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """Yield the choices of chunks."""
        if not self.begun:
            self.begun = True
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        for kind, text, index in added:
            if kind == "content":
                yield self.chunk(content=text)
            elif kind == "reasoning":
                yield self.chunk(reasoning_content=text, reasoning=text)
            else:
                call: dict[str, Any] = {"function": {"arguments": text}}
                if kind == "tool_call":
                    call = {"id": self.calls[index], **function_of(name=text, arguments="")}
                yield self.chunk(tool_calls=[{"index": index, **call}])

    def chunk(self, **delta: Any) -> dict[str, Any]:
        """Return the choice of a chunk, with the log probabilities since the last one."""
        noted, self.logprobs = self.logprobs, []
        return {"delta": delta, "logprobs": {"content": noted} if noted else None}


@dataclass(slots=True, kw_only=True)
class TextChoice(_Choice):
    """A completion of a prompt."""

    decoder: TextStream
    ends: frozenset[int]  # stop tokens, which have no text
    only_scored: bool = False
    length: int = 0  # characters so far, for text offsets

    object = chunk_object = "text_completion"

    def echo(self, tokenizer: Tokenizer, scored: Scored | None) -> str:
        """Return the text of the prompt, and record the log probabilities of its tokens."""
        if self.names is not None and scored is not None:
            pieces = tokenizer.stream()
            scores = [(None, ()), *scored.tokens]
            for token, (logprob, top) in zip(self.prompt, scores, strict=True):
                self._note(token, logprob, top)
                self.length += len(pieces.push(token))
        if self.only_scored and scored is not None:
            self.finish = "length"
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
        if self.names is None:
            return
        text, table = self.names.decode([token]), dict[str, float]()
        for other, its in top:  # of equal texts the most likely counts
            table.setdefault(self.names.decode([other]), finite(its))
        values = (None, None) if logprob is None else (finite(logprob), table)
        self.logprobs.append((text, *values, self.length))

    def _taken(self) -> dict[str, Any]:
        noted, self.logprobs = self.logprobs, []
        columns = zip(*noted, strict=True) if noted else ((), (), (), ())
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(keys, columns, strict=True))

    def whole(self, said: list[str]) -> dict[str, Any]:
        """Return the choice of a whole response."""
        logprobs = None if self.names is None else self._taken()
        return {"text": "".join(said), "logprobs": logprobs}

    def chunks(self, added: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the choice of a chunk, if there is any."""
        text = "".join(added)
        if text or self.logprobs:
            yield self.chunk(text)

    def chunk(self, text: str = "") -> dict[str, Any]:
        """Return the choice of a chunk, with the log probabilities since the last one."""
        return {"text": text, "logprobs": self._taken() if self.logprobs else None}


Piece = tuple[int, Sequence[Any], str]
"""Index of the choice, deltas or text, finish reason or ""."""


@dataclass(slots=True)
class Pipeline:
    """The response to one request, whole or in chunks."""

    answer: Answer
    asked: ChatRequest | CompletionRequest
    job: Job
    choices: Sequence[Any]  # all ChatChoice or all TextChoice
    prompts: PromptRoom

    async def steps(self) -> AsyncIterator[Iterable[Piece]]:
        """Yield the pieces of each step, to be iterated once: a token counts when it is reached."""
        try:
            if not self.asked.scores:
                for index, choice in enumerate(self.choices):
                    if choice.prompt:
                        yield [await self._echo(index, None)]
            while news := await self.job.read():
                scored = {at: await self._echo(at, w) for at, w in news if isinstance(w, Scored)}
                yield self._step(news, scored)
        finally:
            self.job.close()

    async def _echo(self, index: int, scored: Scored | None) -> Piece:
        choice = self.choices[index]
        text = await self.prompts.apart(lambda: choice.echo(self.prompts.tokenizer, scored))
        return index, [text], choice.finish

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
                self.answer.count(what, index % self.asked.choices == 0)
                added = choice.push(what)
                if choice.finish:
                    self.job.end(index, "stop")  # if the engine did not: a stop string
                yield index, added, choice.finish

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request without `stream`; raises ApiError."""
        said: list[list[Any]] = [[] for _ in self.choices]
        async for step in self.steps():
            for index, added, _ in step:
                said[index] += added
        choices = [
            {"index": index, **choice.whole(said[index]), "finish_reason": choice.finish}
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head("object"), "choices": choices, "usage": self.answer.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response."""
        head, options = self._head("chunk_object"), self.asked.options
        raw = self.prompts.tokenizer.token_bytes
        include_usage, continuous = options.include_usage, options.continuous_usage_stats

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
                parts = list(choice.chunks(added))
                if choice.unsure is not None:
                    ids = choice.unsure.ids  # None: a mask
                    texts = [None if t is None else raw(t).decode("utf-8", "replace") for t in ids]
                    parts.append({**choice.chunk(), "canvas": texts})
                    choice.unsure = None
                if finish:
                    parts.append({**choice.chunk(), "finish_reason": finish})
                events += [event({"index": index, "finish_reason": None, **part}) for part in parts]
            if events:
                yield b"".join(events)
        yield event() + DONE if include_usage else DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a failed stream."""
        return b"data: " + to_json(error.body) + b"\n\n" + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        answer, name = self.answer, getattr(self.choices[0], kind)
        return {"id": answer.id, "object": name, "created": answer.created, "model": answer.model}
