"""Conversations in OpenAI's format, and chat templates: Jinja programs of models, run apart."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from clocher_kernels.errors import ClocherError, FormatError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.text import Refused
from clocher_runtime.text.call_styles import STYLES, AnswerStyle, CallStyle
from clocher_runtime.text.text_process import PROCESS

MAX_TEMPLATE_BYTES = 64 << 10
MAX_SECONDS = 1.0
MAX_MEMORY_BYTES = 256 << 20

Message = dict[str, Any]
_dumped = partial(json.dumps, ensure_ascii=False)
_TOOLS = """# Tools

You may call functions to answer. These are the functions, with JSON Schemas of their parameters:
<tools>
{tools}
</tools>

To call functions, answer with one of these for each call:
{call}"""

_FOLDED = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content ~ '\n\n' %}{% else %}"
)
_ASKED = "{% endfor %}{% if add_generation_prompt %}"
NAMED: Mapping[str, str] = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}"
    "{{ '<|im_end|>\n' }}" + _ASKED + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "gemma": _FOLDED + "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else 'user') }}"
    "{{ '\n' ~ (ns.system ~ m.content) | trim ~ '<end_of_turn>\n' }}{% set ns.system = '' %}"
    "{% endif %}" + _ASKED + "{{ '<start_of_turn>model\n' }}{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' ~ m.role }}"
    "{{ '<|end_header_id|>\n\n' ~ m.content | trim }}<|eot_id|>"
    + _ASKED
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "mistral": _FOLDED + "{% if m.role == 'assistant' %}{{ ' ' ~ m.content ~ eos_token }}"
    "{% else %}{{ '[INST] ' ~ ns.system ~ m.content ~ ' [/INST]' }}{% set ns.system = '' %}"
    "{% endif %}{% endif %}{% endfor %}",
}
"""Templates that `--chat-template` knows by name; none reads tools."""
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high"}
"""OpenAI's reasoning effort -> the nearest one that templates of models know."""


