"""Decode speed of a model by what is prepacked, in turns.

    python -m bench.pretranspose --model-dir DIR [--scopes all,default] [--threads 1,2]

Ratios are to the last scope; "default" is what a run does that is not given one. Where a model has
integer weights, those outside a scope are multiplied with fp32 activations, so other kernels run.
Float weights run the same kernels on large pages ("all") and in place on the pages of the mapped
file ("default").
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import click

from bench.decode import Runner
from bench.measure import ratio
from bench.ops.experiment import FILE, TEAMS, Listed, Row, experiment, opened, turns
from clocher_runtime.models.inventory import SCOPES

_SCOPES = {"default": None, **{name: name for name in SCOPES}}


@experiment(
    "pretranspose",
    __doc__,
    "prepacked | threads | activations | tok/s | GB/s | ratio",
    "{pretranspose} | {threads} | {act_prec} | {tok_s:.2f} | {gbps:.1f} | "
    "{ratio:.2f}x [{ratio_95[0]:.2f}, {ratio_95[1]:.2f}]",
    title="{model}  {format}",
    rounds=9,
)
@click.option("--model-dir", type=FILE, help="default: the embedded model")
@click.option("--scopes", type=Listed.of(_SCOPES), default="all,default", show_default=True)
@TEAMS
@click.option("--tokens", type=click.IntRange(1), default=16, show_default=True)
def main(
    model_dir: Path | None,
    scopes: tuple[str, ...],
    threads: tuple[int, ...],
    tokens: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each thread count and scope."""
    model = opened(model_dir)
    context = min(model.spec.max_positions, tokens + 2)
    with ExitStack() as stack:
        runners = {
            (count, scope): stack.enter_context(
                closing(Runner(model, count, context, _SCOPES[scope]))
            )
            for count, scope in product(threads, scopes)
        }
        runs = {case: partial(runner.decode, tokens) for case, runner in runners.items()}
        found = turns(runs, rounds)
    for (count, scope), runner in runners.items():
        speeds = found[count, scope]
        over = ratio(speeds, found[count, scopes[-1]])
        yield {
            "op": "decode",
            "test": f"tg{tokens}",
            "model": str(model.checkpoint.path),
            "format": model.precision,
            "pretranspose": scope,
            "threads": count,
            "isa": runner.session.isa,
            "act_prec": runner.session.act_prec,
            "tok_s": median(speeds),
            "gbps": median(speeds) * model.bytes_per_token / 1e9,
            "samples": speeds,
            "ratio": over.value,
            "ratio_95": [over.low, over.high],
        }


if __name__ == "__main__":
    main()
