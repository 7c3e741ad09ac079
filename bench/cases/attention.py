"""Attention of one decode step or of a prefill chunk, beside the read bandwidth of the same run.

    python -m bench attention [--context 1024 --context 8192] [--kv bf16,i8] [--tokens 1]

A step attends in many layers, so that their caches exceed every cache of the processor. GB/s counts
the keys and values that the step must read once; with several tokens the limit is arithmetic, and
GFLOP/s says how far it is.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import product
from statistics import median

import click
import numpy as np

from bench.ops.experiment import TEAM, Listed, Row, experiment, of_read, seconds, turns
from clocher_kernels.dtypes import STORAGE, from_f32
from clocher_kernels.ops.attention import KV_DTYPES
from clocher_kernels.plan import Buffer, Call, Plan
from cpu_fallback.executor import CpuExecutor
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

SHAPES = {
    "llama-1b": (32, 8, 64, 0),
    "gpt-oss-20b": (64, 8, 64, 0),
    "gpt-oss-20b window": (64, 8, 64, 128),
    "bitnet-2b": (20, 5, 128, 0),
}
"""Model -> query heads, key/value heads, values of a head, window."""

_PAGE = 64
_BYTES, _READ_BYTES = 192 << 20, 512 << 20
_MAX_LAYERS = 64
_TOKEN = ("slots", "positions", "ends", "ancestors")


class Step:
    """A step that only attends; its tokens are the last ones of the context."""

    def __init__(self, model: str, kv: str, context: int, tokens: int, threads: int) -> None:
        heads, kv_heads, dim, window = SHAPES[model]
        blocks, width = -(-context // _PAGE), heads * dim
        item = STORAGE[kv].itemsize
        seen = min(context, window + tokens - 1) if window else context
        layer = 2 * blocks * _PAGE * kv_heads * dim * item
        layers = max(1, min(_MAX_LAYERS, _BYTES // layer)) if tokens == 1 else 1
        self.nbytes = layers * 2 * seen * kv_heads * dim * item
        ends = np.arange(context - tokens + 1, context + 1)
        cells = np.minimum(ends, window).sum() if window else ends.sum()
        self.flops = 4.0 * layers * float(cells) * width
        shape = (blocks, kv_heads, _PAGE, dim)
        buffers = {name: Buffer((tokens,), "i32", "M", "input") for name in _TOKEN[:3]}
        buffers["ancestors"] = Buffer((tokens,), "u64", "M", "input")
        buffers["pages"] = Buffer((1, blocks), "i32", "", "input")
        buffers["q"] = Buffer((tokens, width), "f32", "M", "input")
        buffers["y"] = Buffer((tokens, width), "f32", "M", "output")
        calls = []
        for i in range(layers):
            args = {name: name for name in (*_TOKEN, "pages", "q", "y")}
            for name in ("k", "v"):
                args[f"{name}_cache"] = f"{name}{i}"
                buffers[f"{name}{i}"] = Buffer(shape, kv, "", "state")
                if kv == "i8":
                    args[f"{name}_scale"] = f"{name}{i}s"
                    buffers[f"{name}{i}s"] = Buffer(shape[:3], "f32", "", "state")
            attrs = {"kv_dtype": kv, "scale": dim**-0.5, "window": window}
            calls.append(Call("attention", args, attrs))
        plan = Plan(tokens, 1, buffers, {}, (), tuple(calls))
        self.layers, self.tokens = layers, tokens
        self.executor = CpuExecutor(plan, {}, threads)
        self.close = self.executor.close
        rng = np.random.default_rng(0)
        values = rng.standard_normal((1, *shape[1:]), dtype=np.float32)
        for name, buffer in buffers.items():
            array = self.executor.array(name)
            if buffer.role == "state" and buffer.shape == shape:
                codes = (values * 30).astype(np.int8) if kv == "i8" else from_f32(values, kv)
                array[...] = codes
            elif buffer.role == "state":
                array[...] = 0.03
        self.executor.array("q")[...] = rng.standard_normal((tokens, width), dtype=np.float32)
        self.executor.array("pages")[0] = rng.permutation(blocks)
        self.executor.array("positions")[...] = ends - 1
        self.executor.array("ends")[...] = ends

    def seconds(self) -> float:
        """Return the seconds of a step."""
        with self.executor.running():
            return seconds(lambda: self.executor.step(self.tokens, 1), 0.01)


@experiment("attention", __doc__, title="attention, {isa}", rounds=11)
@click.option("--models", type=Listed.of(SHAPES), default=",".join(SHAPES))
@click.option("--kv", "kinds", type=Listed.of(KV_DTYPES), default="f32,bf16,e4m3,i8")
@click.option("--context", type=click.IntRange(1), multiple=True, default=(1024, 8192))
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True)
@TEAM
def main(
    models: tuple[str, ...],
    kinds: tuple[str, ...],
    context: tuple[int, ...],
    tokens: int,
    threads: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each model, context and KV dtype."""
    reader = Reader("2m", _READ_BYTES)
    for model, length, kind in product(models, context, kinds):
        with closing(Step(model, kind, length, tokens, threads)) as step:
            runs = {"step": step.seconds, "read": partial(reader.gbps, threads)}
            found = turns(runs, rounds, rest_s=0.01)
        took = median(found["step"])
        yield {
            "op": "attention",
            "model": model,
            "kv": kind,
            "context": length,
            "tokens": tokens,
            "threads": threads,
            "isa": CURRENT.name,
            **of_read([step.nbytes / value / 1e9 for value in found["step"]], found["read"]),
            "gflops": step.flops / took / 1e9,
            "us_per_layer": took / step.layers * 1e6,
        }


if __name__ == "__main__":
    main()