def chosen_template(given: str, source: str) -> str:
    """Return the template that a name or a path stands for; raises UsageError about `source`."""
    if given in NAMED:
        return NAMED[given]
    try:
        text = read_bytes(Path(given), MAX_TEMPLATE_BYTES).decode("utf-8")
        ChatTemplate(text)
    except (ClocherError, OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise UsageError(
            f"{source} {given}: {reason.removeprefix(f'{given}: ')}; expected a Jinja file, or one "
            f"of {', '.join(NAMED)}"
        ) from None
    return text


def conversation_of(messages: Sequence[Message], style: AnswerStyle = "plain") -> list[Message]:
    """Return the messages of a conversation as chat templates read them; raises UsageError.

    "developer" becomes "system", and arguments of calls become objects where they are JSON objects.
    The templates of gpt-oss and Llama 3 take one call per message, so parallel calls become
    successive ones, each with its result. gpt-oss reads a system message at the start only, and
    either text or reasoning of a message with a call. Mistral's take ids of nine letters or digits,
    DeepSeek's arguments as text and no content beside calls.
    """
    found = [_readable(message, style) for message in messages]
    if style in ("harmony", "llama3"):
        found = _one_call_each(found)
    return _for_harmony(found) if style == "harmony" else found


def _readable(message: Message, style: AnswerStyle) -> Message:
    def named(call: str) -> str:
        short = re.sub(r"[^A-Za-z0-9]", "", call)[-9:].rjust(9, "0")
        return short if style.startswith("mistral") else call

    found = {**message, "role": "system"} if message["role"] == "developer" else message
    if "tool_call_id" in message:
        return {**found, "tool_call_id": named(message["tool_call_id"])}
    if "tool_calls" not in message:
        return found
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if style != "deepseek":
            function["arguments"] = _arguments(function["arguments"])
        calls.append({**call, "id": named(call["id"]), "function": function})
    content = message.get("content") or (None if style == "deepseek" else "")
    return {**found, "content": content, "tool_calls": calls}


def _arguments(text: str) -> Mapping[str, Any] | str:
    """Return arguments as an object, or as text if they are not a complete JSON object."""
    try:
        value = parse_json(text.encode(), "arguments") if text else {}
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
        results: list[Message] = []
        while pending and pending[-1]["role"] == "tool":
            results.append(pending.pop())
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            message = {"role": "assistant", "content": ""}
            its = (n for n, each in enumerate(results) if each.get("tool_call_id") == call["id"])
            if (at := next(its, None)) is not None:
                found.append(results.pop(at))
        found += sorted(results, key=lambda each: each.get("tool_call_id") is None)
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


def _as_text(messages: Sequence[Message], style: CallStyle) -> list[Message]:
    """Return messages with calls as text of the assistant, and results as turns of the user."""
    found: list[Message] = []
    was_result = False
    for message in messages:
        is_result, content = message["role"] == "tool", message.get("content") or ""
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            given = [(each["name"], each["arguments"]) for each in functions]
            text = style.written((n, a if isinstance(a, str) else _dumped(a)) for n, a in given)
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = f"{content}\n\n{text}".lstrip()
        elif is_result:
            result = f"<tool_response>\n{content}\n</tool_response>"
            message = {"role": "user", "content": result}
        if (is_result or was_result) and found and message["role"] == found[-1]["role"]:
            # Templates want turns of the user and of the assistant to alternate.
            content = f"{found.pop()['content']}\n\n{message['content']}"
            message = {**message, "content": content}
        found.append(message)
        was_result = is_result
    return found


def _with_tools(messages: Sequence[Message], role: str, prompt: str) -> list[Message]:
    """Return messages that tell of tools, in the system message or the first one of the user."""
    roles = [message["role"] for message in messages]
    if role not in roles or (role == "system" and roles[0] != role):
        return [{"role": role, "content": prompt}, *messages]
    at = roles.index(role)
    both = [str(messages[at].get("content") or ""), prompt]
    content = "\n\n".join(both if role == "system" else both[::-1])
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


class ChatTemplate:
    """A template with transformers' functions; raises FormatError."""

    def __init__(self, text: str) -> None:
        self._text = text
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

    def converse(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        style: AnswerStyle,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation with tools; raises as `render`.

        What the template does not read becomes text: earlier calls and results, and the tools, in
        the system message or, where that is refused or lost, in the first one of the user. So do
        tools that would be called in an unknown style.
        """
        is_known = style != "plain"
        if style != "harmony" and ("tool_calls" not in self._text or (tools and not is_known)):
            messages = _as_text(messages, STYLES[style])
        if not tools or ("tools" in self._reads and is_known):
            return self.render(**{**variables, "messages": messages, "tools": tools or None})
        try:
            listed = [_dumped(each.get("function", each)) for each in tools]
        except (AttributeError, TypeError, ValueError):
            raise UsageError("tools are not JSON values; expected a list of objects") from None
        call = STYLES[style].written([("<name>", "<arguments as a JSON object>")])
        prompt = _TOOLS.format(tools="\n".join(listed), call=call)
        for role in ("system", "user"):
            shown = _with_tools(messages, role, prompt)
            try:
                text = self.render(**{**variables, "messages": shown, "tools": None})
            except UsageError:
                if role == "user":
                    raise
                continue
            if prompt in text:
                break
        return text

    def settled(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return variables with a reasoning effort as the template knows it.

        An effort that its text does not name becomes the nearest of low, medium and high; "none",
        and any effort where the template does not read it, becomes `enable_thinking`.
        Raises UsageError if it does not read one of the variables.
        """
        found = dict(variables)
        effort = found.get("reasoning_effort", "")
        if effort and not re.search(rf"""(['"]){re.escape(effort)}\1""", self._text):
            is_switch = effort == "none" or "reasoning_effort" not in self._reads
            if is_switch and "enable_thinking" in self._reads:
                del found["reasoning_effort"]
                found.setdefault("enable_thinking", effort != "none")
            else:
                found["reasoning_effort"] = _NEAREST.get(effort, effort)
        if unread := sorted(found.keys() - self._reads):
            raise UsageError(
                f"{unread[0]!r} is neither an option nor a variable of the chat template, which "
                f"reads {', '.join(sorted(self._reads))}"
            )
        return found

    def _ask(self, operation: str, **arguments: Any) -> Any:
        return PROCESS.ask(operation, MAX_SECONDS, MAX_MEMORY_BYTES, source=self._text, **arguments)


checked_template = lru_cache(maxsize=8)(ChatTemplate)
"""The `ChatTemplate` of a text, which is compiled once."""
