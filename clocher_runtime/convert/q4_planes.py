"""Write Q4_0 plane files with their manifest, lay them over an IEBIN pair, append to them."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import q4
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint
from clocher_runtime.checkpoints.iebin import PlaneWriter, Progress, open_iebin, quiet, tensors_of
from clocher_runtime.convert import q4_map
from clocher_runtime.convert.q4_entries import OTHER_WEIGHTS, entry_document
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.convert.to_iebin import job_name, natural, open_source, prepared, refuse_input
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import check_free
from clocher_runtime.disk.plane_index import Entry, check_hashes, place
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES
from clocher_runtime.engine.topology import usable_cpus

CHUNK_ROWS = 1024
_JSON_BYTES = 1024
_PROJECTIONS, _HEAD = r".*_proj\.weight", r"lm_head\.weight"
_ATTENTION = q4_map.name_pattern(r".*\.self_attn\.[qkvo]_proj\.weight")


class Q4Job:
    """The Q4_0 plane files of a model, and their manifest: checked, ready to be written."""

    def __init__(
        self,
        hf_dir: Path,
        codes: Path,
        scales: Path,
        manifest: Path,
        include_lm_head: bool = False,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        """Open the input and check it before writing. Raises ModelError, UsageError, OSError.

        `chunk_rows` are encoded at a time; the bytes do not depend on it.
        """
        paths = [os.path.realpath(path) for path in (codes, scales, manifest)]
        if len(set(paths)) != len(paths):
            raise UsageError("--q4-bytes, --scales and --manifest must be three different files")
        self.source = open_source(hf_dir)
        refuse_input(self.source, codes, scales, manifest)
        self.files, self._chunk_rows = {"codes": codes, "scales": scales}, chunk_rows
        pattern = f"{_PROJECTIONS}|{_HEAD}" if include_lm_head else _PROJECTIONS
        rule = {"pattern": pattern, "dtype": "int4w", "group": 32}
        self.rules = q4_map.parse_q4_map({"version": 1, "rules": [rule]}, manifest)
        assigned = q4_map.assign(self.rules.rules, self.source.tensors, False, str(hf_dir))
        # The matrices, in the order of the files, and why each other tensor is not one of them.
        self.names = tuple(sorted(assigned.chosen, key=natural))
        self.kept = {name: assigned.kept[name] for name in sorted(assigned.kept, key=natural)}
        if not self.names:
            reasons = ", ".join(sorted(set(self.kept.values())))
            raise UsageError(f"{self.source.path}: no float matrix to encode: {reasons}")
        shapes = map(self.source.shape, self.names)
        self.nbytes = sum(q4.Q4_0.nbytes(shape) + _JSON_BYTES for shape in shapes)
        check_free(codes, self.nbytes)

    def run(self, progress: Progress = quiet) -> int:
        """Write the files, resuming a killed run; return how many matrices it had finished."""
        for path in (*self.files.values(), self.rules.path):
            path.parent.mkdir(parents=True, exist_ok=True)
        planned = {name: (q4.Q4_0, self.source.shape(name)) for name in self.names}
        job = job_name(self.source, [(name, shape) for name, (_, shape) in planned.items()])
        with PlaneWriter(self.files, job, progress=progress) as pair:
            done = pair.resume(planned)
            for name, matrix in encoded(self.source, self.names[done:], self._chunk_rows):
                pair.add(name, matrix)
            pair.sync()
            self.source.check_unchanged()
            index = self.files["codes"].with_name(q4.COMPAT_NAME)
            pair.publish(stale=[self.rules.path, index])
            tensors = [entry_document(e.name, e.shape, e.format, 0, e.hashes) for e in pair.entries]
            kept = [{"name": name, "reason": reason} for name, reason in self.kept.items()]
            document = {**self.rules.document, "tensors": tensors, "kept": kept}
            q4_map.write_manifest(self.rules.path, document)
        return done


def encoded(
    source: Checkpoint, names: tuple[str, ...], chunk_rows: int
) -> Iterator[tuple[str, QuantTensor]]:
    """Yield each matrix's name and its Q4_0 form."""
    threads = len(usable_cpus())
    make = partial(round_tensor, fmt=q4.Q4_0, threads=threads, rows=chunk_rows)
    return prepared(source, names, lambda _, tensor: make(tensor))


