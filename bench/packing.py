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
from pathlib import Path
from statistics import median

import click
import numpy as np
from rich.table import Table

from bench.measure import Rows, interleave, machine, print_table, ratio, write_json
from clocher_kernels.errors import ClocherError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.models.rewrite import takes_int8
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


def measure(tensor: QuantTensor, root: Path, rounds: int) -> Rows:
    """Return a row for each way to get the tiles of a tensor."""
    layout = layout_of("pack", tensor.format)
    cache = TileCache(root, 1 << 40)
    key = key_of(layout, tensor, tile_pack.VERSION)
    source = np.concatenate([p.reshape(-1).view(np.uint8) for p in tensor.planes.values()])
    touched = np.zeros_like(source)
    tiles = tile_pack.pack(layout, tensor).data
    cache.write(key, tiles)

    def copy() -> None:
        allocate(source.nbytes)[:] = source

    def copy_again() -> None:
        touched[:] = source

    def read() -> None:
        if not cache.read(key_of(layout, tensor, tile_pack.VERSION), allocate(tiles.nbytes)):
            raise RuntimeError("the cache lost a file")

    ways: dict[str, Callable[[], object]] = {
        "pack": lambda: tile_pack.pack(layout, tensor),
        "copy": copy,
        "copy, memory in use": copy_again,
        "hash": lambda: key_of(layout, tensor, tile_pack.VERSION),
        "read": read,
    }

    def rate(way: Callable[[], object]) -> float:
        start = time.perf_counter()
        way()
        return tensor.nbytes / (time.perf_counter() - start) / 1e9

    found = interleave({name: lambda way=way: rate(way) for name, way in ways.items()}, rounds)
    rows: Rows = []
    for name, speeds in found.items():
        over = ratio(speeds, found["pack"])
        rows.append(
            {
                "op": name,
                "format": tensor.format.name,
                "shape": list(tensor.shape),
                "gbps": median(speeds),
                "samples": speeds,
                "over_pack": over.value,
                "over_pack_95": [over.low, over.high],
            }
        )
    return rows


@click.command(help=__doc__)
@click.option("--model-dir", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(model_dir: Path | None, rounds: int, out: Path | None) -> None:
    """Measure and print."""
    rows: Rows = []
    try:
        model = load_model(open_checkpoint(model_dir or embedded_model()))
        with tempfile.TemporaryDirectory() as root:
            for tensor in largest(model):
                rows += measure(tensor, Path(root), rounds)
    except ClocherError as error:
        raise click.ClickException(str(error)) from None
    table = Table("format", "shape", "way", "GB/s", "over packing", title=machine())
    for row in rows:
        low, high = row["over_pack_95"]
        shape = " x ".join(map(str, row["shape"]))
        over = f"{row['over_pack']:.2f}x [{low:.2f}, {high:.2f}]"
        table.add_row(row["format"], shape, row["op"], f"{row['gbps']:.2f}", over)
    print_table(table)
    if out:
        write_json(out, rows)


if __name__ == "__main__":
    main()
