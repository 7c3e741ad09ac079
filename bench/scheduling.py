"""Show what sharing the steps of a session costs and gains.

    python -m bench.scheduling --model-dir models/l1b-int4

Four measurements, each against the limit that the same session sets:

- `arrivals`: requests that arrive one after another, their tokens a second against those of the
  same requests given together;
- `stall`: the time between tokens of a running text while a long prompt arrives;
- `prefix`: the time to the first token of a prompt that was seen before, against a new one;
- `turn`: tokens that the second turn of a conversation computes, against those it adds.

Prints one JSON line each.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import numpy as np

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import ITL_MS, Session
from clocher_runtime.engine.topology import default_threads


def prompt(model: Model, seed: int, length: int) -> list[int]:
    """Return a random prompt."""
    found: list[int] = (
        np.random.default_rng(seed).integers(5, model.spec.vocab_size, length).tolist()
    )
    return found


def drain(streams: list[Generation], between: Callable[[int], None] = lambda made: None) -> int:
    """Take all tokens of some generations in turn; return how many there were."""
    made = 0
    while streams:
        left = []
        for stream in streams:
            if next(stream, None) is not None:
                made += 1
                left.append(stream)
        streams[:] = left
        between(made)
    return made


def arrivals(session: Session, batch: int, length: int, new: int, rounds: int) -> dict[str, float]:
    """Compare requests that arrive one after another with the same requests given together."""
    rates: dict[str, list[float]] = {"together": [], "one after another": []}
    for number in range(rounds):
        prompts = [prompt(session.model, 100 * number + i, length) for i in range(batch)]
        start = time.perf_counter()
        made = sum(1 for _ in session.generate(prompts, new, stop_ids=frozenset()))
        rates["together"].append(made / (time.perf_counter() - start))
        streams: list[Generation] = []
        waiting = prompts[::-1]
        start = time.perf_counter()

        def arrive(made: int, waiting: list = waiting, streams: list = streams) -> None:
            if waiting:  # the next one comes with the next token
                streams.append(session.generate([waiting.pop()], new, stop_ids=frozenset()))

        arrive(0)
        made = drain(streams, arrive)
        rates["one after another"].append(made / (time.perf_counter() - start))
    together, apart = (median(values) for values in rates.values())
    return {"together_tok_s": together, "arriving_tok_s": apart, "ratio": apart / together}


def stall(session: Session, length: int, new: int) -> dict[str, float]:
    """Measure the gaps between tokens of a text while a long prompt is computed beside it."""
    gaps: list[float] = []
    quiet: list[float] = []
    running = session.generate([prompt(session.model, 1, 32)], 10**6, stop_ids=frozenset())
    for _ in range(8):
        next(running)
    last = time.perf_counter()
    for _ in range(20):
        next(running)
        now = time.perf_counter()
        quiet.append(now - last)
        last = now
    arriving = session.generate([prompt(session.model, 2, length)], new, stop_ids=frozenset())
    box, began = arriving.begin(), time.perf_counter()
    last, first = time.perf_counter(), 0.0
    while not box.is_over:
        next(running)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if box.tokens and not first:
            first = now - began
    running.close()
    ranked = sorted(gaps)
    return {
        "itl_ms": session.scheduler.itl_ms,
        "alone_p50_ms": 1e3 * median(quiet),
        "p50_ms": 1e3 * median(gaps),
        "p99_ms": 1e3 * ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))],
        "max_ms": 1e3 * ranked[-1],
        "first_token_ms": 1e3 * first,
        "steps": len(gaps),
    }


def prefix(session: Session, length: int, rounds: int) -> dict[str, float]:
    """Compare the first token of a prompt that was seen before with that of a new one."""
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    for number in range(rounds):
        ids = prompt(session.model, 1000 + number, length)
        for kind in times:
            start = time.perf_counter()
            list(session.generate([ids], 1))
            times[kind].append(time.perf_counter() - start)
    cold, warm = (median(values) for values in times.values())
    return {"cold_ms": 1e3 * cold, "warm_ms": 1e3 * warm, "ratio": warm / cold}


def turn(session: Session, length: int, new: int) -> dict[str, float]:
    """Count what the second turn of a conversation computes."""
    ids = prompt(session.model, 5000, length)
    answer = [token.id for token in session.generate([ids], new, stop_ids=frozenset())]
    before = session.kv_misses
    added = prompt(session.model, 5001, 20)
    list(session.generate([[*ids, *answer, *added]], 1))
    return {"tokens_added": len(added) + new, "tokens_computed": session.kv_misses - before}


@click.command(help=__doc__)
@click.option("--model-dir", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True)
@click.option("--prompt", "length", type=click.IntRange(1), default=64, show_default=True)
@click.option("--new", type=click.IntRange(2), default=64, show_default=True)
@click.option("--long", "long_", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--repeated", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--itl-ms", type=float, default=ITL_MS, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--precision", help="precision to load the weights in")
def main(
    model_dir: Path | None,
    threads: int | None,
    batch: int,
    length: int,
    new: int,
    long_: int,
    repeated: int,
    itl_ms: float,
    rounds: int,
    precision: str | None,
) -> None:
    """Measure and print."""
    model = load_model(open_checkpoint(model_dir or embedded_model()), precision)
    context = min(model.spec.max_positions, max(long_, repeated) + 256)
    long_, repeated = min(long_, context - new), min(repeated, context - new)
    session = Session(
        model,
        EngineConfig(
            threads=threads or default_threads(),
            batch=batch,
            context=context,
            prefix_cache=True,
            itl_ms=itl_ms,
            speculate="off",
        ),
    )
    session.warm()
    drain([session.generate([prompt(model, 0, 2 * batch)], 8, stop_ids=frozenset())])
    for name, measured in (
        ("arrivals", lambda: arrivals(session, batch, length, new, rounds)),
        ("stall", lambda: stall(session, long_, 2)),
        ("prefix", lambda: prefix(session, repeated, rounds)),
        ("turn", lambda: turn(session, repeated // 2, 32)),
    ):
        line = {"kind": f"scheduling.{name}", "isa": session.isa, **measured()}
        click.echo(json.dumps(line))
    session.close()


if __name__ == "__main__":
    main()
