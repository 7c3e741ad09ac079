"""GGUF vocabulary -> tokenizer.json: byte-level BPE, SentencePiece. Source: llama-vocab.cpp."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import MadeTokenizer
from clocher_runtime.checkpoints.gguf.file import GgufFile, Strings
from clocher_runtime.models import split_patterns as split

MODEL, TOKENS, TYPES = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_PRE, _MERGES = "tokenizer.ggml.pre", "tokenizer.ggml.merges"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_SCORES = "tokenizer.ggml.scores"
_MAX_SPM_CHARS = 1 << 22
_MAX_TOKEN_CHARS = 512
_MAX_SPM_WORK = 1 << 28
_MERGES_PER_TOKEN = 8
_STRIDE = 1024
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# The spaces after a token of Phi-3 belong to it. llama.cpp knows the model by its name.
_PHI_3, _PHI_3_KEEP = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
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
    return MODEL in file.metadata and file.get(MODEL, str) not in ("no_vocab", "none")


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of a special token, or None."""
    key = f"tokenizer.ggml.{ROLES.get(role, role)}_token_id"
    return file.get(key, int) if key in file.metadata else None


def token_types(file: GgufFile, count: int) -> np.ndarray:
    """Return the type of each token, `NORMAL` to `BYTE`; normal without the entry."""
    if TYPES not in file.metadata:
        return np.full(count, NORMAL)
    types = file.get(TYPES, np.ndarray)
    if len(types) != count:
        raise FormatError(f"{file.file.path}: {TYPES} has {len(types)} entries for {count} tokens")
    return types


def tokens(file: GgufFile) -> Strings:
    """Return the tokens by id; raises FormatError if there are none."""
    found = file.get(TOKENS, Strings)
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


def tokenizer_json(file: GgufFile) -> MadeTokenizer:
    """Return the tokenizer.json of a file's vocabulary; raises UnsupportedModel, FormatError."""
    kind = file.get(MODEL, str)
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{file.file.path}: {MODEL} is {kind!r:.60}; Clocher knows {', '.join(_KINDS)}"
        )
    texts = tokens(file).texts()
    vocab = dict(zip(texts, range(len(texts)), strict=True))
    if len(vocab) != len(texts):
        vocab = _renamed(texts)
    document = {
        "version": "1.0",
        "added_tokens": _added(file, texts),
        **_KINDS[kind](file, texts, vocab),
    }
    return MadeTokenizer(document, partial(_check_merges, file, vocab))


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokenizer_config.json of a file's vocabulary; raises FormatError."""
    texts = tokens(file)
    config: dict[str, Any] = {}
    for role in ("bos", "eos", "unk", "pad"):
        index = token_id(file, role)
        if index is None:
            continue
        if not 0 <= index < len(texts):
            raise FormatError(
                f"{file.file.path}: the {role} token is {index}; expected 0 to {len(texts) - 1}"
            )
        config[f"{role}_token"] = texts.text(index)
    pre = PRE_TYPES.get(file.get(_PRE, str, ""))
    begins = file.get(MODEL, str) == "llama" or (pre is not None and pre.bos)
    config["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, begins)
    config["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    if _TEMPLATE in file.metadata:
        config["chat_template"] = _templates(file)
    return config


def _templates(file: GgufFile) -> str | list[dict[str, str]]:
    default = file.get(_TEMPLATE, str)
    if _TEMPLATES not in file.metadata:
        return default
    names = [name for name in file.get(_TEMPLATES, Strings).texts() if name != "default"]
    named = [{"name": name, "template": file.get(f"{_TEMPLATE}.{name}", str)} for name in names]
    return [{"name": "default", "template": default}, *named]


def _renamed(texts: list[str]) -> dict[str, int]:
    """Give the later of two equal texts a name that no text contains; return all by name."""
    found: dict[str, int] = {}
    for index, text in enumerate(texts):
        texts[index] = text if text not in found else f"<|duplicate {index}|>"
        found[texts[index]] = index
    return found


def _added(file: GgufFile, texts: list[str]) -> list[dict[str, Any]]:
    """Return the tokens that are matched before a text is split."""
    types = token_types(file, len(texts))
    roles = [token_id(file, role) for role in ("bos", "eos")]
    matched = np.isin(types, (CONTROL, USER, UNKNOWN))
    matched[[role for role in roles if role is not None and 0 <= role < len(texts)]] = True
    strips = any(name in file.get("general.name", str, "").lower() for name in _PHI_3)
    return [
        {
            "id": index,
            "content": texts[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and texts[index] not in _PHI_3_KEEP,
            "normalized": False,
            "special": bool(types[index] != USER),
        }
        for index in np.flatnonzero(matched).tolist()
        if texts[index]
    ]


def _check_merges(file: GgufFile, vocab: Mapping[str, int]) -> None:
    """Refuse a merge of a byte-level vocabulary that is not of two tokens, or makes none."""
    merges = file.get(_MERGES, Strings).texts() if _MERGES in file.metadata else ()
    for index, merge in enumerate(merges):
        pair = merge.split(" ")
        if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair))):
            raise FormatError(
                f"{file.file.path}: {_MERGES}[{index}] is {merge!r:.60}; expected two tokens whose "
                "union is a token"
            )


