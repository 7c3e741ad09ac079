"""Compile the kernels that the suite will launch, on a machine without a GPU.

    python -m bench.gpu.precompile --arch 90 --out build/kernels

Run it with the Python and the Triton wheel of the GPU's machine: no other Triton finds what it
compiles: it looks a kernel up by a hash over its own sources and libtriton.so. A folder of caches
has one for each: FOLDER/SHA/ with a `key.json` that says what it is for, and Triton's entries.
`python -m bench.gpu_suite --cache build/kernels` says whether they are of use.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from bench.gpu.record import Row, write_json

KEY = "key.json"
_SHORT = 16
# What a launch needs of an entry; the rest (PTX, the IRs, the source) is for people.
_NEEDED = (".cubin", ".json")
_GROUP = "__grp__"


@dataclass(frozen=True)
class Cache:
    """A folder that Triton reads and writes in this run.

    Attributes:
        path: the folder.
        said: whether anything in it was made ahead, for the report.
    """

    path: Path
    said: str

    def files(self) -> Iterator[tuple[str, Path]]:
        """Return what a later run needs: name in an archive, and file."""
        for file in sorted(self.path.rglob("*")):
            if file.suffix in _NEEDED and not file.name.startswith("."):
                yield f"cache/{self.path.name}/{file.relative_to(self.path)}", file


def key() -> Row:
    """Return what compiled kernels depend on: version and SHA-256 of Triton's library.

    Raises:
        FileNotFoundError: Triton is not installed.
    """
    try:
        found = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        raise FileNotFoundError("triton is not installed") from None
    library = Path(str(found.locate_file("triton/_C/libtriton.so")))
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"triton": found.version, "libtriton_sha256": digest}


def use(folder: Path) -> Cache:
    """Let this process and its children use the cache of a folder that is for this Triton.

    There is an empty one if there is none.
    """
    here = key()
    path = folder.resolve() / here["libtriton_sha256"][:_SHORT]
    kernels = len(list(path.glob(f"*/{_GROUP}*.json")))
    others = [json.loads(p.read_text()) for p in folder.glob(f"*/{KEY}") if p.parent != path]
    _settle(path)
    write_json(path / KEY, here)
    os.environ["TRITON_CACHE_DIR"] = str(path)
    name = f"Triton {here['triton']} with libtriton.so {path.name}"
    if kernels:
        return Cache(path, f"{kernels} kernels compiled ahead are used: for {name}")
    made_for = ", ".join(f"{o['triton']} with {o['libtriton_sha256'][:_SHORT]}" for o in others)
    why = f"those in {folder.name} are for Triton {made_for}" if others else "none came along"
    return Cache(path, f"no kernel is compiled ahead: {why}; here is {name}")


def _settle(path: Path) -> None:
    """Correct the absolute paths that Triton notes in its entries, after a cache has moved.

    An entry counts as corrupt if a file that it names is missing, so those left behind are not.
    """
    for group in path.glob(f"*/{_GROUP}*.json"):
        noted = json.loads(group.read_text(encoding="utf-8"))
        children = noted["child_paths"]
        files = {name: group.parent / name for name in children}
        moved = {name: str(file) for name, file in files.items() if file.exists()}
        if moved != children:
            write_json(group, {**noted, "child_paths": moved})


@click.command(help=__doc__)
@click.option("--arch", type=int, default=90, show_default=True, help="90 for sm_90")
@click.option("--sms", type=int, default=132, show_default=True, help="multiprocessors of the GPU")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder of caches")
@click.option("--jobs", type=click.IntRange(1), help="processes; default: one for each CPU")
@click.option("--only", multiple=True, help="only kernels of items whose id contains this")
def main(arch: int, sms: int, out: Path, jobs: int | None, only: tuple[str, ...]) -> None:
    """Compile in several processes and say what there is now."""
    os.environ.pop("TRITON_INTERPRET", None)
    used = use(out)
    count = jobs or os.cpu_count() or 1
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        shards = [(arch, sms, shard, count, only) for shard in range(count)]
        done = pool.starmap(_compile_shard, shards)
    launches, failed = sum(d[0] for d in done), [line for d in done for line in d[1]]
    for line in failed:
        click.echo(line, err=True)
    seconds = time.monotonic() - began
    click.echo(f"{launches} launches compiled, {len(failed)} failed, {seconds:.0f} s: {used.path}")
    click.echo(use(out).said)
    raise SystemExit(1 if failed else 0)


class _Driver:
    """Stands in for Triton's CUDA driver where there is none: enough to compile, not to launch."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_shard(
    arch: int, sms: int, shard: int, shards: int, only: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Compile every n-th item's launches; return how many, and what could not be."""
    import torch
    from triton.runtime import driver

    from clocher_kernels.cuda.executor import compile_side_by_side

    driver.set_active(_Driver(arch))
    torch.set_grad_enabled(False)
    done, failed = 0, []
    for index, (name, lowered) in enumerate(_items(arch, sms)):
        if index % shards != shard or (only and not any(text in name for text in only)):
            continue
        try:
            launches = lowered()
            compile_side_by_side(launches)
            done += len(launches)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return done, failed


def _items(arch: int, sms: int) -> Iterator[tuple[str, Any]]:
    """Return name and launches of what the suite's parts do; large tensors are without memory."""
    from bench.gpu import attention, decode, generate, moe, parity, passes, products
    from bench.gpu.setting import DryTimer, Setting
    from bench.gpu.shapes import experts, matrices
    from clocher_kernels.cuda.launch import Device

    class RealShapes(DryTimer):
        """Times nothing, on the shapes of a run that does."""

        dry = False

    cpu, meta = (
        Setting(Device(place, arch, sms), RealShapes(), 1 << 20, None)  # type: ignore[arg-type]
        for place in ("cpu", "meta")
    )
    yield from parity.launches(cpu)
    for matrix in matrices(dry=False):
        for name in matrix.formats:
            lowered = partial(products.launches, meta, matrix, name)
            yield f"{matrix.model}-{matrix.n}x{matrix.k}-{name}", lowered
    for shape in experts(dry=False):
        for m in shape.tokens:
            yield f"{shape.model}-moe-m{m}", partial(moe.launches, meta, shape, m)
    yield from attention.launches(meta)
    for model in decode.PRECISIONS:
        for batch in model.batches:
            yield f"{model.label}-b{batch}", partial(decode.launches, meta, model, batch)
    for model in generate.MODELS:
        for chunk in generate.CHUNKS:
            yield f"{model.label}-chunk{chunk}", partial(generate.launches, meta, model, chunk)
    for model in passes.MODELS:
        yield f"{model.label}-passes", partial(passes.launches, meta, model)


if __name__ == "__main__":
    main()
