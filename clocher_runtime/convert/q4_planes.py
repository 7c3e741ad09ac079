"""Write Q4_0 plane files, resumably, lay them over an IEBIN pair, append to them."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import q4
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint, Stored
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.checkpoints.plane_writer import PlaneWriter, Progress
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.convert.to_iebin import job_name, natural, open_source, prepared
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import check_free, write_file
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES
from clocher_runtime.engine.topology import usable_cpus

CHUNK_ROWS = 1024
_JSON_BYTES = 1024
_HEAD = "lm_head.weight"
_ATTENTION = re.compile(r".*\.self_attn\.[qkvo]_proj\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Q4Job:
    """A pair of files that can be written."""

    source: Checkpoint
    files: Mapping[str, Path]  # the plane files: "codes" and "scales"
    manifest: Path  # the expanded manifest
    names: tuple[str, ...]  # the matrices, in the order of the files
    kept: Mapping[str, str]  # name -> reason of every other tensor
    chunk_rows: int  # rows that are encoded at a time; the bytes do not depend on it
    nbytes: int  # of the output
    free_bytes: int  # of the disk

    def run(self, progress: Progress | None = None) -> int:
        """Write the files, resuming a killed run; return how many matrices it had finished."""
        folder = os.path.realpath(self.manifest.parent)
        for path in (*self.files.values(), self.manifest):
            path.parent.mkdir(parents=True, exist_ok=True)
        shapes = {name: self.source.shape(name) for name in self.names}
        job = job_name(self.source, list(shapes.items()))
        with PlaneWriter(self.files, job, q4.Q4Entry, progress=progress) as pair:
            planned = {name: (q4.Q4_0, shape) for name, shape in shapes.items()}
            done = len(pair.resume(planned))
            for name, matrix in encoded(self.source, self.names[done:], self.chunk_rows):
                pair.add(name, *matrix)
            pair.sync()
            self.source.check_unchanged()
            pair.publish(stale=[self.manifest, self.files[q4.CODES].with_name(q4.COMPAT_NAME)])
            # Seen from the manifest, so that documents hold no absolute path.
            places = {
                key: Path(os.path.relpath(os.path.realpath(path), folder)).as_posix()
                for key, path in self.files.items()
            }
            document = q4.q4_document(places, pair.entries, dict(self.kept))
            write_file(self.manifest, f"{json.dumps(document, indent=1)}\n".encode())
        return done


def plan_q4(
    hf_dir: Path,
    codes: Path,
    scales: Path,
    manifest: Path,
    include_lm_head: bool = False,
    chunk_rows: int = CHUNK_ROWS,
) -> Q4Job:
    """Open the input and check it before writing. Raises ModelError, UsageError, OSError."""
    paths = [os.path.realpath(path) for path in (codes, scales, manifest)]
    if len(set(paths)) != len(paths):
        raise UsageError("--q4-bytes, --scales and --manifest must be three different files")
    source = open_source(hf_dir)
    taken = {os.path.realpath(file.path) for file in source.files}
    if clash := taken & set(paths):
        raise UsageError(f"{clash.pop()}: is a file of the input; choose another output")
    reasons = {
        name: _reason_to_keep(name, source.tensors[name], include_lm_head)
        for name in sorted(source.names, key=natural)
    }
    names = tuple(name for name, reason in reasons.items() if not reason)
    if not names:
        raise UsageError(
            f"{source.path}: no float matrix to encode: {', '.join(sorted(set(reasons.values())))}"
        )
    kept = {name: reason for name, reason in reasons.items() if reason}
    nbytes = sum(q4.Q4_0.nbytes(source.shape(name)) + _JSON_BYTES for name in names)
    free = check_free(codes, nbytes)
    files = {q4.CODES: codes, q4.SCALES: scales}
    return Q4Job(source, files, manifest, names, kept, chunk_rows, nbytes, free)


def _reason_to_keep(name: str, tensor: Stored, include_lm_head: bool) -> str:
    if not isinstance(tensor.format, Float):
        return f"stored as {tensor.format.name}"
    if len(tensor.shape) != 2:
        return "vector" if len(tensor.shape) < 2 else "experts stored as floats"
    if name == _HEAD:
        return "" if include_lm_head else "output head"
    return "" if name.endswith("_proj.weight") else "embedding, router or other matrix"


def encoded(
    source: Checkpoint, names: tuple[str, ...], chunk_rows: int
) -> Iterator[tuple[str, tuple[QuantTensor, str]]]:
    """Yield each matrix's name, its Q4_0 form and its source hash."""

    def prepare(name: str) -> tuple[QuantTensor, str]:
        tensor = source.tensor(name, verify=True)
        try:
            matrix = round_tensor(tensor, q4.Q4_0, threads=len(usable_cpus()), rows=chunk_rows)
            return matrix, q4.source_hash(tensor)
        except FormatError as error:
            raise FormatError(f"tensor {name!r}: {error}") from None
        finally:
            source.release()

    return prepared(source, names, prepare)


