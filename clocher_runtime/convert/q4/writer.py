"""Writing model.q4.bin, model.q4.scales.fp16.bin and the expanded manifest that describes them.

The manifest is what makes the pair of files valid: it is removed first and written last. A killed
run leaves partial files and a journal; the next run of the same job goes on where it stopped.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint, Stored
from clocher_runtime.checkpoints.q4.overlay import COMPAT_NAME
from clocher_runtime.checkpoints.q4.planes import (
    CODES,
    PLANES,
    Q4_0,
    SCALES,
    Q4Entry,
    next_offsets,
    q4_document,
    relative_place,
    sha256_of,
)
from clocher_runtime.convert.to_iebin import Progress, natural, open_source
from clocher_runtime.disk.output_file import (
    Journal,
    OutputFile,
    check_free,
    sync_directory,
    write_file,
)
from clocher_runtime.engine.topology import usable_cpus

CHUNK_ROWS = 1024
_JSON_BYTES = 1024

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Q4Job:
    """A pair of files that can be written.

    Attributes:
        source: the input.
        files: where the plane files will be: "codes" and "scales".
        manifest: where the expanded manifest will be.
        names: the matrices, in the order of the files.
        kept: name -> reason of every other tensor.
        chunk_rows: rows that are encoded at a time; the bytes do not depend on it.
        nbytes: bytes that the output will take.
        free_bytes: bytes that the disk has for it.
    """

    source: Checkpoint
    files: Mapping[str, Path]
    manifest: Path
    names: tuple[str, ...]
    kept: Mapping[str, str]
    chunk_rows: int
    nbytes: int
    free_bytes: int

    def run(self, progress: Progress | None = None) -> int:
        """Write the files, or the rest of them if an earlier run was killed.

        Args:
            progress: called after each matrix with the bytes written so far and its name.

        Returns:
            How many matrices an earlier run had finished.

        Raises:
            FormatError: a matrix cannot be encoded.
            ModelChanged: the input changed meanwhile.
            UsageError: another process is writing the same files.
            OSError: the output cannot be written; nothing of it is left.
        """
        for path in (*self.files.values(), self.manifest):
            path.parent.mkdir(parents=True, exist_ok=True)
        with _Pair(self.files, self._name()) as pair:
            done = pair.resume(self._shapes(), progress)
            for name, tensor, digest in encoded(
                self.source, self.names[len(done) :], self.chunk_rows
            ):
                pair.add(name, tensor, digest)
                if progress:
                    progress(pair.nbytes, name)
            pair.sync()
            self.source.check_unchanged()
            # They describe the files that are about to be replaced.
            for path in (self.manifest, self.files[CODES].with_name(COMPAT_NAME)):
                path.unlink(missing_ok=True)
                sync_directory(path.parent)
            pair.rename()
            folder = self.manifest.parent
            places = {key: relative_place(path, folder) for key, path in self.files.items()}
            document = q4_document(places, pair.entries, dict(self.kept))
            write_file(self.manifest, f"{json.dumps(document, indent=1)}\n".encode())
        return len(done)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.source.shape(name) for name in self.names}

    def _name(self) -> str:
        files = [(str(f.path), f.nbytes, os.stat(f.path).st_mtime_ns) for f in self.source.files]
        text = json.dumps([files, list(self._shapes().items())])
        return hashlib.sha256(text.encode()).hexdigest()


def plan_q4(
    hf_dir: Path,
    codes: Path,
    scales: Path,
    manifest: Path,
    include_lm_head: bool = False,
    chunk_rows: int = CHUNK_ROWS,
) -> Q4Job:
    """Open the input and check everything that can be checked before writing.

    Args:
        hf_dir: the checkpoint, as `open_source` takes it.
        codes: path of model.q4.bin.
        scales: path of model.q4.scales.fp16.bin.
        manifest: path of the expanded manifest.
        include_lm_head: whether the output head is encoded too.
        chunk_rows: rows that are encoded at a time.

    Raises:
        ModelError: the input is missing, damaged or unknown.
        UsageError: the paths are not three different files, or nothing can be encoded.
        OSError: the disk is too small.
    """
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
    nbytes = sum(Q4_0.nbytes(source.shape(name)) + _JSON_BYTES for name in names)
    free = check_free(codes, nbytes)
    files = {CODES: codes, SCALES: scales}
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
) -> Iterator[tuple[str, QuantTensor, str]]:
    """Yield each matrix in Q4_0 with the hash of what it was made from, one prepared ahead."""
    with ThreadPoolExecutor(1) as ahead, ThreadPoolExecutor(len(usable_cpus())) as workers:

        def prepare(name: str) -> tuple[str, QuantTensor, str]:
            tensor = source.tensor(name, verify=True)
            try:
                return name, _encode(tensor, chunk_rows, workers), sha256_of(tensor)
            except FormatError as error:
                raise FormatError(f"tensor {name!r}: {error}") from None
            finally:
                source.release()

        upcoming = [ahead.submit(prepare, name) for name in names[:1]]
        for index in range(len(names)):
            item = upcoming.pop().result()
            upcoming = [ahead.submit(prepare, name) for name in names[index + 1 : index + 2]]
            yield item


def _encode(tensor: QuantTensor, chunk_rows: int, workers: ThreadPoolExecutor) -> QuantTensor:
    data = tensor.planes["data"]
    planes = {key: np.empty(p.shape, p.storage) for key, p in Q4_0.planes(tensor.shape).items()}

    def one(start: int) -> None:
        piece = data[start : start + chunk_rows]
        values = tensor.format.decode({"data": piece}, piece.shape)
        for key, plane in encode(values, Q4_0).planes.items():
            planes[key][start : start + chunk_rows] = plane

    for _ in workers.map(one, range(0, len(data), chunk_rows)):
        pass
    return QuantTensor(tensor.shape, Q4_0, planes)


class _Pair:
    """The two plane files while they are written, under their temporary names."""

    def __init__(self, files: Mapping[str, Path], job: str) -> None:
        self._final = dict(files)
        self._partial = {k: path.with_name(f"{path.name}.partial") for k, path in files.items()}
        self.entries: list[Q4Entry] = []
        self._files: dict[str, OutputFile] = {}
        try:
            for key, path in self._partial.items():
                self._files[key] = OutputFile(path)
        except BaseException:
            self._close()
            raise
        codes = self._partial[CODES]
        self._journal = Journal(codes.with_name(f"{codes.name}.journal"), job)

    def __enter__(self) -> "_Pair":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            for path in self._partial.values():
                path.unlink(missing_ok=True)
            self._journal.remove()
        self._journal.close()
        self._close()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def resume(
        self, shapes: Mapping[str, tuple[int, ...]], progress: Callable[[int, str], None] | None
    ) -> list[str]:
        """Take over what the journal says and the files hold."""
        for found, (name, shape) in zip(self._journal.entries, shapes.items(), strict=False):
            entry = self._journalled(found, name, shape)
            if entry is None or not self._keep(entry):
                break
            self.entries.append(entry)
            if progress:
                progress(self.nbytes, name)
        for file in self._files.values():
            file.truncate()
        self._journal.restart(len(self.entries))
        return [entry.name for entry in self.entries]

    def add(self, name: str, tensor: QuantTensor, source_sha256: str) -> None:
        offsets = next_offsets(self.entries[-1] if self.entries else None)
        hashes = {}
        for key in PLANES:
            self._files[key].pad(offsets[key])
            hashes[key] = self._files[key].write(tensor.planes[key])
        entry = Q4Entry(name, tensor.shape, source_sha256, offsets, hashes)
        self.entries.append(entry)
        self._journal.add(entry.document())

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def rename(self) -> None:
        for key, path in self._partial.items():
            os.replace(path, self._final[key])
            sync_directory(path.parent)
        self._journal.remove()

    def _journalled(
        self, found: Mapping[str, Any], name: str, shape: tuple[int, ...]
    ) -> Q4Entry | None:
        try:
            hashes = {key: str(found["planes"][key]["sha256"]) for key in PLANES}
            source = str(found["source_sha256"])
        except (KeyError, TypeError):
            return None
        offsets = next_offsets(self.entries[-1] if self.entries else None)
        entry = Q4Entry(name, shape, source, offsets, hashes)
        return entry if found == entry.document() else None

    def _keep(self, entry: Q4Entry) -> bool:
        kept: list[OutputFile] = []
        for key in PLANES:
            place = (entry.offsets[key], entry.nbytes(key), entry.hashes[key])
            if not self._files[key].keep([place]):
                for file in kept:
                    file.unkeep()
                return False
            kept.append(self._files[key])
        return True

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
