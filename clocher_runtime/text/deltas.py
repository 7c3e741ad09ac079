"""An answer in the parts that a chat client gets: text, stop strings, reasoning."""

import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol

DeltaKind = Literal["content", "reasoning", "tool_call", "arguments"]


class Delta(NamedTuple):
    """A piece of an answer; the text is never empty.

    "tool_call" starts a call of the function `text`; "arguments" is a piece of its JSON arguments
    (not sent if there are none).
    """

    kind: DeltaKind
    text: str
    index: int = 0  # type: ignore[assignment]  # of the call, from 0; hides tuple.index


class AnswerReader(Protocol):
    """Reads an answer token by token. It accepts anything a model generates, and never raises."""

    def push(self, token: int) -> list[Delta]:
        """Return the deltas that a token completes."""
        ...

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last token."""
        ...


class TextReader(Protocol):
    """Reads an answer by pieces of text. It accepts any text, and never raises."""

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        ...

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        ...


class PlainText:
    """Text without markup."""

    def push(self, text: str) -> list[Delta]:
        """Return the piece as content."""
        return [Delta("content", text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing."""
        return []


def open_length(text: str, strings: Collection[str]) -> int:
    """Return how many characters at the end of a text may begin one of some strings."""
    start = len(text)
    for string in strings:
        at = text.find(string[0], max(0, len(text) - len(string) + 1))
        while 0 <= at < start:
            if string.startswith(text[at:]):
                start = at
            at = text.find(string[0], at + 1)
    return len(text) - start


class StopStrings:
    """Cuts a text at the first stop string, `found`, and holds back partial ones."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may be the start of a stop string
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that cannot be part of a stop string; "" once one was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        at, found = min(
            ((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(-1, None)
        )
        if found is not None:
            self.found, self._held = found, ""
            return text[:at]
        kept = open_length(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        held, self._held = self._held, ""
        return held


_OPENING, _CLOSING = "<think>", "</think>"
_CLOSINGS = (_CLOSING, "\n" + _CLOSING, "\n\n" + _CLOSING)
_BEGIN = re.compile(r"\s{0,16}")


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt ends with the opening reasoning mark."""
    return prompt.rstrip().endswith(_OPENING)


class Thinking:
    """Reads `<think>...</think>` first (`opened`: in the prompt), then uses another reader."""

    def __init__(self, answer: TextReader, *, opened: bool) -> None:
        self._answer, self._opened = answer, opened
        self._state: Literal["begin", "first", "thoughts", "gap", "answer"] = "begin"
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        found: list[Delta] = []
        while text:
            if self._state == "answer":
                return found + self._answer.push(text)
            if self._state == "begin":
                text = self._begin(text)
            elif self._state == "thoughts":
                text = self._thoughts(text, found)
            else:
                text = text.lstrip("\n")
                if text:
                    self._state = "thoughts" if self._state == "first" else "answer"
        return found

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        text, self._held = self._held, ""
        thinks = self._state == "thoughts" or (self._state == "begin" and self._opened)
        self._state = "answer"
        if not thinks:
            return self._answer.push(text) + self._answer.finish()
        return [Delta("reasoning", text)] if text else []

    def _begin(self, text: str) -> str:
        text = self._held + text
        space = _BEGIN.match(text)
        assert space is not None  # it matches the empty text
        body = text[space.end() :]
        if body.startswith(_OPENING):
            self._held, self._state = "", "first"
            return body.removeprefix(_OPENING)
        if _OPENING.startswith(body):
            self._held = text
            return ""
        self._held, self._state = "", "first" if self._opened else "answer"
        return text

    def _thoughts(self, text: str, found: list[Delta]) -> str:
        text = self._held + text
        at = text.find(_CLOSING)
        if at < 0:
            end = len(text) - open_length(text, _CLOSINGS)
            self._held, rest = text[end:], ""
        else:
            end = max(len(text[:at].rstrip("\n")), at - 2)
            self._held, rest = "", text[at + len(_CLOSING) :]
            self._state = "gap"
        if end:
            found.append(Delta("reasoning", text[:end]))
        return rest
