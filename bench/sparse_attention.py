"""Attention that reads some pages of the cache, beside attention that reads all, in turns.

    python -m bench.sparse_attention [--context 32768] [--kv f16] [--attn topk:2048] [--json FILE]

A decode step attends in many layers, as in `bench.attention`. The sparse one has everything that
it costs: the bounds of the page that became full, the scores of all pages, the choice, and then the
pages themselves. Bounds are random, so the pages lie anywhere. "share" is the pages that are read.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median

import click
import numpy as np

from bench.attention import SHAPES, Step
from bench.bandwidth import DEFAULT_BYTES
from bench.measure import ratio, seconds
from bench.ops.experiment import TEAM, Listed, Row, experiment, of_read, turns
from clocher_kernels.ops.attention import KV_DTYPES
from clocher_kernels.plan import Buffer, Call, Plan
from clocher_runtime.models.selection import PAGE_CELLS, Selection, parse_selection
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader


def sparse_plan(plan: Plan, selection: Selection) -> Plan:
    """Return a Plan of attention that lists pages first."""
    buffers, calls = dict(plan.buffers), []
    for index, call in enumerate(plan.calls):
        pages, heads, _, dim = buffers[call.args["k_cache"]].shape
        words = -(-buffers["pages"].shape[1] // 64)
        buffers["listed"] = Buffer((plan.tokens, heads, words), "u64", "M")
        buffers["counts"] = Buffer((plan.tokens, heads, 2), "i64", "M", "state")
        token = ("slots", "positions", "ends", "ancestors", "pages")
        args = {name: name for name in (*token, "q", "listed", "counts")}
        if selection.is_scored:
            args["bounds"] = f"bounds{index}"
            buffers[args["bounds"]] = Buffer((pages, heads, 2, dim), "f32", "", "state")
            known = (*token, "k_cache", "k_scale")
            keys = {name: call.args[name] for name in known if name in call.args}
            kind = {"kv_dtype": call.attrs["kv_dtype"]}
            calls.append(Call("page_bounds", {**keys, "bounds": args["bounds"]}, kind))
        attrs = {"cells": PAGE_CELLS, "scale": call.attrs["scale"], **selection.attrs}
        calls.append(Call("select_pages", args, attrs))
        calls.append(replace(call, args={**call.args, "listed": "listed"}))
    return replace(plan, buffers=buffers, calls=tuple(calls))


class SparseStep:
    """A step that attends to some pages and does nothing else.

    Args:
        dense: the same with all pages; its inputs and caches are copied.
        threads: size of the team.
    """

    def __init__(self, dense: Step, selection: Selection, threads: int) -> None:
        plan = sparse_plan(dense.executor.plan, selection)
        self.tokens = dense.tokens
        self.executor = CpuExecutor(plan, {}, threads)
        self.close = self.executor.close
        rng = np.random.default_rng(0)
        for name, buffer in plan.buffers.items():
            if name.startswith("bounds"):
                values = rng.standard_normal(buffer.shape, dtype=np.float32)
                self.executor.array(name)[...] = np.sort(values, axis=2)[:, :, ::-1]
            elif name in dense.executor.plan.buffers:
                self.executor.array(name)[...] = dense.executor.array(name)

    @property
    def share(self) -> float:
        """Pages that were read, of all."""
        listed, seen = self.executor.array("counts").sum(axis=(0, 1)).tolist()
        return listed / max(1, seen)

    def seconds(self) -> float:
        """Return the seconds of a step."""
        with self.executor.running():
            return seconds(lambda: self.executor.step(self.tokens, 1), 0.01)


@experiment(
    "sparse_attention",
    __doc__,
    "model | kv | context | attn | share | us a layer | dense | times as fast | dense % of read",
    "{model} | {kv} | {context} | {attn} | {share:.3f} | {us_per_layer:.1f} | "
    "{dense_us_per_layer:.1f} | {of_dense:.2f} | {pct_of_limit:.0f}",
    title="attention to some pages, {tokens} tokens, {threads} threads, {isa}",
    rounds=11,
)
@click.option("--models", type=Listed.of(SHAPES), default="llama-1b")
@click.option("--kv", "kinds", type=Listed.of(KV_DTYPES), default="f16,i8")
@click.option("--context", type=click.IntRange(1), multiple=True, default=(32768,))
@click.option("--attn", multiple=True, default=("topk:2048",), show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True)
@TEAM
def main(
    models: tuple[str, ...],
    kinds: tuple[str, ...],
    context: tuple[int, ...],
    attn: tuple[str, ...],
    tokens: int,
    threads: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each model, context, KV dtype and way to choose pages."""
    reader = Reader("2m", DEFAULT_BYTES)
    for model, length, kind, text in product(models, context, kinds, attn):
        selection = parse_selection(text)
        if selection is None:
            raise click.UsageError(f"--attn {text} reads everything; give one that does not")
        with (
            closing(Step(model, kind, length, tokens, threads)) as dense,
            closing(SparseStep(dense, selection, threads)) as sparse,
        ):
            runs = {
                "sparse": sparse.seconds,
                "dense": dense.seconds,
                "read": partial(reader.gbps, threads),
            }
            found, share = turns(runs, rounds, rest_s=0.01), sparse.share
        faster = ratio(found["dense"], found["sparse"])
        yield {
            "op": "attention",
            "model": model,
            "kv": kind,
            "context": length,
            "attn": text,
            "tokens": tokens,
            "threads": threads,
            "isa": CURRENT.name,
            **of_read([dense.nbytes / value / 1e9 for value in found["dense"]], found["read"]),
            "share": share,
            "us_per_layer": median(found["sparse"]) / dense.layers * 1e6,
            "dense_us_per_layer": median(found["dense"]) / dense.layers * 1e6,
            "of_dense": faster.value,
            "of_dense_low": faster.low,
            "of_dense_high": faster.high,
        }


if __name__ == "__main__":
    main()
