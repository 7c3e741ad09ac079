"""An opened checkpoint -> a GGUF file that is the same model, which is checked by reading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_kernels.formats import Format, Ternary
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.blocks import same_type
from clocher_runtime.checkpoints.gguf.checkpoint import open_gguf
from clocher_runtime.convert.gguf import GgufExport, plan_gguf
from clocher_runtime.convert.gguf_vocabulary import vocabulary_fields
from clocher_runtime.convert.to_iebin import vocabulary
from clocher_runtime.disk.output_file import check_free
from clocher_runtime.disk.plane_writer import Progress
from clocher_runtime.engine.load import model_spec
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class GgufConversion:
    """A file that has been planned."""

    source: Checkpoint  # the model
    path: Path  # the file
    export: GgufExport  # what it will hold
    # names of the tensors that become floats, because ggml cannot hold their numbers
    floats: tuple[str, ...]
    free_bytes: int  # bytes that the disk has for it

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.export.nbytes

    def run(self, progress: Progress | None = None) -> None:
        """Write the file under another name, check it and give it its own.

        Raises ModelError: the input changed, or a tensor is damaged; UnsupportedModel: GGUF cannot
        say all of this model; OSError: the file cannot be written; nothing of it is left.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.export.write(self.source, self.path, progress, self._check)

    def _check(self, path: Path) -> None:
        """Raise UnsupportedModel unless a file is read as the model that was written."""
        written = open_gguf(path)
        try:
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
                _same_tokens(json.loads(tokenizer), json.loads(written.make_tokenizer()))  # type: ignore[misc]
        finally:
            written.close()


def plan_gguf_model(
    source: Checkpoint, path: Path, others: str | None = None, pre: str | None = None
) -> GgufConversion:
    """Check what can be checked before writing.

    `others`: float type of the matrices whose numbers ggml cannot hold; None refuses them; `pre`:
    the pre-type of the tokenizer, if it is not to be found. Raises ModelError: the model is
    damaged, or GGUF cannot say it; UsageError: the file is one of the input's, or a flag has no
    place; FormatError: ggml has no type for the numbers of a matrix; OSError: the disk is too
    small.
    """
    if any(path.exists() and path.samefile(file.path) for file in source.files):
        raise UsageError(f"{path}: is a file of the input; choose another output")
    spec = model_spec(source)
    formats = {name: source.tensors[name].format for name in inventory(spec)}
    floats = {}
    for name, fmt in formats.items():
        try:
            _refuse_inexact(source, name, fmt)
        except FormatError as error:
            if others is None:
                raise FormatError(
                    f"tensor {name!r}: {str(error).partition('; ask for')[0]}; --others bf16 (or "
                    "f16, f32) makes such matrices floats, --to iebin keeps them"
                ) from None
            floats[name] = others
    fields: Mapping[str, Any] = {}
    if tokenizer := vocabulary(source):
        fields = vocabulary_fields(
            tokenizer,
            source.tokenizer_config,
            spec.eos_ids,
            spec.vocab_size,
            begins_with_bos(source),
            pre,
        )
    elif pre is not None:
        raise UsageError("--pre has no place: the model has no tokenizer")
    folder = source.path.resolve()
    title = folder.parent.name if folder.name in ("hf", "original") else folder.stem
    export = plan_gguf(source.config, formats, title, vocab=fields, floats=floats)
    free = check_free(path, export.nbytes)
    return GgufConversion(source, path, export, tuple(floats), free)


def begins_with_bos(source: Checkpoint) -> bool:
    """Return whether a text begins with BOS.

    Raises UnsupportedModel: the tokenizer adds something else to a text.
    """
    tokenizer = Tokenizer(source.tokenizer_source, source.tokenizer_config)
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", special=False)
    if whole not in (plain, [*whole[:1], *plain]):
        raise UnsupportedModel("a tokenizer that puts more than BOS around a text, as GGUF")
    return whole != plain


def _refuse_inexact(source: Checkpoint, name: str, fmt: Format) -> None:
    shape = source.shape(name)
    if len(shape) < 2:
        return
    same_type(fmt).row_bytes(shape[-1])
    if isinstance(fmt, Ternary):
        fmt.f16_multiplier(source.tensor(name).planes)


def _same_tokens(own: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if a tokenizer came back with other merges."""

    def merges(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
        found = document["model"]["merges"]
        return [tuple(m.split(" ") if isinstance(m, str) else m) for m in found]

    if merges(own) != merges(read):
        raise UnsupportedModel(
            "the merges of this tokenizer do not follow from scores, which is all that GGUF has "
            "for its kind; --to iebin keeps them"
        )
