"""The models to judge: a directory, or a manifest over the reference."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Int4, Int8
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.iebin import JSON_NAME
from clocher_runtime.convert.q4.map import load_q4_map
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, parse_object
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.quality.evaluate import Record
from clocher_runtime.quantize.job import quantised_checkpoint

MANIFEST = "q4_manifest.json"
"""Records, beside an IEBIN, what `clocher quantize` did to each tensor, and how good it is."""

Records = Mapping[str, Record]


def open_candidate(
    path: Path, reference: Checkpoint, precision: str | None = None, threads: int = 1
) -> Model:
    """Open a model to judge: a directory, with hashes checked, or a manifest for `reference`."""
    if path.is_file():
        checkpoint = quantised_checkpoint(reference, load_q4_map(path), threads)
    else:
        checkpoint = open_checkpoint(path, verify=True)
    return load_model(checkpoint, precision)


def records_by_model(models: Sequence[Path], manifests: Sequence[Path]) -> dict[Path, Records]:
    """Return manifests' records by model; an IEBIN names its manifest by SHA-256."""
    given = {sha256(data := _read(path)).hexdigest(): (path, data) for path in manifests}
    found: dict[Path, Records] = {}
    used = set()
    for model in models:
        if model.is_file():
            found[model] = records_of(parse_object(_read(model), str(model)))
        elif digest := _manifest_digest(model):
            beside = model / MANIFEST
            if digest in given:
                manifest, data = given[digest]
                used.add(digest)
            elif beside.is_file() and sha256(data := _read(beside)).hexdigest() == digest:
                manifest = beside
            else:
                continue
            found[model] = records_of(parse_object(data, str(manifest)))
    for digest, (manifest, _) in given.items():
        if digest not in used:
            raise UsageError(
                f"--manifest {manifest}: no --model is an IEBIN that was converted with it; leave "
                "it out, or give the manifest as the --model"
            )
    return found


def records_of(manifest: Mapping[str, Any]) -> dict[str, Record]:
    """Return a manifest's valid records; tensors without one count as rounded, the strictest."""
    tensors = manifest.get("tensors")
    found = {}
    for entry in tensors if isinstance(tensors, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        errors = entry.get("err")
        known = errors if isinstance(errors, dict) else {}
        method = entry.get("method")
        found[entry["name"]] = Record(
            method if isinstance(method, str) else "rtn",
            _number(known.get("out_nmse")),
            _number(known.get("out_nmse_rtn")),
        )
    return found


def records_of_gptq(checkpoint: Checkpoint) -> dict[str, Record]:
    """Return the records of a GPTQ checkpoint, or its IEBIN conversion, by its config.json."""
    settings = checkpoint.config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "gptq":
        return {}
    packed = (n for n, t in checkpoint.tensors.items() if isinstance(t.format, Int4 | Int8))
    return {name: Record("gptq") for name in packed}


def _manifest_digest(directory: Path) -> str:
    """Return the SHA-256 of the manifest that an IEBIN was made with, or ""."""
    path = directory / JSON_NAME
    if not path.is_file():
        return ""
    source = parse_object(_read(path), str(path)).get("source")
    manifest = source.get("q4_map") if isinstance(source, dict) else None
    digest = manifest.get("sha256") if isinstance(manifest, dict) else None
    return digest if isinstance(digest, str) else ""


def _read(path: Path) -> bytes:
    return read_bytes(path, MAX_JSON_BYTES)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
