"""What a server costs beside the bare session, and what a long prompt does to a running stream."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from statistics import mean, median
from typing import Any

import numpy as np

from bench.measure import NotMeasured, interleave, ratio
from bench.ops.experiment import Row
from bench.serving.client import Exchange, start
from bench.serving.load import (
    Round,
    Shape,
    arriving,
    cell,
    closed,
    fault,
    gaps_ms,
    observed,
    percentiles,
    seeds,
)
from bench.serving.servers import Server
from clocher_runtime.engine.session import Session

BARE = "bare session"
_METRICS_S = 1.5  # metrics of the engine are at most as old
_NO_STEPS = np.zeros(2)
_RUNNING = 3000  # tokens of a stream that runs while something else is measured


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share.

    Attributes:
        servers: measured in turns; the first one is ours.
        shape: of the requests.
        rounds: how often each is measured.
        session: the engine without a server, in this process; None: there is no model for it.
    """

    servers: list[Server]
    shape: Shape
    rounds: int
    session: Session | None = None


def loads(
    bench: Bench, streams: tuple[int, ...], rates: tuple[float, ...], each: int, seconds: float
) -> Iterator[Row]:
    """Yield a row for each load and server: closed loops, then Poisson arrivals."""
    for count in streams:
        row = {"load": f"{count} stream{'s' * (count > 1)}", "streams": count}
        yield from _load(bench, row, partial(closed, streams=count, each=each))
    for rate in rates:
        row = {"load": f"{rate:g}/s", "rate": rate}
        count = max(2, round(rate * seconds))
        yield from _load(bench, row, partial(arriving, rate=rate, count=count))


def _load(bench: Bench, row: Row, make: Callable[..., Any]) -> Iterator[Row]:
    found: dict[str, list[Round]] = {server.name: [] for server in bench.servers}

    def run(server: Server) -> float:
        done = found[server.name]
        load = make(server, bench.shape, seed=seeds(str(row["load"]), len(done)))
        done.append(asyncio.run(observed(server, load)))
        return done[-1].seconds

    interleave({server.name: partial(run, server) for server in bench.servers}, bench.rounds)
    for server in bench.servers:
        yield {"op": "load", "server": server.name, **row} | cell(
            found[server.name][1:], bench.shape
        )


def fresh(measure: Callable[..., float]) -> Callable[..., float]:
    """Hand a function another seed with each call, so that no prompt comes twice."""
    calls = 0

    @wraps(measure)
    def run(*arguments: Any) -> float:
        nonlocal calls
        calls += 1
        return measure(*arguments, seeds(measure.__name__, calls))

    return run


def overhead(bench: Bench) -> Iterator[Row]:
    """Yield the milliseconds a token of one stream, through each server and from the session.

    Two processes may have luck of their own with a machine. So what the engine of a server says of
    its own steps, in the same seconds, stands beside it.
    """
    times: dict[str, list[float]] = {server.name: [] for server in bench.servers}

    def served(server: Server, seed: int) -> float:
        (answer,) = asyncio.run(closed(server, bench.shape, 1, 1, seed))
        checked(server, [answer], bench.shape)
        times[server.name].append(1e3 * answer.lasted / (bench.shape.new - 1))
        return times[server.name][-1]

    def bare(seed: int) -> float:
        stamps = [
            time.perf_counter()
            for _ in _session(bench).generate(
                [bench.shape.ids(seed)], bench.shape.new, stop_ids=frozenset()
            )
        ]
        return 1e3 * (stamps[-1] - stamps[0]) / (len(stamps) - 1)

    before = {server.name: asyncio.run(_steps(server)) for server in bench.servers}
    run, bares = fresh(served), {BARE: fresh(bare)}
    rows = list(_beside_bare(bench, "overhead", "ms_per_token", run, bares))
    after = {server.name: asyncio.run(_steps(server)) for server in bench.servers}
    for row in rows:
        count, seconds = after.get(row["server"], _NO_STEPS) - before.get(row["server"], _NO_STEPS)
        if count:
            step_ms = 1e3 * seconds / count
            row |= {"step_ms": step_ms, "over_step": mean(times[row["server"]]) / step_ms}
        yield row


