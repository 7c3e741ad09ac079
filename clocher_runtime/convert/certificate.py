"""The certificate of a conversion: hashes by tensor, source and IEBIN; see docs/verification.md."""

import os
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import FormatError, ModelChanged, ModelError, ModelNotFound
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME, Checkpoint
from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.checkpoints.iebin import CERTIFICATE_NAME, IebinIndex, Progress, quiet
from clocher_runtime.convert.q4_entries import plane_hashes
from clocher_runtime.convert.rounding import row_pieces
from clocher_runtime.convert.tied import tied
from clocher_runtime.convert.to_iebin import open_source
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.plane_index import Sealed, check_hashes, check_padding
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, checked_name, fields
from clocher_runtime.models.spec import HEAD

_DOCUMENT = Sealed(
    "iebin.certificate",
    1,
    "convert the model again with --verify, or update Clocher",
    "tensors",
    {"clocher": str, "date": str, "identical": int, "model": dict, "source": dict},
)
_TENSOR: dict[str, type] = {
    **dict.fromkeys(("name", "compared"), str),
    **dict.fromkeys(("source", "stored"), dict),
    "shape": list,
    "identical": bool,
}
_DECODED_AT_ONCE = 16 << 20


def write_certificate(
    source: Checkpoint, model_dir: Path, progress: Progress = quiet
) -> tuple[int, int]:
    """Write the certificate of a model whose hashes were checked; return (identical, all) tensors.

    Raises FormatError if a tensor of the same format has other bytes; ModelChanged, OSError.
    """
    model = open_checkpoint(model_dir)
    found, done = [], 0
    for name in model.names:
        found.append(_compared(name, source.tensor(name, verify=True), model))
        done += source.tensors[name].nbytes
        source.release()
        model.release()
        progress(done, name)
    source.check_unchanged()
    model.check_unchanged()
    identical = sum(each["identical"] for each in found)
    document = IebinIndex(model_dir / JSON_NAME).document
    files = [
        {"file": f.path.name, "nbytes": f.nbytes, "mtime_ns": f.path.stat().st_mtime_ns}
        for f in source.files
    ]
    path = str(source.path.absolute())
    head = {
        "clocher": version("clocher"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "identical": identical,
        "model": {"file": JSON_NAME, "sha256": document["sha256"]},
        "source": {"path": path, "kind": source.kind, "files": files},
    }
    write_file(model_dir / CERTIFICATE_NAME, _DOCUMENT.text(head, found))
    return identical, len(found)


class Checked(NamedTuple):
    """What a check of a certificate found."""

    tensors: int  # how many it lists
    identical: int  # of how many it says that their values are those of the source, bit for bit
    source: Path | None  # the source that was compared, too; None: it is not where it was
    problems: tuple[str, ...]  # a line for each difference


def check_certificate(
    model_dir: Path, source: Path | None = None, progress: Progress = quiet
) -> Checked:
    """Recompute a certificate's hashes, of the model and, if there, `source` (default: its own)."""
    document = read_certificate(model_dir)
    origin, index = document["source"], IebinIndex(model_dir / JSON_NAME)
    model = open_checkpoint(model_dir)
    problems = []
    if document["model"]["sha256"] != index.document["sha256"]:
        problems.append(f"{JSON_NAME}: not the one that was certified")
    path = source or Path(origin["path"])
    was: Checkpoint | None = None
    if source or path.exists():
        try:
            was = open_torch_bin(path) if origin["kind"] == "bin" else open_source(path)
            if HEAD not in {each["name"] for each in document["tensors"]}:
                was = tied(was)  # as it was converted
        except ModelError as error:
            if source:
                raise
            problems.append(f"source: {error}")
    listed = {each["name"]: each for each in document["tensors"]}
    problems += [f"{name}: not in the certificate" for name in model.names if name not in listed]
    done = 0
    for name, each in listed.items():
        problems += _difference(model, each, "stored")
        if was:
            problems += _difference(was, each, "source")
        done += model.tensors[name].nbytes if name in model.tensors else 0
        progress(done, name)
    regions = [region for entry in index.entries for region in entry.regions.values()]
    checks = [checkpoint.check_unchanged for checkpoint in (model, was) if checkpoint]
    checks += [
        partial(check_padding, regions, {"bin": file})
        for file in model.files
        if file.path.name == BIN_NAME
    ]
    for check in checks:
        try:
            check()
        except (FormatError, ModelChanged) as error:
            problems.append(str(error))
    identical = sum(each["identical"] for each in listed.values())
    return Checked(len(listed), identical, path if was else None, tuple(problems))


def read_certificate(model_dir: Path) -> dict[str, Any]:
    """Return a model's certificate; FormatError, UnsupportedModel or ModelNotFound."""
    path = model_dir / CERTIFICATE_NAME
    if not os.path.lexists(path):
        raise ModelNotFound(
            f"{path}: no such file; `clocher convert MODEL {shlex.quote(str(model_dir))} --verify` "
            "writes it"
        )
    document = _DOCUMENT.read(read_bytes(path, MAX_JSON_BYTES), str(path))
    fields(document["model"], f"{path}: model", {"file": str, "sha256": str})
    fields(document["source"], f"{path}: source", {"path": str, "kind": str, "files": list})
    tensors = []
    for number, value in enumerate(document["tensors"]):
        where = f"{path}: tensors[{number}]"
        item = fields(value, where, _TENSOR)
        for side in ("source", "stored"):
            fields(item[side], f"{where}: {side}", {"format": str, "planes": dict})
        tensors.append(item | {"name": checked_name(item["name"], where)})
    return document | {"tensors": tensors}


def _compared(name: str, before: QuantTensor, model: Checkpoint) -> dict[str, Any]:
    hashes = plane_hashes(before)
    stored = {"format": model.tensors[name].format.name, "planes": dict(model.hashes[name])}
    same = before.format.name == stored["format"]
    if same and hashes != stored["planes"]:
        raise FormatError(
            f"{model.path}: tensor {name!r}: its bytes are not those of the source, though its "
            f"format is ({stored['format']}); convert the model again"
        )
    return {
        "name": name,
        "shape": list(before.shape),
        "source": {"format": before.format.name, "planes": hashes},
        "stored": stored,
        "compared": "bytes" if same else "values",
        "identical": same or same_values(before, model.tensor(name)),
    }


def same_values(one: QuantTensor, other: QuantTensor) -> bool:
    """Return whether two tensors of one shape decode to the same fp32 numbers, bit for bit."""
    return all(
        np.array_equal(a.decode().view(np.uint32), b.decode().view(np.uint32))
        for a, b in row_pieces(one, other, elements=_DECODED_AT_ONCE)
    )


def _difference(checkpoint: Checkpoint, line: Mapping[str, Any], side: str) -> list[str]:
    """Return the first difference of a tensor from what a line says of it, [] without one."""
    name, shape, listed = line["name"], line["shape"], line[side]
    try:
        tensor = checkpoint.tensor(name)
        found = (list(tensor.shape), tensor.format.name, set(tensor.planes))
        if found != (shape, listed["format"], set(listed["planes"])):
            raise FormatError(
                f"{tensor.format.name} {list(tensor.shape)}, certified {listed['format']!r:.40} "
                f"{shape!r:.80}"
            )
        check_hashes(tensor.planes, listed["planes"], "", "not what was certified")
    except ModelError as error:
        return [f"{name}: {side}: {error}"]
    finally:
        checkpoint.release()
    return []
