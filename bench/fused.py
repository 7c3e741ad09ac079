"""Products with quantised weights, decoded in the kernel or ahead: "fused" against "cached".

    python -m bench.fused [--formats LIST] [--shapes LIST] [--tokens 1] [--json FILE]

"fused" multiplies the weights as they are stored; "cached" multiplies what they decode to, kept as
fp32 in memory, with Clocher's own kernel, and "cached, torch" with torch's. All walk several
matrices, more than a cache holds, and take turns. "x cached" is how many times faster than "cached"
a product is. A result is correct if it agrees with fp64 arithmetic on the decoded weights.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from statistics import median

import click

from bench.measure import NotMeasured, ratio
from bench.ops.experiment import FORMATS, SHAPES, TEAM, Row, experiment, turns
from bench.ops.products import Engine, Problem, clocher, exact_product, torch_cpu
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode
from cpu_fallback.lanes.isa import CURRENT

_CACHED = parse_format("f32")
_FORMATS = "ternary,int4_sym_g32_f16,int8_row_f32,mxfp4"
_SECONDS = 0.01


@experiment(
    "fused",
    __doc__,
    "format | weights | us | MB | x cached | right | note",
    "{format} | {weights} | {us:.0f} | {megabytes:.1f} | {speedup:.2f} | {correct} | {note}",
    title="{N}x{K}, M={M}, {threads} threads, {isa}",
    rounds=9,
)
@click.option("--formats", type=FORMATS, default=_FORMATS, show_default=True)
@click.option("--shapes", type=SHAPES, default="4096x4096", show_default=True, help="N x K")
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True)
@TEAM
@click.option("--mib", type=click.IntRange(1), default=192, show_default=True, help="of each")
def main(
    formats: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    tokens: int,
    threads: int,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield rows for each shape and format: fused, cached, and cached by torch if it is there."""
    for (n, k), name in product(shapes, formats):
        about = {"N": n, "K": k, "M": tokens, "threads": threads, "isa": CURRENT.name}
        fused = Problem.filling(name, n, k, tokens, mib << 20)
        stored = fused.weights()
        cached = Problem.filling("f32", n, k, tokens, mib << 20)
        decoded = [encode(weight.decode(), _CACHED) for weight in stored[: cached.copies]]
        exact = exact_product(fused, stored)
        problems = {"fused": fused, "cached": cached, "cached, torch": cached}
        engines: dict[str, Engine] = {}
        with ExitStack() as stack:
            for how, make in (
                ("fused", partial(clocher, fused, stored, threads)),
                ("cached", partial(clocher, cached, decoded, threads)),
                ("cached, torch", partial(torch_cpu, cached, decoded, threads)),
            ):
                try:
                    engines[how] = stack.enter_context(closing(make()))
                except NotMeasured as error:
                    yield about | {"format": name, "weights": how, "note": str(error)}
            correct = {how: engine.correct(exact) for how, engine in engines.items()}
            runs = {how: partial(engine.seconds, _SECONDS) for how, engine in engines.items()}
            took = {
                how: [seconds / problems[how].copies for seconds in found]
                for how, found in turns(runs, rounds, rest_s=0.01).items()
            }
        for how, engine in engines.items():
            yield about | {
                "op": "linear",
                "format": name,
                "weights": how,
                "us": median(took[how]) * 1e6,
                "megabytes": problems[how].nbytes / problems[how].copies / 1e6,
                "speedup": ratio(took["cached"], took[how]).value,
                "correct": correct[how],
                "note": engine.note,
            }


if __name__ == "__main__":
    main()
