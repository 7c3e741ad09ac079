"""`clocher::linear` beside torch's own int4 and int8 linears on the CPU: one run, taking turns.

    python -m bench.torch_linear --threads 2

Each library multiplies the same matrices in turn, several of them one after another, so that no
weight is in the cache of a core from the turn before. A row says how many times as fast as torch's
the op is: the median over rounds of the ratio within a round.
"""

import json
import statistics
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import NamedTuple

import click
import torch

from clocher_kernels.torch import QuantLinear, awake

GROUP = 128
MATRICES = 6
Step = Callable[[torch.Tensor], torch.Tensor]


class Peer(NamedTuple):
    """A linear of torch's.

    Attributes:
        bits: of its weights.
        dtype: of the activations that it takes.
        make: takes a weight [N, K] fp32.
    """

    bits: int
    dtype: torch.dtype
    make: Callable[[torch.Tensor], Step]


def _int4(weight: torch.Tensor, dtype: torch.dtype) -> Step:
    n, k = weight.shape
    cells = weight.view(n, k // GROUP, GROUP)
    scales = (cells.abs().amax(2) / 7).clamp(min=1e-8)
    codes = (cells / scales[..., None]).round().clamp(-8, 7).view(n, k).int() + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack([scales, torch.zeros_like(scales)], 2).transpose(0, 1).contiguous().to(dtype)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, both)


def _int8(weight: torch.Tensor, dtype: torch.dtype) -> Step:
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    scales = scales.to(dtype)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales)


def _dynamic(weight: torch.Tensor) -> Step:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    made: Step = torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8
    )
    return made


PEERS = {
    "int4pack-bf16": Peer(4, torch.bfloat16, lambda w: _int4(w, torch.bfloat16)),
    "int8pack-bf16": Peer(8, torch.bfloat16, lambda w: _int8(w, torch.bfloat16)),
    "int8-dynamic": Peer(8, torch.float32, _dynamic),
}


def compare(m: int, n: int, k: int, rounds: int, act_prec: str) -> list[dict[str, object]]:
    """Return a row for each of torch's linears: times in microseconds a product, and ratios."""
    weights = [torch.randn(n, k) * k**-0.5 for _ in range(MATRICES)]
    ours = {
        bits: [QuantLinear.from_linear(_linear(w), name, act_prec=act_prec) for w in weights]
        for bits, name in ((4, f"int4_g{GROUP}"), (8, "int8"))
    }
    steps: dict[str, list[Step]] = {}
    for name, peer in PEERS.items():
        try:
            made = [peer.make(w) for w in weights]
            made[0](torch.randn(m, k, dtype=peer.dtype))
        except RuntimeError as error:
            click.echo(f"{name}: {str(error).splitlines()[0]}", err=True)
            continue
        steps[name] = made
    x = torch.randn(m, k)
    inputs = {dtype: x.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    times: dict[str, list[float]] = {name: [] for name in (*steps, "ours-4", "ours-8")}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name in times:
                own = name.startswith("ours")
                run = ours[int(name[-1])] if own else steps[name]
                given = inputs[torch.float32 if own else PEERS[name].dtype]
                with awake(torch.get_num_threads()) if own else nullcontext():
                    start = perf_counter()
                    for step in run:
                        step(given)
                    spent = perf_counter() - start
                if turn >= 2:
                    times[name].append(spent / MATRICES * 1e6)
    rows = []
    for name in steps:
        mine = times[f"ours-{PEERS[name].bits}"]
        ratios = sorted(t / o for t, o in zip(times[name], mine, strict=True))
        rows.append(
            {
                "peer": name,
                "m": m,
                "n": n,
                "k": k,
                "act_prec": act_prec,
                "torch_us": round(statistics.median(times[name])),
                "clocher_us": round(statistics.median(mine)),
                "times_as_fast": round(statistics.median(ratios), 2),
            }
        )
    return rows


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


@click.command()
@click.option("--threads", default=2, help="Threads of both.")
@click.option("--rounds", default=15, help="Turns of each.")
@click.option("--act-prec", default="int8", help="int8 or fp32: what our op makes of activations.")
@click.option("--tokens", multiple=True, type=int, default=(1, 8, 64), help="Rows of x.")
@click.option("--size", nargs=2, type=int, default=(4096, 4096), help="N and K of the weights.")
def main(
    threads: int, rounds: int, act_prec: str, tokens: tuple[int, ...], size: tuple[int, int]
) -> None:
    """Write one JSON line for each comparison."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # torch deprecates what it has nothing else for
    for m in tokens:
        for row in compare(m, *size, rounds, act_prec):
            click.echo(json.dumps({**row, "threads": threads, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
