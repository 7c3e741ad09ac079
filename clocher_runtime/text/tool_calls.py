"""Tool calls in plain text answers, in the formats of Hermes and Llama 3.

A call is reported as it comes: its name once its arguments begin, then the arguments. Text that
turns out not to be a call is content, unless part of it was reported; then only the rest is.
"""

import json
import re
from typing import Literal

from clocher_runtime.text.deltas import Delta, open_length

Event = Literal["more", "begins", "ends", "closed", "broken"]

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_LITERAL = re.compile(r"[-+.0-9A-Za-z]*")
_VALUE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_LITERAL = 400
_MAX_KEY = 200
_MAX_DEPTH = 200

Expected = Literal["object", "key or }", "key", ":", "value", "value or ]", ", or end"]


class JsonObject:
    """An incremental scanner of a JSON object: where the values of its keys begin and end."""

    def __init__(self) -> None:
        self.key = ""
        self._open: list[str] = []  # open "{" and "["
        self._expected: Expected = "object"
        self._within: Literal["", "string", "escape", "literal"] = ""
        self._hex = 0  # digits still missing of a \u escape
        self._is_key, self._told = False, False
        self._piece = ""  # of a literal, or of a key of the object itself

    def follow(self, text: str, at: int) -> tuple[Event, int]:
        """Scan to the next event; return it and its position.

        "more": end of the piece; "begins", "ends": a value of `key`; "closed": the object ended;
        "broken": invalid JSON. The last two are final.
        """
        while at < len(text):
            if self._within == "string":
                at = self._string(text, at)
            elif self._within == "escape":
                if not self._escape(text[at]):
                    return "broken", at
                at += 1
                continue
            elif self._within == "literal":
                end = _match_end(_LITERAL, text, at)
                self._piece += text[at:end]
                at = end
                if len(self._piece) > _MAX_LITERAL:
                    return "broken", at
                if at == len(text):
                    break
                if not _VALUE.fullmatch(self._piece):
                    return "broken", at
                self._within = ""
            else:
                event, at = self._structure(text, at)
                if event != "more":
                    return event, at
                continue
            if not self._within and not self._is_key and len(self._open) == 1:
                return "ends", at
        return "more", at

    def _string(self, text: str, at: int) -> int:
        end = _match_end(_PLAIN, text, at)
        if self._is_key and len(self._open) == 1 and len(self._piece) <= _MAX_KEY:
            self._piece += text[at:end]
        if end == len(text):
            return end
        self._within = "escape" if text[end] == "\\" else ""
        if not self._within and self._is_key and len(self._open) == 1:
            self.key = self._piece
        return end + 1

    def _escape(self, character: str) -> bool:
        if self._hex:
            self._hex -= 1
            valid = character in _HEX
        else:
            self._hex = 4 if character == "u" else 0
            valid = character in '"\\/bfnrtu'
        if not self._hex:
            self._within = "string"
        return valid

    def _structure(self, text: str, at: int) -> tuple[Event, int]:
        end = _match_end(_SPACE, text, at)
        if end > at:
            return "more", end
        character, expected = text[at], self._expected
        if expected == "object":
            if character != "{":
                return "broken", at
            self._open.append("{")
            self._expected = "key or }"
        elif expected == ":":
            if character != ":":
                return "broken", at
            self._expected = "value"
        elif character == '"' and expected in ("key", "key or }"):
            self._within, self._is_key, self._piece = "string", True, ""
            self._expected = ":"
        elif expected in ("value", "value or ]") and character != "]":
            return self._value(character, at)
        elif character == "," and expected == ", or end":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif character == ("}" if self._open[-1] == "{" else "]") and "or" in expected:
            self._open.pop()
            self._expected = ", or end"
            if not self._open:
                return "closed", at + 1
            if len(self._open) == 1:
                return "ends", at + 1
        else:
            return "broken", at
        return "more", at + 1

    def _value(self, character: str, at: int) -> tuple[Event, int]:
        if len(self._open) == 1 and not self._told:
            self._told = True
            return "begins", at
        self._told, self._is_key = False, False
        self._expected = ", or end"
        if character in "-0123456789tfn":
            self._within, self._piece = "literal", ""
            return "more", at
        if character == '"':
            self._within = "string"
        elif character in "{[" and len(self._open) < _MAX_DEPTH:
            self._open.append(character)
            self._expected = "key or }" if character == "{" else "value or ]"
        else:
            return "broken", at
        return "more", at + 1


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # all of them match the empty text
    return found.end()


