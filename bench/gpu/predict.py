"""Predict decode steps of one sequence, also on GPUs that were not measured; no GPU is needed.

    python -m bench.gpu.predict

A step takes its bytes at the bandwidth that reads reach, and for each launch a time in which
nothing is read. Both are fitted to the H200 of docs/cuda.md, which they give within 13 %.
"""

from math import inf
from typing import NamedTuple
from unittest.mock import patch

import click

from bench.gpu import models
from bench.gpu.setting import Setting
from clocher_kernels.cuda import executor
from clocher_kernels.cuda.launch import Device

READ = 0.9
"""Share of the published bandwidth that reads reach."""
LAUNCH_US = {True: 2.9, False: 4.2}
"""Microseconds of a launch with programmatic dependent launch, and without: 1.3 more, what a launch
in a graph costs (Hazy Research, "Look Ma, No Bubbles!", 2025); not measured."""


class Gpu(NamedTuple):
    """Compute capability, multiprocessors and published bandwidth (TB/s)."""

    capability: int
    sms: int
    tbs: float


GPUS = {
    "H200": Gpu(90, 132, 4.8),
    "H100 SXM": Gpu(90, 132, 3.35),
    "A100 80 GB": Gpu(80, 108, 2.04),
    "RTX 4090": Gpu(89, 128, 1.01),
    "L4": Gpu(89, 58, 0.3),
}


def step(shape: models.Shape, gpu: Gpu, context: int) -> tuple[int, int, float]:
    """Return the launches, bytes and predicted microseconds of a greedy step of one token."""
    device = Device("meta", gpu.capability, gpu.sms)
    # Tensors on "meta" have no memory, and nothing runs.
    made = models._made(Setting(device, None, True), shape)  # type: ignore[arg-type]
    config = models.EngineConfig(
        backend="cuda", kv_dtype="bf16", speculate="off", context=context, itl_ms=inf
    )
    with patch.object(executor, "current_device", lambda: device):
        session = models.Session(made, config)  # type: ignore[arg-type]
    launches = len(session.executor.lower((1, 1, context), True))
    size = made.nbytes(1, context)
    return launches, size, size / (gpu.tbs * READ) / 1e6 + launches * LAUNCH_US[device.pdl]


@click.command(help=__doc__)
@click.option("--context", default=1024, show_default=True, help="tokens in the cache")
def main(context: int) -> None:
    """Print a table of all shapes and GPUs."""
    click.echo(f"Predicted tokens per second, one sequence, context {context}:\n")
    click.echo(f"| model | GB | launches | {' | '.join(GPUS)} |\n|{'---|' * (len(GPUS) + 3)}")
    for shape in models.SHAPES:
        found = [step(shape, gpu, context) for gpu in GPUS.values()]
        launches, size, _ = found[0]
        speeds = " | ".join(f"{1e6 / us:.0f}" for _, _, us in found)
        click.echo(f"| {shape.label} | {size / 1e9:.2f} | {launches} | {speeds} |")


if __name__ == "__main__":
    main()
