"""From the vocabulary of a GGUF file to the JSON of the `tokenizers` library.

Two kinds are known: byte-level BPE ("gpt2"), whose text is split as `tokenizer.ggml.pre` says, and
SentencePiece ("llama"), whose merges follow from the scores of its tokens.

Source: llama.cpp's llama-vocab.cpp for what each kind and pre-type does; the expressions are those
of the models' own tokenizer.json.
"""

import json
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.weights.gguf.file import GgufFile
from clocher_runtime.weights.gguf.tokens import (
    CONTROL,
    MODEL,
    UNKNOWN,
    USER,
    token_id,
    token_types,
    tokens,
)

_PRE, _MERGES, _SCORES = "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_MAX_SPM_CHARS = 1 << 22
_MAX_TOKEN_CHARS = 512

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "gpt-4o": (_GPT4O,),
}
"""Pre-type -> expressions that split a text, one after the other."""
_WHOLE_TOKENS = ("llama-bpe", "llama-v3", "llama3")  # a token's text is looked up before merging
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # their tokenizer.json composes characters (NFC)

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def tokenizer_json(file: GgufFile) -> bytes:
    """Return the tokenizer.json of a file's vocabulary.

    Raises:
        UnsupportedModel: the kind of vocabulary or its pre-type is not known.
        FormatError: the vocabulary is damaged.
    """
    kind = file.text(MODEL)
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"{file.file.path}: {MODEL} is {kind!r:.60}; Clocher knows {', '.join(_KINDS)}"
        )
    texts = _texts(file)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(file, texts),
        "post_processor": None,
        **_KINDS[kind](file, texts),
    }
    return json.dumps(document, ensure_ascii=False).encode()


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokenizer_config.json of a file's vocabulary.

    Raises:
        FormatError: an entry is of the wrong type, or names a token that there is not.
    """
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
    spm = file.text(MODEL) == "llama"
    whole = not spm and file.text(_PRE, "") in _WHOLE_TOKENS
    config["add_bos_token"] = file.flag("tokenizer.ggml.add_bos_token", spm or whole)
    config["add_eos_token"] = file.flag("tokenizer.ggml.add_eos_token", False)
    if "tokenizer.chat_template" in file.keys:
        config["chat_template"] = file.text("tokenizer.chat_template")
    return config


def _texts(file: GgufFile) -> list[str]:
    """Return the tokens; the later of two equal ones gets a name that no text has."""
    texts = tokens(file).texts()
    if len(set(texts)) == len(texts):
        return texts
    seen: set[str] = set()
    for index, text in enumerate(texts):
        texts[index] = text if text not in seen else f"<|duplicate {index}|>"
        seen.add(texts[index])
    return texts


def _added(file: GgufFile, texts: list[str]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split: control and user-defined."""
    types = token_types(file, len(texts))
    roles = {token_id(file, role) for role in ("bos", "eos")}
    return [
        {
            "id": index,
            "content": texts[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": bool(types[index] != USER),
        }
        for index in range(len(texts))
        if texts[index] and (types[index] in (CONTROL, USER) or index in roles)
    ]


def _byte_level(file: GgufFile, texts: list[str]) -> dict[str, Any]:
    if _PRE not in file.keys:
        raise UnsupportedModel(
            f"{file.file.path}: {_PRE} is missing: the file is older than llama.cpp's knowledge of "
            "how text is split, and would be split wrongly; convert the model anew"
        )
    pre = file.text(_PRE)
    if pre not in _SPLITS:
        raise UnsupportedModel(
            f"{file.file.path}: {_PRE} is {pre!r:.60}; Clocher knows {', '.join(_SPLITS)}"
        )
    vocab = {text: index for index, text in enumerate(texts)}
    merges = []
    for index, merge in enumerate(file.strings(_MERGES).texts()):
        # The space that parts the two is never a character of theirs: bytes are spelled otherwise.
        pair = merge.split(" ")
        if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair))):
            raise FormatError(
                f"{file.file.path}: {_MERGES}[{index}] is {merge!r:.60}; expected two tokens whose "
                "union is a token"
            )
        merges.append(pair)
    splits = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
        for text in _SPLITS[pre]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre in _WHOLE_TOKENS),
    }


def _sentencepiece(file: GgufFile, texts: list[str]) -> dict[str, Any]:
    scores = file.numbers(_SCORES)
    if len(scores) != len(texts) or not np.isfinite(scores).all():
        raise FormatError(
            f"{file.file.path}: {_SCORES} has {len(scores)} numbers for {len(texts)} tokens; "
            "expected a finite one for each"
        )
    types = token_types(file, len(texts))
    unknown = token_id(file, "unk")
    if unknown is None and (marked := np.flatnonzero(types == UNKNOWN)).size:
        unknown = int(marked[0])
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    model = _bpe(
        {text: index for index, text in enumerate(texts)},
        _merges(file, texts, scores.tolist(), types),
        unk_token=texts[unknown] if unknown is not None and 0 <= unknown < len(texts) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": model,
    }


def _merges(
    file: GgufFile, texts: list[str], scores: list[float], types: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, that of the best score first.

    As in transformers' generate_merges: of one token's pairs, the one with the longer left part
    comes first.
    """
    total, longest = sum(map(len, texts)), max(map(len, texts))
    if total > _MAX_SPM_CHARS or longest > _MAX_TOKEN_CHARS:
        raise FormatError(
            f"{file.file.path}: tokens of {total} characters in all, the longest of {longest}; the "
            f"limits are {_MAX_SPM_CHARS} and {_MAX_TOKEN_CHARS}"
        )
    mergeable = (types != CONTROL) & (types != UNKNOWN) & (types != USER)
    parts = {text for text, use in zip(texts, mergeable.tolist(), strict=True) if use}
    found = [
        (score, at, text)
        for text, score in zip(texts, scores, strict=True)
        if text in parts
        for at in range(1, len(text))
        if text[:at] in parts and text[at:] in parts
    ]
    found.sort(key=lambda pair: (-pair[0], -pair[1], pair[1] - len(pair[2])))
    return [(text[:at], text[at:]) for _, at, text in found]


def _bpe(vocab: dict[str, int], merges: list[Any], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocab,
        "merges": merges,
    }


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
