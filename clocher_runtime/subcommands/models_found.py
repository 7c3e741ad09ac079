"""Local models, described from their headers without reading weights."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels.errors import ClocherError, UnsupportedModel
from clocher_kernels.guards import available
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.gguf.checkpoint import models_among
from clocher_runtime.checkpoints.hf.hub import HubName, repositories, revisions
from clocher_runtime.checkpoints.locate import EMBEDDED, embedded_model, holds_model, listed
from clocher_runtime.command.loading import converses
from clocher_runtime.engine.footprint import footprint, kv_bytes_per_token
from clocher_runtime.engine.load import Destined, bytes_per_token, describe, destined, label
from clocher_runtime.models.spec import ModelSpec

MOST_MODELS = 1000
_DEPTH, _MOST_ENTRIES, _PHRASE = 3, 20_000, 120
_CONTEXTS = (2048, 4096, 8192, 32768, 131072)
_UNKNOWN = dict.fromkeys(("family", "parameters", "format", "memory", "fits", "chat"))


class Found(NamedTuple):
    """A possible model; `place` is "embedded", "Hub", "llama.cpp" or "directory"."""

    name: str
    place: str
    path: Path


def find(directories: Sequence[Path], everywhere: bool = True) -> list[Found]:
    """Return the models of this machine, at most `MOST_MODELS`."""
    seen: dict[str, Found] = {}
    for found in islice(_all(directories, everywhere), MOST_MODELS):
        seen.setdefault(os.path.realpath(found.path), found)
    return [*seen.values()]


def look(found: Found) -> dict[str, Any]:
    """Describe a model; values are None where a model that cannot run leaves them unknown."""
    about = {**found._asdict(), "path": str(found.path), **_UNKNOWN, "disk": _size(found.path)}
    try:
        return about | _read(found.path)[0] | {"runs": "yes"}
    except Exception as error:  # any error of a hostile directory; the others are still listed
        why = "no: " if isinstance(error, UnsupportedModel) else "damaged: "
        why += "" if isinstance(error, ClocherError) else f"{type(error).__name__}: "
        return about | {"runs": why + _phrase(error, found.path)}


def _read(path: Path) -> tuple[dict[str, Any], Checkpoint, ModelSpec, dict[str, Destined]]:
    checkpoint = open_checkpoint(path)
    spec, needs = describe(checkpoint)
    weights = destined(spec, needs, checkpoint)
    memory, left = footprint(spec, weights).total, available()
    known = {
        "family": spec.family,
        "parameters": sum(need.elements for need in needs.values()),
        "format": label({n: (w.format, w.nbytes) for n, w in weights.items() if w.format}),
        "memory": memory,
        "fits": None if left is None else memory <= left,
        "chat": converses(path, checkpoint.tokenizer_config.get("chat_template")),
    }
    return known, checkpoint, spec, weights


def details(name: str, path: Path) -> dict[str, Any]:
    """Describe one model in full; raises ModelError if damaged or unsupported."""
    known, checkpoint, spec, weights = _read(path)
    formats: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.tensors.values():
        row = formats.setdefault(tensor.format.name, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += tensor.nbytes
    contexts = [n for n in _CONTEXTS if n <= spec.max_positions] or [spec.max_positions]
    return {
        "name": name,
        "path": str(checkpoint.path),
        **{key: known[key] for key in ("family", "parameters", "format", "chat")},
        "layers": spec.num_layers,
        "longest_context": spec.max_positions,
        "stored": formats,
        "bytes_per_token": bytes_per_token(spec, {n: w.nbytes for n, w in weights.items()}),
        "kv_bytes_per_token": kv_bytes_per_token(spec),
        "memory": {str(n): footprint(spec, weights, n).total for n in contexts},
        "available": available(),
    }


def _all(directories: Sequence[Path], everywhere: bool) -> Iterator[Found]:
    if everywhere:
        yield Found(EMBEDDED, "embedded", embedded_model())
        yield from _of_the_hub()
        # llama.cpp's download directory. Source: its common/common.cpp.
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        llama = Path(os.environ.get("LLAMA_CACHE") or os.path.join(base, "llama.cpp"))
        yield from _below(llama, "llama.cpp", _DEPTH, [_MOST_ENTRIES])
    for directory in (*([Path("models")] * everywhere), *directories):
        yield from _below(directory, "directory", _DEPTH, [_MOST_ENTRIES])


def _of_the_hub() -> Iterator[Found]:
    for repo, folder in repositories().items():
        refs = revisions(folder)
        try:
            commits = sorted(os.listdir(folder / "snapshots"))
        except OSError:
            commits = []
        for commit in commits:
            names = sorted(ref for ref, target in refs.items() if target == commit)
            revision = "main" if "main" in names else names[0] if names else commit
            hub = HubName(repo, revision)
            yield from _files_of(str(hub), "Hub", folder / "snapshots" / commit)
        if not commits and any(folder.glob("[!.]*")):  # not only the lock of a failed fetch
            yield Found(repo, "Hub", folder)


def _below(directory: Path, place: str, depth: int, left: list[int]) -> Iterator[Found]:
    """Yield the models below a directory; `left` counts the entries that may still be read."""
    if holds_model(directory, adapters=True):
        yield from _files_of(str(directory), place, directory)
        return
    if depth == 0:
        return
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry, _ in zip(entries, range(left[0]), strict=False)]
    except OSError:
        return
    left[0] -= len(names)
    for name in sorted(names):
        inner = directory / name
        if not name.startswith(".") and os.path.isdir(inner):
            yield from _below(inner, place, depth - 1, left)


def _files_of(name: str, place: str, directory: Path) -> list[Found]:
    try:
        files = models_among(listed(directory))
    except ClocherError:
        files = []
    if len(files) < 2:
        return [Found(name, place, directory)]
    return [Found(f"{name}/{file}", place, directory / file) for file in files]


def _size(path: Path) -> int:
    files = islice(path.rglob("*"), _MOST_ENTRIES) if path.is_dir() else [path]
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file))


def _phrase(error: Exception, path: Path) -> str:
    text = str(error).removeprefix(str(path)).lstrip("/: ") or type(error).__name__
    text = text.split("; ")[0]
    return text if len(text) <= _PHRASE else f"{text[:_PHRASE]}..."
