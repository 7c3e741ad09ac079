"""Compile the suite's kernels without a GPU, into an archive for `--cache` of the suite.

    python -m bench.gpu.kernels build/kernels.tar.xz [CAPABILITY, 90 if not given] [TEXT]

Needs the Python and the Triton wheel of the GPU's machine: Triton finds a kernel by a hash over its
sources and libtriton.so. TEXT filters items by name.
"""

import hashlib
import io
import json
import multiprocessing
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SUFFIX = ".tar.xz"
_SMS, _SHORT, _TIGHT = 132, 16, 9
_NEEDED = (".cubin", ".json")  # the rest (PTX, the IRs, the source) is for debugging


def tar(files: Iterable[tuple[str, Path]], preset: int = 1) -> bytes:
    """Return an xz archive of files by their names in it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=preset) as packed:
        for name, path in files:
            packed.add(path, name)
    return content.getvalue()


@dataclass(frozen=True)
class Cache:
    """Triton's cache folder in this run, and its initial content."""

    path: Path
    said: str
    known: frozenset[Path]

    def files(self, known: bool = False) -> list[tuple[str, Path]]:
        """Return (name in an archive, file) of what a launch needs: new files, or all."""
        found = [f for f in self.path.rglob("[!.]*") if f.suffix in _NEEDED]
        found = [f for f in found if known or f not in self.known]
        found.sort(key=lambda file: (file.suffix, file.name, file))  # similar files compress best
        return [(f"cache/{self.path.name}/{file.relative_to(self.path)}", file) for file in found]


def use(archives: Sequence[Path]) -> Cache:
    """Let this process and its children use archived kernels; ValueError if one is no .tar.xz."""
    if not archives[0].name.endswith(SUFFIX):
        raise ValueError(f"{archives[0]}: expected a name that ends in {SUFFIX}")
    triton = metadata.distribution("triton")
    with Path(str(triton.locate_file("triton/_C/libtriton.so"))).open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()[:_SHORT]
    folder = archives[0].with_name(archives[0].name.removesuffix(SUFFIX)).resolve()
    path = folder / sha
    path.mkdir(parents=True, exist_ok=True)
    for archive in filter(Path.exists, archives):
        try:
            with tarfile.open(archive) as packed:
                for member in packed:
                    top, _, name = member.name.partition("/")
                    if top == "cache" and not (folder / name).exists():
                        packed.extract(member.replace(name=name), folder, filter="data")
        except tarfile.TarError as error:
            raise ValueError(f"{archive} cannot be unpacked: {error}") from None
    groups = list(path.glob("*/__grp__*.json"))
    for group in groups:  # it has absolute paths; a missing file makes it corrupt
        noted = json.loads(group.read_text(encoding="utf-8"))
        files = {name: group.parent / name for name in noted["child_paths"]}
        noted["child_paths"] = {name: str(file) for name, file in files.items() if file.exists()}
        group.write_text(json.dumps(noted), encoding="utf-8")
    os.environ["TRITON_CACHE_DIR"] = str(path)
    others = ", ".join(sorted(p.name for p in folder.iterdir() if p != path))
    said = f"{len(groups)} kernels compiled ahead, for Triton {triton.version}, libtriton.so {sha}"
    said += f"; others are for libtriton.so {others}" if others else ""
    return Cache(path, said, frozenset(path.rglob("*")))


def main(out: Path, capability: int = 90, only: str = "") -> int:
    """Compile with one process per CPU; return the exit code."""
    os.environ.pop("TRITON_INTERPRET", None)
    used, count = use([out]), os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        shards = [(capability, shard, count, only) for shard in range(count)]
        failed = [line for lines in pool.starmap(_compile_shard, shards) for line in lines]
    out.write_bytes(tar(used.files(known=True), _TIGHT))
    print(*failed, f"{len(failed)} failed; {use([out]).said}", sep="\n")
    return 1 if failed else 0


def _compile_shard(capability: int, shard: int, shards: int, only: str) -> list[str]:
    """Compile every n-th item's launches; return the failures."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.runtime import driver  # type: ignore[import-untyped]

    from clocher_kernels.cuda.executor import compile_side_by_side

    # Stands in for Triton's CUDA driver: enough to compile, not to launch.
    methods = {"target": GPUTarget("cuda", capability, 32), "device": 0}
    made = {f"get_current_{name}": lambda value=value: value for name, value in methods.items()}
    driver.set_active(SimpleNamespace(**made, get_current_stream=lambda device: 0))
    failed = []
    for index, (name, lowered) in enumerate(_items(capability)):
        if index % shards == shard and only in name:
            try:
                compile_side_by_side(lowered())
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return failed


def _items(capability: int) -> Iterator[tuple[str, Callable[[], Sequence[Any]]]]:
    """Return all launches by name: the op table, its real sizes, whole models."""
    from bench.gpu import steps
    from bench.gpu.parity import Trial, activations
    from bench.gpu.setting import Setting, Timer
    from bench.ops.shapes import real_cases
    from clocher_kernels.cuda.launch import Device
    from clocher_kernels.ops import OPS

    made: Any = (Timer(dry=True), None)
    cpu, meta = (Setting(Device(p, capability, _SMS), *made) for p in ("cpu", "meta"))
    table = [(spec, case) for spec in OPS.values() for case in spec.cases]
    for spec, case in [*table, *real_cases()]:
        for act in activations(spec, case):
            trial = partial(Trial, cpu, spec, case, act)
            yield f"{spec.name}-{case.id}", partial(_launches, trial)
    for shape in steps.SHAPES:
        yield shape.label, partial(steps.launches, meta, shape)


def _launches(trial: Callable[[], Any]) -> Sequence[Any]:
    made: Sequence[Any] = trial().launches()
    return made


if __name__ == "__main__":
    words = [*sys.argv[1:], "90"] if len(sys.argv) == 2 else sys.argv[1:]
    sys.exit(main(Path(words[0]), int(words[1]), " ".join(words[2:])))
