"""Dense against block-sparse: y = x W^T over sparsities and block shapes.

    python -m bench.block_sparse [--blocks 32x32,16x16] [--inner f32] [--json FILE] [--plot FILE]

Dense and sparse run in turns, each over copies of its weight that together exceed every cache. The
break-even density is where the times of the sparse product, taken as a line in the density, meet
that of the dense one. A plot is drawn if matplotlib is there.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from bench.bandwidth import Reader
from bench.measure import Rows, interleave, machine, print_table, ratio, seconds, write_json
from clocher_kernels.formats import Bsr, parse_format
from clocher_kernels.formats.bsr import INNERS
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.engine.topology import default_threads
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.lanes.isa import CURRENT

_BYTES = 128 << 20
_MAX_COPIES = 256
_DENSE = {"f32": "f32", "f16": "f16", "bf16": "bf16", "int8": "int8_row_bf16"}
_DENSE["int4"] = "int4_sym_g32_f16"


class Product:
    """A step that multiplies the same tokens by copies of one weight.

    Args:
        op: "linear" or "bsr_linear".
        weight: logical [N, K].
        tokens: M.
        threads: size of the team.
    """

    def __init__(self, op: str, weight: QuantTensor, tokens: int, threads: int) -> None:
        n, k = weight.shape
        self.nbytes, self.tokens = weight.nbytes, tokens
        self.copies = min(_MAX_COPIES, -(-_BYTES // weight.nbytes))
        buffers = {
            "x": Buffer((tokens, k), "f32", "M", "input"),
            "y": Buffer((tokens, n), "f32", "M", "output"),
        }
        names = tuple(f"w{i}" for i in range(self.copies))
        calls = tuple(Call(op, {"x": "x", "w": name, "y": "y"}) for name in names)
        planes = weight.planes
        copies = {
            name: QuantTensor(
                weight.shape, weight.format, {key: planes[key].copy() for key in planes}
            )
            for name in names
        }
        plan = Plan(tokens, 1, buffers, {}, names, calls)
        self.executor = CpuExecutor(plan, copies, threads)
        rng = np.random.default_rng(0)
        self.executor.array("x")[...] = rng.standard_normal((tokens, k), dtype=np.float32)

    def seconds(self) -> float:
        """Return the seconds of one product."""
        with self.executor.running():
            return seconds(lambda: self.executor.step(self.tokens, 1)) / self.copies

    def result(self) -> np.ndarray:
        """Return y of the last step."""
        return np.array(self.executor.fetch("y", self.tokens))


def sparse_weight(
    shape: tuple[int, int], block: tuple[int, int], inner: str, sparsity: float
) -> QuantTensor:
    """Return a random weight of which so many blocks are zero."""
    rng = np.random.default_rng(1)
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    kept = np.zeros(grid[0] * grid[1], bool)
    kept[: round(len(kept) * (1 - sparsity))] = True
    mask = np.kron(rng.permutation(kept).reshape(grid), np.ones(block, bool))
    values = rng.standard_normal(shape, dtype=np.float32) * mask[: shape[0], : shape[1]]
    return encode(values, Bsr.for_values(values, block, inner))


def break_even(densities: Sequence[float], times: Sequence[float], dense: float) -> float:
    """Return the density at which sparse takes as long as dense, 0 .. 1."""
    slope, start = np.polyfit(np.asarray(densities), np.asarray(times), 1)
    return float(np.clip((dense - start) / slope, 0, 1)) if slope > 0 else 1.0


def _blocks(
    context: click.Context, option: click.Parameter, value: str
) -> tuple[tuple[int, int], ...]:
    parts = value.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", part) for part in parts):
        raise click.BadParameter(f"{value!r}; expected shapes such as 32x32,16x64")
    sides = [part.split("x") for part in parts]
    return tuple((int(rows), int(columns)) for rows, columns in sides)


def _sparsities(context: click.Context, option: click.Parameter, value: str) -> tuple[float, ...]:
    parts = value.split(",")
    if not all(re.fullmatch("[0-9]{1,2}", part) for part in parts):
        raise click.BadParameter(f"{value!r}; expected whole per cents below 100, such as 0,50,90")
    return tuple(int(part) / 100 for part in parts)


@click.command(help=__doc__)
@click.option("--shape", default="4096x4096", callback=_blocks, show_default=True, help="N x K")
@click.option("--blocks", default="16x16,32x32,64x64,16x64", callback=_blocks, show_default=True)
@click.option("--inner", type=click.Choice(INNERS), default="f32", show_default=True)
@click.option("--sparsity", default="0,50,70,80,90,95", callback=_sparsities, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=default_threads, show_default="all")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a PNG there.")
def main(
    shape: tuple[tuple[int, int], ...],
    blocks: tuple[tuple[int, int], ...],
    inner: str,
    sparsity: tuple[float, ...],
    tokens: int,
    threads: int,
    rounds: int,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure and print."""
    rows = Rows()
    heads = ("block", "sparsity", "us", "GB/s", "of read", "x dense")
    size, setting = shape[0], f"{threads} threads, {CURRENT.name}"
    for block in blocks:
        rows += _compare(size, block, inner, sparsity, tokens, threads, rounds)
    name = f"{size[0]}x{size[1]} {inner}, M={tokens}, {setting}, {machine()}"
    table = Table(*heads, title=f"block-sparse, {name}")
    for row in rows:
        table.add_row(
            row["block"],
            "dense" if row["op"] == "linear" else f"{row['sparsity']:.0%}",
            f"{row['seconds'] * 1e6:.0f}",
            f"{row['gbps']:.1f}",
            f"{row['pct_of_limit']:.0f} %",
            f"{row['speedup']:.2f}" if row["correct"] else "wrong",
        )
    print_table(table)
    for block in blocks:
        own = [row for row in rows if row["block"] == _spell(block)]
        click.echo(f"break-even density of {_spell(block)}: {own[0]['break_even']:.0%}")
    if out:
        write_json(out, rows)
    if plot:
        _draw(plot, rows, name)


