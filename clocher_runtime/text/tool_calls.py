"""Calls of functions in answers that are plain text, in the shapes of Hermes and of Llama 3.

A call goes out while it is made: its name once its arguments begin, then they as they come. So text
that turns out to be no call is content as long as nothing of it went out, and after that only what
comes behind the error is.
"""

import json
import re
from typing import Literal

from clocher_runtime.text.deltas import Delta
from clocher_runtime.text.json_object import JsonObject
from clocher_runtime.text.stops import open_length

_NAME = re.compile(r'"([A-Za-z0-9_.-]{1,256})"')
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class _Call:
    """A call as a JSON object with a name and arguments, in either order.

    Args:
        index: which call of the answer it is.
        bare: nothing but its keys says that it is a call, so it needs both.

    Attributes:
        is_out: whether a part of it was given out.
        is_closed: whether it has come to its end.
    """

    def __init__(self, index: int, *, bare: bool) -> None:
        self._index, self._bare = index, bare
        self._object = JsonObject()
        self._value: Literal["", "name", "arguments", "other"] = ""  # whose text is gathered
        self._gathered: list[str] = []
        self._name, self._has_arguments = "", False
        self._ready: list[str] = []  # arguments that can go out once the name is known
        self._raw: list[str] = []
        self.is_out = self.is_closed = False

    @property
    def raw(self) -> str:
        """Its text, as long as nothing is out."""
        return "".join(self._raw)

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        """Go on in a piece of text.

        Returns:
            What is certain, and the text that is not of this call once it ended: what comes after
            it, or if nothing is out, all of it. None: it has not ended.
        """
        if not self.is_out:
            self._raw.append(text)
        found: list[Delta] = []
        at = 0
        while True:
            event, end = self._object.follow(text, at)
            if self._value:
                gathered = self._ready if self._value == "arguments" else self._gathered
                gathered.append(text[at:end])
            at = end
            valid = event in ("more", "closed")
            if event == "begins":
                valid = self._begin(text[at])
            elif event == "ends":
                valid = self._end()
            elif event == "closed":
                self.is_closed = True
                if not self._has_arguments and not self._bare:
                    self._ready.append("{}")
            self._give_out(found)
            if event == "more":
                return found, None
            if event == "closed" or not valid:
                return found, text[at:] if self.is_out else self.raw

    def _begin(self, first: str) -> bool:
        """Note whose value begins; return whether it belongs in a call."""
        key, self._value, self._gathered = self._object.key, "", []
        if key == "name" and not self._name:
            self._value = "name"
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._value = "arguments" if first == "{" else "other"
        return self.is_out or key in _KEYS

    def _end(self) -> bool:
        """Take a value; return whether it can be one of a call."""
        value, self._value = self._value, ""
        text = "".join(self._gathered)
        if value == "name":
            name = _NAME.fullmatch(text)
            self._name = name[1] if name else ""
            return name is not None
        if value == "other":
            arguments = _spelled_out(text)
            self._ready.append(arguments)
            return bool(arguments)
        return True

    def _give_out(self, found: list[Delta]) -> None:
        text = "".join(self._ready)
        if not self._name or not text:
            return
        if not self.is_out:
            self.is_out, self._raw = True, []
            found.append(Delta("tool_call", self._name, self._index))
        found.append(Delta("arguments", text, self._index))
        self._ready = []


def _spelled_out(text: str) -> str:
    """Return arguments that are a JSON text in a string, or null; "" if they are neither."""
    try:
        inner = json.loads(text, strict=False)
        if inner is None or inner == "":
            return "{}"
        return inner if isinstance(json.loads(inner), dict) else ""
    except (ValueError, TypeError, RecursionError):
        return ""


