"""What `tokenizer.ggml.pre` says of a byte-level vocabulary: how its text is split, and what else.

Source: llama.cpp's llama-vocab.cpp. Where it only approximates what a model's tokenizer.json says,
that is here instead: accents beside letters (`GPT4O`, `TEKKEN`), and characters that are composed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clocher_runtime.models.split_patterns import (
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DEEPSEEK_V3,
    DEFAULT,
    DIGITS,
    FALCON,
    GPT2,
    GPT4O,
    LLAMA3,
    QWEN2,
    QWEN35,
    TEKKEN,
)


@dataclass(frozen=True, slots=True)
class PreType:
    """A kind of byte-level tokenizer.

    `splits`: expressions that split a text, one after the other; `whole`: a piece that is a token
    is one, whatever the merges say; `bos`: a text begins with BOS where the file does not say;
    `composed`: characters are composed (NFC) first, as their tokenizer.json says.
    """

    splits: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    composed: bool = False


_LLAMA3 = PreType((LLAMA3,), whole=True, bos=True)
_QWEN2 = PreType((QWEN2,))

PRE_TYPES: Mapping[str, PreType] = {
    "default": PreType(DEFAULT),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "granite-docling"), PreType((GPT2,))
    ),
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "lfm2", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreType((LLAMA3,))),
    "glm4": PreType((LLAMA3,), whole=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreType((QWEN2,), composed=True)),
    "qwen35": PreType((QWEN35,)),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez", "solar-open"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreType((GPT4O,))),
    "tekken": PreType((TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), PreType(DIGITS)),
    **dict.fromkeys(("exaone", "minerva-7b"), PreType(DIGITS)),
    "falcon": PreType(FALCON),
    "deepseek-llm": PreType(DEEPSEEK_LLM),
    "deepseek-coder": PreType(DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreType(DEEPSEEK_V3)),
}