def make_index(model_dir: Path, manifest: Path) -> list[str]:
    """Write model.ie.compat.json from a manifest; return the names taken from the plane files."""
    planes = q4.load_q4_planes(manifest)
    for key, name in q4.Q4_NAMES.items():
        found = planes.files[key]
        if os.path.realpath(found) != os.path.realpath(model_dir / name):
            raise UsageError(f"{manifest}: describes {found}, expected {model_dir / name}")
    base = open_iebin(model_dir / JSON_NAME)
    for name, entry in planes.entries.items():
        tensor = base.tensors.get(name)
        wanted = (entry.shape, q4.Q4_0.name)
        done = tensor is not None and (tensor.shape, tensor.format.name) == wanted
        if not done and not q4.is_float(tensor, entry.shape):
            raise UsageError(
                f"{manifest}: tensor {name!r} {list(entry.shape)}: {JSON_NAME} has "
                f"{q4.described(tensor)}"
            )
    for name in planes.entries:
        planes.check(name)
    q4.write_overlay(model_dir / q4.COMPAT_NAME, list(planes.entries.values()))
    return list(planes.entries)


@dataclass(frozen=True, slots=True, eq=False)
class AppendJob:
    """Attention matrices that can be appended."""

    source: Checkpoint  # the checkpoint that the pair was made of
    index: Path  # model.ie.compat.json
    entries: tuple[q4.Q4Entry, ...]  # what the index lists
    names: tuple[str, ...]  # the matrices that it lacks
    present: tuple[str, ...]  # those that it has
    nbytes: int  # bytes that the new ones will take
    free_bytes: int  # bytes that the disk has for them

    def run(self, progress: Progress | None = None) -> None:
        """Append the matrices, rewriting the index after each. Raises UsageError, ModelError."""
        paths = {key: self.index.with_name(name) for key, name in q4.Q4_NAMES.items()}
        with PlaneWriter(paths, kind=q4.Q4Entry, in_place=True) as pair:
            for entry in self.entries:
                if not pair.keep(entry):
                    raise FormatError(
                        f"{self.index.parent}: the bytes of {entry.name!r} in the plane files do "
                        f"not match the SHA-256 in the index; {q4.AGAIN}"
                    )
            pair.sync()  # which cuts off what a killed run has left
            start = pair.nbytes
            for name, matrix in encoded(self.source, self.names, CHUNK_ROWS):
                self.source.check_unchanged()
                pair.add(name, *matrix)
                pair.sync()
                q4.write_overlay(self.index, pair.entries)
                if progress:
                    progress(pair.nbytes - start, name)


def plan_append(hf_dir: Path, index: Path, q4_bin: Path) -> AppendJob:
    """Find the attention matrices that an index lacks. Raises UsageError, ModelError, OSError."""
    expected = index.with_name(q4.Q4_NAMES[q4.CODES])
    if os.path.realpath(q4_bin) != os.path.realpath(expected):
        raise UsageError(f"--q4-bin {q4_bin}: expected {expected}, the one beside --compat-json")
    if not os.path.isfile(index):
        raise UsageError(
            f"--compat-json not found: {index}; scripts/rebuild_dedup_and_quant.sh --model-dir "
            f"{index.parent} makes it"
        )
    entries = q4.read_overlay(index, read_bytes(index, MAX_JSON_BYTES))
    source, base = open_source(hf_dir), q4.open_index(index)
    there = {entry.name for entry in entries}
    wanted = [name for name in base.names if _ATTENTION.fullmatch(name)]
    missing = tuple(name for name in wanted if name not in there)
    for name in missing:
        if not q4.is_float(found := source.tensors.get(name), base.shape(name)):
            raise UsageError(
                f"{hf_dir}: tensor {name!r} {list(base.shape(name))}: got {q4.described(found)}; "
                "give the checkpoint that the model was made of, with floats"
            )
    nbytes = sum(q4.Q4_0.nbytes(base.shape(name)) for name in missing)
    free = check_free(index, nbytes)
    present = tuple(name for name in wanted if name in there)
    return AppendJob(source, index, entries, missing, present, nbytes, free)
