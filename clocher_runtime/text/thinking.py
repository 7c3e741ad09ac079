"""What a model thinks between `<think>` and `</think>`, before it answers."""

import re
from typing import Literal

from clocher_runtime.text.deltas import Delta, TextReader
from clocher_runtime.text.stops import open_length

_OPENING, _CLOSING = "<think>", "</think>"
_CLOSINGS = (_CLOSING, "\n" + _CLOSING, "\n\n" + _CLOSING)
_BEGIN = re.compile(r"\s{0,16}")


def opens_thoughts(prompt: str) -> bool:
    """Whether the end of a prompt is the mark that thoughts begin with."""
    return prompt.rstrip().endswith(_OPENING)


class Thinking:
    """Reads thoughts at the beginning of an answer, and leaves the rest to another reader.

    Line breaks next to the marks belong to them.

    Args:
        answer: reads what comes after the thoughts.
        opened: the prompt ended with the opening mark.
    """

    def __init__(self, answer: TextReader, *, opened: bool) -> None:
        self._answer, self._opened = answer, opened
        self._state: Literal["begin", "first", "thoughts", "gap", "answer"] = "begin"
        self._held = ""

    def push(self, text: str) -> list[Delta]:
        """Return what a piece makes certain."""
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
        """Return what was held back, after the last piece."""
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