def _compare(
    size: tuple[int, int],
    block: tuple[int, int],
    inner: str,
    sparsity: Sequence[float],
    tokens: int,
    threads: int,
    rounds: int,
) -> Rows:
    """Return rows for one block shape: the dense product, then one for each sparsity."""
    weights = [sparse_weight(size, block, inner, part) for part in sparsity]
    plain = encode(
        np.random.default_rng(2).standard_normal(size, dtype=np.float32),
        parse_format(_DENSE[inner]),
    )
    dense = Product("linear", plain, tokens, threads)
    sparse = [Product("bsr_linear", weight, tokens, threads) for weight in weights]
    reader = Reader("2m", _BYTES)
    runs = {f"{part:.2f}": product.seconds for part, product in zip(sparsity, sparse, strict=True)}
    found = interleave(
        {"dense": dense.seconds, "read": lambda: reader.gbps(threads), **runs}, rounds, rest_s=0.01
    )
    times = [median(found[f"{part:.2f}"]) for part in sparsity]
    even = break_even([1 - part for part in sparsity], times, median(found["dense"]))
    rows = [_row("linear", block, 0.0, found["dense"], found, dense, True)]
    for part, product, weight in zip(sparsity, sparse, weights, strict=True):
        exact = product.executor.array("x").astype(np.float64) @ weight.decode().T
        error = np.abs(product.result() - exact).max() / np.sqrt(np.mean(exact**2))
        own = found[f"{part:.2f}"]
        rows.append(_row("bsr_linear", block, part, own, found, product, bool(error < 1e-4)))
    for product in (dense, *sparse):
        product.executor.close()
    return [
        {**row, "n": size[0], "k": size[1], "inner": inner, "m": tokens, "threads": threads}
        | {"isa": CURRENT.name, "break_even": even}
        for row in rows
    ]


def _spell(block: tuple[int, int]) -> str:
    return f"{block[0]}x{block[1]}"


def _row(
    op: str,
    block: tuple[int, int],
    sparsity: float,
    times: list[float],
    found: dict[str, list[float]],
    product: Product,
    correct: bool,
) -> dict[str, object]:
    gbps = [product.nbytes / value / 1e9 for value in times]
    return {
        "op": op,
        "block": _spell(block),
        "sparsity": sparsity,
        "seconds": median(times),
        "gbps": median(gbps),
        "read_gbps": median(found["read"]),
        "pct_of_limit": 100 * ratio(gbps, found["read"]).value,
        "speedup": ratio(found["dense"], times).value,
        "correct": correct,
    }


def _draw(path: Path, rows: Rows, title: str) -> None:
    """Plot the speed-up over the sparsity, a line for each block shape."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note = "no plot: matplotlib is missing; pip install 'clocher[bench]'"
        Console(stderr=True).print(note, markup=False)
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for block in dict.fromkeys(row["block"] for row in rows):
        own = [row for row in rows if row["block"] == block and row["op"] == "bsr_linear"]
        at = [100 * row["sparsity"] for row in own]
        axes.plot(at, [row["speedup"] for row in own], marker="o", label=block)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="zero blocks, %", ylabel="speed-up over dense", title=title, yscale="log")
    axes.legend(title="block")
    figure.savefig(path, format="png", dpi=150)


if __name__ == "__main__":
    main()
