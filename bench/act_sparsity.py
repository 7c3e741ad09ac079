"""Small activations: what of a decode step is left when the weights they multiply are not read.

    python -m bench.act_sparsity --model-dir DIR [--rules 0.25,0.4] [--made] [--json FILE]

A row for each rule of --act-sparsity compares a session that has it with a dense one, taking turns,
beside the bandwidth of reading memory. "zeros" is the share of the codes that products skip, which
a model with idle channels has more of than the rule asks for. --made gives int4 weights codes at
random, so that no channel is idle; its text is worth nothing. Thresholds come from random tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.bandwidth import MIB, PAGES_READ
from bench.decode import Runner
from bench.measure import ratio
from bench.ops.experiment import MODEL_DIR, TEAM, Row, experiment, opened, turns
from clocher_kernels.dtypes import from_f32
from clocher_kernels.formats import Int4
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.act_sparsity import MOST_TOKENS
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from cpu_fallback.team.bandwidth import Reader

_STEP = np.float32(2**-8)
"""Scale of random codes."""


def made(model: Model) -> Model:
    """Return a model of the same shape whose int4 weights are random."""
    rng, weights = np.random.default_rng(0), dict(model.weights)
    for name, stored in model.weights.items():
        if not isinstance(stored, QuantTensor):
            weights[name] = np.ones_like(stored)
        elif isinstance(stored.format, Int4):
            low, high = rng.integers(1, 16, (2, *stored.planes["codes"].shape), np.uint8)
            scales = from_f32(
                np.full(stored.planes["scales"].shape, _STEP), stored.format.scale_dtype
            )
            weights[name] = replace(stored, planes={"codes": low | high << 4, "scales": scales})
    return replace(model, weights=weights)


def zeros(session: Session, tokens: int) -> float:
    """Return the share of weights that products skip in decode steps, of those that they have."""
    executor: Any = session.executor
    skipped = total = 0.0
    for _ in session.generate([[1]], 1, stop_ids=frozenset()):
        pass
    for _ in range(tokens):
        for call in executor.walk(1, 1):
            if call.op == "skip_linear":
                rows, columns = session.model.weights[call.args["w"]].shape
                codes = executor.array(call.args["x"])[0]
                skipped += rows * float(np.count_nonzero(codes == 0))
                total += rows * columns
    return skipped / total


@experiment(
    "act_sparsity",
    __doc__,
    "rule | zeros | sparse tok/s | dense tok/s | x",
    "{rule} | {zeros:.1%} | {sparse:.2f} | {dense:.2f} | {speedup:.2f} [{low:.2f}, {high:.2f}]",
    title="{model} {format}, {threads} threads, {isa}, read {read_gbps:.1f} GB/s",
    rounds=7,
)
@MODEL_DIR
@click.option("--rules", default="0.25,0.4", show_default=True, help="of --act-sparsity")
@click.option("--made", "is_made", is_flag=True, help="random weights of the same shape")
@TEAM
@click.option("--tokens", type=click.IntRange(1), default=32, show_default=True)
@PAGES_READ
@MIB
def main(
    model_dir: Path | None,
    rules: str,
    is_made: bool,
    threads: int,
    tokens: int,
    pages: str,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each rule."""
    model = opened(model_dir)
    name, precision = model.checkpoint.path.name, model.precision
    if is_made:
        model, name = made(model), f"{name} (random weights)"
    reader, names = Reader(pages, mib << 20), rules.split(",")
    context = tokens + 64
    text = np.random.default_rng(0).integers(model.spec.vocab_size, size=MOST_TOKENS).tolist()
    with ExitStack() as stack:
        runners = {}
        for rule in ("dense", *names):
            sparse = None if rule == "dense" else rule
            runner = Runner(model, threads, context, act_sparsity=sparse, act_calibration=text)
            runners[rule] = stack.enter_context(closing(runner))
        shares = {rule: zeros(runners[rule].session, tokens // 4) for rule in names}
        runs: dict[str, Callable[[], float]] = {
            rule: partial(runner.decode, tokens) for rule, runner in runners.items()
        }
        runs["read"] = partial(reader.gbps, threads)
        steps = turns(runs, rounds)
    for rule in names:
        times = ratio(steps[rule], steps["dense"])
        yield {
            "op": "act_sparsity",
            "model": name,
            "format": precision,
            "threads": threads,
            "isa": runners["dense"].session.isa,
            "read_gbps": median(steps["read"]),
            "rule": rule,
            "zeros": shares[rule],
            "sparse": median(steps[rule]),
            "dense": median(steps["dense"]),
            "samples": {"sparse": steps[rule], "dense": steps["dense"], "read": steps["read"]},
            "speedup": times.value,
            "low": times.low,
            "high": times.high,
        }


if __name__ == "__main__":
    main()