async def _steps(server: Server) -> np.ndarray:
    """Return decode steps of a server's engine and their seconds, 0 if it does not say."""
    await asyncio.sleep(_METRICS_S)
    try:
        found = await server.metrics()
    except NotMeasured:
        return _NO_STEPS
    return np.array(
        [found.get(f"clocher:decode_step{name}_total", 0) for name in ("s", "_seconds")]
    )


def batch(bench: Bench, count: int = 8) -> Iterator[Row]:
    """Yield the tokens a second of eight requests that come together, prefill included."""

    def served(server: Server, seed: int) -> float:
        begin = time.perf_counter()
        answers = asyncio.run(closed(server, bench.shape, count, 1, seed))
        checked(server, answers, bench.shape)
        return count * bench.shape.new / (max(a.ended for a in answers) - begin)

    def bare(rows: int, seed: int) -> float:
        prompts = [bench.shape.ids(seed + row) for row in range(rows)]
        begin = time.perf_counter()
        tokens = _session(bench).generate(prompts, bench.shape.new, stop_ids=frozenset())
        return sum(1 for _ in tokens) / (time.perf_counter() - begin)

    run = fresh(bare)
    bares = {BARE: partial(run, count), f"{BARE}, one stream": partial(run, 1)}
    yield from _beside_bare(bench, "batch", "tok_s", fresh(served), bares)


def _beside_bare(
    bench: Bench, op: str, unit: str, served: Any, bares: dict[str, Callable[[], float]]
) -> Iterator[Row]:
    runs = {server.name: partial(served, server) for server in bench.servers}
    found = interleave(runs | (bares if bench.session else {}), bench.rounds)
    for name, values in found.items():
        row: Row = {"op": op, "server": name, unit: median(values), "samples": values}
        if bench.session and name != BARE:
            of = ratio(values, found[BARE])
            row |= {"ratio": of.value, "ratio_low": of.low, "ratio_high": of.high}
        yield row


def intrusion(bench: Bench, length: int) -> Iterator[Row]:
    """Yield the times between tokens of a running stream while a long prompt arrives."""
    found: dict[str, list[tuple[np.ndarray, float]]] = {s.name: [] for s in bench.servers}
    for number in range(bench.rounds):
        turn = number % len(bench.servers)
        for server in bench.servers[turn:] + bench.servers[:turn]:
            seed = seeds("intrusion", number)
            found[server.name].append(asyncio.run(_intruded(server, bench.shape, length, seed)))
    for name, rounds in found.items():
        gaps = np.concatenate([gaps for gaps, _ in rounds])
        yield {
            "op": "intrusion",
            "server": name,
            "prompt": length,
            "tokens": len(gaps),
            **percentiles("gap", gaps),
            "max_ms": float(gaps.max()),
            "intruder_ttft_ms": median(first_ms for _, first_ms in rounds),
        }


async def _intruded(
    server: Server, shape: Shape, length: int, seed: int
) -> tuple[np.ndarray, float]:
    """Return gaps, in ms, that overlap the prefill of a long prompt, and its time to a token."""
    running = await start(server.target, shape.request(server, seed, max_tokens=_RUNNING))
    if not await running.has_tokens(16):
        raise NotMeasured(f"{server.name}: the running stream ended: {running.error}")
    request = replace(shape, length=length, new=2).request(server, seed + 1)
    long = await (await start(server.target, request)).answered()
    running.leave()
    if why := fault(long, 2):
        raise NotMeasured(f"{server.name}: a prompt of {length}: {why}")
    stamps, gaps = np.asarray(running.stamps), gaps_ms(running)
    during = (stamps[1:] > long.started) & (stamps[:-1] < long.stamps[0])
    if not during.any():
        raise NotMeasured(f"{server.name}: no token while the prompt arrived")
    return gaps[during], 1e3 * (long.stamps[0] - long.started)


def checked(server: Server, answers: list[Exchange], shape: Shape) -> None:
    """Raise if an answer that is compared has a fault.

    Raises:
        NotMeasured: one has.
    """
    if why := next(filter(None, (fault(answer, shape.new) for answer in answers)), None):
        raise NotMeasured(f"{server.name}: {why}")


def _session(bench: Bench) -> Session:
    assert bench.session is not None
    return bench.session
