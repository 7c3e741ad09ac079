"""Any checkpoint -> IEBIN, two tensors in memory at a time; equal input gives equal bytes."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float, Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import iebin, open_checkpoint
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME, Checkpoint
from clocher_runtime.checkpoints.hf.checkpoint import open_hf
from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.checkpoints.locate import CONFIG, find_hf
from clocher_runtime.convert.q4_map import load_q4_map
from clocher_runtime.convert.tied import tied
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import PARTIAL, check_free, write_file
from clocher_runtime.disk.strict_json import prefixed
from clocher_runtime.engine.topology import usable_cpus

MAP_NAME = "tensor_map.json"

_MAPPED = ("offset", "nbytes", "dtype", "shape")
_CONTAINERS = {"hf": "safetensors", "bin": "pytorch"}


def prepared(
    source: Checkpoint, names: Sequence[str], make: Callable[[str, QuantTensor], QuantTensor]
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield each name with what `make` makes of its tensor, preparing the next one meanwhile."""

    def one(name: str) -> QuantTensor:
        tensor = source.tensor(name, verify=True)
        with prefixed(f"tensor {name!r}"):
            made = make(name, tensor)
        if made is not tensor:
            source.release()
        return made

    with ThreadPoolExecutor(1) as ahead:
        upcoming = [ahead.submit(one, name) for name in names[:1]]
        for index, name in enumerate(names):
            result = upcoming.pop().result()
            upcoming = [ahead.submit(one, later) for later in names[index + 1 : index + 2]]
            yield name, result
            del result


def job_name(source: Checkpoint, *options: object) -> str:
    """Return a key of an input, as it is now, and of the options."""
    files = [(str(f.path), f.nbytes, os.stat(f.path).st_mtime_ns) for f in source.files]
    return hashlib.sha256(json.dumps([files, *options]).encode()).hexdigest()


def finish(
    writer: iebin.IebinWriter, source: Checkpoint, vocab: bytes | None, **provenance: object
) -> None:
    """Commit what was made of a checkpoint. Raises ModelChanged, OSError."""
    source.check_unchanged()
    container = _CONTAINERS.get(source.kind, source.kind)
    files = [{"file": f.path.name, "nbytes": f.nbytes} for f in source.files]
    writer.commit(
        source.config,
        source.generation_config,
        source.tokenizer_config,
        vocab,
        {"container": container, "files": files, **provenance},
    )


def refuse_hf_folder(out_dir: Path) -> None:
    """Raise UsageError if an output directory holds a Hugging Face model."""
    if os.path.lexists(out_dir / CONFIG):
        raise UsageError(
            f"{out_dir}: holds a Hugging Face model (config.json), whose files the output could "
            "overwrite; choose another --out-dir"
        )


def refuse_input(source: Checkpoint, *outputs: Path) -> None:
    """Raise UsageError if an output is the input's directory or one of its files."""
    taken = {
        os.path.realpath(path) for path in (source.path, *(file.path for file in source.files))
    }
    for path in outputs:
        if os.path.realpath(path) in taken:
            raise UsageError(f"{path}: is the input, or a file of it; choose another output")


def exported_formats(
    source: Checkpoint,
    names: Iterable[str],
    check: Callable[[str, Format], None],
    others: str | None,
) -> tuple[dict[str, Format], tuple[str, ...]]:
    """Return the formats of tensors in another container, and which of them become floats.

    `check` raises FormatError for a name and format that the container cannot hold; such a tensor
    becomes floats of the type `others`, and None refuses it.
    """
    formats = {name: source.tensors[name].format for name in names}
    floats: dict[str, Format] = {}
    for name, fmt in formats.items():
        try:
            check(name, fmt)
        except FormatError as error:
            if others is None:
                raise FormatError(
                    f"tensor {name!r}: {str(error).partition('; ask for')[0]}; --others bf16 (or "
                    "f16, f32) makes such matrices floats, --to iebin keeps them"
                ) from None
            floats[name] = Float(others)
    return formats | floats, tuple(floats)


def open_source(path: Path) -> Checkpoint:
    """Open a conversion's input: Hugging Face (also pickled) before IEBIN. Raises ModelError."""
    directory = find_hf(path)
    if directory:
        if any(directory.glob("*.safetensors*")) or not any(directory.glob("pytorch_model*.bin")):
            return open_hf(directory)
        return open_torch_bin(directory)
    return open_checkpoint(path)


