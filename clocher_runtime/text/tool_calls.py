"""Tool calls in plain text answers: between marks (see `call_styles`), or bare as in Llama 3.

A call is reported once it is whole. Text that turns out not to be a call is content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from clocher_runtime.text.answers import Delta, TextReader, split_at
from clocher_runtime.text.call_styles import CallStyle

Call = tuple[str, str]
"""The name of a function, and the JSON text of its arguments."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset(("name", "type", "id", *_ARGUMENTS))
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_BARE = re.compile(r'\{\s{0,16}"name"\s{0,4}:\s{0,4}"(?P<name>[\w.-]{1,256})"')
"""How a call without marks begins."""
_BARE_START = re.compile(
    r'(\{\s{0,16}("(n(a(m(e("\s{0,4}(:\s{0,4}("[\w.-]{0,256})?)?)?)?)?)?)?)?)?'
)
"""What may become that."""
_VALUE = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
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


def _call(text: str, value: Any, *, bare: bool = False) -> list[Call]:
    """Return the call that is `value`, as a text wrote it; [] if it is none.

    `bare`: only its keys mark it as a call, so it needs both.
    """
    if isinstance(value, dict) and value.keys() <= {"type", "id", "function"}:
        value = value.get("function")
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        return []
    given = [value[key] for key in _ARGUMENTS if key in value] or ([] if bare else [None])
    name = value.get("name")
    if not given or not isinstance(name, str) or not _NAME.fullmatch(name):
        return []
    arguments = _arguments(text, given[0])
    return [(name, arguments)] if arguments else []


def _deltas(calls: Sequence[Call], first: int) -> list[Delta]:
    """Return the deltas of calls, the first of which has the index `first`."""
    return [
        delta
        for index, (name, arguments) in enumerate(calls, first)
        for delta in (Delta("tool_call", name, index), Delta("arguments", arguments, index))
    ]


_BETWEEN = re.compile(r"(?:[\s,;\[\])}]|print\(|```|<｜tool▁call▁(?:begin|end)｜>)*")
"""What may stand around calls: brackets of a list, a brace too many, marks within marks."""


def _after(text: str, end: int) -> int:
    between = _BETWEEN.match(text, end)
    assert between is not None  # it matches the empty text
    return between.end()


_HEAD = re.compile(
    r"(?:call:|function(?=<))?(?:<｜tool▁sep｜>)?(?P<name>[A-Za-z0-9_.-]{1,256})"
    r"(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\]|<｜tool▁sep｜>)?\s*(?:```json\s*)?(?=[{(])"
)
"""A name before its arguments: Mistral, DeepSeek, FunctionGemma, Python."""
_PIECE = re.compile(
    r"<escape>(?P<text>.*?)<escape>|'(?P<quoted>(?:[^'\\\n]|\\.)*)'"
    r'|"(?:[^"\\]|\\.)*"|(?P<key>[A-Za-z_]\w*)\s*[=:]|[A-Za-z_]\w*|[(){}\[\]]',
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "{", ")": "}"}


def _as_json(text: str, at: int) -> tuple[str, int]:
    """Return an object, spelled as in FunctionGemma or Python, as JSON, and its end; "", 0."""
    made, depth, done = list[str](), 0, at
    for found in _PIECE.finditer(text, at):
        spelled = _WORDS.get(found[0], found[0])
        if found["text"] is not None:
            spelled = json.dumps(found["text"], ensure_ascii=False)
        elif found["quoted"] is not None:
            spelled = found["quoted"].replace("\\'", "'").replace('"', '\\"')
            spelled = f'"{spelled}"'
        elif found["key"]:
            spelled = f'"{found["key"]}":'
        made += [text[done : found.start()], spelled]
        done = found.end()
        depth += (found[0] in "({[") - (found[0] in ")}]")
        if not depth:
            return "".join(made), done
    return "", 0


def _calls(text: str, bare: bool, named: bool) -> tuple[list[Call], str]:
    """Return calls, [] if the text does not begin with one, and the text after them.

    They are objects in JSON, one or a list, or if `named` names before their arguments.
    """
    calls, at = list[Call](), _after(text, 0)
    while True:
        made, end = list[Call](), at
        if text.startswith("{", at):
            value, end = _object(text, at)
            made = _call(text[at:end], value, bare=bare)
        elif named and (head := _HEAD.match(text, at)):
            value, end = _object(text, head.end())
            arguments = text[head.end() : end]
            if not isinstance(value, dict):
                arguments, end = _as_json(text, head.end())
                value = _object(arguments)[0]
            made = [(head["name"], arguments)] if isinstance(value, dict) else []
        if not made:
            return calls, text[at:]
        calls += made
        at = _after(text, end)


