"""Why a directory is no model that can be opened, and what to give instead."""

import fnmatch
import os
from pathlib import Path

from clocher_kernels.errors import ModelError, ModelNotFound
from clocher_runtime.checkpoints.gguf.parts import SUFFIX
from clocher_runtime.checkpoints.hf.cache import repositories, repository_of
from clocher_runtime.checkpoints.hf.checkpoint import CONFIG, SUBFOLDERS
from clocher_runtime.checkpoints.hf.foreign import (
    HEAD_BYTES,
    foreign_weights,
    is_llama2c,
    listed,
    no_model_file,
    unfinished,
)
from clocher_runtime.checkpoints.iebin import JSON_NAME

_SHOWN = 5
_MOST_NAMES = 1000


def holds_model(directory: Path) -> bool:
    """Return whether a directory has what every model has; no file is opened."""
    markers = [JSON_NAME, *(str(Path(folder, CONFIG)) for folder in SUBFOLDERS)]
    if any(os.path.isfile(directory / marker) for marker in markers):
        return True
    try:
        return any(name.lower().endswith(SUFFIX) for name in listed(directory))
    except ModelNotFound:
        return False


def no_model(path: Path) -> ModelError:
    """Return the error for a path that holds no model."""
    if os.path.isfile(path):
        return no_model_file(path, _head(path))
    if os.path.exists(path) and not os.path.isdir(path):
        return ModelNotFound(f"{path}: not a regular file; give the directory of a model")
    if not os.path.isdir(path):
        return ModelNotFound(_looked(path))
    names = listed(path)
    foreign = foreign_weights(path)
    if foreign is not None:
        return foreign
    if inner := repositories(path):
        return ModelNotFound(f"{path}: a cache of the Hub; name a model of it: {_some([*inner])}")
    if (repo := repository_of(path / "snapshots" / "x")) and "snapshots" in names:
        return ModelNotFound(f"{path}: the Hub's folder of {repo}; give the name {repo}")
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        return ModelNotFound(
            f"{path}: {weights[0]}, but no {CONFIG}; put that of the model there, or give the "
            f"directory that has both{_again(path)}"
        )
    pickled = [n for n in names if fnmatch.fnmatch(n, "*.bin") or n.endswith((".pt", ".pth"))]
    if raw := next((path / n for n in pickled if is_llama2c(_head(path / n))), None):
        return no_model_file(raw, _head(raw))
    if pickled:
        return ModelNotFound(
            f"{path}: {pickled[0]}, but no {CONFIG}; pickled weights are not opened: give the "
            "directory of the model in safetensors, or a GGUF file"
        )
    models = [str(path / name) for name in names[:_MOST_NAMES] if holds_model(path / name)]
    if models:
        return ModelNotFound(
            f"{path}: no model, but {len(models)} below it: {_some(models)}; give one of them"
        )
    if not names:
        return ModelNotFound(f"{_looked(path)}; the directory is empty{_again(path)}")
    return ModelNotFound(_looked(path) + _again(path))


def _head(path: Path) -> bytes:
    if not os.path.isfile(path):
        return b""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _again(path: Path) -> str:
    return f"; {unfinished(path)}" if repository_of(path) else ""


def _looked(path: Path) -> str:
    looked = ", ".join([JSON_NAME, *(str(Path(folder, CONFIG)) for folder in SUBFOLDERS)])
    return f"{path}: no model there; looked for {looked}, *{SUFFIX}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
