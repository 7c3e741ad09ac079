"""POST /v1/chat/completions: answers to conversations, whole or in chunks.

Source: OpenAI API reference, chat completions; names of the reasoning fields as in vLLM.
"""

import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.serve.jobs import Job
from clocher_runtime.serve.json_text import to_json
from clocher_runtime.serve.messages import Made, Scored, Unsure
from clocher_runtime.serve.usage import Answer, Chunks, TokenTexts, canvas
from clocher_runtime.text.answers import AnswerReader, Delta
from clocher_runtime.text.stops import StopStrings


@dataclass(slots=True)
class ChatChoice:
    """One answer as it is made.

    Attributes:
        reader: tells what its tokens say.
        stops: end it; they are looked for in what the user reads.
        one_call: end it where a second call begins.
        finish: why it ended; "" before that.
        calls: names of the calls so far, by index.
        logprobs: of tokens that no chunk has told of.
        unsure: what stands behind it, if no chunk has told of that.
    """

    reader: AnswerReader
    stops: StopStrings
    one_call: bool = False
    finish: str = ""
    begun: bool = False
    calls: dict[int, str] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    unsure: Unsure | None = None

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
        """Return deltas as far as neither a stop string nor a second call ends them."""
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
class ChatAnswer:
    """The answers to one request.

    Attributes:
        answer: what is common to its parts.
        job: makes the tokens.
        choices: by their index.
        likeliest: how many tokens to tell in place of each; -1: no log probabilities.
        names: of tokens.
    """

    answer: Answer
    job: Job
    choices: list[ChatChoice]
    likeliest: int
    names: TokenTexts

    async def deltas(self) -> AsyncIterator[Iterable[tuple[int, list[Delta], str]]]:
        """Yield what each step adds: index of the choice, deltas, why it ended if it did.

        It is to be gone through once: a token counts when it is reached.

        Raises:
            ApiError: the engine cannot go on.
        """
        try:
            while news := await self.job.read():
                yield (
                    self._push(at, what)
                    for at, what in news
                    if not isinstance(what, Scored) and not self.choices[at].finish
                )
        finally:
            self.job.close()

    def _push(self, index: int, made: Made | Unsure) -> tuple[int, list[Delta], str]:
        choice = self.choices[index]
        if isinstance(made, Unsure):
            choice.unsure = made
            return index, [], ""
        self.answer.count(made, index == 0)
        if self.likeliest >= 0:
            choice.logprobs.append(self._logprob(made))
        deltas = choice.push(made)
        if choice.finish:
            self.job.end(index)
        return index, deltas, choice.finish

    def _logprob(self, made: Made) -> dict[str, Any]:
        assert made.logprob is not None
        return {
            **self.names.named(made.token, made.logprob),
            "top_logprobs": [self.names.named(token, logprob) for token, logprob in made.top],
        }

    async def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed."""
        said: list[list[Delta]] = [[] for _ in self.choices]
        async for step in self.deltas():
            for index, deltas, _ in step:
                said[index] += deltas
        return {
            "id": self.answer.id,
            "object": "chat.completion",
            "created": self.answer.created,
            "model": self.answer.model,
            "choices": [
                {
                    "index": index,
                    "message": _message(said[index], choice.calls),
                    "logprobs": {"content": choice.logprobs} if self.likeliest >= 0 else None,
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
        chunks = Chunks(self.answer, "chat.completion.chunk", include_usage, continuous)
        async for step in self.deltas():
            events = []
            for index, deltas, finish in step:
                choice = self.choices[index]
                parts = [] if choice.begun else [_ROLE]
                choice.begun = True
                parts += [_delta(delta, choice.calls) for delta in deltas]
                events += [chunks.event(self._choice(index, part, "")) for part in parts]
                if choice.unsure is not None:
                    told, choice.unsure = self.names.unsure(choice.unsure.ids), None
                    events.append(chunks.event(self._choice(index, b"{}", "", told)))
                if finish:
                    events.append(chunks.event(self._choice(index, b"{}", finish)))
            if events:
                yield b"".join(events)
        yield chunks.last()

    def _choice(
        self, index: int, delta: bytes, finish: str, unsure: list[str | None] | None = None
    ) -> bytes:
        choice, told = self.choices[index], b"null"
        if choice.logprobs and delta != _ROLE:
            told = to_json({"content": choice.logprobs})
            choice.logprobs = []
        return b'{"index":%d,"delta":%s,"logprobs":%s,"finish_reason":%s%s}' % (
            index,
            delta,
            told,
            to_json(finish or None),
            canvas(unsure),
        )


_ROLE = b'{"role":"assistant","content":""}'


def _delta(delta: Delta, calls: dict[int, str]) -> bytes:
    """Return a delta as the JSON of a chunk."""
    text = to_json(delta.text)
    match delta.kind:
        case "content":
            return b'{"content":' + text + b"}"
        case "reasoning":
            return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
        case "tool_call":
            return (
                b'{"tool_calls":[{"index":%d,"id":%s,"type":"function",'
                b'"function":{"name":%s,"arguments":""}}]}'
            ) % (delta.index, to_json(calls[delta.index]), text)
        case "arguments":
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%s}}]}' % (
                delta.index,
                text,
            )


def _message(deltas: list[Delta], calls: dict[int, str]) -> dict[str, Any]:
    """Return the message that deltas add up to."""
    content, reasoning = _joined(deltas, "content"), _joined(deltas, "reasoning")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        names = {delta.index: delta.text for delta in deltas if delta.kind == "tool_call"}
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": call,
                "type": "function",
                "function": {
                    "name": names[index],
                    "arguments": _joined([d for d in deltas if d.index == index], "arguments"),
                },
            }
            for index, call in calls.items()
        ]
    return message


def _joined(deltas: list[Delta], kind: str) -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)
