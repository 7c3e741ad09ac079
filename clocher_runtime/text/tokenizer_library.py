"""The `tokenizers` library: its files are checked first, its errors and panics become `Refused`.

Plain: all steps are known, take linear time and do not lengthen texts much. Others run apart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.checkpoint import MadeTokenizer
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.models.split_patterns import KNOWN
from clocher_runtime.text import Refused

MAX_FILE_BYTES = 64 << 20
MAX_VOCABULARY = 1 << 20
MAX_MERGES = 1 << 22
MAX_TOKEN_CHARS = 1 << 12
MAX_ADDED, MAX_ADDED_CHARS = 1 << 16, 1 << 20

_MAX_STEPS, _MAX_LITERAL, _MAX_PIECES, _MAX_PIECE_IDS = 16, 16, 64, 16
_JSON_GROWTH = 8

BASE_SECONDS, BASE_BYTES = 5.0, 512 << 20
LOADED_BYTES_PER_SECOND, BYTES_PER_LOADED_BYTE = 1 << 20, 24
CHARS_PER_SECOND, BYTES_PER_CHAR = 1 << 16, 256
_MESSAGE_CHARS = 200

Spec = Mapping[str, Any]
Check = Callable[[Spec], bool]


class Inspection(NamedTuple):
    """A tokenizer.json and its longest token's characters; `plain`: short texts are cheap."""

    source: bytes | MadeTokenizer
    where: str  # for messages
    plain: bool
    longest: int
    document: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The content of tokenizer.json."""
        return bytes(self.source).decode("utf-8")

    def tokens(self) -> dict[int, str]:
        """Return id -> token, with added tokens."""
        model = self.document.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        found: dict[int, str] = {}
        if isinstance(vocab, dict):
            found = {i: text for text, i in vocab.items() if isinstance(i, int)}
        else:  # pairs of text and score
            pairs = (entry if isinstance(entry, list) else [] for entry in _list(vocab))
            found = {i: str(pair[0]) for i, pair in enumerate(pairs) if pair}
        for each in _list(self.document.get("added_tokens")):
            if isinstance(each, dict) and isinstance(each.get("id"), int):
                found[each["id"]] = str(each.get("content"))
        return found

    def load(self) -> "LibraryTokenizer | TokenizerApart":
        """Return the tokenizer; raises Refused."""
        if not self.plain:
            return TokenizerApart(self.text)
        return LibraryTokenizer(
            self.document if isinstance(self.source, MadeTokenizer) else self.text
        )


def inspect(
    data: Path | bytes | MadeTokenizer, where: str = "the tokenizer of the metadata"
) -> Inspection:
    """Check a tokenizer.json; raises FormatError if not a JSON object, or above the limits."""
    if isinstance(data, Path):
        where, data = str(data), read_bytes(data, MAX_FILE_BYTES)
    document = _parse(data, where) if isinstance(data, bytes) else data.document
    model, added = document.get("model"), _list(document.get("added_tokens"))
    model = model if isinstance(model, dict) else {}
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):  # pairs of text and score
        firsts = [entry[0] for entry in _list(vocab) if isinstance(entry, list) and entry]
        vocab = [text for text in firsts if isinstance(text, str)]
    extra = [t.get("content") for t in added if isinstance(t, dict)]
    texts = [text for text in extra if isinstance(text, str)]
    longest = max(map(len, (*vocab, *texts)), default=1) or 1
    for what, found, limit in (
        ("tokens", len(vocab), MAX_VOCABULARY),
        ("merges", len(_list(model.get("merges"))), MAX_MERGES),
        ("added tokens", len(added), MAX_ADDED),
        ("characters of added tokens", sum(map(len, texts)), MAX_ADDED_CHARS),
        ("characters in a token", longest, MAX_TOKEN_CHARS),
    ):
        if found > limit:
            raise FormatError(f"{where}: {found} {what}; the limit is {limit}")
    plain = _is_plain(document, model, isinstance(data, MadeTokenizer))
    return Inspection(data, where, plain, longest, document)


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_FILE_BYTES:
        raise FormatError(
            f"{where}: {len(data)} bytes; the limit for this file is {MAX_FILE_BYTES}"
        )
    # Of a repeated key, which is refused, the library might use the other one.
    what = f"{where}: not a tokenizer that can be loaded"
    return parse_object(data, what, rest=_JSON_GROWTH * len(data))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_plain(document: Spec, model: Spec, made: bool) -> bool:
    added = _list(document.get("added_tokens"))
    return (
        _is_plain_model(model)
        and (made or _are_in(model["vocab"], _list(model.get("merges"))))
        and all(isinstance(each, dict) and _is_text(each.get("content")) for each in added)
        and all(_are_plain(document.get(step), *kinds) for step, kinds in _STEPS.items())
        and document.get("truncation") is None
        and document.get("padding") is None
    )


def _is_plain_model(model: Spec) -> bool:
    vocab, unknown = model.get("vocab"), model.get("unk_token")
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    return (
        model.get("type") in ("BPE", "WordLevel")
        and isinstance(vocab, dict)
        and (unknown is None or (isinstance(unknown, str) and len(unknown) <= MAX_TOKEN_CHARS))
        and all(affix in (None, "") for affix in affixes)
        and not model.get("dropout")
    )


def _are_in(vocab: Spec, merges: list[Any]) -> bool:
    """Whether each merge makes a token: the library panics otherwise."""
    try:
        if merges and isinstance(merges[0], str):
            return all(merge.replace(" ", "", 1) in vocab for merge in merges)
        return all(map(vocab.__contains__, map("".join, merges)))
    except (TypeError, AttributeError):
        return False


def _are_plain(step: object, within: str, kinds: Mapping[str, Check]) -> bool:
    steps: list[Spec] = []
    pending = [] if step is None else [step]
    while pending:
        if len(steps) + len(pending) > _MAX_STEPS:
            return False
        one = pending.pop()
        if not isinstance(one, dict):
            return False
        steps.append(one)
        if one.get("type") == "Sequence":
            pending += _list(one.get(within))
    # Two would spell the bytes of spelled bytes, four times as many.
    if sum(one.get("type") == "ByteLevel" for one in steps) > 1:
        return False
    known = {**_any_of("Sequence"), **kinds}
    checks = ((known.get(str(one.get("type"))), one) for one in steps)
    return all(check is not None and check(one) for check, one in checks)


def _is_text(text: object, most: int | None = None) -> bool:
    return isinstance(text, str) and 0 < len(text) <= (most or len(text))


def _pattern(step: Spec, kind: str) -> Any:
    pattern = step.get("pattern")
    return pattern.get(kind) if isinstance(pattern, dict) and len(pattern) == 1 else None


def _replaces(step: Spec) -> bool:
    found, content = _pattern(step, "String"), step.get("content")
    short = _is_text(found, _MAX_LITERAL)
    return short and isinstance(content, str) and len(content) <= len(found)


def _splits(step: Spec) -> bool:
    literal = _is_text(_pattern(step, "String"), _MAX_LITERAL)
    return literal or str(_pattern(step, "Regex")) in KNOWN


def _strips(step: Spec) -> bool:
    """Whether it strips only from the start: at the end of "" the library panics."""
    start, stop = step.get("start"), step.get("stop")
    return type(start) is int and 0 <= start <= _MAX_STEPS and type(stop) is int and stop == 0


def _surrounds(step: Spec) -> bool:
    special = step.get("special_tokens")
    if not isinstance(special, dict) or len(special) > _MAX_PIECES:
        return False
    for token in special.values():
        ids, spelled = (
            _list(token.get(name)) if isinstance(token, dict) else [] for name in ("ids", "tokens")
        )
        if not 0 < len(ids) <= _MAX_PIECE_IDS or len(spelled) != len(ids):
            return False
    # A single template has only $A: with $B the library panics.
    for name, texts in (("single", "A"), ("pair", "AB")):
        pieces = _list(step.get(name))
        if not 0 < len(pieces) <= _MAX_PIECES:
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


def _any_of(names: str) -> dict[str, Check]:
    return dict.fromkeys(names.split(), lambda step: True)


_STEPS: Mapping[str, tuple[str, Mapping[str, Check]]] = {
    "normalizer": (
        "normalizers",
        {
            **_any_of("NFC NFD NFKC NFKD Lowercase Strip StripAccents"),
            "Prepend": lambda step: _is_text(step.get("prepend"), _MAX_LITERAL),
            "Replace": _replaces,
        },
    ),
    "pre_tokenizer": (
        "pretokenizers",
        {
            **_any_of("ByteLevel Digits Metaspace Punctuation Whitespace"),
            **_any_of("BertPreTokenizer WhitespaceSplit UnicodeScripts"),
            "Split": _splits,
        },
    ),
    "post_processor": (
        "processors",
        {**_any_of("ByteLevel"), "TemplateProcessing": _surrounds},
    ),
    "decoder": (
        "decoders",
        {
            **_any_of("ByteLevel ByteFallback Fuse Metaspace"),
            "Replace": _replaces,
            "Strip": _strips,
        },
    ),
}
"""Step of a tokenizer -> key of a sequence's steps, and the check of each known kind."""


