"""Hugging Face checkpoint -> IEBIN, one tensor in memory at a time.

Tensors are copied byte for byte, plane by plane, except those that a quantisation manifest names.
The input is only read. The output depends on the input and the manifest alone: it has no dates and
no paths, and two runs give the same bytes.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.weights.base import Checkpoint
from clocher_runtime.weights.files import read_bytes
from clocher_runtime.weights.hf import CONFIG, find_hf, open_hf
from clocher_runtime.weights.iebin import MAX_VOCAB_BYTES, place
from clocher_runtime.weights.iebin_writer import PARTIAL_NAME, IebinWriter
from clocher_runtime.weights.q4_map import Q4Map, load_q4_map

Progress = Callable[[int, str], None]

_ENCODE_ELEMENTS = 1 << 20
_JSON_BYTES_PER_TENSOR = 2048


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A conversion that has been checked and can start.

    Attributes:
        source: the input.
        out_dir: where the IEBIN files will be.
        formats: format of every tensor in the output, in the order of the file.
        q4_map: the manifest, if there is one.
        notes: what a person should know about how the manifest was applied.
        nbytes: bytes that the output will take (an upper bound, closer than 1 %, for real models).
        free_bytes: bytes that the disk has for it.
    """

    source: Checkpoint
    out_dir: Path
    formats: Mapping[str, Format]
    q4_map: Q4Map | None
    notes: tuple[str, ...]
    nbytes: int
    free_bytes: int

    @property
    def quantised(self) -> dict[str, str]:
        """Names of the tensors that are not copied, with the format that they come from."""
        return {
            name: self.source.tensors[name].format.name
            for name, fmt in self.formats.items()
            if fmt.name != self.source.tensors[name].format.name
        }

    def run(self, progress: Progress | None = None) -> None:
        """Write the output.

        Args:
            progress: called after each tensor with the bytes written so far and its name.

        Raises:
            FormatError: a tensor holds a code that its format forbids, or cannot be quantised.
            UsageError: another conversion is writing to the same directory.
            OSError: the output cannot be written; nothing of it is left.
        """
        tokenizer = self.source.tokenizer_json
        vocab = read_bytes(tokenizer, MAX_VOCAB_BYTES) if os.path.isfile(tokenizer) else None
        self.out_dir.mkdir(parents=True, exist_ok=True)
        with IebinWriter(self.out_dir) as writer:
            for name, fmt in self.formats.items():
                tensor = self.source.tensor(name, verify=True)
                if fmt.name != tensor.format.name:
                    tensor = _quantise(tensor, fmt, name)
                writer.add(name, tensor)
                self.source.release()
                if progress:
                    progress(writer.nbytes, name)
            writer.commit(
                self.source.config,
                self.source.generation_config,
                self.source.tokenizer_config,
                vocab,
                self._provenance(),
            )

    def _provenance(self) -> dict[str, Any]:
        files = [{"file": f.path.name, "nbytes": f.nbytes} for f in self.source.files]
        return {
            "container": "safetensors",
            "files": files,
            "q4_map": self.q4_map.document if self.q4_map else None,
            "quantised": self.quantised,
        }


def plan_conversion(hf_dir: Path, out_dir: Path, q4_map: Path | None = None) -> Conversion:
    """Open the input and check everything that can be checked before writing.

    Args:
        hf_dir: directory of a Hugging Face checkpoint, or one with it in `hf` or `hf/original`.
        out_dir: directory for the output; it is made if need be.
        q4_map: path of a quantisation manifest.

    Raises:
        ModelError: the input is missing, damaged or unknown.
        UsageError: the output directory or the manifest cannot be used.
        OSError: the disk is too small.
    """
    directory = find_hf(hf_dir)
    if directory is None:
        raise ModelNotFound(f"{hf_dir}: no {CONFIG} there, nor in hf or hf/original below it")
    if os.path.lexists(out_dir / CONFIG):
        raise UsageError(
            f"{out_dir}: holds a Hugging Face model (config.json), whose files the output could "
            "overwrite; choose another --out-dir"
        )
    rules = load_q4_map(q4_map) if q4_map else None
    source = open_hf(directory)
    chosen, notes = rules.choose(source.tensors) if rules else ({}, [])
    names = sorted(source.names, key=_natural)
    formats = {name: chosen.get(name, source.tensors[name].format) for name in names}
    nbytes = _output_bytes(source, formats)
    free = _free_bytes(out_dir)
    if nbytes > free:
        message = f"the model needs {nbytes} bytes, the disk has {free} free: {nbytes - free} short"
        raise OSError(errno.ENOSPC, message, str(out_dir))
    return Conversion(source, out_dir, formats, rules, tuple(notes), nbytes, free)


def convert(
    hf_dir: Path, out_dir: Path, q4_map: Path | None = None, progress: Progress | None = None
) -> Conversion:
    """Convert a checkpoint; see `plan_conversion` and `Conversion.run`."""
    conversion = plan_conversion(hf_dir, out_dir, q4_map)
    conversion.run(progress)
    return conversion


def _quantise(tensor: QuantTensor, fmt: Format, name: str) -> QuantTensor:
    """Encode a float matrix, a few rows at a time where the format allows it."""
    rows, columns = tensor.shape
    planes = fmt.planes(tensor.shape)
    step = max(1, _ENCODE_ELEMENTS // columns)
    if any(plane.shape[0] != rows for plane in planes.values()):
        step = rows
    data = tensor.planes["data"]
    try:
        parts = []
        for start in range(0, rows, step):
            piece = data[start : start + step]
            values = tensor.format.decode({"data": piece}, piece.shape)
            parts.append(encode(values, fmt).planes)
    except FormatError as error:
        raise FormatError(f"tensor {name!r}: {error}") from None
    joined = {key: np.concatenate([part[key] for part in parts]) for key in planes}
    return QuantTensor(tensor.shape, fmt, joined)


def _output_bytes(source: Checkpoint, formats: Mapping[str, Format]) -> int:
    end = 0
    for name, fmt in formats.items():
        end = place(fmt, source.shape(name), end)[-1].end
    files = [source.tokenizer_json, *source.path.glob("*config.json")]
    rest = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    return end + rest + _JSON_BYTES_PER_TENSOR * len(formats)


def _free_bytes(out_dir: Path) -> int:
    existing = next(folder for folder in (out_dir, *out_dir.parents) if folder.is_dir())
    leftover = out_dir / PARTIAL_NAME
    reclaimed = leftover.stat().st_size if leftover.is_file() else 0
    return shutil.disk_usage(existing).free + reclaimed


def _natural(name: str) -> list[str | int]:
    """Return a sort key that puts layer 2 before layer 10."""
    parts: list[str | int] = list(re.split("([0-9]{1,9})", name))
    parts[1::2] = [int(part) for part in parts[1::2]]
    return parts
