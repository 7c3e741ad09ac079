"""From the vocabulary of a GGUF file to the JSON of the `tokenizers` library.

Two kinds are known: byte-level BPE ("gpt2"), whose text is split as `tokenizer.ggml.pre` says, and
SentencePiece ("llama"), whose merges follow from the scores of its tokens. Which ids have a role
is said here too.

Source: llama.cpp's llama-vocab.cpp for what each kind and pre-type does; the expressions are those
of the models' own tokenizer.json.
"""

import json
from array import array
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.gguf.file import GgufFile, Strings
from clocher_runtime.models.split_patterns import DEFAULT, GPT2, GPT4O, LLAMA3, QWEN2

MODEL, TOKENS, TYPES = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")

# What ends a turn, by name, as in llama.cpp: a file has one id for it, chat models several.
_END_TEXTS = {
    "<|call|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
}


def has_vocabulary(file: GgufFile) -> bool:
    """Return whether the file has one: files for benchmarks may do without."""
    return MODEL in file.keys and file.text(MODEL) not in ("no_vocab", "none")


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of a special token, None where the file does not say it."""
    key = f"tokenizer.ggml.{ROLES.get(role, role)}_token_id"
    if file.value(key) is None:
        return None
    return file.integer(key)


def token_types(file: GgufFile, count: int) -> np.ndarray:
    """Return what each token is, `NORMAL` to `BYTE`; without the entry all are normal.

    Raises:
        FormatError: the entry has another length.
    """
    if TYPES not in file.keys:
        return np.full(count, NORMAL)
    types = file.numbers(TYPES)
    if len(types) != count:
        raise FormatError(f"{file.file.path}: {TYPES} has {len(types)} entries for {count} tokens")
    return types


def tokens(file: GgufFile) -> Strings:
    """Return the tokens, in the order of their ids.

    Raises:
        FormatError: there are none.
    """
    found = file.strings(TOKENS)
    if not len(found):
        raise FormatError(f"{file.file.path}: {TOKENS} is empty")
    return found


def stop_ids(file: GgufFile) -> list[int]:
    """Return the ids that end a turn: those that the file names, and control tokens known for it.

    Raises:
        FormatError: the vocabulary is damaged.
    """
    found = [token_id(file, role) for role in _ENDS]
    ids = [index for index in found if index is not None]
    if has_vocabulary(file):
        texts = tokens(file)
        for index in np.flatnonzero(token_types(file, len(texts)) == CONTROL).tolist():
            if texts.text(index) in _END_TEXTS:
                ids.append(index)
    return list(dict.fromkeys(ids))


_PRE, _MERGES, _SCORES = "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_MAX_SPM_CHARS = 1 << 22
_MAX_TOKEN_CHARS = 512
_MAX_SPM_WORK = 1 << 28
_MERGES_PER_TOKEN = 8
_STRIDE = 1024

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    "gpt-2": (GPT2,),
    "llama-bpe": (LLAMA3,),
    "llama-v3": (LLAMA3,),
    "llama3": (LLAMA3,),
    "qwen2": (QWEN2,),
    "deepseek-r1-qwen": (QWEN2,),
    "gpt-4o": (GPT4O,),
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
        _merges(file, texts, scores.astype(np.float64), types),
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
    file: GgufFile, texts: list[str], scores: np.ndarray, types: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, that of the best score first.

    As in transformers' generate_merges: of one token's pairs, the one with the longer left part
    comes first.
    """
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