class HermesCalls:
    """Calls between `<tool_call>` and `</tool_call>`, as Hermes and Qwen make them.

    Line breaks before and after belong to the marks.
    """

    _OPENING, _CLOSING = "<tool_call>", "</tool_call>"
    _OPENINGS = (_OPENING, "\n" + _OPENING, "\n\n" + _OPENING)
    _TAIL = re.compile(r"[\s}]{0,64}")

    def __init__(self) -> None:
        self._state: Literal["text", "call", "tail", "gap"] = "text"
        self._held = ""
        self._calls = 0
        self._call = _Call(0, bare=False)

    def push(self, text: str) -> list[Delta]:
        """Return what a piece makes certain."""
        found: list[Delta] = []
        steps = {"text": self._text, "call": self._in_call, "tail": self._tail, "gap": self._gap}
        while text:
            text = steps[self._state](text, found)
        return found

    def finish(self) -> list[Delta]:
        """Return what was held back, after the last piece."""
        text, self._held = self._held, ""
        if self._state == "call":
            text += self._call.raw
        elif self._state != "text":
            text = ""  # the end of a call
        self._state = "text"
        return [Delta("content", text)] if text else []

    def _text(self, text: str, found: list[Delta]) -> str:
        text = self._held + text
        at = text.find(self._OPENING)
        if at < 0:
            end = len(text) - open_length(text, self._OPENINGS)
            self._held, rest = text[end:], ""
        else:
            end = max(len(text[:at].rstrip("\n")), at - 2)
            after = at + len(self._OPENING)
            self._held, rest = text[end:after], text[after:]
            self._state, self._call = "call", _Call(self._calls, bare=False)
        if end:
            found.append(Delta("content", text[:end]))
        return rest

    def _in_call(self, text: str, found: list[Delta]) -> str:
        deltas, rest = self._call.push(text)
        if deltas and deltas[0].kind == "tool_call":
            self._held = ""
            self._calls += 1
        found += deltas
        if rest is None:
            return ""
        self._state = "tail" if self._call.is_out else "text"
        if self._held:
            found.append(Delta("content", self._held))
            self._held = ""
        return rest

    def _tail(self, text: str, found: list[Delta]) -> str:
        """Look for the end of a call; models forget or double its last brace."""
        text = self._held + text
        found_tail = self._TAIL.match(text)
        assert found_tail is not None  # it matches the empty text
        closing = text[found_tail.end() :]
        if closing.startswith(self._CLOSING):
            self._held, self._state = "", "gap"
            return closing.removeprefix(self._CLOSING)
        if self._CLOSING.startswith(closing):
            self._held = text
            return ""
        self._held, self._state = "", "text"
        return text

    def _gap(self, text: str, found: list[Delta]) -> str:
        text = text.lstrip("\n")
        if text:
            self._state = "text"
        return text


class LlamaCalls:
    """Calls as Llama 3 makes them: an answer that is a JSON object, or several after another.

    `<|python_tag|>` may come first, and ";" between them.
    """

    _TAG = "<|python_tag|>"
    _FIRST = re.compile(r"\s{0,32}(<\|python_tag\|>\s{0,32})?")
    _NEXT = re.compile(r"[\s;]{0,32}(<\|python_tag\|>\s{0,32})?")

    def __init__(self) -> None:
        self._state: Literal["begin", "call", "text"] = "begin"
        self._held = ""
        self._calls = 0
        self._call = _Call(0, bare=True)

    def push(self, text: str) -> list[Delta]:
        """Return what a piece makes certain."""
        found: list[Delta] = []
        while text:
            if self._state == "begin":
                text = self._begin(text)
            elif self._state == "call":
                text = self._in_call(text, found)
            else:
                found.append(Delta("content", text))
                text = ""
        return found

    def finish(self) -> list[Delta]:
        """Return what was held back, after the last piece."""
        text, self._held = self._held, ""
        if self._state == "call":
            text += self._call.raw
        elif self._calls and not text.strip("; \n"):
            text = ""
        self._state = "text"
        return [Delta("content", text)] if text else []

    def _begin(self, text: str) -> str:
        text, self._held = self._held + text, ""
        begin = (self._NEXT if self._calls else self._FIRST).match(text)
        assert begin is not None  # both match the empty text
        body = text[begin.end() :]
        if body.startswith("{"):
            self._held = begin[0]
            self._state, self._call = "call", _Call(self._calls, bare=True)
            return body
        if not body or (begin[1] is None and self._TAG.startswith(body)):
            self._held = text
            return ""
        self._state = "text"
        return text

    def _in_call(self, text: str, found: list[Delta]) -> str:
        deltas, rest = self._call.push(text)
        if deltas and deltas[0].kind == "tool_call":
            self._held = ""
            self._calls += 1
        found += deltas
        if rest is None:
            return ""
        rest, self._held = self._held + rest, ""
        self._state = "begin" if self._call.is_out and self._call.is_closed else "text"
        return rest
