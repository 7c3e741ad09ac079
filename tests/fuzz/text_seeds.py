"""Small sound tokenizers of many kinds, chat templates, and texts and messages to go into them."""

import base64
import json
import struct
from typing import Any

Seed = dict[str, bytes]
"""Name in the directory -> content: the files of one model, or one file."""

TEXT = "ab é\n<s> ba  AB 12\t日本"
_SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "<s>"}, "add_bos_token": True}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
}
_LETTERS = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁ab": 4, "<unk>": 5, "<0x41>": 6}
_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
# A trie without entries, then the texts that it would lead to.
_CHARSMAP = base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + b"a\0bb\0").decode()


def tokenizers() -> list[Seed]:
    """Return tokenizers of every kind of the library, each with settings and a text."""
    byte_vocab = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ã": 4, "©": 5, "Ċ": 6}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{N}{1,3}"},
        "behavior": "Isolated",
        "invert": False,
    }
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    unusual = {**split, "pattern": {"Regex": r"\s+(?!\S)|a+b|\w+"}}
    documents = (
        _document(
            {**_BPE, "vocab": byte_vocab, "merges": [["a", "b"]]},
            pre_tokenizer=_BYTE_LEVEL,
            post_processor=_BYTE_LEVEL,
            decoder=_BYTE_LEVEL,
        ),
        _document(
            {
                **_BPE,
                "vocab": _LETTERS,
                "merges": [["a", "b"], ["▁", "ab"]],
                "unk_token": "<unk>",
                "byte_fallback": True,
                "fuse_unk": True,
            },
            normalizer=_sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, replace),
            post_processor=_TEMPLATE,
            decoder=_sequence("decoders", back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip),
        ),
        _document(
            {**_BPE, "vocab": _LETTERS, "merges": ["a b"]},
            normalizer={"type": "NFC"},
            pre_tokenizer=_sequence(
                "pretokenizers", split, {"type": "Digits", "individual_digits": True}, _METASPACE
            ),
            decoder=_METASPACE,
        ),
        _document(
            {"type": "WordLevel", "vocab": _LETTERS, "unk_token": "<unk>"},
            normalizer={"type": "Lowercase"},
            pre_tokenizer=unusual,
            post_processor={**_TEMPLATE, "single": _TEMPLATE["single"][:1]},  # type: ignore[index]
            decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        ),
        _document(
            {
                "type": "Unigram",
                "unk_id": 0,
                "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.5], ["▁", -3.0]],
                "byte_fallback": False,
            },
            normalizer={"type": "Precompiled", "precompiled_charsmap": _CHARSMAP},
            pre_tokenizer={"type": "FixedLength", "length": 5},
            decoder={
                "type": "CTC",
                "pad_token": "<pad>",
                "word_delimiter_token": "|",
                "cleanup": True,
            },
        ),
        _document(
            {
                "type": "WordPiece",
                "vocab": {"[UNK]": 0, "a": 1, "##b": 2, "b": 3},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
            normalizer={
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            pre_tokenizer={"type": "BertPreTokenizer"},
            post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 3]},
            decoder={"type": "BPEDecoder", "suffix": "</w>"},
            truncation={
                "direction": "Right",
                "max_length": 3,
                "strategy": "LongestFirst",
                "stride": 1,
            },
            padding={
                "strategy": {"Fixed": 9},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "a",
            },
        ),
    )
    return [
        {
            "tokenizer.json": json_bytes(document),
            "tokenizer_config.json": json_bytes(_SETTINGS),
            "text.txt": TEXT.encode(),
        }
        for document in documents
    ]


def templates() -> list[Seed]:
    """Return chat templates, each with messages and tools."""
    messages = [
        {"role": "system", "content": "é"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, "y"]}}}],
        },
        {"role": "tool", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    values = json_bytes({"messages": messages, "tools": tools, "bos_token": "<s>"})
    return [
        {"chat_template.jinja": source.encode(), "values.json": values}
        for source in (_CHATML, _TOOLS, _MACROS)
    ]


_CHATML = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}"
    "{% elif message.content is none %}{{ message.tool_calls | tojson(indent=2) }}{% else %}"
    "{{ message.content | map(attribute='text') | join('\\n') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TOOLS = (
    "{%- set ns = namespace(last=-1, text='') %}{%- for m in messages[::-1] %}"
    "{%- set index = (messages | length - 1) - loop.index0 %}"
    "{%- if m.role == 'tool' and ns.last < 0 %}{%- set ns.last = index %}{%- endif %}"
    "{%- set ns.text = ns.text ~ m.role.upper()[:3] %}{%- endfor %}"
    "{{- ns.text.split('S')[-1].replace('U', 'u') }}{{- '%d' | format(ns.last * 3 % 4 ** 2) }}"
    "{%- for tool in tools %}{{- tool.function.items() | list | length }}"
    "{%- if loop.first %}{% continue %}{%- endif %}{{- tool | tojson }}{%- endfor %}"
)
_MACROS = (
    "{%- macro show(value, depth=0) -%}{%- if value is mapping -%}"
    "{%- for key, item in value | dictsort -%}{{ key | center(9) }}: {{ show(item, depth + 1) }}"
    "{%- endfor -%}{%- elif value is iterable and value is not string -%}"
    "{%- for item in value -%}{{ show(item, depth + 1) | indent(2) }}{%- endfor -%}"
    "{%- else -%}{{ value | string | wordwrap(20) | e }}{%- endif -%}{%- endmacro -%}"
    "{{ show(messages) }}{{ range(9) | sum }}{{ strftime_now('%Y') | length }}"
    "{% generation %}{{ [1, 2, 3] | batch(2, 0) | list }}{% endgeneration %}"
)


def _sequence(within: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", within: list(steps)}


def _document(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    token = {
        "id": 7,
        "content": "<s>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    document: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    return {**document, **parts, "model": model}


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON text."""
    return json.dumps(document).encode()
