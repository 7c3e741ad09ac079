"""What a tokenizer.json may hold, checked before the library builds anything of it.

A tokenizer is plain if all its steps are known, take time that grows with the text and make no text
much longer. That is so for the models that Clocher runs. Any other works too, in a process that can
be ended (see `text_process`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.models.split_patterns import KNOWN

MAX_FILE_BYTES = 64 << 20
MAX_VOCABULARY = 1 << 20
MAX_MERGES = 1 << 22
MAX_TOKEN_CHARS = 1 << 12
MAX_ADDED, MAX_ADDED_CHARS = 1 << 16, 1 << 20

_MAX_STEPS, _MAX_LITERAL, _MAX_PIECES, _MAX_PIECE_IDS = 16, 16, 64, 16
_SMALL_FILE = 1 << 20
_JSON_GROWTH = 8

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found in a tokenizer.json.

    Attributes:
        text: the file.
        plain: nothing in it can take long or much memory for a short text.
        longest: characters of its longest token; no token stands for more of a text.
    """

    text: str
    plain: bool
    longest: int


def inspect(data: bytes, where: str) -> Inspection:
    """Check a tokenizer.json.

    Args:
        data: its content.
        where: its name, for messages.

    Raises:
        FormatError: it is no JSON object, or holds more than the limits.
    """
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(
            f"{where}: {len(data)} bytes; the limit for this file is {MAX_FILE_BYTES}"
        )
    document = _parse(data, where)
    model, added = document.get("model"), document.get("added_tokens")
    model = model if isinstance(model, dict) else {}
    tokens = _tokens(model.get("vocab"))
    extra = [t.get("content") for t in _list(added) if isinstance(t, dict)]
    texts = [text for text in extra if isinstance(text, str)]
    longest = max(max(map(len, tokens), default=1), max(map(len, texts), default=1))
    for what, found, limit in (
        ("tokens", len(tokens), MAX_VOCABULARY),
        ("merges", len(_list(model.get("merges"))), MAX_MERGES),
        ("added tokens", len(_list(added)), MAX_ADDED),
        ("characters of added tokens", sum(map(len, texts)), MAX_ADDED_CHARS),
        ("characters in a token", longest, MAX_TOKEN_CHARS),
    ):
        if found > limit:
            raise FormatError(f"{where}: {found} {what}; the limit is {limit}")
    return Inspection(data.decode("utf-8"), _is_plain(document, model), longest)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        # Values of a small file fit in a few times its size; of a large one they are counted first.
        if len(data) > _SMALL_FILE:
            document = parse_json(data, where, rest=_JSON_GROWTH * len(data))
        else:
            document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError, FormatError) as error:
        raise FormatError(f"{where}: not a tokenizer that can be loaded: {error!s:.200}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{where}: not a tokenizer that can be loaded: expected a JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is there twice: the library might follow the other one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tokens(vocab: object) -> list[str]:
    """Return the texts of a vocabulary: an object, or pairs of text and score."""
    if isinstance(vocab, dict):
        return list(vocab)
    firsts = [entry[0] for entry in _list(vocab) if isinstance(entry, list) and entry]
    return [text for text in firsts if isinstance(text, str)]


def _is_plain(document: Spec, model: Spec) -> bool:
    return (
        _is_plain_model(model)
        and all(_is_text(entry, "content") for entry in _list(document.get("added_tokens")))
        and _are_plain(document.get("normalizer"), "normalizers", _NORMALIZERS)
        and _are_plain(document.get("pre_tokenizer"), "pretokenizers", _PRE_TOKENIZERS)
        and _are_plain(document.get("post_processor"), "processors", _POST_PROCESSORS)
        and _are_plain(document.get("decoder"), "decoders", _DECODERS)
        and document.get("truncation") is None
        and document.get("padding") is None
    )


def _is_plain_model(model: Spec) -> bool:
    if model.get("type") not in ("BPE", "WordLevel") or not isinstance(model.get("vocab"), dict):
        return False
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    unknown = model.get("unk_token")
    known = unknown is None or (isinstance(unknown, str) and len(unknown) <= MAX_TOKEN_CHARS)
    return (
        known
        and all(affix in (None, "") for affix in affixes)
        and not model.get("dropout")
        and _are_in(model["vocab"], _list(model.get("merges")))
    )


def _are_in(vocab: Spec, merges: list[Any]) -> bool:
    """Whether what each merge makes is a token: the library panics where it is not."""
    try:
        if merges and isinstance(merges[0], str):
            return all(merge.replace(" ", "", 1) in vocab for merge in merges)
        return all(map(vocab.__contains__, map("".join, merges)))
    except (TypeError, AttributeError):
        return False


def _are_plain(step: object, within: str, kinds: Mapping[str, Callable[[Spec], bool]]) -> bool:
    """Whether a step, or all steps of a sequence of them, are of a kind and pass its check."""
    if step is None:
        return True
    steps: list[Spec] = []
    pending = [step]
    while pending:
        if len(steps) + len(pending) > _MAX_STEPS:
            return False
        one = pending.pop()
        if not isinstance(one, dict):
            return False
        if one.get("type") == "Sequence":
            pending += _list(one.get(within))
            steps.append({"type": "Sequence"})
        else:
            steps.append(one)
    # Two of them would spell bytes of spelled bytes, four times as many.
    if sum(one.get("type") == "ByteLevel" for one in steps) > 1:
        return False
    checks = {"Sequence": _always, **kinds}
    return all(checks.get(str(one.get("type")), _never)(one) for one in steps)


def _always(step: Spec) -> bool:
    return True


def _never(step: Spec) -> bool:
    return False


def _is_text(step: Any, key: str) -> bool:
    text = step.get(key) if isinstance(step, dict) else None
    return isinstance(text, str) and bool(text)


def _literal(step: Spec, key: str) -> str:
    """Return a short text, "" where it is no such text."""
    text = step.get(key)
    return text if isinstance(text, str) and len(text) <= _MAX_LITERAL else ""


def _pattern(step: Spec) -> Spec:
    pattern = step.get("pattern")
    return pattern if isinstance(pattern, dict) and len(pattern) == 1 else {}


def _prepends(step: Spec) -> bool:
    return bool(_literal(step, "prepend"))


def _replaces(step: Spec) -> bool:
    """Whether one text is replaced by another that is not longer."""
    found, content = _literal(_pattern(step), "String"), step.get("content")
    return bool(found) and isinstance(content, str) and len(content) <= len(found)


def _splits(step: Spec) -> bool:
    pattern = _pattern(step)
    return bool(_literal(pattern, "String")) or str(pattern.get("Regex")) in KNOWN


def _strips(step: Spec) -> bool:
    """Whether it takes a few characters from the start: from the end of "" the library panics."""
    start, stop = step.get("start"), step.get("stop")
    return type(start) is int and 0 <= start <= _MAX_STEPS and type(stop) is int and stop == 0


def _surrounds(step: Spec) -> bool:
    """Whether a template adds a few tokens that it explains."""
    special = step.get("special_tokens")
    if not isinstance(special, dict) or len(special) > _MAX_PIECES:
        return False
    for token in special.values():
        ids = token.get("ids") if isinstance(token, dict) else None
        spelled = token.get("tokens") if isinstance(token, dict) else None
        if not isinstance(ids, list) or not 0 < len(ids) <= _MAX_PIECE_IDS:
            return False
        if not isinstance(spelled, list) or len(spelled) != len(ids):
            return False
    # A single text is "A"; the library looks for "B" in vain and panics.
    for name, texts in (("single", "A"), ("pair", "AB")):
        pieces = step.get(name)
        if not isinstance(pieces, list) or not 0 < len(pieces) <= _MAX_PIECES:
            return False
        if not all(_is_piece(piece, special, texts) for piece in pieces):
            return False
    return True


def _is_piece(piece: object, special: Spec, texts: str) -> bool:
    if not isinstance(piece, dict) or len(piece) != 1:
        return False
    ((kind, what),) = piece.items()
    name = what.get("id") if isinstance(what, dict) else None
    if not isinstance(name, str) or not name:
        return False
    return (kind == "Sequence" and name in texts) or (kind == "SpecialToken" and name in special)


_NORMALIZERS: dict[str, Callable[[Spec], bool]] = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"), _always),
    "Prepend": _prepends,
    "Replace": _replaces,
}
_PRE_TOKENIZERS: dict[str, Callable[[Spec], bool]] = {
    **dict.fromkeys(("ByteLevel", "Digits", "Metaspace", "Punctuation", "Whitespace"), _always),
    **dict.fromkeys(("BertPreTokenizer", "WhitespaceSplit", "UnicodeScripts"), _always),
    "Split": _splits,
}
_POST_PROCESSORS: dict[str, Callable[[Spec], bool]] = {
    "ByteLevel": _always,
    "TemplateProcessing": _surrounds,
}
_DECODERS: dict[str, Callable[[Spec], bool]] = {
    **dict.fromkeys(("ByteLevel", "ByteFallback", "Fuse", "Metaspace"), _always),
    "Replace": _replaces,
    "Strip": _strips,
}
