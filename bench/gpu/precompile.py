"""Compile the kernels that the suite will launch, on a machine without a GPU.

    python -m bench.gpu.precompile --arch 90 --out build/kernels

Run it with the Python and the Triton wheel of the GPU's machine: no other Triton finds what it
compiles. `python -m bench.gpu_suite --cache build/kernels` says whether they are of use.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.gpu import cache


@click.command(help=__doc__)
@click.option("--arch", type=int, default=90, show_default=True, help="90 for sm_90")
@click.option("--sms", type=int, default=132, show_default=True, help="multiprocessors of the GPU")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="folder of caches")
@click.option("--jobs", type=click.IntRange(1), help="processes; default: one for each CPU")
@click.option("--only", multiple=True, help="only kernels of items whose id contains this")
def main(arch: int, sms: int, out: Path, jobs: int | None, only: tuple[str, ...]) -> None:
    """Compile in several processes and say what there is now."""
    os.environ.pop("TRITON_INTERPRET", None)
    used = cache.use(out)
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
    click.echo(cache.use(out).said)
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
    from bench.gpu import attention, decode, generate, moe, parity, real_shapes
    from bench.gpu.setting import Setting
    from bench.gpu.shapes import experts, matrices
    from bench.gpu.timer import DryTimer
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
            lowered = partial(real_shapes.launches, meta, matrix, name)
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


if __name__ == "__main__":
    main()