def tried(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a library and return its result; raises Refused for its errors, and panics of Rust."""
    try:
        return work(*arguments, **options)
    except BaseException as error:
        # A Rust panic is not an Exception, and its class cannot be imported.
        ours = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, MemoryError) or not ours:
            raise
        text = str(error)
        short = text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."
        raise Refused("refused", short) from None


def _of_parts(made: Spec) -> Any:
    """Return what `from_str` makes of a document of BPE with merges in pairs, in half the time."""
    model = {key: value for key, value in made["model"].items() if value is not None}
    empty = {**made, "added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    whole = tokenizers.Tokenizer.from_str(json.dumps(empty))
    del model["type"]
    whole.model = tokenizers.models.BPE(**model)
    added = [{key: token[key] for key in token if key != "id"} for token in made["added_tokens"]]
    whole.add_tokens([tokenizers.AddedToken(**token) for token in added])
    return whole


class LibraryTokenizer:
    """A tokenizer of the library, from a tokenizer.json or the document of one that was made.

    Raises Refused.
    """

    def __init__(self, source: str | Spec) -> None:
        make: Any = tokenizers.Tokenizer.from_str if isinstance(source, str) else _of_parts
        self._tokenizer = tried(make, source)
        # The file may ask for truncation and padding, for training; prompts have neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text, with those that the file adds if `special`."""
        try:
            text.encode()
        except UnicodeError:
            raise Refused("unicode", "not valid Unicode text") from None
        ids: list[int] = tried(self._tokenizer.encode, text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids; raises Refused if longer than tokens can be."""
        text: str = tried(self._tokenizer.decode, list(ids), skip_special_tokens=skip_special)
        if len(text) > MAX_TOKEN_CHARS * len(ids):
            raise Refused("refused", f"{len(ids)} tokens with a text of {len(text)} characters")
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None."""
        try:
            found: str | None = self._tokenizer.id_to_token(token)
        except OverflowError:
            return None
        return found

    def to_text(self) -> str:
        """Return its tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text


def loading_limits(text: str) -> tuple[float, int]:
    """Return the seconds and bytes allowed for loading a tokenizer.json in a process apart."""
    seconds = BASE_SECONDS + len(text) / LOADED_BYTES_PER_SECOND
    return seconds, BASE_BYTES + BYTES_PER_LOADED_BYTE * len(text)


class TokenizerApart:
    """A tokenizer in its own process, like `LibraryTokenizer`; raises Refused over its limits."""

    def __init__(self, text: str) -> None:
        self._load = *loading_limits(text), {"text": text}
        self.vocab_size: int = self._ask("vocab_size", 0)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._ask("encode", len(text), text=text, special=special)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids."""
        text: str = self._ask("decode", len(ids), ids=list(ids), skip_special=skip_special)
        return text

    def token_to_id(self, text: str) -> int | None:
        """Return the id of a token, or None."""
        found: int | None = self._ask("token_to_id", len(text), text=text)
        return found

    def id_to_token(self, token: int) -> str | None:
        """Return a token as the vocabulary spells it, or None."""
        found: str | None = self._ask("id_to_token", 0, token=token)
        return found

    def _ask(self, operation: str, size: int, **arguments: Any) -> Any:
        from clocher_runtime.text.text_process import PROCESS

        return PROCESS.ask(
            operation,
            BASE_SECONDS + size / CHARS_PER_SECOND,
            BASE_BYTES + BYTES_PER_CHAR * size,
            self._load,
            **arguments,
        )
