"""Conversations of the OpenAI API as chat templates read them."""

import json
from typing import Any

import pytest

from clocher_kernels.errors import UsageError
from clocher_runtime.text.chat_template import NAMED, ChatTemplate, conversation_of
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


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
EACH = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH
)
LOST = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}|{% endfor %}"
IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}|"
    "{% endfor %}"
)


def told(template: str, messages: list[dict[str, Any]], tools: Any = TOOLS) -> str:
    """Return the text of a conversation with tools."""
    tokenizer = Tokenizer(TOKENIZER_JSON, {"chat_template": template})
    return tokenizer.apply_chat_template(
        conversation_of(messages, tokenizer.style), tools=tools, variables={}
    )


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        (EACH, "system: # Tools\n\nYou may call", "|user: Hi|"),
        (EACH + "{# it reads #}{{ tools and 'Own' }}", "system: # Tools", "|user: Hi|None"),
        (NO_SYSTEM, "user: # Tools", "\n\nHi|"),
        (LOST, "user: # Tools", "\n\nHi|"),
    ],
    ids=["system", "unknown calls", "refused", "lost"],
)
def test_a_template_that_knows_no_tools_tells_of_them(template: str, begin: str, end: str) -> None:
    text = told(template, [USER])
    assert text.startswith(begin) and text.endswith(end)
    assert '<tools>\n{"name": "f", "parameters": {"type": "object"}}\n</tools>' in text
    assert '<tool_call>\n{"name": "<name>", "arguments": ' in text
    assert told(template, [USER], None).startswith("user: Hi|")


def test_the_system_message_keeps_what_it_says() -> None:
    text = told(EACH, [{"role": "developer", "content": "Be brief."}, USER])
    assert text.startswith("system: Be brief.\n\n# Tools")


def test_calls_and_results_become_text_where_a_template_does_not_know_them() -> None:
    calls = calling(("c1", '{"x": 1}'), ("c2", "[cut"), content="Wait.")
    messages = [USER, calls, result("c1", "1"), result("c2", "2"), {**USER, "content": "So?"}]
    expected = (
        "user: Hi|assistant: Wait.\n\n<tool_call>\n"
        '{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "f", "arguments": [cut}\n</tool_call>|user: <tool_response>\n1\n</tool_response>'
        "\n\n<tool_response>\n2\n</tool_response>\n\nSo?|"
    )
    assert told(EACH, messages, None) == told(IN_TURN, messages, None) == expected
    assert told(EACH, messages).endswith(expected)


KNOWS = "{{ tools | tojson }}{% for m in messages %}{% for c in m.tool_calls or [] %}"


def test_mistral_gets_ids_of_nine() -> None:
    template = KNOWS + "[TOOL_CALLS]{{ c.id }}{% endfor %}{{ m.tool_call_id }}|{% endfor %}"
    messages = [USER, calling(("call_0123456789abc", "{}")), result("call_0123456789abc", "1")]
    assert told(template, messages).endswith("]|[TOOL_CALLS]456789abc|456789abc|")
    assert told(template, [calling(("é-7", "{}"))]).endswith("[TOOL_CALLS]000000007|")


def test_deepseek_gets_arguments_as_it_adds_them() -> None:
    template = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ '<｜tool▁sep｜>' + c['function']['arguments'] }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    text = told(template, [{"role": "system", "content": "s"}, calling(("c", '{"x": "é"}'))], None)
    assert text == '<｜tool▁sep｜>{"x": "é"}'


def test_a_template_gets_calls_as_its_model_writes_them() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{# <|/tool|> #}"
    text = told(template, [USER, calling(("c", "{}")), result("c", "1")])
    assert '\n<|tool_call|>[{"name": "<name>", "arguments": <arguments as a' in text
    assert text.endswith(
        '<|user|>Hi<|assistant|><|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|><|user|>'
        "<tool_response>\n1\n</tool_response>"
    )


@pytest.mark.parametrize("name", NAMED)
def test_templates_with_a_name(name: str) -> None:
    messages = [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "Yes"}]
    render = ChatTemplate(NAMED[name]).render
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    text = render(messages=[*messages, USER], add_generation_prompt=True, **special)
    system, user, asked = {
        "chatml": (
            "<|im_start|>system\ns<|im_end|>\n",
            "Hi<|im_end|>\n",
            "<|im_start|>assistant\n",
        ),
        "gemma": (
            "<s><start_of_turn>user\ns\n\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>",
            "\n<start_of_turn>user\nHi<end_of_turn>\n",
            "<start_of_turn>model\n",
        ),
        "llama3": (
            "<s><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        "mistral": ("<s>[INST] s\n\nHi [/INST] Yes</s>", "[INST] Hi [/INST]", ""),
    }[name]
    assert text.startswith(system) and text.endswith(user + asked)
