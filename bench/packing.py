"""How fast weights are packed into tiles, beside copying them and beside the tile cache.

    python -m bench.packing [--model-dir DIR] [--rounds N] [--json FILE]

For each format of the model, its largest integer tensor, read from the page cache. GB/s are 10^9
stored bytes a second on all CPUs. "copy" writes the same bytes to memory as new as that of the
tiles: much of the time goes into getting that memory from the system. "hash" is what the tile cache
must do before it can look for a file, "read" is hash and file together.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import click
import numpy as np

from bench.measure import ratio
from bench.ops.experiment import FILE, Row, experiment, opened, turns
from clocher_kernels.ops.rewrite import takes_int8
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.load import Model
from cpu_fallback.team.large_pages import allocate
from cpu_fallback.tiles import tile_pack
from cpu_fallback.tiles.layout import layout_of
from cpu_fallback.tiles.tile_cache import TileCache, key_of


def largest(model: Model) -> Iterator[QuantTensor]:
    """Yield the largest tensor of each format that has tiles."""
    found: dict[str, QuantTensor] = {}
    for tensor in model.weights.values():
        if isinstance(tensor, QuantTensor) and takes_int8(tensor.format):
            known = found.get(tensor.format.name)
            if known is None or tensor.nbytes > known.nbytes:
                found[tensor.format.name] = tensor
    yield from found.values()


def ways(tensor: QuantTensor, root: Path) -> dict[str, Callable[[], object]]:
    """Return the ways to get the tiles of a tensor, and what they are compared with."""
    layout = layout_of("pack", tensor.format)
    cache = TileCache(root, 1 << 40)
    source = np.concatenate([p.reshape(-1).view(np.uint8) for p in tensor.planes.values()])
    touched = np.zeros_like(source)
    pack = partial(tile_pack.pack, layout, tensor)
    key = partial(key_of, layout, tensor, tile_pack.VERSION)
    tiles = pack().data
    cache.write(key(), tiles)

    def copy() -> None:
        allocate(source.nbytes)[:] = source

    def copy_again() -> None:
        touched[:] = source

    def read() -> None:
        if not cache.read(key(), allocate(tiles.nbytes)):
            raise RuntimeError("the cache lost a file")

    return {
        "pack": pack,
        "copy": copy,
        "copy, memory in use": copy_again,
        "hash": key,
        "read": read,
    }


def rate(way: Callable[[], object], nbytes: int) -> float:
    """Return 10^9 bytes a second."""
    start = time.perf_counter()
    way()
    return nbytes / (time.perf_counter() - start) / 1e9


@experiment(
    "packing",
    __doc__,
    "format | shape | way | GB/s | over packing",
    "{format} | {shape[0]} x {shape[1]} | {op} | {gbps:.2f} | "
    "{over_pack:.2f}x [{over_pack_95[0]:.2f}, {over_pack_95[1]:.2f}]",
    title="packing",
    rounds=9,
)
@click.option("--model-dir", type=FILE, help="default: the embedded model")
def main(model_dir: Path | None, rounds: int) -> Iterator[Row]:
    """Yield a row for each format of a model and each way to get its tiles."""
    with tempfile.TemporaryDirectory() as root:
        for tensor in largest(opened(model_dir)):
            runs = {n: partial(rate, w, tensor.nbytes) for n, w in ways(tensor, Path(root)).items()}
            found = turns(runs, rounds)
            for name, speeds in found.items():
                over = ratio(speeds, found["pack"])
                yield {
                    "op": name,
                    "format": tensor.format.name,
                    "shape": list(tensor.shape),
                    "gbps": median(speeds),
                    "samples": speeds,
                    "over_pack": over.value,
                    "over_pack_95": [over.low, over.high],
                }


if __name__ == "__main__":
    main()