def make_index(model_dir: Path, manifest: Path) -> list[str]:
    """Write model.ie.compat.json from a manifest; return the names taken from the plane files."""
    listed = q4_map.load_q4_map(manifest).entries or {}
    base = open_iebin(model_dir / JSON_NAME)
    entries: list[Entry] = []
    ends = dict.fromkeys(q4.Q4_NAMES, 0)
    for name, item in listed.items():
        if item.format != q4.Q4_0 or len(item.shape) != 2:
            raise UsageError(
                f"{manifest}: tensor {name!r} is {item.format.name}{list(item.shape)}, expected a "
                f"matrix in {q4.Q4_0.name}; give a manifest of gen_q4_bytes_stream.py"
            )
        tensor = base.tensors.get(name)
        if tensor is None or (tensor.shape, tensor.format) != (item.shape, q4.Q4_0):
            _check_float(tensor, item.shape, f"{manifest}: tensor {name!r}: {JSON_NAME} has")
        entries.append(replace(item, regions=place(item.format, item.shape, ends)))
        ends |= entries[-1].ends
    if not entries:
        raise UsageError(f"{manifest}: no tensors; give a manifest of gen_q4_bytes_stream.py")
    for name, matrix in tensors_of(entries, q4.map_planes(model_dir, entries)).items():
        where = f"{manifest}: tensor {name!r} in {model_dir}: "
        check_hashes(matrix.planes, listed[name].hashes, where, OTHER_WEIGHTS)
    q4.write_overlay(model_dir / q4.COMPAT_NAME, entries)
    return list(listed)


def _check_float(
    tensor: QuantTensor | None, shape: tuple[int, ...], where: str, more: str = ""
) -> None:
    if tensor is None or tensor.shape != shape or not isinstance(tensor.format, Float):
        got = f"{tensor.format.name}{list(tensor.shape)}" if tensor else "no such tensor"
        raise UsageError(f"{where} {got}, expected floats {list(shape)}{more}")


class AppendJob:
    """The attention matrices that an index lacks: checked, ready to be appended."""

    def __init__(self, hf_dir: Path, index: Path, q4_bin: Path) -> None:
        """Find the matrices. Raises UsageError, ModelError, OSError.

        `hf_dir` is what the pair was made of, `index` its model.ie.compat.json.
        """
        expected = index.with_name(q4.Q4_NAMES["codes"])
        if os.path.realpath(q4_bin) != os.path.realpath(expected):
            raise UsageError(
                f"--q4-bin {q4_bin}: expected {expected}, the one beside --compat-json"
            )
        if not os.path.isfile(index):
            raise UsageError(
                f"--compat-json not found: {index}; scripts/rebuild_dedup_and_quant.sh --model-dir "
                f"{index.parent} makes it"
            )
        self.index, self._entries = index, q4.read_overlay(index, read_bytes(index, MAX_JSON_BYTES))
        self.source, base = open_source(hf_dir), q4.open_index(index)
        there = {entry.name for entry in self._entries}
        wanted = [name for name in base.names if _ATTENTION.fullmatch(name)]
        self.names = tuple(name for name in wanted if name not in there)
        self.present = tuple(name for name in wanted if name in there)
        for name in self.names:
            _check_float(
                self.source.tensors.get(name),
                base.shape(name),
                f"{hf_dir}: tensor {name!r}: got",
                "; give the checkpoint that the model was made of, with floats",
            )
        self.nbytes = sum(q4.Q4_0.nbytes(base.shape(name)) for name in self.names)
        check_free(index, self.nbytes)

    def run(self, progress: Progress = quiet) -> None:
        """Append the matrices, rewriting the index after each. Raises UsageError, ModelError."""
        paths = {key: self.index.with_name(name) for key, name in q4.Q4_NAMES.items()}
        with PlaneWriter(paths, in_place=True) as pair:
            for entry in self._entries:
                if not pair.keep(entry):
                    raise FormatError(
                        f"{self.index.parent}: the bytes of {entry.name!r} in the plane files do "
                        f"not match the SHA-256 in the index; {q4.AGAIN}"
                    )
            pair.sync()  # which cuts off what a killed run has left
            start = pair.nbytes
            for name, matrix in encoded(self.source, self.names, CHUNK_ROWS):
                self.source.check_unchanged()
                pair.add(name, matrix)
                pair.sync()
                q4.write_overlay(self.index, pair.entries)
                progress(pair.nbytes - start, name)
