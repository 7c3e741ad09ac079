"""An opened checkpoint -> a Hugging Face directory with compressed-tensors weights.

Written beside its place under another name, read back, and then renamed.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import FormatError, UnsupportedModel, UsageError
from clocher_kernels.formats import Float, Format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.hf.checkpoint import open_hf
from clocher_runtime.checkpoints.hf.foreign import CONFIG
from clocher_runtime.convert.compressed_arrays import NAMES, Arrays, Scheme, scheme_of
from clocher_runtime.convert.to_iebin import natural, vocabulary
from clocher_runtime.disk.output_file import PARTIAL, check_free, sync_directory, write_file
from clocher_runtime.disk.plane_index import Region
from clocher_runtime.disk.plane_writer import PlaneWriter, Progress
from clocher_runtime.disk.safetensors_file import DTYPES, safetensors_head
from clocher_runtime.engine.load import model_spec
from clocher_runtime.models.families import family_of
from clocher_runtime.models.inventory import EMBED, HEAD

SHARD_BYTES = 5_000_000_000
"""A file of weights has at most so many bytes, unless one linear has more."""

_INDEX = "model.safetensors.index.json"
_HEADER = 1 << 16


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the output.

    Attributes:
        name: in the checkpoint.
        format: that it will have.
        scheme: how that is stored; None: as plain floats, under its own name.
        arrays: by their names in the file.
    """

    name: str
    format: Format
    scheme: Scheme | None
    arrays: Arrays

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(
            prod(shape) * STORAGE[DTYPES[dtype]].itemsize for dtype, shape in self.arrays.values()
        )


