"""How a model spells its answers, and the reader that fits."""

import random

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from clocher_runtime.text.answers import make_reader
from clocher_runtime.text.call_styles import AnswerStyle, style_of
from clocher_runtime.text.tokenizer import Tokenizer
from tests.answer_texts import TOKENIZER, read_tokens

QWEN = "{{ '<tool_call>\\n{\"name\": ' }}"
LLAMA = 'Respond in the format {"name": function name, "parameters": ...}'
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀"}}\n</tool_call>'
READ = [("tool_call", "f", 0), ("arguments", '{"a": "é😀"}', 0)]


def byte_tokenizer(*added: str, **config: object) -> Tokenizer:
    """Return a tokenizer whose tokens are single bytes, and some more."""
    alphabet = {f"<0x{byte:02X}>": byte for byte in range(256)}
    raw = RawTokenizer(models.BPE(alphabet | {"?": 256}, [], byte_fallback=True, unk_token="?"))
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(list(added))
    return Tokenizer(raw.to_str().encode(), config)


PLAIN = byte_tokenizer()
SPECIAL = byte_tokenizer("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>")


@pytest.mark.parametrize(
    ("tokenizer", "template", "style"),
    [
        (TOKENIZER, "", "harmony"),
        (PLAIN, "", "plain"),
        (PLAIN, QWEN, "hermes"),
        (byte_tokenizer("<|python_tag|>"), QWEN, "hermes"),  # Hermes on Llama 3
        (byte_tokenizer("<|python_tag|>"), LLAMA, "llama3"),
        (byte_tokenizer("<|python_tag|>"), "", "plain"),
        (PLAIN, LLAMA, "plain"),
        (SPECIAL, QWEN + "<function=f><parameter=a>", "hermes"),
        (PLAIN, "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        (PLAIN, "{{ '[TOOL_CALLS][' }}", "mistral_list"),
        (PLAIN, "'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek"),
        (PLAIN, "'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4"),
        (PLAIN, "respond only with <|tool_call|> followed by a JSON list", "granite"),
        (PLAIN, "'<start_of_turn>' + '<start_function_call>call:'", "function_gemma"),
        (PLAIN, "'<start_of_turn>' + role", "gemma"),
    ],
)
def test_the_style_of_a_model(tokenizer: Tokenizer, template: str, style: AnswerStyle) -> None:
    assert style_of(template, lambda name: tokenizer.token_id(name) is not None) == style


def test_the_template_of_a_model_is_known() -> None:
    assert "<|start|>" in TOKENIZER.chat_template
    assert PLAIN.chat_template == ""
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN}]
    assert byte_tokenizer(chat_template=several).chat_template == QWEN
    assert byte_tokenizer(chat_template=several).style == "hermes"


@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL, TOKENIZER])
def test_marks_may_be_tokens_or_not(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"<think>\nHm 😀\n</think>\n\n{CALL}", special=False)
    reader = make_reader(tokenizer, "hermes", tools=True)
    assert read_tokens(reader, tokens) == [("reasoning", "Hm 😀", 0), *READ]
    reader = make_reader(tokenizer, "hermes", tools=False)
    assert read_tokens(reader, tokens) == [("reasoning", "Hm 😀", 0), ("content", CALL, 0)]


def test_a_prompt_may_begin_the_thoughts() -> None:
    tokens = PLAIN.encode("Hm\n</think>\nYes", special=False)
    for style in ("plain", "hermes", "llama3"):
        reader = make_reader(PLAIN, style, tools=True, prompt_tail="<|im_start|>x\n<think>\n")
        assert read_tokens(reader, tokens) == [("reasoning", "Hm", 0), ("content", "Yes", 0)]
        reader = make_reader(PLAIN, style, tools=True, prompt_tail="<think>\n\n</think>\n\n")
        assert read_tokens(reader, tokens) == [("content", "Hm\n</think>\nYes", 0)]


def test_ids_that_end_an_answer_have_no_text() -> None:
    (end,) = SPECIAL.encode("<|im_end|>", special=False)
    tokens = [*SPECIAL.encode("Hé", special=False), end]
    reader = make_reader(SPECIAL, "hermes", tools=True, ends=[end])
    assert read_tokens(reader, tokens) == [("content", "Hé", 0)]
    reader = make_reader(SPECIAL, "hermes", tools=True)
    assert read_tokens(reader, tokens) == [("content", "Hé<|im_end|>", 0)]
    reader = make_reader(SPECIAL, "hermes", tools=True)
    assert read_tokens(reader, tokens[:-2]) == [("content", "H\N{REPLACEMENT CHARACTER}", 0)]


def test_harmony_gets_all_its_settings() -> None:
    tokens = TOKENIZER.encode("{}<|endoftext|>analysis", special=False)
    tail = "<|start|>assistant to=functions.f<|message|>"
    ends = TOKENIZER.encode("<|endoftext|>", special=False)
    reader = make_reader(TOKENIZER, "harmony", tools=True, prompt_tail=tail, ends=ends)
    expected = [("tool_call", "f", 0), ("arguments", "{}", 0), ("content", "analysis", 0)]
    assert read_tokens(reader, tokens) == expected
    reader = make_reader(TOKENIZER, "harmony", tools=False, prompt_tail=tail)
    assert read_tokens(reader, tokens)[0][0] == "reasoning"


@pytest.mark.parametrize("style", ["plain", "hermes", "llama3"])
def test_any_tokens_are_read(style: AnswerStyle) -> None:
    """Without a mark in it, all of an answer is content."""
    draw = random.Random(style)
    for _ in range(500):
        tokens = draw.choices(range(TOKENIZER.vocab_size), k=draw.randrange(1, 30))
        found = read_tokens(make_reader(TOKENIZER, style, tools=True), tokens)
        assert found == [("content", TOKENIZER.decode(tokens), 0)]
