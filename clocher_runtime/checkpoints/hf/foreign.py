"""What a directory holds in place of weights that are read, and the way out of it."""

import fnmatch
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clocher_kernels.errors import ModelError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.hf.cache import repository_of
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.schema import given, read_as
from clocher_runtime.disk.strict_json import parse_object

ADAPTER_CONFIG = "adapter_config.json"
_MOST_NAMES = 10_000
_MAX_ADAPTER_BYTES = 1_000_000
_FETCH = "fetch the model's safetensors (`clocher pull OWNER/NAME`), or a GGUF file"
_OTHERS = (
    ("model_index.json", "a diffusers pipeline, which makes pictures", "give a language model"),
    ("*.onnx", "an ONNX model", _FETCH),
    ("onnx", "an ONNX model", _FETCH),
    ("openvino_model.xml", "an OpenVINO model", _FETCH),
    ("tf_model*.h5", "TensorFlow weights", _FETCH),
    ("saved_model.pb", "TensorFlow weights", _FETCH),
    ("flax_model*.msgpack", "Flax weights", _FETCH),
    ("weights*.npz", "weights of an old MLX", _FETCH),
    ("*.nemo", "a NeMo archive", _FETCH),
    ("*.mlpackage", "a Core ML model", _FETCH),
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


class _Adapter(Struct):
    base_model_name_or_path: str = ""


def listed(directory: Path) -> list[str]:
    """Return the names in a directory, in order; a very large one is cut off.

    Raises:
        ModelNotFound: it cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            found = zip(entries, range(_MOST_NAMES), strict=False)
            return sorted(entry.name for entry, _ in found)
    except OSError as error:
        raise ModelNotFound(f"{directory}: cannot be listed: {error.strerror}") from None


def foreign_weights(directory: Path) -> ModelError | None:
    """Return the error for a directory whose weights are another program's, None if none is known.

    Raises:
        ModelNotFound: it cannot be listed.
    """
    names = listed(directory)
    if ADAPTER_CONFIG in names or "adapter_model.safetensors" in names:
        return _adapter(directory)
    for pattern, what, way_out in _OTHERS:
        if found := fnmatch.filter(names, pattern):
            return UnsupportedModel(f"{directory}: {found[0]} is {what}, not read here; {way_out}")
    return None


def no_weights(directory: Path) -> ModelError:
    """Return the error for a directory with config.json and without weights that are read."""
    names = listed(directory)
    if any(fnmatch.fnmatch(name, "pytorch_model*.bin") for name in names):
        return UnsupportedModel(
            f"{directory}: only pickled weights (pytorch_model*.bin), which can run code. Clocher "
            "never unpickles; `clocher convert` and `clocher quantize` follow them: make a model "
            "with one of them, or convert to safetensors"
        )
    weights = [name for name in names if name.endswith(".safetensors")]
    dangling = [name for name in weights if not os.path.exists(directory / name)]
    if dangling:
        return ModelNotFound(
            f"{directory}: {dangling[0]} is a link to a file that is gone; {unfinished(directory)}"
        )
    foreign = foreign_weights(directory)
    if foreign is not None:
        return foreign
    looked = "neither model.safetensors nor model.safetensors.index.json is there"
    shards = [found for name in names if (found := _SHARD.fullmatch(name))]
    if shards:
        return ModelNotFound(
            f"{directory}: {looked}, though {len(shards)} of {int(shards[0][2])} weight files are; "
            f"{unfinished(directory)}"
        )
    other = [name for name in names if name.endswith(".safetensors")]
    if other:
        return UnsupportedModel(
            f"{directory}: {looked}, but {other[0]}, whose names are of another program; give the "
            "directory of the model as transformers saves it"
        )
    return ModelNotFound(f"{directory}: {looked}; {unfinished(directory)}")


def unfinished(directory: Path) -> str:
    """Return what to do about a directory that lacks files."""
    repo = repository_of(directory)
    if repo is None:
        return "fetch the files that are missing; `clocher pull OWNER/NAME --out-dir DIR` goes on"
    return f"a download that did not end; `clocher pull {repo}` goes on with it"


def is_mlx(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes weights that MLX quantised."""
    settings = config.get("quantization")
    return isinstance(settings, dict) and {"bits", "group_size"} <= settings.keys()


def no_model_file(path: Path, head: bytes) -> ModelError:
    """Return the error for a file that is no model by itself.

    Args:
        path: a regular file.
        head: its first bytes, at least 4 where it has so many.
    """
    name = path.name.lower()
    if head.startswith(b"GGUF"):
        return UnsupportedModel(
            f"{path}: a GGUF file whose name does not say so; link it: ln -s {path} model.gguf, "
            "and give the link"
        )
    if name.endswith(".safetensors"):
        return UnsupportedModel(
            f"{path}: one file of weights; give the directory that holds it and config.json"
        )
    if any(fnmatch.fnmatch(name, pattern) for pattern in _PICKLED):
        return UnsupportedModel(
            f"{path}: pickled weights, which can run code and are not opened; give the directory "
            "of the model in safetensors, or a GGUF file"
        )
    if name in ("config.json", "model.ie.json", "model.ie.bin", "model.safetensors.index.json"):
        return ModelNotFound(f"{path}: one file of a model; give its directory, {path.parent}")
    return ModelNotFound(
        f"{path}: not a model; give the directory of one, a GGUF file, or owner/name of a model in "
        "the Hub's cache"
    )


def _adapter(directory: Path) -> ModelError:
    base = "its base"
    try:
        data = read_bytes(directory / ADAPTER_CONFIG, _MAX_ADAPTER_BYTES)
        config = read_as(given(parse_object(data, ADAPTER_CONFIG)), _Adapter, ADAPTER_CONFIG)
        if config.base_model_name_or_path:
            base = f"{config.base_model_name_or_path!r:.100}"
    except ModelError:
        pass  # that it is an adapter is known all the same
    return UnsupportedModel(
        f"{directory}: a LoRA adapter of {base}, not a model; merge the two first, with Python's "
        f"peft: AutoPeftModelForCausalLM.from_pretrained({str(directory)!r}).merge_and_unload()"
        ".save_pretrained('merged'), copy the tokenizer of the base there, and give that directory"
    )
