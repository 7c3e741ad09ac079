"""Chat templates: rendered as in transformers, unable to escape, and bounded in time and memory."""

import ast
import copy
import json
import threading
from pathlib import Path

import pytest
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.text.chat_template import MAX_MEMORY_BYTES, MAX_TEMPLATE_BYTES, ChatTemplate
from clocher_runtime.text.text_process import PROCESS

MODELS = Path(transformers.__file__).parent / "models"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"], "y": None}}}
CONVERSATIONS = [
    [{"role": "user", "content": "Hi é <b>&"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "assistant", "content": "b\n", "reasoning_content": "hm"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
    ],
    [],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {}}}]


def templates_of_transformers() -> dict[str, str]:
    """Return the chat templates in the source of transformers, by the file that has them."""
    found = {}
    for path in sorted(MODELS.glob("*/processing_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "{%" in text and "messages" in text:
                found[path.stem] = max(found.get(path.stem, ""), text, key=len)
    return found


TEMPLATES = templates_of_transformers() | {
    path.name: json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
    for path in (embedded_model(), Path(__file__).parent / "data" / "clocher-tiny-llama")
}


def test_there_are_templates_of_several_models():
    assert {"processing_llama4", "processing_qwen2_audio"} < set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_models_render_as_in_transformers(name):
    made = 0
    for messages in CONVERSATIONS:
        for settings in ({"add_generation_prompt": True}, {"tools": TOOLS}, {"bos_token": "<s>"}):
            try:
                (expected,), _ = render_jinja_template(
                    [copy.deepcopy(messages)], chat_template=TEMPLATES[name], **settings
                )
            except Exception:
                expected = None
            given = {"tools": None, "documents": None, "add_generation_prompt": False} | settings
            try:
                text = ChatTemplate(TEMPLATES[name]).render(messages=messages, **given)
            except (FormatError, UsageError):
                text = None
            assert text == expected
            made += text is not None
    assert made > 0


MESSAGES = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n{{ m.role }}\n{% endfor %}\n", "user\nassistant\n"),
        ("    {% if true %}x{% endif %}", "x"),
        ("{% for m in messages %}{% break %}{% endfor %}ok", "ok"),
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ '<&>' | tojson(indent=2) }}", '"<&>"'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n * 3 % 4 ** 2 }}", "6"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ bos_token }}{{ 'a,b'.split(',')[1].upper() }}", "<s>B"),
        ("{{ '=' * 3 }}{{ '%3d' % 7 }}{{ '%s' | format(1) }}{{ '{:>3}'.format(2) }}", "===  71  2"),
        ("{% generation %}a{{ messages | length }}{% endgeneration %}", "a2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_template_renders_as_in_transformers(source, text):
    assert ChatTemplate(source).render(messages=MESSAGES, bos_token="<s>") == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "chat template"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "chat template"),
        (" " * (MAX_TEMPLATE_BYTES + 1), "the limit is"),
        ("{{ x | no_such_filter }}", "No filter named"),
    ],
    ids=["syntax", "deep", "large", "filter"],
)
def test_template_that_cannot_be_used_is_a_format_error(source, message):
    with pytest.raises(FormatError, match=message):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ joiner.__init__.__globals__['os'].system('true') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ range(100001) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.rjust(1000000000) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(9999) %}{{ 'abc' | center(60000) }}{% endfor %}",
        # Each of these took gigabytes or more than half a minute where steps were counted in lines.
        "{{ ('a' | center(60000)) | replace('a', 'b' | center(60000)) | replace(' ', 'c' * 999) }}",
        "{{ (range(60000) | list | join('x' * 60000)) | length }}",
        "{{ ('ab' | center(65000)).translate({32: 'x' * 65000}) | length }}",
        "{{ ('\t' * 65000).expandtabs(65000) | length }}",
        "{{ [[[[[[[[[[1]] * 9] * 9] * 9] * 9] * 9] * 9] * 9] * 9] | tojson(indent=60000) }}",
        "{% set n = namespace(x=9 ** 9) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}"
        "{% endfor %}{{ n.x % 7 }}",
        "{% for i in range(9999) %}{% set s = range(99999) | sum %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x | length }}",
        "{% set n = namespace(x=[0]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}{{ n.x | length }}",
        "{{ (('a' * 30) ~ '!') | wordwrap(1, wrapstring='x' * 99999999) | length }}",
        "{{ range(99999) | batch(2) | map('join', 'x' * 999999) | list | length }}",
    ],
)
@pytest.mark.one_in(2)
def test_template_that_breaks_out_or_does_not_end_is_stopped(source):
    with pytest.raises(FormatError, match="chat template stopped"):
        ChatTemplate(source).render(messages=MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing.here }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].role }}",
        "{{ messages + 1 }}",
        "{{ 5 | dictsort }}",
    ],
)
def test_template_that_refuses_the_messages_is_a_usage_error(source):
    with pytest.raises(UsageError, match="refused the messages"):
        ChatTemplate(source).render(messages=MESSAGES)


