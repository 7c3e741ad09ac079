"""A Hugging Face directory: which files belong to it, and what they hold.

Nothing in it is trusted: shard names must be plain, links may not leave the model's directory (or,
in a hub cache, the `models--x` directory that holds the blobs), and the index and the shards must
agree on every tensor. Pickled weights (`pytorch_model*.bin`) are not opened; see `torch_bin`.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.arrays import StoredArray
from clocher_runtime.checkpoints.hf.tensors import logical_tensors
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.safetensors_file import SafetensorsFile
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, parse_object

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUBFOLDERS = ("", "hf", "hf/original", "original")

Weights = tuple[dict[str, StoredArray], tuple[MappedFile, ...]]
"""Arrays of weight files by name, and the files."""

_MAX_CONFIG_BYTES = 16_000_000
_MAX_TEMPLATE_BYTES = 1_000_000
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,240}\.safetensors")


def find_hf(path: Path) -> Path | None:
    """Return the directory with config.json: the path itself or one of `SUBFOLDERS` in it."""
    folders = (path / folder for folder in SUBFOLDERS)
    return next((folder for folder in folders if os.path.isfile(folder / CONFIG)), None)


def open_hf(directory: Path) -> Checkpoint:
    """Open the checkpoint of a Hugging Face directory.

    Args:
        directory: the folder that holds config.json.

    Raises:
        ModelNotFound: a file is missing.
        FormatError: a file is damaged, or the files contradict each other.
        UnsupportedModel: the files are sound but of a kind that is not read.
        WindowError: a timed window is open.
    """
    return read_folder(directory, "hf", _open_safetensors)


def read_folder(
    directory: Path, kind: Literal["hf", "bin"], read: Callable[["HfFolder"], Weights]
) -> Checkpoint:
    """Return the checkpoint of a directory whose weights are read in a way of their own.

    Args:
        directory: the folder that holds config.json.
        kind: of the checkpoint.
        read: returns the arrays of the folder's weight files by name, and the mapped files.

    Raises:
        ModelError: as `open_hf`.
    """
    folder = HfFolder(directory)
    config = folder.json(CONFIG)
    settings = config.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise FormatError(f"{directory / CONFIG}: quantization_config is not an object")
    arrays, files = read(folder)
    tensors, notes = logical_tensors(arrays, settings)
    return Checkpoint(
        path=directory,
        kind=kind,
        config=config,
        generation_config=folder.optional_json("generation_config.json"),
        tokenizer_config=_tokenizer_config(folder),
        tokenizer_json=folder.member("tokenizer.json"),
        tensors=tensors,
        files=files,
        notes=notes,
    )


def _open_safetensors(folder: "HfFolder") -> Weights:
    shards = _open_shards(folder)
    arrays = {
        name: StoredArray(info.dtype, shard.view(name), f"{shard.file.path}: tensor {name!r}")
        for shard in shards
        for name, info in shard.tensors.items()
    }
    return arrays, tuple(shard.file for shard in shards)


class HfFolder:
    """A directory whose files must really lie in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        real = Path(os.path.realpath(directory))
        cached = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
        self.boundary = real.parents[1] if cached else real

    def member(self, name: str) -> Path:
        """Return the path of a file of the directory, which need not exist."""
        path = self.directory / name
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(self.boundary):
            raise FormatError(f"{path}: a link to {target}, which is outside {self.boundary}")
        return path

    def has(self, name: str) -> bool:
        """Return whether the directory has a file of this name."""
        return os.path.isfile(self.member(name))

    def json(self, name: str, limit: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
        """Return the object in a JSON file."""
        path = self.member(name)
        return parse_object(read_bytes(path, limit), str(path))

    def optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, {} without the file."""
        return self.json(name) if self.has(name) else {}

    def weight_map(self, index: str, shard: re.Pattern[str], suffix: str) -> dict[str, str]:
        """Return the tensors of an index file with the shard that holds each.

        Args:
            index: name of the index file.
            shard: what names of shards look like.
            suffix: their ending, for the message.
        """
        where = self.directory / index
        weight_map = self.json(index, MAX_JSON_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{where}: weight_map must be an object that is not empty")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not shard.fullmatch(file_name):
                raise FormatError(
                    f"{where}: tensor {name!r:.80} is in {file_name!r:.80}; a shard is a plain "
                    f"file name of letters, digits, '.', '_', '-' that ends in {suffix}"
                )
        return weight_map


def _tokenizer_config(folder: HfFolder) -> dict[str, Any]:
    config = folder.optional_json("tokenizer_config.json")
    if folder.has("chat_template.jinja"):
        path = folder.member("chat_template.jinja")
        try:
            config["chat_template"] = read_bytes(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8: {error}") from None
    return config


def _open_shards(folder: HfFolder) -> list[SafetensorsFile]:
    if folder.has(SINGLE):
        return [SafetensorsFile(folder.member(SINGLE))]
    if not folder.has(INDEX):
        raise _no_weights(folder.directory)
    weight_map = folder.weight_map(INDEX, _SHARD, ".safetensors")
    shards = []
    for file_name in sorted(set(weight_map.values())):
        shard = SafetensorsFile(folder.member(file_name))
        listed = {name for name, shard_name in weight_map.items() if shard_name == file_name}
        if differing := sorted(listed ^ set(shard.tensors)):
            state = "is not in it" if differing[0] in listed else "is not listed for it"
            raise FormatError(
                f"{folder.directory / file_name}: {INDEX} and the shard disagree: tensor "
                f"{differing[0]!r} {state} ({len(differing)} in all); download the model again"
            )
        shards.append(shard)
    return shards


def _no_weights(directory: Path) -> Exception:
    if any(directory.glob("pytorch_model*.bin")):
        return UnsupportedModel(
            f"{directory}: only pickled weights (pytorch_model*.bin). Clocher never unpickles on "
            "its own, because a pickle can run code; convert the model to safetensors, or ask for "
            "torch's restricted unpickler: scripts/hf_to_iebin_stream_pt.py, ptq_from_bin.py"
        )
    return ModelNotFound(f"{directory}: neither {SINGLE} nor {INDEX} is there")
