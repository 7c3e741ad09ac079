"""Compile the kernels that the suite will launch, on a machine without a GPU.

    python -m bench.gpu.precompile --arch 90 --out build/kernels.tar.xz

Run it with the Python and the Triton wheel of the GPU's machine: no other Triton finds what it
compiles: it looks a kernel up by a hash over its own sources and libtriton.so. The archive has what
a launch needs of each kernel. It is unpacked beside itself, build/kernels/SHA/ for each Triton,
with a `key.json` that says for which. `python -m bench.gpu_suite --cache build/kernels.tar.xz` says
whether they are of use.
"""

import hashlib
import json
import multiprocessing
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from bench.gpu.record import Row, tar, write_json, write_whole

KEY, SUFFIX = "key.json", ".tar.xz"
_SHORT, _TIGHT = 16, 9
# What a launch needs of an entry; the rest (PTX, the IRs, the source) is for people.
_NEEDED = (".cubin", ".json")
_GROUP = "__grp__"


@dataclass(frozen=True)
class Cache:
    """A folder that Triton reads and writes in this run.

    Attributes:
        path: the folder.
        said: whether anything in it was made ahead, for the report.
        known: what was in it at first.
    """

    path: Path
    said: str
    known: frozenset[Path] = frozenset()

    def files(self) -> list[tuple[str, Path]]:
        """Return what a later run needs and was not there: name in an archive, and file."""
        found = [f for f in self.path.rglob("[!.]*") if f.suffix in _NEEDED and f not in self.known]
        if not {f.name for f in found} - {KEY}:
            return []
        # Those of one kernel are alike, so they pack best side by side.
        found.sort(key=lambda file: (file.suffix, file.name, file))
        return [(f"cache/{self.path.name}/{file.relative_to(self.path)}", file) for file in found]


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


def use(archives: Sequence[Path]) -> Cache:
    """Let this process and its children use the kernels that are for this Triton.

    Args:
        archives: packed by `Cache.files`; the first one names the folder that all are unpacked to.
            One that is not there is empty.

    Raises:
        ValueError: the name of the first does not end in .tar.xz, or one is no archive.
    """
    here = key()
    if not archives[0].name.endswith(SUFFIX):
        raise ValueError(f"{archives[0]}: expected a name that ends in {SUFFIX}")
    folder = archives[0].with_name(archives[0].name.removesuffix(SUFFIX)).resolve()
    for archive in archives:
        _unpack(archive, folder)
    path = folder / here["libtriton_sha256"][:_SHORT]
    kernels = len(list(path.glob(f"*/{_GROUP}*.json")))
    others = [json.loads(p.read_text()) for p in folder.glob(f"*/{KEY}") if p.parent != path]
    _settle(path)
    known = frozenset(path.rglob("*")) if kernels else frozenset()
    write_json(path / KEY, here)
    os.environ["TRITON_CACHE_DIR"] = str(path)
    name = f"Triton {here['triton']} with libtriton.so {path.name}"
    if kernels:
        return Cache(path, f"{kernels} kernels compiled ahead are used: for {name}", known)
    made_for = ", ".join(f"{o['triton']} with {o['libtriton_sha256'][:_SHORT]}" for o in others)
    why = f"those in {folder.name} are for Triton {made_for}" if others else "none came along"
    return Cache(path, f"no kernel is compiled ahead: {why}; here is {name}")


def _unpack(archive: Path, folder: Path) -> None:
    """Add the kernels of an archive to a folder."""
    if not archive.exists():
        return
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                top, _, name = member.name.partition("/")
                if top == "cache" and not (folder / name).exists():
                    packed.extract(member.replace(name=name), folder, filter="data")
    except tarfile.TarError as error:
        raise ValueError(f"{archive} cannot be unpacked: {error}") from None


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
            group.write_text(json.dumps({**noted, "child_paths": moved}), encoding="utf-8")


@click.command(help=__doc__)
@click.option("--arch", type=int, default=90, show_default=True, help="90 for sm_90")
@click.option("--sms", type=int, default=132, show_default=True, help="multiprocessors of the GPU")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the .tar.xz to write")
@click.option("--jobs", type=click.IntRange(1), help="processes; default: one for each CPU")
@click.option("--only", multiple=True, help="only kernels of items whose id contains this")
def main(arch: int, sms: int, out: Path, jobs: int | None, only: tuple[str, ...]) -> None:
    """Compile in several processes and say what there is now."""
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        used = use([out])
    except ValueError as error:
        raise click.UsageError(f"--out: {error}") from None
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
    write_whole(out, tar(replace(used, known=frozenset()).files(), _TIGHT))
    click.echo(f"{use([out]).said}; {out} has {out.stat().st_size / (1 << 20):.1f} MiB")
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