@pytest.mark.parametrize(
    "source",
    ["{{ ''['__class__'] }}", "{{ '' | attr('__class__') }}", "{{ raise_exception.__globals__ }}"],
)
def test_attribute_of_python_is_undefined(source):
    assert ChatTemplate(source).render(messages=MESSAGES) == ""


@pytest.mark.parametrize("source", ["{% include 'x' %}", "{% import 'os' as os %}"])
def test_template_cannot_load_files(source):
    with pytest.raises((FormatError, UsageError)):
        ChatTemplate(source).render(messages=MESSAGES)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes"], ids=["set", "object", "bytes"])
def test_messages_that_are_no_json_are_a_usage_error(value):
    with pytest.raises(UsageError, match="not JSON values"):
        ChatTemplate("{{ messages }}").render(messages=value)


def test_variables_reach_a_template_as_they_are():
    value = {"text": "\ud800 \U0001f600 \x00", "n": 10**30, "f": 0.5, "none": None, "list": [True]}
    text = ChatTemplate("{{ v.text }}|{{ v.n }}|{{ v.f }}|{{ v.none }}|{{ v.list }}").render(
        v=value
    )
    assert text == f"\ud800 \U0001f600 \x00|{10**30}|0.5|None|[True]"


EFFORT, THINKS = "{{ reasoning_effort }}", "{{ enable_thinking }}"


@pytest.mark.parametrize(
    ("source", "effort", "settled"),
    [
        (EFFORT, "high", {"reasoning_effort": "high"}),
        (EFFORT, "none", {"reasoning_effort": "low"}),
        (EFFORT, "minimal", {"reasoning_effort": "low"}),
        (EFFORT, "xhigh", {"reasoning_effort": "high"}),
        (EFFORT + "{{ ['none', 'high'] }}", "none", {"reasoning_effort": "none"}),
        (EFFORT + THINKS, "none", {"enable_thinking": False}),
        (EFFORT + THINKS, "xhigh", {"reasoning_effort": "high"}),
        (THINKS, "none", {"enable_thinking": False}),
        (THINKS, "minimal", {"enable_thinking": True}),
    ],
)
def test_an_effort_becomes_what_the_template_knows(source, effort, settled):
    assert ChatTemplate(source).settled({"reasoning_effort": effort}) == settled


def test_an_effort_does_not_undo_what_is_asked_of_the_template():
    asked = {"reasoning_effort": "none", "enable_thinking": True}
    assert ChatTemplate(THINKS).settled(asked) == {"enable_thinking": True}
    with pytest.raises(UsageError, match="'reasoning_effort' is neither"):
        ChatTemplate("{{ messages }}").settled({"reasoning_effort": "none"})


def test_a_stopped_template_leaves_no_large_process():
    PROCESS.close()
    with pytest.raises(FormatError, match=r"memory|time|long"):
        ChatTemplate("{{ ('x' * 200000000) ~ ('y' * 200000000) }}").render()
    assert ChatTemplate("{{ a }}").render(a="b") == "b"
    process = PROCESS._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    (peak,) = (int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)
    assert peak < MAX_MEMORY_BYTES + (128 << 20)


def test_threads_get_their_own_texts():
    found = {}

    def render(name):
        template = ChatTemplate("{{ name }}{{ i }}")
        found[name] = [template.render(name=name, i=i) for i in range(40)]

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [f"{name}{i}" for i in range(40)] for name in "abcd"}
