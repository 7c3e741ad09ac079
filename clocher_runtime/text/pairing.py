"""Draft models: loading, and the check that both vocabularies are the same."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.checkpoint import MadeTokenizer
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.engine.load import Model, load_model, model_spec
from clocher_runtime.text.tokenizer_library import MAX_FILE_BYTES, inspect

_SHOWN = 40
_NEXT = "give a model of the same family, or leave the draft model out"


def load_draft(path: Path, model: Model) -> Model:
    """Load a draft model as it is stored; raises UnsupportedModel, ModelError."""
    with _named_as_draft():
        checkpoint = open_checkpoint(path)
        sizes = model.spec.vocab_size, model_spec(checkpoint).vocab_size
    _check_same_vocabulary(model.checkpoint, sizes, checkpoint)
    with _named_as_draft():
        return load_model(checkpoint)


@contextmanager
def _named_as_draft() -> Iterator[None]:
    try:
        yield
    except (FormatError, ModelNotFound, UnsupportedModel) as error:
        raise type(error)(f"draft model: {error}") from None


def _check_same_vocabulary(model: Checkpoint, sizes: tuple[int, int], draft: Checkpoint) -> None:
    data, other = _content(model), _content(draft)
    if data is None or other is None:
        if data is not other or sizes[0] != sizes[1]:
            raise UnsupportedModel(
                f"draft model {draft.path}: {sizes[1]} ids, and {model.path} has {sizes[0]}; "
                f"without both tokenizers it is unknown whether their ids mean the same: {_NEXT}"
            )
        return
    if data == other:
        return
    own, theirs = (
        inspect(each, str(where)).tokens()
        for each, where in ((data, model.path), (other, draft.path))
    )
    if own == theirs:
        return
    ids = sorted({*own, *theirs})
    first = next(i for i in ids if own.get(i) != theirs.get(i))
    hashes = " and ".join(sha256(bytes(each)).hexdigest()[:12] for each in (data, other))
    raise UnsupportedModel(
        f"draft model {draft.path}: its vocabulary is another one: {len(theirs)} ids, and "
        f"{model.path} has {len(own)}; the first that differs is {first}, {_name(theirs, first)} "
        f"instead of {_name(own, first)} (tokenizers {hashes}); {_NEXT}"
    )


def _content(checkpoint: Checkpoint) -> bytes | MadeTokenizer | None:
    source = checkpoint.tokenizer_source
    if not isinstance(source, Path):
        return source
    try:
        return read_bytes(source, MAX_FILE_BYTES)
    except ModelNotFound:
        return None


def _name(tokens: Mapping[int, str], token: int) -> str:
    return f"{tokens[token]!r:.{_SHOWN}}" if token in tokens else "nothing"