def _byte_level(file: GgufFile, texts: list[str], vocab: dict[str, int]) -> dict[str, Any]:
    if _PRE not in file.metadata:
        raise UnsupportedModel(
            f"{file.file.path}: {_PRE} is missing: the file is older than llama.cpp's knowledge of "
            "how text is split, and would be split wrongly; convert the model again"
        )
    name = file.get(_PRE, str)
    if name not in PRE_TYPES:
        raise UnsupportedModel(
            f"{file.file.path}: {_PRE} is {name!r:.60}; Clocher knows {', '.join(PRE_TYPES)}"
        )
    pre = PRE_TYPES[name]
    merges = file.get(_MERGES, Strings)
    # The space that parts the two is never a character of theirs: bytes are spelled otherwise.
    parts = " ".join(merges.texts()).split(" ") if len(merges) else []
    if len(parts) != 2 * len(merges):
        _check_merges(file, vocab)
    splits = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
        for text in pre.splits
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if pre.composed else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.whole,
            "vocab": vocab,
            "merges": list(zip(parts[::2], parts[1::2], strict=True)),
        },
    }


def _sentencepiece(file: GgufFile, texts: list[str], vocab: dict[str, int]) -> dict[str, Any]:
    scores = file.get(_SCORES, np.ndarray)
    if len(scores) != len(texts) or not np.isfinite(scores).all():
        raise FormatError(
            f"{file.file.path}: {_SCORES} has {len(scores)} numbers for {len(texts)} tokens; "
            "expected a finite one for each"
        )
    types = token_types(file, len(texts))
    unknown = token_id(file, "unk")
    if unknown is None and (marked := np.flatnonzero(types == UNKNOWN)).size:
        unknown = int(marked[0])
    named = texts[unknown] if unknown is not None and 0 <= unknown < len(texts) else None
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": named,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges(file, texts, scores.astype(np.float64), types),
        },
    }


def _merges(
    file: GgufFile, texts: list[str], scores: np.ndarray, types: np.ndarray
) -> list[tuple[str, str]]:
    """Return the merges, best score first."""
    lengths = np.array([len(text) for text in texts], np.int64)
    for what, size, limit in (
        ("characters in all", int(lengths.sum()), _MAX_SPM_CHARS),
        ("characters in the longest", int(lengths.max()), _MAX_TOKEN_CHARS),
        ("squares of their lengths", int((lengths**2).sum()), _MAX_SPM_WORK),
    ):
        if size > limit:
            raise FormatError(
                f"{file.file.path}: {len(texts)} tokens with {size} {what}; the limit is {limit}"
            )
    mergeable = (types != CONTROL) & (types != UNKNOWN) & (types != USER)
    # Text -> the same text, so that the parts of all merges are no more strings than there are.
    parts = {text: text for text, use in zip(texts, mergeable.tolist(), strict=True) if use}
    splits = array("q")
    for index, text in enumerate(texts):
        if text in parts:
            splits.extend(
                index * _STRIDE + at
                for at in range(1, len(text))
                if text[:at] in parts and text[at:] in parts
            )
        if len(splits) > _MERGES_PER_TOKEN * len(texts):
            raise FormatError(
                f"{file.file.path}: its {len(texts)} tokens are made of each other in more than "
                f"{_MERGES_PER_TOKEN} ways each; those of models are in 2 or 3"
            )
    whole, cuts = np.divmod(np.array(splits, np.int64), _STRIDE)
    order = np.lexsort((cuts - lengths[whole], -cuts, -scores[whole]))
    return [
        (parts[texts[one][:cut]], parts[texts[one][cut:]])
        for one, cut in zip(whole[order].tolist(), cuts[order].tolist(), strict=True)
    ]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
