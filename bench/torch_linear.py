"""`clocher::linear` beside torch's own int4 and int8 linears on the CPU: one run, taking turns.

    python -m bench.torch_linear --threads 2

In two forms. "streamed" multiplies copies of a matrix one after another, together more than the
last level of cache holds, as a model does that reads all its layers for each token. "hot" has one
matrix again and again, which stays in a cache if it fits in one. A row says how many times as fast
as torch's the op is: the median over rounds of the ratio within a round.
"""

import copy
import json
import statistics
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import click
import torch

from clocher_kernels.torch import QuantLinear
from cpu_fallback.lanes.isa import CURRENT

GROUP = 128
HOT = 20
"""Products of a turn with one matrix."""
Step = Callable[[torch.Tensor], torch.Tensor]


class Peer(NamedTuple):
    """A linear of torch's.

    Attributes:
        bits: of its weights.
        dtype: of the activations that it takes.
        make: takes a weight [N, K] fp32 and a number of copies.
    """

    bits: int
    dtype: torch.dtype
    make: Callable[[torch.Tensor, int], list[Step]]


def _int4(weight: torch.Tensor, count: int) -> list[Step]:
    n, k = weight.shape
    cells = weight.view(n, k // GROUP, GROUP)
    scales = (cells.abs().amax(2) / 7).clamp(min=1e-8)
    codes = (cells / scales[..., None]).round().clamp(-8, 7).view(n, k).int() + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack([scales, torch.zeros_like(scales)], 2).transpose(0, 1).contiguous()
    both = both.to(torch.bfloat16)

    def step(w: torch.Tensor, s: torch.Tensor) -> Step:
        return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, GROUP, s)

    return [step(packed.clone(), both.clone()) for _ in range(count)]


def _int8(weight: torch.Tensor, count: int) -> list[Step]:
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    scales = scales.to(torch.bfloat16)

    def step(w: torch.Tensor) -> Step:
        return lambda x: torch.ops.aten._weight_int8pack_mm(x, w, scales)

    return [step(codes.clone()) for _ in range(count)]


def _dynamic(weight: torch.Tensor, count: int) -> list[Step]:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    made = torch.ao.quantization.quantize_dynamic(
        torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8
    )
    return [copy.deepcopy(made)[0] for _ in range(count)]


PEERS = {
    "int4pack-bf16": Peer(4, torch.bfloat16, _int4),
    "int8pack-bf16": Peer(8, torch.bfloat16, _int8),
    "int8-dynamic": Peer(8, torch.float32, _dynamic),
}


def matrices(n: int, k: int, nbytes: int, act_prec: str) -> dict[str, list[Step]]:
    """Return the linears of all libraries, each so many times that its weights are `nbytes`."""
    weight = torch.randn(n, k) * k**-0.5
    counts = {bits: -(-nbytes * 8 // (n * k * bits)) for bits in (4, 8)}
    made: dict[str, list[Step]] = {}
    for name, peer in PEERS.items():
        try:
            steps = peer.make(weight, counts[peer.bits])
            steps[0](torch.randn(1, k, dtype=peer.dtype))
        except RuntimeError as error:
            click.echo(f"{name}: {str(error).splitlines()[0]}", err=True)
            continue
        made[name] = steps
    for bits, name in ((4, f"int4_g{GROUP}"), (8, "int8")):
        layer = QuantLinear.from_linear(_linear(weight), name, act_prec=act_prec)
        made[f"ours-{bits}"] = [copy.deepcopy(layer) for _ in range(counts[bits])]
    return made


def compare(made: dict[str, list[Step]], m: int, k: int, rounds: int) -> list[dict[str, object]]:
    """Return a row for each form and linear of torch's: microseconds a product, and ratios."""
    x = torch.randn(m, k)
    inputs = {dtype: x.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    rows: list[dict[str, object]] = []
    for form in ("streamed", "hot"):
        times: dict[str, list[float]] = {name: [] for name in made}
        with torch.inference_mode():
            for turn in range(rounds + 2):
                for name, steps in made.items():
                    given = inputs[PEERS[name].dtype if name in PEERS else torch.float32]
                    run = steps if form == "streamed" else steps[:1] * HOT
                    if form == "hot":
                        run[0](given)
                    start = perf_counter()
                    for step in run:
                        step(given)
                    if turn >= 2:
                        times[name].append((perf_counter() - start) / len(run) * 1e6)
        for name in times.keys() & PEERS.keys():
            mine = times[f"ours-{PEERS[name].bits}"]
            ratios = [t / o for t, o in zip(times[name], mine, strict=True)]
            row = {
                "peer": name,
                "form": form,
                "m": m,
                "torch_us": round(statistics.median(times[name])),
                "clocher_us": round(statistics.median(mine)),
                "times_as_fast": round(statistics.median(ratios), 2),
            }
            rows.append(row)
    return sorted(rows, key=lambda row: list(PEERS).index(str(row["peer"])))


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
@click.option("--stream", default=400, help="MB of weights that are streamed; more than the cache.")
def main(
    threads: int,
    rounds: int,
    act_prec: str,
    tokens: tuple[int, ...],
    size: tuple[int, int],
    stream: int,
) -> None:
    """Write one JSON line for each comparison."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # torch deprecates what it has nothing else for
    n, k = size
    said = {"n": n, "k": k, "act_prec": act_prec, "stream_mb": stream, "threads": threads}
    said |= {"isa": CURRENT.name, "torch": torch.__version__}
    made = matrices(n, k, stream * 1_000_000, act_prec)
    for m in tokens:
        for row in compare(made, m, k, rounds):
            click.echo(json.dumps({**row, **said}))


if __name__ == "__main__":
    main()
