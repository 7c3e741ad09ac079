"""Errors for paths that are no readable model: what they are, and what to give instead."""

import fnmatch
import os
import re
import shlex
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clocher_kernels.errors import ModelError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.hf.cache import published_as, repositories, repository_of
from clocher_runtime.checkpoints.iebin import JSON_NAME
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.schema import given, read_as
from clocher_runtime.disk.strict_json import parse_object

ADAPTER_CONFIG = "adapter_config.json"
CONFIG = "config.json"
SUBFOLDERS = ("", "hf", "hf/original", "original")
_SHOWN = 5
_MOST_MODELS = 1000
_MOST_NAMES = 10_000
_MAX_ADAPTER_BYTES = 1_000_000
_FETCH = "fetch the model's safetensors (`clocher pull OWNER/NAME`), or a GGUF file"
_OTHERS = {
    "model_index.json": "a diffusers pipeline, which makes pictures",
    "*.onnx": "an ONNX model",
    "onnx": "an ONNX model",
    "openvino_model.xml": "an OpenVINO model",
    "tf_model*.h5": "TensorFlow weights",
    "saved_model.pb": "TensorFlow weights",
    "flax_model*.msgpack": "Flax weights",
    "weights*.npz": "weights of an old MLX",
    "qmodel.pt": "an HQQ model",
    "quanto_qmap.json": "a model that quanto quantised",
    "*.nemo": "a NeMo archive",
    "*.mlpackage": "a Core ML model",
}
_METHODS = {
    "torchao": "torchao weights",
    "hqq": "HQQ weights",
    "exl2": "EXL2 weights, made for ExLlamaV2",
    "exl3": "EXL3 weights, made for ExLlamaV3",
    "aqlm": "AQLM weights, sums of codebook vectors",
    "quip": "QuIP# weights, vectors of a lattice in rotated axes",
    "spqr": "SpQR weights, 3 bits with sparse outliers",
    "vptq": "VPTQ weights, codebook vectors",
    "quanto": "quanto weights",
    "eetq": "EETQ weights, in the layout of its kernel",
    "higgs": "HIGGS weights, in the layout of its kernel",
    "fbgemm_fp8": "fp8 weights of FBGEMM",
    "fp_quant": "FP-Quant weights, in rotated axes",
    "quark": "Quark weights",
    "modelopt": "weights of NVIDIA's ModelOpt",
}
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
HEAD_BYTES = 28
"""The longest magic header that is known, llama2.c's."""
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")


class _Adapter(Struct):
    base_model_name_or_path: str = ""


def listed(directory: Path) -> list[str]:
    """Return the sorted names in a directory, truncated if there are very many."""
    try:
        with os.scandir(directory) as entries:
            found = zip(entries, range(_MOST_NAMES), strict=False)
            return sorted(entry.name for entry, _ in found)
    except OSError as error:
        raise ModelNotFound(f"{directory}: cannot be listed: {error.strerror}") from None


def foreign_weights(directory: Path) -> ModelError | None:
    """Return the error for another program's weights, None if unknown."""
    names = listed(directory)
    if ADAPTER_CONFIG in names or "adapter_model.safetensors" in names:
        named = base_of(directory)
        base = repr(named) if named else "its base"
        return UnsupportedModel(
            f"{directory}: a LoRA adapter of {base}, not a model; give that, and the adapter with "
            f"it: clocher chat {shlex.quote(named or 'BASE')} --lora {shlex.quote(str(directory))}"
        )
    for pattern, what in _OTHERS.items():
        if found := fnmatch.filter(names, pattern):
            way_out = "give a language model" if "pictures" in what else _FETCH
            return UnsupportedModel(f"{directory}: {found[0]} is {what}, not read here; {way_out}")
    return None


