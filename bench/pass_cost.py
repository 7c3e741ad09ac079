"""What a pass of several tokens costs beside a pass of one: what guessed tokens are verified at.

    python -m bench.pass_cost --model-dir DIR [--precision P] [--threads N] [--context N]
                              [--tokens 1,2,3,4,6,8,12,16,32] [--what chain,sequences,prompt]
                              [--text FILE]

A chain is that many tokens of one sequence one after the other, as a draft is verified; sequences
are that many of one token each, as a batch is decoded. Every token has an output row and draws its
next one. A prompt is a chain without output rows, as a piece of a prompt that others follow. Timed
is a whole pass: staging its inputs, the compiled call, reading what was drawn. The cache holds the
keys of `--context` tokens before them, which were computed. Tokens are random, and so are the
experts that they choose in a random model; with --text they are those of a file.

"experts" is the mean over the layers of how many a pass reads, "gbps" what its calls must move at
least by its time. "warm_up_ms" is the table that a session measures by itself for its gate. Medians
of interleaved rounds.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.bandwidth import MIB, PAGES_READ
from bench.measure import NotMeasured, ratio, seconds
from bench.ops.experiment import (
    COUNTS,
    FILE,
    MODEL_DIR,
    TEAM,
    Listed,
    Row,
    experiment,
    opened,
    turns,
)
from clocher_kernels.ops import OPS
from clocher_kernels.ops.cases import cost
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.forwards import Part, StepInputs
from clocher_runtime.engine.load import PRECISIONS, Model
from clocher_runtime.engine.requests import OutputQueue, Request, Score
from clocher_runtime.engine.session import Session
from clocher_runtime.speculation.gate import ForwardCosts
from clocher_runtime.text.tokenizer import Tokenizer
from cpu_fallback.team.bandwidth import Reader

_AT_LEAST_S = 0.1
_CHUNK = 512
_KINDS = ("chain", "sequences", "prompt")


class Passes:
    """A session whose passes are timed one by one.

    Args:
        model: what to run.
        threads: of the team.
        ids: where the tokens of sequences are taken from, in turn.
        context: tokens of a sequence before those of a pass.
        most: tokens of the largest pass.
        sequences: side by side.
    """

    def __init__(
        self, model: Model, threads: int, ids: np.ndarray, context: int, most: int, sequences: int
    ) -> None:
        self.model = model
        self.session = Session(
            model,
            EngineConfig(
                threads=threads,
                batch=sequences,
                context=context + most,
                chunk=max(_CHUNK, most),
                score_rows=most,
                speculate="off",
            ),
        )
        self.session.warm()
        self._executor: Any = self.session.executor
        self._inputs = StepInputs(self._executor)
        each = ids[: sequences * (context + most)].reshape(sequences, -1).tolist()
        with self._executor.running():
            self._requests = [self._begun(slot, own, context) for slot, own in enumerate(each)]

    def _begun(self, slot: int, ids: list[int], context: int) -> Request:
        """Return a sequence whose first tokens are in the cache, and all of whose pages are."""
        request = Request(ids=ids, queue=OutputQueue(1))
        pages = self.session.scheduler.pages
        pages.admit(request, slot, reuse=False)
        while request.cells < context:
            count = min(context - request.cells, self._executor.plan.tokens)
            pages.reserve(request, request.cells + count)
            self._pass([(request, count)])
            pages.commit(request, request.cells + count)
        pages.reserve(request, len(ids))
        return Score(**_held(request), ids=ids, scored=_nobody)  # each of its tokens has a row

    def chain(self, tokens: int) -> list[Part]:
        """Return a pass of some tokens of one sequence."""
        return [(self._requests[0], tokens)]

    def sequences(self, tokens: int) -> list[Part]:
        """Return a pass of one token of each of some sequences."""
        return [(request, 1) for request in self._requests[:tokens]]

    def prompt(self, tokens: int) -> list[Part]:
        """Return a pass of some tokens of one sequence after which more of its text comes."""
        first = self._requests[0]
        return [(Request(**_held(first), ids=[*first.ids, 0]), tokens)]

    def milliseconds(self, parts: list[Part]) -> float:
        """Return how long a pass takes, the mean of some."""
        with self._executor.running():
            self._pass(parts)
            return 1e3 * seconds(partial(self._pass, parts), _AT_LEAST_S)

    def _pass(self, parts: list[Part]) -> None:
        tokens, rows = self._inputs.stage(parts)
        self._executor.step(tokens, rows)
        self._executor.fetch("sampled", rows).tolist()

    def moved(self, parts: list[Part]) -> tuple[int, float | None]:
        """Return the bytes of a pass, and the experts that it reads of a layer; None without."""
        tokens, rows = self._inputs.stage(parts)
        nbytes, experts = 0, []
        for call in self._executor.walk(tokens, rows):
            values = {param: self._value(name, tokens, rows) for param, name in call.args.items()}
            nbytes += int(cost(OPS[call.op], values, call.attrs).bytes)
            if call.op == "moe_gate_up":
                experts.append(len(np.unique(values["ids"])))
        return nbytes, sum(experts) / len(experts) if experts else None

    def _value(self, name: str, tokens: int, rows: int) -> Any:
        plan = self._executor.plan
        if name not in plan.buffers:
            return (plan.consts if name in plan.consts else self.model.weights)[name]
        lead = plan.buffers[name].rows
        array = self._executor.array(name)
        return array[: {"M": tokens, "R": rows}[lead]] if lead else array

    def warm_up(self, most: int) -> dict[int, float]:
        """Return what the gate of a session measures, milliseconds of a pass by its tokens."""
        costs = ForwardCosts(most)
        with self._executor.running():
            costs.measure(self.session.scheduler.forwards.blank)
        return {tokens: ns / 1e6 for tokens, ns in costs.known.items()}


def _held(request: Request) -> dict[str, Any]:
    """Return the fields that say where a request stands in the cache."""
    return {name: getattr(request, name) for name in ("queue", "slot", "cells", "held")}


def _nobody(position: int, logits: np.ndarray) -> None:
    """Take logits that nobody wants."""


def _ids(model: Model, text: Path | None, count: int) -> np.ndarray:
    """Return random tokens, or those of a text, from its start again if it is short."""
    if text is None:
        return np.random.default_rng(0).integers(model.spec.vocab_size, size=count)
    stored = model.checkpoint
    if stored.tokenizer_json is None:
        raise NotMeasured("this model has no tokenizer for --text")
    found = Tokenizer(stored.tokenizer_json, stored.tokenizer_config).encode(text.read_text())
    return np.resize(found, count)


@experiment("pass_cost", __doc__, rounds=7)
@MODEL_DIR
@click.option("--precision", type=click.Choice(PRECISIONS), help="default: as stored")
@TEAM
@click.option("--tokens", type=COUNTS, default="1,2,3,4,6,8,12,16,32", show_default=True)
@click.option("--context", type=click.IntRange(1), default=16, show_default=True)
@click.option("--what", type=Listed.of(_KINDS), default="chain,sequences", show_default=True)
@click.option("--text", type=FILE, help="take tokens from there; default: random ones")
@PAGES_READ
@MIB
def main(
    model_dir: Path | None,
    precision: str | None,
    threads: int,
    tokens: tuple[int, ...],
    context: int,
    what: tuple[str, ...],
    text: Path | None,
    pages: str,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each kind of pass."""
    model, reader, most = opened(model_dir, precision), Reader(pages, mib << 20), max(tokens)
    sequences = most if "sequences" in what else 1
    ids = _ids(model, text, sequences * (context + most))
    passes = Passes(model, threads, ids, context, most, sequences)
    with closing(passes.session):
        parts = {(kind, count): getattr(passes, kind)(count) for kind in what for count in tokens}
        runs: dict[tuple[str, int], Callable[[], float]] = {
            key: partial(passes.milliseconds, each) for key, each in parts.items()
        }
        runs["read", 0] = partial(reader.gbps, threads)
        found = turns(runs, rounds)
        moved = {key: passes.moved(each) for key, each in parts.items()}
        warm_up = passes.warm_up(most)
    read = median(found["read", 0])
    for kind in what:
        ms = {count: median(found[kind, count]) for count in tokens}
        gbps = {count: moved[kind, count][0] / ms[count] / 1e6 for count in tokens}
        ratios = {count: ratio(found[kind, count], found[kind, tokens[0]]) for count in tokens}
        experts = {count: moved[kind, count][1] for count in tokens}
        yield {
            "op": "pass",
            "test": kind,
            "model": model.checkpoint.path.name,
            "format": model.precision,
            "threads": threads,
            "context": context,
            "isa": passes.session.isa,
            "tokens": tokens,
            "ms": [ms[count] for count in tokens],
            "ratio": [ratios[count].value for count in tokens],
            "ratio_95": [[ratios[count].low, ratios[count].high] for count in tokens],
            "experts": [experts[count] for count in tokens] if None not in experts.values() else [],
            "gbps": [gbps[count] for count in tokens],
            "read_gbps": read,
            "pct_of_limit": [100 * gbps[count] / read for count in tokens],
            "warm_up_ms": warm_up,
        }


if __name__ == "__main__":
    main()
