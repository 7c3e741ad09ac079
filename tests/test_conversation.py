"""Conversations of the OpenAI API as chat templates read them."""

import json
from typing import Any

import pytest

from clocher_kernels.errors import UsageError
from clocher_runtime.text.chat_template import conversation_of
from clocher_runtime.text.tokenizer import Tokenizer
from tests.answer_texts import TOKENIZER

USER = {"role": "user", "content": "Hi"}


def calling(*calls: tuple[str, str], **message: Any) -> dict[str, Any]:
    """Return an assistant's message with calls: id and arguments of the function "f"."""
    made = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **message}


def result(name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_a_conversation_of_a_client() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        calling(("c1", '{"x": [1, "é"]}'), reasoning_content="Hm."),
        result("c1", "3"),
        {"role": "assistant", "content": "Yes."},
    ]
    assert conversation_of(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": {"x": [1, "é"]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "Yes."},
    ]
    assert messages[0]["role"] == "developer"  # what was given is as it was


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("{}", {}),
        ("", {}),
        ('{"a": ', '{"a": '),  # cut short by the length
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": "\ud800"}', '{"a": "\ud800"}'),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_objects_where_they_can_be(given: str, taken: object) -> None:
    (message,) = conversation_of([calling(("c", given))])
    assert message["tool_calls"][0]["function"]["arguments"] == taken


# As the template of gpt-oss does: one call a message, text or thoughts beside it, the name of a
# result from the call before it, a system message at the beginning only.
HARMONY = """
{%- set rest = messages %}{%- if messages[0].role == "system" %}
{{- "S:" + messages[0].content + "|" }}{%- set rest = messages[1:] %}{%- endif %}
{%- set last = namespace(name=none) %}{%- for m in rest %}
{%- if m.role == "assistant" %}{%- if "<|channel|>" in m.content %}{{ raise_exception("x") }}
{%- endif %}{%- if "tool_calls" in m %}
{%- if m.content and m.thinking %}{{ raise_exception("Cannot pass both") }}{%- endif %}
{{- "T:" + (m.content or m.thinking or "") }}{%- set c = m.tool_calls[0].function %}
{{- "|C:" + c.name + c.arguments|tojson + "|" }}{%- set last.name = c.name %}
{%- else %}{{- "A:" + m.content + "|" }}{%- endif %}
{%- elif m.role == "tool" %}{%- if last.name is none %}{{ raise_exception("no call") }}{%- endif %}
{{- "R:" + last.name + m.content + "|" }}
{%- elif m.role == "user" %}{{- "U:" + m.content + "|" }}{%- endif %}{%- endfor -%}
"""


def rendered(messages: list[dict[str, Any]], template: str = HARMONY) -> str:
    tokenizer = Tokenizer(TOKENIZER_JSON, {"chat_template": template})
    return tokenizer.apply_chat_template(conversation_of(messages, "harmony")).strip()


TOKENIZER_JSON = json.dumps(
    {"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}, "added_tokens": []}
).encode()


def test_the_template_of_gpt_oss_reads_everything() -> None:
    messages = [
        {"role": "system", "content": "s1"},
        {"role": "developer", "content": "s2"},
        USER,
        calling(("a", '{"x":1}'), ("b", "{}"), content="pre", reasoning_content="why"),
        result("b", "2"),
        result("a", "1"),
        {"role": "assistant", "content": "done", "reasoning_content": "old"},
        {**USER, "content": "more"},
        calling(("c", "{}"), ("d", "{}"), ("c", "{}")),
        {"role": "tool", "content": "no id"},
        result("d", "4"),
        result("z", "9"),
    ]
    assert rendered(messages) == (
        's1\n\ns2|U:Hi|T:why\n\npre|C:f{"x": 1}|R:f1|T:|C:f{}|R:f2|A:done|U:more|'
        "T:|C:f{}|T:|C:f{}|R:f4|T:|C:f{}|R:f9|R:fno id|"
    ).replace("s1", "S:s1", 1)


def test_a_system_message_that_would_be_lost_is_refused() -> None:
    late = [USER, {"role": "system", "content": "s"}]
    with pytest.raises(UsageError, match="put it at the beginning"):
        conversation_of(late, "harmony")
    assert conversation_of(late)[1]["role"] == "system"


def test_several_calls_stay_together_where_templates_take_them() -> None:
    messages = [calling(("a", "{}"), ("b", "{}")), result("a", "1"), result("b", "2")]
    assert len(conversation_of(messages, "hermes")[0]["tool_calls"]) == 2
    assert [len(m.get("tool_calls", "")) for m in conversation_of(messages, "llama3")] == [1, 0] * 2


def test_the_embedded_model_takes_a_conversation() -> None:
    found = TOKENIZER.apply_chat_template(conversation_of([USER, calling(("a", "{}"))], "harmony"))
    assert found == "<|start|>user<|message|>Hi<|end|><|start|>assistant<|message|><|end|>" + (
        "<|start|>assistant"
    )
