"""One choice of a chat or a completion, built token by token."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from clocher_runtime.serve.messages import Made, Scored, Top, Unsure
from clocher_runtime.text.answers import AnswerReader, Delta
from clocher_runtime.text.deltas import StopStrings
from clocher_runtime.text.tokenizer import TextStream, Tokenizer


class TokenTexts:
    """The texts of single tokens, for log probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token alone; bytes of an incomplete character become U+FFFD."""
        return self._tokenizer.decode([token])

    def named(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token in the chat format."""
        raw = list(self._tokenizer.token_bytes(token))
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": raw}

    def unsure(self, tokens: Sequence[int | None]) -> list[str | None]:
        """Return the texts of uncommitted tokens, spaces included; None for a mask."""
        raw = self._tokenizer.token_bytes
        return [
            None if token is None else raw(token).decode("utf-8", "replace") for token in tokens
        ]

    def table(self, top: Top) -> dict[str, float]:
        """Return top tokens in the completions format; of equal texts the most likely counts."""
        table: dict[str, float] = {}
        for token, logprob in top:
            table.setdefault(self.text(token), finite(logprob))
        return table


def finite(logprob: float) -> float:
    """Return a log probability that JSON can hold; -inf becomes OpenAI's value for 0."""
    return max(logprob, -9999.0)


@dataclass(slots=True)
class _Choice:
    """One answer as it is made; `finish` is why it ended, "" before that."""

    finish: str = field(default="", kw_only=True)
    unsure: Unsure | None = field(default=None, kw_only=True)  # uncommitted, not reported yet


@dataclass(slots=True)
class ChatChoice(_Choice):
    """A choice of a chat: `stops` end its content, `one_call` ends it before a second tool call."""

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
    """A completion of a prompt; `prompt` has its ids if they are echoed."""

    prompt: list[int]
    decoder: TextStream
    stops: StopStrings
    ends: frozenset[int]  # stop tokens, which have no text
    names: TokenTexts | None  # if log probabilities are requested
    only_scored: bool = False
    length: int = 0  # characters so far, for text offsets
    logprobs: list[tuple[str, float | None, dict[str, float] | None, int]] = field(
        default_factory=list
    )  # not reported yet: token, log probability, top tokens, offset

    def echo(self, tokenizer: Tokenizer, scored: Scored | None) -> str:
        """Return the text of the prompt, and record the log probabilities of its tokens."""
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
        """Return the log probabilities not reported yet; None if not requested."""
        if self.names is None:
            return None
        noted, self.logprobs = self.logprobs, []
        columns = zip(*noted, strict=True) if noted else ((), (), (), ())
        keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(keys, columns, strict=True))