@dataclass(frozen=True, slots=True, eq=False)
class CompressedConversion:
    """A directory that has been planned.

    Attributes:
        source: the model.
        out_dir: the directory.
        shards: what each file of weights will hold.
        floats: names of the matrices that become floats.
        free_bytes: bytes that the disk has for it.
    """

    source: Checkpoint
    out_dir: Path
    shards: tuple[tuple[_Stored, ...], ...]
    floats: tuple[str, ...]
    free_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the files of weights."""
        return sum(item.nbytes for shard in self.shards for item in shard)

    def run(self, progress: Progress | None = None) -> None:
        """Write the directory.

        Raises:
            ModelError: the input changed, or a tensor is damaged.
            UnsupportedModel: the directory is not read as the model that was written.
            UsageError: something has its name meanwhile.
            OSError: it cannot be written; nothing of it is left.
        """
        partial = self.out_dir.with_name(self.out_dir.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            self._write(partial, progress)
            self.source.check_unchanged()
            self._check(partial)
            if self.out_dir.is_dir():
                self.out_dir.rmdir()  # which is empty
            partial.rename(self.out_dir)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_directory(self.out_dir.parent)

    def _write(self, folder: Path, progress: Progress | None) -> None:
        names = [
            "model.safetensors"
            if len(self.shards) == 1
            else f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
            for i in range(len(self.shards))
        ]
        done = 0
        for file, shard in zip(names, self.shards, strict=True):
            done = self._write_shard(folder / file, shard, done, progress)
        if len(names) > 1:
            where = {
                key: file
                for file, shard in zip(names, self.shards, strict=True)
                for item in shard
                for key in item.arrays
            }
            _write_json(
                folder / _INDEX, {"metadata": {"total_size": self.nbytes}, "weight_map": where}
            )
        _write_json(folder / CONFIG, self._config())
        if self.source.generation_config:
            _write_json(folder / "generation_config.json", self.source.generation_config)
        if tokenizer := vocabulary(self.source):
            write_file(folder / "tokenizer.json", tokenizer)
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **self.source.tokenizer_config,
            }
            _write_json(folder / "tokenizer_config.json", settings)

    def _write_shard(
        self, path: Path, shard: tuple[_Stored, ...], done: int, progress: Progress | None
    ) -> int:
        arrays = {key: array for item in shard for key, array in item.arrays.items()}
        head, places = safetensors_head(arrays, {"format": "pt"})
        with PlaneWriter({path.name: path}) as output:
            output.put(Region(path.name, 0, len(head)), np.frombuffer(head, np.uint8))
            for item in shard:
                for key, array in zip(item.arrays, self._made(item), strict=True):
                    place = places[key]
                    output.put(Region(path.name, place.offset, place.nbytes), array)
                self.source.release()
                done += item.nbytes
                if progress:
                    progress(done, item.name)
            output.sync()
            output.publish()
        return done

    def _made(self, item: _Stored) -> list[np.ndarray]:
        tensor = self.source.tensor(item.name, verify=True)
        if tensor.format.name != item.format.name:
            tensor = encode(tensor.decode(), item.format)
        if item.scheme is None:
            return [tensor.planes["data"]]
        return item.scheme.make(tensor)

    def _config(self) -> dict[str, Any]:
        config = {k: v for k, v in self.source.config.items() if k != "quantization_config"}
        config.setdefault("model_type", model_spec(self.source).family)
        stored = [item for shard in self.shards for item in shard]
        quantised = [item for item in stored if item.scheme is not None]
        if not quantised:
            return config
        plain = [i.name for i in stored if i.scheme is None and len(self.source.shape(i.name)) == 2]
        ignore = [_module(name) for name in plain if name != EMBED]
        if HEAD not in self.source.tensors:
            ignore.append(_module(HEAD))  # tied: a module that shares the embedding
        formats = {item.format.name: item for item in quantised}
        groups = {}
        for number, (name, item) in enumerate(formats.items()):
            assert item.scheme is not None, "only quantised linears are here"
            mine = [_module(other.name) for other in quantised if other.format.name == name]
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(formats) == 1 else mine,
                "weights": dict(item.scheme.weights),
                "input_activations": None,
                "output_activations": None,
                "format": item.scheme.form,
            }
        forms = {group["format"] for group in groups.values()}
        settings = {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": forms.pop() if len(forms) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": sorted(ignore, key=natural),
            "kv_cache_scheme": None,
        }
        return {**config, "quantization_config": settings}

    def _check(self, folder: Path) -> None:
        """Read the directory, and compare every tensor with the one that it was made of."""
        written = open_hf(folder)
        model_spec(written)
        for item in (item for shard in self.shards for item in shard):
            own, found = self.source.tensor(item.name), written.tensor(item.name)
            made = own if own.format.name == item.format.name else None
            if not _same(made or encode(own.decode(), item.format), found):
                raise UnsupportedModel(f"{item.name} comes back with other numbers")
            self.source.release()
            written.release()


def plan_compressed(
    source: Checkpoint, out_dir: Path, others: str | None = None
) -> CompressedConversion:
    """Check what can be checked before writing.

    Args:
        source: the model.
        out_dir: the directory; there is none, or it is empty.
        others: float type of the matrices that compressed-tensors cannot hold; None refuses them.

    Raises:
        UnsupportedModel: the family's files have other tensors than Clocher.
        FormatError: a matrix cannot be held.
        UsageError: the directory is not empty.
        OSError: the disk is too small.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir}: is not empty; choose another directory")
    spec = model_spec(source)
    if family_of(source.config).tensors or any(len(t.shape) > 2 for t in source.tensors.values()):
        raise UnsupportedModel(
            f"a {spec.family} model as compressed-tensors: its files have other tensors than "
            "Clocher, or experts in a stack, which this writer does not take apart"
        )
    stored, floats = [], []
    for name in sorted(source.names, key=natural):
        item = _planned(source, name, others)
        stored.append(item)
        if item.format.name != source.tensors[name].format.name:
            floats.append(name)
    shards: list[list[_Stored]] = [[]]
    room = SHARD_BYTES
    for item in stored:
        if shards[-1] and item.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(item)
        room -= item.nbytes
    nbytes = sum(item.nbytes for item in stored) + _HEADER
    free = check_free(out_dir, nbytes)
    return CompressedConversion(source, out_dir, tuple(map(tuple, shards)), tuple(floats), free)


def _planned(source: Checkpoint, name: str, others: str | None) -> _Stored:
    tensor = source.tensors[name]
    fmt, shape = tensor.format, tensor.shape
    try:
        if not isinstance(fmt, Float) and name == EMBED:
            raise FormatError(f"{fmt.name}: compressed-tensors has no quantised embedding")
        scheme = scheme_of(fmt)
    except FormatError as error:
        if others is None:
            raise FormatError(
                f"tensor {name!r}: {error}; --others bf16 (or f16, f32) makes such matrices floats"
            ) from None
        fmt = Float(others)
        scheme = scheme_of(fmt)
    if isinstance(fmt, Float):
        return _Stored(name, fmt, None, {name: (NAMES[fmt.dtype], shape)})
    stem = _module(name)
    arrays = {f"{stem}.{key}": array for key, array in scheme.arrays(shape).items()}
    return _Stored(name, fmt, scheme, arrays)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _same(one: QuantTensor, other: QuantTensor) -> bool:
    """Return whether two tensors have the same bytes; a float one may have come back as it was."""
    if one.format.name != other.format.name or one.shape != other.shape:
        return False
    return all(np.array_equal(plane, other.planes[key]) for key, plane in one.planes.items())


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_file(path, f"{json.dumps(document, indent=2, ensure_ascii=False)}\n".encode())
