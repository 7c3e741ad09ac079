"""GGUF vocabularies. Source: llama.cpp's llama-vocab.cpp; `PRE_TYPES` is as in tokenizer.json."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.gguf.file import GgufFile, Strings
from clocher_runtime.models import split_patterns as split

MODEL, TOKENS, TYPES = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# What ends a turn, by name, as in llama.cpp: a file has one id for it, chat models several.
_END_TEXTS = {
    *("<eos>", "<end_of_turn>", "<end_of_utterance>", "<|call|>", "<|calls|>", "<|end|>"),
    *("<|end_of_text|>", "<|endoftext|>", "<|eom_id|>", "<|eot_id|>", "<|flush|>", "<|im_end|>"),
    *("<|return|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),  # the odd one: DeepSeek
}
# Where a message ends with "<|end|>" and a turn does not: Harmony, and Solar Open.
_MESSAGES_END = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


@dataclass(frozen=True, slots=True)
class PreType:
    """A kind of byte-level tokenizer.

    `splits` are applied in order; `whole`: a piece that is a token ignores the merges; `bos` is the
    default of the file; `composed`: text is normalised to NFC first.
    """

    splits: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    composed: bool = False


_ROWS = {
    "default": PreType(split.DEFAULT),
    "gpt-2 phi-2 olmo mpt exaone4 granite-docling": PreType((split.GPT2,)),
    "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral lfm2 midm-2.0": PreType(
        (split.LLAMA3,), whole=True, bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreType((split.LLAMA3,)),
    "glm4": PreType((split.LLAMA3,), whole=True),
    "qwen2 deepseek-r1-qwen": PreType((split.QWEN2,), composed=True),
    "qwen35": PreType((split.QWEN35,)),
    "stablelm2 hunyuan megrez solar-open": PreType((split.QWEN2,)),
    "gpt-4o llama4 kanana2": PreType((split.GPT4O,)),
    "tekken": PreType((split.TEKKEN,), whole=True, bos=True),
    "starcoder refact command-r smollm codeshell exaone minerva-7b": PreType(split.DIGITS),
    "falcon": PreType(split.FALCON),
    "deepseek-llm": PreType(split.DEEPSEEK_LLM),
    "deepseek-coder": PreType(split.DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": PreType(split.DEEPSEEK_V3),
}
PRE_TYPES: Mapping[str, PreType] = {
    name: kind for names, kind in _ROWS.items() for name in names.split()
}
"""`tokenizer.ggml.pre` -> how a byte-level vocabulary splits text."""


def has_vocabulary(file: GgufFile) -> bool:
    """Return whether the file has one; benchmark files may not."""
    return MODEL in file.keys and file.text(MODEL) not in ("no_vocab", "none")


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of a special token, or None."""
    key = f"tokenizer.ggml.{ROLES.get(role, role)}_token_id"
    return file.integer(key) if key in file.keys else None


def token_types(file: GgufFile, count: int) -> np.ndarray:
    """Return the type of each token, `NORMAL` to `BYTE`; normal without the entry."""
    if TYPES not in file.keys:
        return np.full(count, NORMAL)
    types = file.numbers(TYPES)
    if len(types) != count:
        raise FormatError(f"{file.file.path}: {TYPES} has {len(types)} entries for {count} tokens")
    return types


def tokens(file: GgufFile) -> Strings:
    """Return the tokens by id; raises FormatError if there are none."""
    found = file.strings(TOKENS)
    if not len(found):
        raise FormatError(f"{file.file.path}: {TOKENS} is empty")
    return found


def stop_ids(file: GgufFile) -> list[int]:
    """Return the ids that end a turn: the file's, and control tokens known for it."""
    ids = [index for role in ("eos", "eot", "eom") if (index := token_id(file, role)) is not None]
    if has_vocabulary(file):
        texts = tokens(file)
        control = np.flatnonzero(token_types(file, len(texts)) == CONTROL).tolist()
        ends = {text: index for index in control if (text := texts.text(index)) in _END_TEXTS}
        if any(marks <= ends.keys() for marks in _MESSAGES_END):
            ends.pop("<|end|>", None)
        ids += ends.values()
    return list(dict.fromkeys(ids))