_NAME = re.compile(r'"([A-Za-z0-9_.-]{1,256})"')
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class _Call:
    """A call as a JSON object with a name and arguments, in either order.

    `bare`: only its keys mark it as a call, so it needs both. `is_out`: part of it was reported.
    """

    def __init__(self, index: int, *, bare: bool) -> None:
        self._index, self._bare = index, bare
        self._object = JsonObject()
        self._value: Literal["", "name", "arguments", "other"] = ""  # key whose text is collected
        self._gathered: list[str] = []
        self._name, self._has_arguments = "", False
        self._ready: list[str] = []  # arguments to report once the name is known
        self._raw: list[str] = []
        self.is_out = self.is_closed = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def push(self, text: str) -> tuple[list[Delta], str | None]:
        """Return the deltas of a piece, and after the end of the call the remaining text."""
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
        key, self._value, self._gathered = self._object.key, "", []
        if key == "name" and not self._name:
            self._value = "name"
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            self._value = "arguments" if first == "{" else "other"
        return self.is_out or key in _KEYS

    def _end(self) -> bool:
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
    """Return arguments that are JSON text in a string, or null; else ""."""
    try:
        inner = json.loads(text, strict=False)
        if inner is None or inner == "":
            return "{}"
        return inner if isinstance(json.loads(inner), dict) else ""
    except (ValueError, TypeError, RecursionError):
        return ""


class _Calls:
    """Shared state of the readers: possible call text, the call, the number of calls."""

    def __init__(self) -> None:
        self._held, self._calls = "", 0
        self._call = _Call(0, bare=False)

    def _go_on(self, text: str, found: list[Delta]) -> str | None:
        """Continue the call; return the text after it, None if it is incomplete."""
        deltas, rest = self._call.push(text)
        if deltas and deltas[0].kind == "tool_call":
            self._held = ""
            self._calls += 1
        found += deltas
        return rest


class HermesCalls(_Calls):
    """`<tool_call>...</tool_call>` of Hermes and Qwen, with the line breaks around the marks."""

    _OPENING, _CLOSING = "<tool_call>", "</tool_call>"
    _OPENINGS = (_OPENING, "\n" + _OPENING, "\n\n" + _OPENING)
    _TAIL = re.compile(r"[\s}]{0,64}")

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["text", "call", "tail", "gap"] = "text"

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        found: list[Delta] = []
        steps = {"text": self._text, "call": self._in_call, "tail": self._tail, "gap": self._gap}
        while text:
            text = steps[self._state](text, found)
        return found

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
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
        rest = self._go_on(text, found)
        if rest is None:
            return ""
        self._state = "tail" if self._call.is_out else "text"
        if self._held:
            found.append(Delta("content", self._held))
            self._held = ""
        return rest

    def _tail(self, text: str, found: list[Delta]) -> str:
        """Find the end of a call; models omit or double its last brace."""
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


class LlamaCalls(_Calls):
    """Llama 3's calls: JSON objects, with ";" between them and maybe `<|python_tag|>` before."""

    _TAG = "<|python_tag|>"
    _FIRST = re.compile(r"\s{0,32}(<\|python_tag\|>\s{0,32})?")
    _NEXT = re.compile(r"[\s;]{0,32}(<\|python_tag\|>\s{0,32})?")

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["begin", "call", "text"] = "begin"

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
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
        """Return the text held back, after the last piece."""
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
        rest = self._go_on(text, found)
        if rest is None:
            return ""
        rest, self._held = self._held + rest, ""
        self._state = "begin" if self._call.is_out and self._call.is_closed else "text"
        return rest
