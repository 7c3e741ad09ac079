"""An opened checkpoint -> GGUF with tokenizer, verified by reading it back.

Byte-level BPE becomes "gpt2" with the pre-type of the same expressions; BPE with byte fallback
becomes "llama", each token scored by the negated place of its merge. Source: llama.cpp
convert_hf_to_gguf.py and llama-vocab.cpp.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_kernels.formats import Format, Ternary
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.blocks import same_type
from clocher_runtime.checkpoints.gguf.checkpoint import open_gguf
from clocher_runtime.checkpoints.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TYPES,
    UNKNOWN,
    UNUSED,
    USER,
)
from clocher_runtime.checkpoints.iebin import Progress, quiet
from clocher_runtime.convert.gguf import Field, GgufExport
from clocher_runtime.convert.to_iebin import exported_formats, refuse_input, vocabulary
from clocher_runtime.disk.output_file import check_free
from clocher_runtime.engine.load import model_spec
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.spec import ModelSpec
from clocher_runtime.text.tokenizer import Tokenizer


class GgufConversion:
    """A model as a GGUF file: checked, ready to be written."""

    def __init__(
        self, source: Checkpoint, path: Path, others: str | None = None, pre: str | None = None
    ) -> None:
        """Check the export before writing; `pre` overrides the tokenizer's pre-type.

        `others`: float type of matrices that ggml cannot hold; None refuses them.
        """
        refuse_input(source, path)
        self.source, self._path = source, path
        spec = model_spec(source)

        def check(name: str, fmt: Format) -> None:
            if len(source.shape(name)) > 1:
                same_type(fmt).row_bytes(source.shape(name)[-1])
                if isinstance(fmt, Ternary):
                    fmt.f16_multiplier(source.tensor(name).planes)

        formats, self.floats = exported_formats(source, inventory(spec), check, others)
        fields: Mapping[str, Any] = {}
        if tokenizer := vocabulary(source):
            begins, config = begins_with_bos(source), source.tokenizer_config
            try:
                fields = _vocabulary_fields(json.loads(tokenizer), config, spec, begins, pre)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise FormatError(f"tokenizer.json: {type(error).__name__} {error}") from None
        elif pre is not None:
            raise UsageError("--pre has no place: the model has no tokenizer")
        folder = source.path.resolve()
        title = folder.parent.name if folder.name in ("hf", "original") else folder.stem
        self.export = GgufExport(source.config, formats, title, vocab=fields)
        self.nbytes = self.export.nbytes
        check_free(path, self.nbytes)

    def run(self, progress: Progress = quiet) -> None:
        """Write, check and rename the file. Raises ModelError, UnsupportedModel, OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.export.write(self.source, self._path, progress, self._check)

    def _check(self, path: Path) -> None:
        written = open_gguf(path)
        own = spec_from_config(self.source.config)
        # A Mistral without a window is a Llama in GGUF, and computes the same.
        found = replace(spec_from_config(written.config), family=own.family)
        if replace(found, eos_ids=()) != replace(own, eos_ids=()):
            raise UnsupportedModel(
                f"GGUF cannot say all that this {own.family} model is: read back, it has other "
                "settings; --to iebin keeps them"
            )
        ends = set(model_spec(self.source).eos_ids) - set(model_spec(written).eos_ids)
        if ends:
            raise UnsupportedModel(
                f"GGUF has places for three ids that end a turn; it would not know {min(ends)}"
            )
        if tokenizer := vocabulary(self.source):
            texts = tokenizer, vocabulary(written) or b""
            merges = [map(_pair, json.loads(text)["model"]["merges"]) for text in texts]
            if list(merges[0]) != list(merges[1]):
                raise UnsupportedModel(
                    "the merges of this tokenizer do not follow from scores, which is all that "
                    "GGUF has for its kind; --to iebin keeps them"
                )


def begins_with_bos(source: Checkpoint) -> bool:
    """Return whether text begins with BOS; UnsupportedModel if more is added to it."""
    tokenizer = Tokenizer(source.tokenizer_source, source.tokenizer_config)
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", special=False)
    if whole not in (plain, [*whole[:1], *plain]):
        raise UnsupportedModel("a tokenizer that puts more than BOS around a text, as GGUF")
    return whole != plain


_PREFIX = "tokenizer.ggml."
_ROLES = {"bos": "bos", "unk": "unknown", "pad": "padding"}
_ENDS = ("eos", "eot", "eom")
_UNMERGED = -1e9


def _vocabulary_fields(
    document: Mapping[str, Any],
    config: Mapping[str, Any],
    spec: ModelSpec,
    begins: bool,
    pre: str | None,
) -> dict[str, Field]:
    """Return the metadata of a vocabulary; `pre` overrides the pre-type of byte-level BPE."""
    model = document["model"]
    if model["type"] != "BPE":
        raise UnsupportedModel(
            f"a {model['type']} tokenizer as GGUF; this writer knows BPE; --to iebin keeps it"
        )
    step = document.get("pre_tokenizer") or {"type": "Sequence", "pretokenizers": []}
    steps = list(step["pretokenizers"]) if step["type"] == "Sequence" else [step]
    texts, types = _tokens(document, spec.vocab_size)
    ids = {text: index for index, text in enumerate(texts)}
    common: dict[str, Field] = {f"{_PREFIX}tokens": texts, f"{_PREFIX}token_type": types}
    for key, index in zip(_ENDS, spec.eos_ids, strict=False):
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
    if pre is not None:
        raise UsageError("--pre is for byte-level tokenizers, which this is not")
    if not model.get("byte_fallback"):
        raise UnsupportedModel("a BPE tokenizer that knows neither all bytes nor how to spell them")
    return {
        f"{_PREFIX}model": "llama",
        f"{_PREFIX}pre": "default",
        **common,
        f"{_PREFIX}scores": _scores(model, texts, types),
        f"{_PREFIX}add_space_prefix": _begins_with_space(document, steps),
    }


def _tokens(document: Mapping[str, Any], size: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the spelling and type of each token; ids without one are unused."""
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


def _pair(merge: str | Sequence[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else list(merge)


def _pre_type(document: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the pre-type with exactly tokenizer.json's expressions."""
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