def no_weights(directory: Path) -> ModelError:
    """Return the error for a config.json without readable weights."""
    names = listed(directory)
    if any(fnmatch.fnmatch(name, "pytorch_model*.bin") for name in names):
        return UnsupportedModel(
            f"{directory}: only pickled weights (pytorch_model*.bin), which are not run from; "
            "`clocher convert` and `clocher quantize` read them with torch's restricted unpickler: "
            "make a model with one of them, or convert to safetensors"
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
    if weights:
        return UnsupportedModel(
            f"{directory}: {looked}, but {weights[0]}, whose names are of another program; give "
            "the directory of the model as transformers saves it"
        )
    return ModelNotFound(f"{directory}: {looked}; {unfinished(directory)}")


def no_directory(path: Path) -> ModelNotFound:
    """Return the error for a path without a Hugging Face directory, with a next step."""
    if path.name == "original" and (path.parent / "config.json").is_file():
        return ModelNotFound(f"{path}: no config.json there; the model is in {path.parent}")
    if repo := published_as(str(path)):
        return ModelNotFound(
            f"{path}: no config.json there; "
            f"`clocher pull {repo} --out-dir {path}` fetches the model"
        )
    return ModelNotFound(f"{path}: no config.json there, nor in hf or hf/original below it")


def unfinished(directory: Path) -> str:
    """Return advice for a directory that lacks files."""
    repo = repository_of(directory)
    if repo is None:
        return "fetch the files that are missing; `clocher pull OWNER/NAME --out-dir DIR` resumes"
    return f"an unfinished download; `clocher pull {repo}` resumes it"


def foreign_quantisation(config: Mapping[str, Any], where: str) -> UnsupportedModel | None:
    """Return the error for weights in another program's quantisation, None if there is none."""
    what = _quantised_by(config)
    if what is None:
        return None
    return UnsupportedModel(
        f"{where}: {what}, not read here; take the float model that it was made of (`clocher "
        "pull`, `clocher quantize` if it is too large), its GPTQ or AWQ, or a GGUF file"
    )


def _quantised_by(config: Mapping[str, Any]) -> str | None:
    mlx, settings = config.get("quantization"), config.get("quantization_config")
    if isinstance(mlx, dict) and {"bits", "group_size"} <= mlx.keys():
        return "weights in MLX's own quantisation"
    if "quip_params" in config:
        return _METHODS["quip"]
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # whose configs had no method at first
    if method != "bitsandbytes":
        return _METHODS.get(method) if isinstance(method, str) else None
    if not settings.get("load_in_4bit"):
        return "bitsandbytes weights of 8 bits, LLM.int8()"
    kind = "nf4" if settings.get("bnb_4bit_quant_type") == "nf4" else "fp4"
    return f"bitsandbytes weights of 4 bits, {kind}"


def no_model_file(path: Path, head: bytes) -> ModelError:
    """Return the error for a file that is not a model."""
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
    if is_llama2c(head):
        return UnsupportedModel(
            f"{path}: a llama2.c checkpoint (a header and raw floats, no pickle), not read here; "
            "give the Hugging Face directory that it was exported from, or a GGUF file of it "
            "(llama.cpp's llama-convert-llama2c-to-ggml writes one)"
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


def is_llama2c(head: bytes) -> bool:
    """Return whether a header is llama2.c's: its magic, or seven sizes."""
    if head.startswith(b"24ka"):
        return True
    if len(head) < HEAD_BYTES:
        return False
    sizes = [abs(size) for size in struct.unpack_from("<7i", head)]  # a vocabulary may be negative
    return all(0 < size < 1 << 24 for size in sizes) and sizes[0] % sizes[3] == 0


def base_of(directory: Path) -> str:
    """Return the base that an adapter names, or ""."""
    try:
        data = read_bytes(directory / ADAPTER_CONFIG, _MAX_ADAPTER_BYTES)
        config = read_as(given(parse_object(data, ADAPTER_CONFIG)), _Adapter, ADAPTER_CONFIG)
    except ModelError:
        return ""
    return config.base_model_name_or_path[:100]


def holds_model(directory: Path) -> bool:
    """Return whether a directory has the files of a model; none is opened."""
    markers = [JSON_NAME, *(str(Path(folder, CONFIG)) for folder in SUBFOLDERS)]
    if any(os.path.isfile(directory / marker) for marker in markers):
        return True
    try:
        return any(name.lower().endswith(".gguf") for name in listed(directory))
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
    again = f"; {unfinished(path)}" if repository_of(path) else ""
    if foreign := foreign_weights(path):
        return foreign
    if inner := repositories(path):
        return ModelNotFound(f"{path}: a cache of the Hub; name a model of it: {_some([*inner])}")
    if (repo := repository_of(path / "snapshots" / "x")) and "snapshots" in names:
        return ModelNotFound(f"{path}: the Hub's folder of {repo}; give the name {repo}")
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        return ModelNotFound(
            f"{path}: {weights[0]}, but no {CONFIG}; put that of the model there, or give the "
            f"directory that has both{again}"
        )
    pickled = [n for n in names if fnmatch.fnmatch(n, "*.bin") or n.endswith((".pt", ".pth"))]
    if raw := next((path / n for n in pickled if is_llama2c(_head(path / n))), None):
        return no_model_file(raw, _head(raw))
    if pickled:
        return ModelNotFound(
            f"{path}: {pickled[0]}, but no {CONFIG}; pickled weights are not opened: give the "
            "directory of the model in safetensors, or a GGUF file"
        )
    models = [str(path / name) for name in names[:_MOST_MODELS] if holds_model(path / name)]
    if models:
        return ModelNotFound(
            f"{path}: no model, but {len(models)} below it: {_some(models)}; give one of them"
        )
    if not names:
        return ModelNotFound(f"{_looked(path)}; the directory is empty{again}")
    return ModelNotFound(_looked(path) + again)


def _head(path: Path) -> bytes:
    if not os.path.isfile(path):
        return b""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _looked(path: Path) -> str:
    looked = ", ".join([JSON_NAME, *(str(Path(folder, CONFIG)) for folder in SUBFOLDERS)])
    return f"{path}: no model there; looked for {looked}, *.gguf"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
