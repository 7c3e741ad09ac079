"""A GGUF file as a checkpoint: config, tokenizer and tensors of one file, named as elsewhere."""

import os
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.config import generation_config, model_config
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.checkpoints.gguf.names import ROPE_FACTORS, heads_of, pieces
from clocher_runtime.checkpoints.gguf.tensors import logical_tensor
from clocher_runtime.checkpoints.gguf.tokenizer import tokenizer_config, tokenizer_json
from clocher_runtime.checkpoints.gguf.tokens import has_vocabulary
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory

SUFFIX = ".gguf"


def find_gguf(path: Path) -> Path | None:
    """Return the path of a GGUF file: the path itself, or the only such file in the directory.

    Raises:
        ModelNotFound: the directory has several, or may not be listed.
    """
    if not os.path.isdir(path):
        return path if path.suffix.lower() == SUFFIX else None
    try:
        found = sorted(name for name in os.listdir(path) if name.lower().endswith(SUFFIX))
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be listed: {error.strerror}") from None
    if len(found) > 1:
        raise ModelNotFound(
            f"{path}: {len(found)} GGUF files ({', '.join(found[:3])}); name one of them"
        )
    return path / found[0] if found else None


def open_gguf(path: Path) -> Checkpoint:
    """Open the checkpoint in a GGUF file.

    Headers, metadata, tensor names and shapes are checked here. Of the data only the scales of
    ternary (tq2_0) matrices are read; the rest is repacked tensor by tensor when it is asked for.

    Raises:
        ModelNotFound: there is no such file.
        FormatError: the file is damaged or contradicts itself.
        UnsupportedModel: it is sound, but of a kind that is not read.
        WindowError: a timed window is open.
    """
    file = GgufFile(path)
    config = model_config(file)
    try:
        spec = spec_from_config(config)
    except (FormatError, UnsupportedModel) as error:
        raise type(error)(f"{path}: the metadata give this {error}") from None
    parts = {source: pieces(spec, source, need) for source, need in inventory(spec).items()}
    wanted = {part.name: source for source, group in parts.items() for part in group}
    if missing := [name for name in wanted if name not in file.tensors]:
        raise FormatError(
            f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}"
        )
    if extra := [name for name in file.tensors if name not in wanted and name != ROPE_FACTORS]:
        raise UnsupportedModel(
            f"{path}: {len(extra)} tensors have no place in a {spec.family} model, the first is "
            f"{extra[0]!r}"
        )
    return Checkpoint(
        path=path,
        kind="gguf",
        config=config,
        generation_config=generation_config(file),
        tokenizer_config=tokenizer_config(file) if has_vocabulary(file) else {},
        tokenizer_json=path / "tokenizer.json",
        tensors={
            source: logical_tensor(
                file, parts[source], need, heads_of(spec, source), f"{path}: tensor {source!r}"
            )
            for source, need in inventory(spec).items()
        },
        files=(file.file,),
        make_tokenizer=(lambda: tokenizer_json(file)) if has_vocabulary(file) else None,
    )
