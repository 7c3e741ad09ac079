"""Conversations in OpenAI's format, prepared for chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.engine.arguments import listed
from clocher_runtime.text.answers import AnswerStyle

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
    if not isinstance(message, Mapping):
        _refuse(where, message, "a mapping with a role and its content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    found: Message = {"role": _ROLES[role]}
    found["content"] = _content(message.get("content"), f"{where}.content", role == "assistant")
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            found[name] = _text(message[name], f"{where}.{name}")
    if role != "assistant":
        return found
    if message.get("function_call") is not None:
        raise UsageError(f"{where}.function_call is of an older API; give it in tool_calls")
    if thoughts := [name for name in _REASONING if message.get(name)]:
        found["reasoning_content"] = _text(message[thoughts[0]], f"{where}.{thoughts[0]}")
    if calls := message.get("tool_calls"):
        where = f"{where}.tool_calls"
        calls = listed(calls, f"a list of calls as {where}")
        found["tool_calls"] = [_call(call, f"{where}[{at}]") for at, call in enumerate(calls)]
    return found


def _content(content: object, where: str, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list):
        _refuse(where, content, "text, or a list of parts with text")
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        _refuse(where, part, 'a part as {"type": "text", "text": ...}')
    if kind not in _TEXT_PARTS:
        raise UsageError(f"{where} has the type {shown(kind)}, and this model reads text only")
    return _text(part.get(_TEXT_PARTS[kind]), f"{where}.{_TEXT_PARTS[kind]}")


def _call(call: object, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        _refuse(where, call, 'a call as {"id": ..., "type": "function", "function": {...}}')
    name = _text(function.get("name"), f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        found["id"] = _text(call["id"], f"{where}.id")
    return found


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
    if not isinstance(value, str):
        _refuse(where, value, "text")
    return value


def _refuse(where: str, value: object, expected: str) -> NoReturn:
    raise UsageError(f"{where} is {shown(value)}; expected {expected}")
