"""Dense against block-sparse: y = x W^T over sparsities and block shapes.

    python -m bench block_sparse [--blocks 32x32,16x16] [--inner f32] [--json FILE]

Dense and sparse run in turns, each over copies of its weight that together exceed every cache. The
break-even density is where the times of the sparse product, taken as a line in the density, meet
that of the dense one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from statistics import median

import click
import numpy as np

from bench.cases.products import Engine, Problem, clocher, copies_of, exact_product
from bench.ops.experiment import (
    SHAPES,
    TEAM,
    Listed,
    Row,
    experiment,
    of_read,
    ratio,
    turns,
)
from clocher_kernels.formats import Bsr, parse_format
from clocher_kernels.formats.bsr import INNERS
from clocher_kernels.quant_tensor import QuantTensor, encode
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

_BYTES = 128 << 20
_MAX_COPIES, _TOLERANCE = 256, 1e-5
_DENSE = {"f32": "f32", "f16": "f16", "bf16": "bf16", "int8": "int8_row_bf16"}
_DENSE["int4"] = "int4_sym_g32_f16"


def sparse_weight(
    shape: tuple[int, int], block: tuple[int, int], inner: str, sparsity: float
) -> QuantTensor:
    """Return a random weight with this share of zero blocks."""
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


def _engine(weight: QuantTensor, tokens: int, threads: int) -> Engine:
    copies = min(_MAX_COPIES, -(-_BYTES // weight.nbytes))
    problem = Problem(weight.format.name, *weight.shape, tokens, copies)
    made = clocher(problem, copies_of(weight, copies), threads, None)
    return replace(made, tolerance=_TOLERANCE)


def _whole_percent(text: str) -> float:
    if not (text.isascii() and text.isdigit() and len(text) < 3):
        raise ValueError
    return int(text) / 100


@experiment(
    "block_sparse",
    __doc__,
    title="block-sparse, {n}x{k} {inner}, M={m}, {threads} threads, {isa}",
    rounds=9,
)
@click.option("--shape", type=SHAPES, default="4096x4096", show_default=True, help="N x K")
@click.option("--blocks", type=SHAPES, default="16x16,32x32,64x64,16x64", show_default=True)
@click.option("--inner", type=click.Choice(INNERS), default="f32", show_default=True)
@click.option(
    "--sparsity",
    type=Listed(_whole_percent, "whole per cents below 100, such as 0,50,90"),
    default="0,50,70,80,90,95",
    show_default=True,
)
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True)
@TEAM
def main(
    shape: tuple[tuple[int, int], ...],
    blocks: tuple[tuple[int, int], ...],
    inner: str,
    sparsity: tuple[float, ...],
    tokens: int,
    threads: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield rows for each block shape: the dense matmul, then one for each sparsity."""
    size = shape[0]
    values = np.random.default_rng(2).standard_normal(size, dtype=np.float32)
    dense = encode(values, parse_format(_DENSE[inner]))
    for block in blocks:
        weights = {part: sparse_weight(size, block, inner, part) for part in sparsity}
        read = partial(Reader("2m", _BYTES).gbps, threads)
        with ExitStack() as stack:
            made = {
                name: stack.enter_context(closing(_engine(weight, tokens, threads)))
                for name, weight in {None: dense, **weights}.items()
            }
            problem = Problem("f32", *size, tokens, 1)
            right = {
                name: name is None or made[name].correct(exact_product(problem, [weights[name]]))
                for name in made
            }
            runs = {name: engine.seconds for name, engine in made.items()}
            found = turns({**runs, "read": read}, rounds, rest_s=0.01)
        took = {name: [s / made[name].products for s in found[name]] for name in made}
        times = {name: median(each) for name, each in took.items()}
        even = break_even([1 - part for part in weights], [times[p] for p in weights], times[None])
        for name, engine in made.items():
            yield {
                "op": "linear" if name is None else "bsr_linear",
                "block": f"{block[0]}x{block[1]}",
                "sparsity": name or 0.0,
                "seconds": times[name],
                "us": times[name] * 1e6,
                **of_read([engine.nbytes / s / 1e9 for s in found[name]], found["read"]),
                "speedup": ratio(took[None], took[name]).value,
                "correct": right[name],
                **{"n": size[0], "k": size[1], "inner": inner, "m": tokens, "threads": threads},
                "isa": CURRENT.name,
                "break_even": even,
            }


if __name__ == "__main__":
    main()