class Conversion:
    """A model as IEBIN: checked, ready to be written."""

    def __init__(
        self,
        hf_dir: Path,
        out_dir: Path,
        q4_map: Path | None = None,
        opener: Callable[[Path], Checkpoint] = open_source,
    ) -> None:
        """Open the input and check it before writing. Raises ModelError, UsageError, OSError."""
        refuse_hf_folder(out_dir)
        self.out_dir = out_dir
        self._q4_map = load_q4_map(q4_map) if q4_map else None
        source = opener(hf_dir)
        self.source = source = tied(source) if self._q4_map and self._q4_map.tied else source
        refuse_input(source, out_dir)
        chosen, notes = self._q4_map.choose(source.tensors) if self._q4_map else ({}, [])
        self.notes = (*source.notes, *notes)
        # Of every tensor in the output, in the order of the file.
        names = sorted(source.names, key=natural)
        self.formats = {name: chosen.get(name, source.tensors[name].format) for name in names}
        # An upper bound, closer than 1 % for real models.
        self.nbytes = iebin.model_bytes((fmt, source.shape(n)) for n, fmt in self.formats.items())
        self.nbytes += beside_tensors(source)
        partial = out_dir / (BIN_NAME + PARTIAL)
        reclaimed = partial.stat().st_size if partial.is_file() else 0
        check_free(partial, self.nbytes, reclaimed)

    @property
    def quantised(self) -> dict[str, str]:
        """Names of the quantised tensors, with their source format."""
        return {
            name: self.source.tensors[name].format.name
            for name, fmt in self.formats.items()
            if fmt.name != self.source.tensors[name].format.name
        }

    def run(self, progress: iebin.Progress = iebin.quiet) -> int:
        """Write the output, resuming a killed run; return how many tensors it had finished."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        vocab = vocabulary(self.source)
        tensors = {name: (fmt, self.source.shape(name)) for name, fmt in self.formats.items()}
        manifest = self._q4_map.document if self._q4_map else None
        planned = [(name, fmt.name, shape) for name, (fmt, shape) in tensors.items()]
        job = job_name(self.source, planned, manifest)
        with iebin.IebinWriter(self.out_dir, job, progress) as writer:
            done = writer.resume(tensors)
            names = list(self.formats)[done:]
            for name, tensor in prepared(self.source, names, self._stored):
                writer.add(name, tensor)
                self.source.release()
            finish(writer, self.source, vocab, q4_map=manifest, quantised=self.quantised)
        return done

    def _stored(self, name: str, tensor: QuantTensor) -> QuantTensor:
        if self.formats[name].name == tensor.format.name:
            return tensor
        assert self._q4_map is not None, "only a manifest changes formats"
        return self._q4_map.stored(name, tensor, threads=len(usable_cpus()))


def beside_tensors(source: Checkpoint) -> int:
    """Return the bytes of the settings and the vocabulary of a model."""
    settings = sum(os.path.getsize(file) for file in source.path.glob("*config.json"))
    return settings + len(vocabulary(source) or b"")


def vocabulary(source: Checkpoint) -> bytes | None:
    """Return the content of tokenizer.json, or None."""
    tokenizer = source.tokenizer_source
    if not isinstance(tokenizer, Path):
        return bytes(tokenizer)
    return read_bytes(tokenizer, iebin.MAX_VOCAB_BYTES) if os.path.isfile(tokenizer) else None


def natural(name: str) -> list[str | int]:
    """Return a sort key that puts layer 2 before layer 10."""
    parts: list[str | int] = list(re.split("([0-9]{1,9})", name))
    parts[1::2] = [int(part) for part in parts[1::2]]
    return parts


def write_tensor_map(model_dir: Path) -> int:
    """Write tensor_map.json, with model.ie.json's checksum; return its number of tensors."""
    document = iebin.IebinIndex(model_dir / JSON_NAME).document
    head = {
        "format": "clocher.tensor_map",
        "version": 1,
        "index": {"file": JSON_NAME, "sha256": document["sha256"]},
    }
    tensors = {}
    for tensor in document["tensors"]:
        planes = {
            key: {"file": BIN_NAME, **{field: plane[field] for field in _MAPPED}}
            for key, plane in tensor["planes"].items()
        }
        found = {"shape": tensor["shape"], "format": tensor["format"], "planes": planes}
        tensors[tensor["name"]] = found
    text = json.dumps({**head, "tensors": tensors}, ensure_ascii=False, indent=1)
    write_file(model_dir / MAP_NAME, f"{text}\n".encode())
    return len(tensors)
