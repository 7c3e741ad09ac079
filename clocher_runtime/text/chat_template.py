"""Conversations in OpenAI's format, and chat templates: Jinja programs of models, run apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.text import Refused, template_text
from clocher_runtime.text.answers import AnswerStyle
from clocher_runtime.text.text_process import PROCESS

MAX_TEMPLATE_BYTES = 64 << 10
MAX_SECONDS = 1.0
MAX_MEMORY_BYTES = 256 << 20

Message = dict[str, Any]


def conversation_of(messages: Sequence[Message], style: AnswerStyle = "plain") -> list[Message]:
    """Return the messages of a conversation as chat templates read them; raises UsageError.

    "developer" becomes "system", and arguments of calls become objects where they are JSON objects.
    The templates of gpt-oss and Llama 3 take one call per message, so parallel calls become
    successive ones, each with its result. gpt-oss reads a system message at the start only, and
    either text or reasoning of a message with a call.
    """
    found = [_readable(message) for message in messages]
    if style in ("harmony", "llama3"):
        found = _one_call_each(found)
    return _for_harmony(found) if style == "harmony" else found


def _readable(message: Message) -> Message:
    found = {**message, "role": "system"} if message["role"] == "developer" else message
    if "tool_calls" not in message:
        return found
    calls = [(call, call["function"]) for call in message["tool_calls"]]
    read = [{**c, "function": {**f, "arguments": _arguments(f["arguments"])}} for c, f in calls]
    return {**found, "tool_calls": read}


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