_XML = re.compile(r"<function=([^<>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)


def _takes_text(schema: Any) -> bool:
    """Return whether the JSON schema of an argument allows text."""
    either = schema.get("anyOf") or schema.get("oneOf") if isinstance(schema, Mapping) else None
    schemas = [schema, *(either if isinstance(either, list) else [])]
    kinds = [each.get("type") for each in schemas if isinstance(each, Mapping)]
    return any("string" in (kind if isinstance(kind, list) else [kind]) for kind in kinds)


class MarkedCalls(TextReader):
    """Calls between marks, with the line breaks around the marks.

    Models that are asked for JSON may omit the marks: an answer may begin with calls of
    `functions`, which also say which arguments in XML are text.
    """

    def __init__(self, style: CallStyle, functions: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._marks, self._named = style.marks, style.named
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") for tool in functions
        }
        self._calls = 0
        self._mark = ""  # the mark of the call that is open
        self._is_gap = False  # whether a call has just ended
        self._may_be_bare = bool(self._schemas) and "```json" in style.marks

    def _read(self, text: str, *, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        may_close = ended or "}" in text[len(self._held) :]
        self._held = ""
        while self._may_be_bare and text:
            call, rest = self._bare_call(text, may_close=may_close, ended=ended)
            if self._held:
                return found
            found += _deltas(call, self._calls)
            self._calls += len(call)
            self._may_be_bare = bool(call)
            self._is_gap, text = self._is_gap or bool(call), rest
        while text or (ended and self._mark):
            if self._mark:
                opening = self._mark.lstrip("\n")
                closing = self._marks[opening]
                body, closed, after = text.partition(closing or opening)
                if not closed and not ended:
                    self._held = text
                    break
                calls, rest = self._called(body.strip(), opening, closing)
                if calls:
                    text = rest + after if closing else rest + closed + after
                else:
                    found.append(Delta("content", self._mark))
                found += _deltas(calls, self._calls)
                self._calls += len(calls)
                self._is_gap, self._mark = bool(calls), ""
                continue
            text = text.lstrip("\n") if self._is_gap else text
            self._is_gap = self._is_gap and not text
            content, mark, behind = split_at(text, *self._marks)
            if content or (ended and behind is None and mark):
                found.append(Delta("content", content + (mark if ended and behind is None else "")))
            if behind is None:
                self._held = "" if ended else mark
                break
            self._mark, text = mark, behind
        return found

    def _bare_call(self, text: str, *, may_close: bool, ended: bool) -> tuple[list[Call], str]:
        """Return the call without marks that begins a text, [] if there is none, and what follows.

        A text that may become one is held.
        """
        body = text.lstrip()
        head = _BARE.match(body)
        if head is None or head["name"] not in self._schemas:
            self._held = text if not ended and _BARE_START.fullmatch(body) else ""
            return [], text
        value, end = _object(body) if may_close else (None, 0)
        if ended and not end:
            value, end = _object(f"{body}}}")  # models omit the last brace
        self._held = "" if end or ended else text
        call = _call(body[:end], value, bare=True)
        return (call, body[end:]) if call else ([], text)

    def _called(self, body: str, opening: str, closing: str) -> tuple[list[Call], str]:
        """Return calls, [] if there is none, and the text after them."""
        if body.startswith("<function="):
            return self._xml_call(body), ""
        # Models omit the last brace.
        for text in (body, f"{body}}}")[: 1 + body.startswith("{")]:
            calls, rest = _calls(text, opening[0] == "`", self._named)
            names = {name for name, _ in calls}
            if opening[0] == "`" and self._schemas and not names <= self._schemas.keys():
                continue  # other JSON that was shown
            if calls and not (closing and rest):
                return calls, rest
        return [], ""

    def _xml_call(self, body: str) -> list[Call]:
        whole = _XML.fullmatch(body)
        if whole is None or not _NAME.fullmatch(whole[1]):
            return []
        properties = (self._schemas.get(whole[1]) or {}).get("properties")
        arguments, at = dict[str, Any](), 0
        while found := _PARAMETER.match(whole[2], at):
            (key, text), at = found.groups(), found.end()
            spelled = _WORDS.get(text, text)
            value, end = _object(spelled)
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = text if _takes_text(schema) or end < len(spelled) else value
        try:
            made = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return []
        return [] if whole[2][at:].strip() else [(whole[1], made)]


class LlamaCalls(TextReader):
    """Llama 3's calls: JSON objects, with ";" between them and maybe `<|python_tag|>` before."""

    _TAG = "<|python_tag|>"
    _FIRST = re.compile(r"\s{0,32}(<\|python_tag\|>\s{0,32})?")
    _NEXT = re.compile(r"[\s;]{0,32}(<\|python_tag\|>\s{0,32})?")

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._is_text = 0, False

    def _read(self, text: str, *, ended: bool) -> list[Delta]:
        found: list[Delta] = []
        may_close = ended or "}" in text[len(self._held) :]  # else it is read when it can be whole
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
                call = _call(body[:end], value, bare=True)
                found += _deltas(call, self._calls)
                self._calls += len(call)
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
