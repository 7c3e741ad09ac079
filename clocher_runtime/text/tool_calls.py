"""Tool calls in plain text answers, in the formats of Hermes and Llama 3.

A call is reported as it comes: its name once its arguments begin, then the arguments. Text that
turns out not to be a call is content, unless part of it was reported; then only the rest is.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

from clocher_runtime.text.answers import Delta, split_at

Event = Literal["more", "begins", "ends", "closed", "broken"]

Expected = Literal["object", "key or }", "key", ":", "value", "value or ]", ", or end"]

_TOKEN = re.compile(r'[ \t\n\r]+|[{}\[\],:"]|[-+.0-9A-Za-z]+')
_CHARACTERS = re.compile(r'(?:[^"\\]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_MAX_LITERAL, _MAX_KEY, _MAX_DEPTH = 400, 200, 200
_CLOSES = {"}": "{", "]": "["}


class JsonObject:
    """An incremental scanner of a JSON object: where the values of its keys begin and end."""

    def __init__(self) -> None:
        self.key = ""
        self._open: list[str] = []  # open "{" and "["
        self._expected: Expected = "object"
        self._in_string = self._is_key = self._told = False
        self._held = ""  # a literal or an escape that may go on

    def follow(self, text: str, at: int) -> tuple[Event, int]:
        """Scan to the next event; return it and its position.

        "more": end of the piece; "begins", "ends": a value of `key`; "closed": the object ended;
        "broken": invalid JSON. The last two are final.
        """
        held, self._held = self._held, ""
        text = held + text[at:]
        event: Event = "more"
        end = 0
        while event == "more" and end < len(text) and not self._held:
            event, end = (self._string if self._in_string else self._structure)(text, end)
        return event, at + end - len(held)

    def _string(self, text: str, at: int) -> tuple[Event, int]:
        found = _CHARACTERS.match(text, at)
        assert found is not None  # it matches the empty text
        end, is_own = found.end(), len(self._open) == 1
        if self._is_key and is_own and len(self.key) <= _MAX_KEY:
            self.key += found[0]
        if end == len(text):
            return "more", end
        if escape := _OPEN_ESCAPE.match(text, end):
            if escape.end() < len(text):
                return "broken", escape.end()
            self._held = escape[0]
            return "more", len(text)
        self._in_string = False
        return "ends" if is_own and not self._is_key else "more", end + 1

    def _structure(self, text: str, at: int) -> tuple[Event, int]:
        found = _TOKEN.match(text, at)
        if found is None:
            return "broken", at
        token, expected, end = found[0], self._expected, found.end()
        if token.isspace():
            return "more", end
        if token == "{" and expected == "object":
            self._open.append(token)
            self._expected = "key or }"
        elif token == '"' and expected in ("key", "key or }"):
            self._in_string, self._is_key, self._expected = True, True, ":"
            if len(self._open) == 1:
                self.key = ""
        elif token == ":" and expected == ":":
            self._expected = "value"
        elif token == "," and expected == ", or end":
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif "or" in expected and _CLOSES.get(token) == self._open[-1]:
            self._open.pop()
            self._expected = ", or end"
            if len(self._open) < 2:
                return "ends" if self._open else "closed", end
        elif expected in ("value", "value or ]"):
            return self._value(token, at, end == len(text))
        else:
            return "broken", at
        return "more", end

    def _value(self, token: str, at: int, may_go_on: bool) -> tuple[Event, int]:
        is_own, end = len(self._open) == 1, at + len(token)
        if is_own and not self._told:
            self._told = True
            return "begins", at
        if token in ("{", "[") and len(self._open) < _MAX_DEPTH:
            self._open.append(token)
            self._expected = "key or }" if token == "{" else "value or ]"
        elif token == '"':
            self._in_string, self._is_key, self._expected = True, False, ", or end"
        elif token[0] not in "-0123456789tfn":
            return "broken", at
        elif may_go_on and len(token) <= _MAX_LITERAL:
            self._held = token
            return "more", end
        elif len(token) <= _MAX_LITERAL and _LITERAL.fullmatch(token):
            self._told, self._expected = False, ", or end"
            return "ends" if is_own else "more", end
        else:
            return "broken", end
        self._told = False
        return "more", end


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


Step = Callable[[str, list[Delta]], str]
"""Takes text, appends its deltas and returns the text that the next step takes."""


class _Calls:
    """What the readers share: the step they are at, text held back, the calls."""

    def __init__(self, first: Step) -> None:
        self._step, self._held, self._calls = first, "", 0
        self._call = _Call(0, bare=False)

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        found: list[Delta] = []
        while text:
            text = self._step(text, found)
        return found

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        text, self._held = self._held, ""
        if self._step == self._in_call:
            text += self._call.raw
        elif self._is_end_of_call(text):
            text = ""
        self._step = self._in_text
        return [Delta("content", text)] if text else []

    def _go_on(self, text: str, found: list[Delta]) -> str | None:
        """Continue the call; return the text after it, None if it is incomplete."""
        deltas, rest = self._call.push(text)
        if deltas and deltas[0].kind == "tool_call":
            self._held = ""
            self._calls += 1
        found += deltas
        return rest

    def _in_text(self, text: str, found: list[Delta]) -> str:
        found.append(Delta("content", text))
        return ""

    @abstractmethod
    def _in_call(self, text: str, found: list[Delta]) -> str: ...

    @abstractmethod
    def _is_end_of_call(self, held: str) -> bool: ...


class HermesCalls(_Calls):
    """`<tool_call>...</tool_call>` of Hermes and Qwen, with the line breaks around the marks."""

    _OPENING, _CLOSING = "<tool_call>", "</tool_call>"
    _TAIL = re.compile(r"[\s}]{0,64}")

    def __init__(self) -> None:
        super().__init__(self._in_text)

    def _is_end_of_call(self, held: str) -> bool:
        return self._step != self._in_text

    def _in_text(self, text: str, found: list[Delta]) -> str:
        content, self._held, rest = split_at(self._held + text, self._OPENING)
        if content:
            found.append(Delta("content", content))
        if rest is None:
            return ""
        self._step, self._call = self._in_call, _Call(self._calls, bare=False)
        return rest

    def _in_call(self, text: str, found: list[Delta]) -> str:
        rest = self._go_on(text, found)
        if rest is None:
            return ""
        self._step = self._tail if self._call.is_out else self._in_text
        if self._held:
            found.append(Delta("content", self._held))
            self._held = ""
        return rest

    def _tail(self, text: str, found: list[Delta]) -> str:
        """Find the end of a call; models omit or double its last brace."""
        text, self._held = self._held + text, ""
        found_tail = self._TAIL.match(text)
        assert found_tail is not None  # it matches the empty text
        closing = text[found_tail.end() :]
        if closing.startswith(self._CLOSING):
            self._step = self._gap
            return closing.removeprefix(self._CLOSING)
        if self._CLOSING.startswith(closing):
            self._held = text
            return ""
        self._step = self._in_text
        return text

    def _gap(self, text: str, found: list[Delta]) -> str:
        text = text.lstrip("\n")
        if text:
            self._step = self._in_text
        return text


class LlamaCalls(_Calls):
    """Llama 3's calls: JSON objects, with ";" between them and maybe `<|python_tag|>` before."""

    _TAG = "<|python_tag|>"
    _FIRST = re.compile(r"\s{0,32}(<\|python_tag\|>\s{0,32})?")
    _NEXT = re.compile(r"[\s;]{0,32}(<\|python_tag\|>\s{0,32})?")

    def __init__(self) -> None:
        super().__init__(self._begin)

    def _is_end_of_call(self, held: str) -> bool:
        return bool(self._calls) and not held.strip("; \n")

    def _begin(self, text: str, found: list[Delta]) -> str:
        text, self._held = self._held + text, ""
        begin = (self._NEXT if self._calls else self._FIRST).match(text)
        assert begin is not None  # both match the empty text
        body = text[begin.end() :]
        if body.startswith("{"):
            self._held = begin[0]
            self._step, self._call = self._in_call, _Call(self._calls, bare=True)
            return body
        if not body or (begin[1] is None and self._TAG.startswith(body)):
            self._held = text
            return ""
        self._step = self._in_text
        return text

    def _in_call(self, text: str, found: list[Delta]) -> str:
        rest = self._go_on(text, found)
        if rest is None:
            return ""
        rest, self._held = self._held + rest, ""
        goes_on = self._call.is_out and self._call.is_closed
        self._step = self._begin if goes_on else self._in_text
        return rest
