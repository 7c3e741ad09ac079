"""Conversations in OpenAI's format, and chat templates: Jinja programs of models, run apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.engine.arguments import listed
from clocher_runtime.text import Refused
from clocher_runtime.text.answers import AnswerStyle
from clocher_runtime.text.text_process import PROCESS

MAX_TEMPLATE_BYTES = 64 << 10
MAX_SECONDS = 1.0
MAX_MEMORY_BYTES = 256 << 20
_ROLES = {"system": "system", "developer": "system", "user": "user"}
_ROLES |= {"assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_REASONING = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


def conversation_of(messages: object, style: AnswerStyle = "plain") -> list[Message]:
    """Return the messages of a conversation as chat templates read them; raises UsageError.

    Contents become text, "developer" becomes "system", and arguments of calls become objects where
    they are JSON objects; unknown fields are dropped. The templates of gpt-oss and Llama 3 take one
    call per message, so parallel calls become successive ones, each with its result. gpt-oss reads
    a system message at the start only, and either text or reasoning of a message with a call.
    """
    given = listed(messages, "a list of messages, each with a role and its content")
    if not given:
        raise UsageError("there are no messages; expected at least one")
    found = [_message(message, f"messages[{at}]") for at, message in enumerate(given)]
    if style in ("harmony", "llama3"):
        found = _one_call_each(found)
    return _for_harmony(found) if style == "harmony" else found


def _message(message: object, where: str) -> Message:
    given = _expect(Mapping, message, where, "a mapping with a role and its content")
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UsageError(f"{where}.role is {shown(role)}; expected one of {', '.join(_ROLES)}")
    found: Message = {"role": _ROLES[role]}
    found["content"] = _content(given.get("content"), f"{where}.content", role == "assistant")
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            found[name] = _text(given[name], f"{where}.{name}")
    if role != "assistant":
        return found
    if given.get("function_call") is not None:
        raise UsageError(f"{where}.function_call is of an older API; give it in tool_calls")
    if thoughts := [name for name in _REASONING if given.get(name)]:
        found["reasoning_content"] = _text(given[thoughts[0]], f"{where}.{thoughts[0]}")
    if calls := given.get("tool_calls"):
        where = f"{where}.tool_calls"
        calls = listed(calls, f"a list of calls as {where}")
        found["tool_calls"] = [_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]
    return found


def _content(content: object, where: str, may_be_missing: bool) -> str:
    if isinstance(content, str) or (content is None and may_be_missing):
        return content or ""
    parts = _expect(list, content, where, "text, or a list of parts with text")
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(parts))


def _part(part: object, where: str) -> str:
    given = _expect(Mapping, part, where, 'a part as {"type": "text", "text": ...}')
    kind = _text(given.get("type"), f"{where}.type")
    if kind not in _TEXT_PARTS:
        raise UsageError(f"{where} has the type {shown(kind)}, and this model reads text only")
    return _text(given.get(_TEXT_PARTS[kind]), f"{where}.{_TEXT_PARTS[kind]}")


def _call(call: object, where: str) -> Message:
    given = _expect(Mapping, call, where, 'a call as {"id": ..., "function": {...}}')
    function = _expect(Mapping, given.get("function"), f"{where}.function", "an object")
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found if given.get("id") is None else {**found, "id": _text(given["id"], f"{where}.id")}


def _arguments(arguments: object, where: str) -> Mapping[str, Any] | str:
    """Return arguments as an object, or as text if they are not a complete JSON object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    text = _text(arguments, where)
    try:
        value = parse_json(text.encode(), where)
    except (FormatError, UnicodeEncodeError):
        return text
    return value if isinstance(value, dict) else text


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    pending = list(reversed(messages))
    while pending:
        message = pending.pop()
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            found.append(message)
            continue
        results: dict[str, Message] = {}
        others = []
        while pending and pending[-1]["role"] == "tool":
            result = pending.pop()
            key = result.get("tool_call_id")
            if key is None or key in results:
                others.append(result)
            else:
                results[key] = result
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            if call.get("id") in results:
                found.append(results.pop(call["id"]))
        found += [*results.values(), *others]
    return found


def _for_harmony(messages: Sequence[Message]) -> list[Message]:
    """Return messages that the gpt-oss template neither truncates nor rejects."""
    systems = [message["role"] == "system" for message in messages]
    first = systems.index(False) if False in systems else len(systems)
    if any(systems[first:]):
        raise UsageError(
            "a system or developer message comes after others, where this model does not read it; "
            "put it at the beginning"
        )
    found = list(messages[first:])
    for at, message in enumerate(found):
        if "tool_calls" in message and message["content"] and "reasoning_content" in message:
            both = f"{message['reasoning_content']}\n\n{message['content']}"
            found[at] = {**message, "reasoning_content": both, "content": ""}
    if first:
        texts = [message["content"] for message in messages[:first]]
        found.insert(0, {"role": "system", "content": "\n\n".join(texts)})
    return found


def _text(value: object, where: str) -> str:
    text: str = _expect(str, value, where, "text")
    return text


def _expect(kind: type, value: Any, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{where} is {shown(value)}; expected {expected}")
    return value


class ChatTemplate:
    """A template (or a list with a "default") with transformers' functions; raises FormatError."""

    def __init__(self, source: object) -> None:
        self._text = template_text(source)
        if len(self._text.encode("utf-8", errors="replace")) > MAX_TEMPLATE_BYTES:
            raise FormatError(
                f"chat template of {len(self._text)} characters; the limit is "
                f"{MAX_TEMPLATE_BYTES} bytes"
            )
        try:
            self._reads = frozenset(self._ask("compile_template"))
        except Refused as error:
            # Constant expressions are evaluated already here.
            stopped = "" if error.kind == "refused" else " stopped"
            raise FormatError(f"chat template{stopped}: {error}") from None

    def render(self, **variables: Any) -> str:
        """Return the text; raises UsageError (rejected), FormatError (forbidden, over limits)."""
        try:
            text: str = self._ask("render", variables=variables)
        except Refused as error:
            if error.kind == "refused":
                raise UsageError(f"chat template refused the messages: {error}") from None
            raise FormatError(f"chat template stopped: {error}") from None
        return text

    def refuse_unread(self, variables: Iterable[str]) -> None:
        """Raise UsageError if the template does not read one of the variables."""
        if unread := sorted(set(variables) - self._reads):
            if "tools" in unread:
                raise UsageError("the chat template of this model has no tools; ask without them")
            raise UsageError(
                f"{unread[0]!r} is neither an option nor a variable of the chat template, which "
                f"reads {', '.join(sorted(self._reads))}"
            )

    def _ask(self, operation: str, **arguments: Any) -> Any:
        return PROCESS.ask(operation, MAX_SECONDS, MAX_MEMORY_BYTES, source=self._text, **arguments)


def template_text(source: object) -> str:
    """Return the text of a template, or of the "default" in a list; raises FormatError."""
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, Mapping)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        source = named.get("default")
    if not isinstance(source, str):
        raise FormatError("chat template: expected text, or a list with one named 'default'")
    return source
