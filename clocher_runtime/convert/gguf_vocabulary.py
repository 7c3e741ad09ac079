"""A tokenizer.json as the metadata of a GGUF file, for tokenizers that GGUF can say exactly.

Byte-level BPE becomes "gpt2" with the pre-type of the same expressions; BPE over pieces with bytes
to fall back on becomes "llama", whose merges a reader makes of scores: that of a token is minus the
place of the merge that makes it.

Source: llama.cpp's convert_hf_to_gguf.py and llama-vocab.cpp.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_runtime.checkpoints.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TYPES,
    UNKNOWN,
    UNUSED,
    USER,
)

Field = str | bool | int | float | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]

_PREFIX = "tokenizer.ggml."
_ROLES = {"bos": "bos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")
_UNMERGED = -1e9


def vocabulary_fields(
    tokenizer: bytes,
    config: Mapping[str, Any],
    ends: Sequence[int],
    size: int,
    begins: bool,
    pre: str | None = None,
) -> dict[str, Field]:
    """Return the metadata of a vocabulary.

    Args:
        tokenizer: content of tokenizer.json.
        config: content of tokenizer_config.json.
        ends: ids that end a turn, the most important first.
        size: rows of the embedding.
        begins: whether a text begins with BOS.
        pre: what to call how text is split, whatever tokenizer.json says; byte-level BPE.

    Raises:
        UnsupportedModel: GGUF has no such tokenizer.
        FormatError: the tokenizer contradicts itself or the model.
        UsageError: the pre-type is not known, or has no place.
    """
    try:
        document = json.loads(tokenizer)
        return _fields(document, config, ends, size, begins, pre)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(f"tokenizer.json: {type(error).__name__} {error}") from None


def _fields(
    document: Mapping[str, Any],
    config: Mapping[str, Any],
    ends: Sequence[int],
    size: int,
    begins: bool,
    pre: str | None,
) -> dict[str, Field]:
    model = document["model"]
    if model["type"] != "BPE":
        raise UnsupportedModel(
            f"a {model['type']} tokenizer as GGUF; this writer knows BPE; --to iebin keeps it"
        )
    steps = _steps(document.get("pre_tokenizer"))
    texts, types = _tokens(document, size)
    ids = {text: index for index, text in enumerate(texts)}
    common: dict[str, Field] = {f"{_PREFIX}tokens": texts, f"{_PREFIX}token_type": types}
    for key, index in zip(_ENDS, ends, strict=False):
        common[f"{_PREFIX}{key}_token_id"] = index
    for key, name in _ROLES.items():
        text = config.get(f"{key}_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        if isinstance(text, str) and text in ids:
            common[f"{_PREFIX}{name}_token_id"] = ids[text]
    common[f"{_PREFIX}add_bos_token"] = begins
    common |= _templates(config.get("chat_template"))
    if any(step["type"] == "ByteLevel" for step in steps):
        name = _pre_type(document, steps) if pre is None else pre
        if name not in PRE_TYPES:
            raise UsageError(f"--pre is {name!r}; known: {', '.join(PRE_TYPES)}")
        merges = tuple(" ".join(_pair(merge)) for merge in model["merges"])
        head: dict[str, Field] = {f"{_PREFIX}model": "gpt2", f"{_PREFIX}pre": name}
        return {**head, **common, f"{_PREFIX}merges": merges}
    if pre is not None or not model.get("byte_fallback"):
        if pre is not None:
            raise UsageError("--pre is for byte-level tokenizers, which this is not")
        raise UnsupportedModel("a BPE tokenizer that knows neither all bytes nor how to spell them")
    return {
        f"{_PREFIX}model": "llama",
        f"{_PREFIX}pre": "default",
        **common,
        f"{_PREFIX}scores": _scores(model, texts, types),
        f"{_PREFIX}add_space_prefix": _begins_with_space(document, steps),
    }


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return list(step["pretokenizers"]) if step["type"] == "Sequence" else [step]


def _tokens(document: Mapping[str, Any], size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return how each token is spelled and what it is; ids without one are unused."""
    model = document["model"]
    found = {index: (text, NORMAL) for text, index in model["vocab"].items()}
    if model.get("byte_fallback"):
        spelled = {f"<0x{byte:02X}>" for byte in range(256)}
        found |= {i: (text, BYTE) for i, (text, _) in found.items() if text in spelled}
    for token in document.get("added_tokens", []):
        found[token["id"]] = (token["content"], CONTROL if token["special"] else USER)
    unknown = model.get("unk_token")
    found |= {i: (text, UNKNOWN) for i, (text, _) in found.items() if text == unknown}
    if max(found, default=0) >= size or min(found, default=0) < 0:
        raise FormatError(
            f"tokenizer.json: id {max(found)}, the model has {size} rows of embeddings"
        )
    rows = [found.get(index, (f"[PAD{index}]", UNUSED)) for index in range(size)]
    return tuple(text for text, _ in rows), tuple(kind for _, kind in rows)


def _pair(merge: str | Sequence[str]) -> Sequence[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _pre_type(document: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the pre-type whose expressions are those of a tokenizer.json, to the letter."""
    splits = []
    for step in steps:
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            splits.append(step["pattern"].get("Regex"))
        elif step["type"] == "ByteLevel" and step.get("use_regex", True):
            splits.extend(PRE_TYPES["gpt-2"].splits)
        elif step["type"] != "ByteLevel":
            splits.append(None)
    normalizer = document.get("normalizer")
    composed = normalizer == {"type": "NFC"}
    whole = bool(document["model"].get("ignore_merges"))
    for name, known in PRE_TYPES.items():
        same = (tuple(splits), whole, composed) == (known.splits, known.whole, known.composed)
        if same and (composed or normalizer is None):
            return name
    raise UnsupportedModel(
        "GGUF has no name for how this model's text is split before it is tokenised; --pre NAME "
        f"takes the nearest, and some texts get other tokens: {', '.join(PRE_TYPES)}"
    )


def _scores(
    model: Mapping[str, Any], texts: Sequence[str], types: Sequence[int]
) -> tuple[float, ...]:
    places: dict[str, int] = {}
    for place, merge in enumerate(model["merges"]):
        places.setdefault("".join(_pair(merge)), place)
    return tuple(
        -float(places[text]) if text in places else 0.0 if kind != NORMAL else _UNMERGED
        for text, kind in zip(texts, types, strict=True)
    )


def _begins_with_space(document: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    normalizer = document.get("normalizer") or {"type": "Sequence", "normalizers": []}
    before = normalizer.get("normalizers", [normalizer])
    if any(step["type"] == "Prepend" for step in before):
        return True
    spaces = [step for step in steps if step["type"] == "Metaspace"]
    return any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _templates(template: object) -> dict[str, Field]:
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    if not isinstance(template, list):
        return {}
    named = {item["name"]: item["template"] for item in template}
    default = named.pop("default", None)
    if default is None:
        return {}
    found: dict[str, Field] = {"tokenizer.chat_template": default}
    if named:
        found["tokenizer.chat_templates"] = tuple(named)
    return found | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
