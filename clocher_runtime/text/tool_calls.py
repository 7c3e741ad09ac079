"""Tool calls in plain text answers, in the formats of Hermes and Llama 3.

A call is reported once it is whole. Text that turns out not to be a call is content.
"""

import json
import re
from typing import Any

from clocher_runtime.text.answers import Delta, split_at

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "type", "id", *_ARGUMENTS))
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_VALUE = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_AFTER = re.compile(r"[\s}]*")
_decoder = json.JSONDecoder(strict=False)


def _object(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value that begins there in a text, and its end; None, 0 if there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, 0


def _arguments(text: str, value: Any) -> str:
    """Return arguments as JSON text: as written, or as a text spells them; "" if they are none."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        found, end = _object(value)
        return value if isinstance(found, dict) and not value[end:].strip() else ""
    for place in _VALUE.finditer(text) if isinstance(value, dict) else ():
        found, end = _object(text, place.end())
        if found == value:
            return text[place.end() : end]
    return ""


def _call(text: str, value: Any, index: int, *, bare: bool = False) -> list[Delta]:
    """Return the deltas of a call, `value`, as a text wrote it; [] if it is none.

    `bare`: only its keys mark it as a call, so it needs both.
    """
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        return []
    given = [value[key] for key in _ARGUMENTS if key in value] or ([] if bare else [None])
    name = value.get("name")
    if not given or not isinstance(name, str) or not _NAME.fullmatch(name):
        return []
    arguments = _arguments(text, given[0])
    if not arguments:
        return []
    return [Delta("tool_call", name, index), Delta("arguments", arguments, index)]


class HermesCalls:
    """`<tool_call>...</tool_call>` of Hermes and Qwen, with the line breaks around the marks."""

    _OPENING, _CLOSING = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self._calls = "", 0
        self._mark = ""  # the mark of the call that is open
        self._is_gap = False  # whether a call has just ended

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        return self._read(self._held + text, ended=False)

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        return self._read(self._held, ended=True)

    def _read(self, text: str, *, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        self._held = ""
        while text or (ended and self._mark):
            if self._mark:
                body, closing, after = text.partition(self._CLOSING)
                if not closing and not ended:
                    self._held = text
                    break
                call = self._called(body.strip())
                if not call:
                    found.append(Delta("content", self._mark))
                self._calls += bool(call)
                text, self._is_gap, self._mark = after if call else text, bool(call), ""
                found += call
                continue
            text = text.lstrip("\n") if self._is_gap else text
            self._is_gap = self._is_gap and not text
            content, mark, rest = split_at(text, self._OPENING)
            if content or (ended and rest is None and mark):
                found.append(Delta("content", content + (mark if ended and rest is None else "")))
            if rest is None:
                self._held = "" if ended else mark
                break
            self._mark, text = mark, rest
        return found

    def _called(self, body: str) -> list[Delta]:
        for text in (body, f"{body}}}"):  # models omit or double the last brace
            value, end = _object(text)
            if end and _AFTER.fullmatch(text, end):
                return _call(text, value, self._calls)
        return []


class LlamaCalls:
    """Llama 3's calls: JSON objects, with ";" between them and maybe `<|python_tag|>` before."""

    _TAG = "<|python_tag|>"
    _FIRST = re.compile(r"\s{0,32}(<\|python_tag\|>\s{0,32})?")
    _NEXT = re.compile(r"[\s;]{0,32}(<\|python_tag\|>\s{0,32})?")

    def __init__(self) -> None:
        self._held, self._calls = "", 0
        self._is_text = False

    def push(self, text: str) -> list[Delta]:
        """Return the deltas that a piece completes."""
        return self._read(self._held + text, may_close="}" in text, ended=False)

    def finish(self) -> list[Delta]:
        """Return the text held back, after the last piece."""
        return self._read(self._held, may_close=True, ended=True)

    def _read(self, text: str, *, may_close: bool, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        self._held = ""
        while text and not self._is_text:
            begin = (self._NEXT if self._calls else self._FIRST).match(text)
            assert begin is not None  # both match the empty text
            body = text[begin.end() :]
            if body.startswith("{"):
                value, end = _object(body) if may_close else (None, 0)
                key = _FIRST_KEY.match(body)
                if not end and not ended and (key is None or key[1] in _KEYS):
                    self._held = text
                    break
                call = _call(body[:end], value, self._calls, bare=True)
                self._calls += bool(call)
                found += call
                text, self._is_text = (body[end:], False) if call else (text, True)
            elif not body or (begin[1] is None and self._TAG.startswith(body)):
                if ended and self._calls and not text.strip("; \n"):
                    break
                self._held, self._is_text = ("", True) if ended else (text, False)
                if not ended:
                    break
            else:
                self._is_text = True
        if text and self._is_text:
            found.append(Delta("content", text))
        return found
