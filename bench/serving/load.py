"""Loads: what is asked, when, and what the answers amount to."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.ops.experiment import Row
from bench.serving.client import Exchange, start
from bench.serving.servers import Server

_FIRST_ID = 5  # those before it may be special
_WORDS = ("alpha", "beta", "river", "stone", "green", "seven", "window", "paper", "cloud", "orbit")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request looks like.

    Attributes:
        endpoint: "completions" gets token ids, "chat" words.
        length: ids, or words, of the prompt.
        new: tokens of the output.
        vocab: ids are below it.
        slo_ms: bounds of the time to the first token and of a request's 99th percentile between
            tokens, within which an answer is good; None: no such bounds.
    """

    endpoint: str
    length: int
    new: int
    vocab: int
    slo_ms: tuple[float, float] | None = None

    def ids(self, seed: int) -> list[int]:
        """Return a prompt."""
        return random.Random(seed).choices(range(_FIRST_ID, self.vocab), k=self.length)

    def request(self, server: Server, seed: int, **other: Any) -> bytes:
        """Return a request for exactly `new` tokens; `other` fields replace its own."""
        fields: dict[str, Any] = {
            "model": server.model,
            "max_tokens": self.new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        if self.endpoint == "chat":
            words = random.Random(seed).choices(_WORDS, k=self.length)
            fields["messages"] = [{"role": "user", "content": " ".join(words)}]
        else:
            fields["prompt"] = self.ids(seed)
        body = json.dumps(fields | other).encode()
        return server.target.request("POST", PATHS[self.endpoint], body)


def seeds(load: str, number: int) -> int:
    """Return the first of a million seeds of a round, so that no prompt comes twice."""
    return random.Random(f"{load} {number}").randrange(1 << 40) * 1_000_000


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Return when requests arrive, in seconds, `rate` of them a second in the mean."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


async def closed(
    server: Server, shape: Shape, streams: int, each: int, seed: int
) -> list[Exchange]:
    """Let some clients ask `each` requests, one after another."""

    async def client(number: int) -> list[Exchange]:
        mine = []
        for turn in range(each):
            request = shape.request(server, seed + number * each + turn)
            mine.append(await (await start(server.target, request)).answered())
        return mine

    found = await asyncio.gather(*map(client, range(streams)))
    return [exchange for mine in found for exchange in mine]


async def arriving(
    server: Server, shape: Shape, rate: float, count: int, seed: int
) -> list[Exchange]:
    """Ask requests as they arrive, whether or not earlier ones have ended."""
    at = poisson(rate, count, seed)
    began = time.perf_counter()

    async def one(number: int) -> Exchange:
        await asyncio.sleep(began + at[number] - time.perf_counter())
        return await (await start(server.target, shape.request(server, seed + number))).answered()

    return list(await asyncio.gather(*map(one, range(len(at)))))


@dataclass(frozen=True, slots=True)
class Round:
    """Answers of one round, and what they cost.

    Attributes:
        answers: all of them.
        seconds: from the first request to the last answer.
        client_cpu: CPUs that this process used meanwhile.
        server_cpu: those of the server's processes; None: not ours to know.
    """

    answers: list[Exchange]
    seconds: float
    client_cpu: float
    server_cpu: float | None


async def observed(server: Server, load: Any) -> Round:
    """Await the answers of a load, and watch the CPUs."""
    used, began, theirs = time.process_time(), time.perf_counter(), server.cpu_seconds()
    answers = await load
    wall = time.perf_counter() - began
    spent = server.cpu_seconds()
    other = None if spent is None or theirs is None else (spent - theirs) / wall
    return Round(answers, wall, (time.process_time() - used) / wall, other)


def fault(answer: Exchange, new: int) -> str:
    """Return what is wrong with the answer to a request for `new` tokens; "" if nothing is."""
    if answer.error:
        return answer.error
    if answer.tokens is None:
        return "no usage in the stream"
    if answer.tokens != new:
        return f"{answer.tokens} tokens, asked for {new}"
    if answer.finish != "length":
        return f"finish_reason {answer.finish!r}, expected 'length'"
    return "" if answer.stamps else "no token in any chunk"


def errors(answers: Sequence[Exchange], new: int) -> dict[str, int]:
    """Count what went wrong, by reason."""
    return dict(Counter(why for answer in answers if (why := fault(answer, new))))


def gaps_ms(answer: Exchange) -> np.ndarray:
    """Return the times between chunks that carry a token."""
    return np.diff(np.asarray(answer.stamps)) * 1e3


def percentiles(name: str, values: np.ndarray | Sequence[float]) -> Row:
    """Return the 50th, 95th and 99th percentile of some milliseconds, None of nothing."""
    data = np.asarray(values, np.float64)
    found = np.percentile(data, [50, 95, 99]).tolist() if data.size else [None] * 3
    return {f"{name}_p{p}_ms": value for p, value in zip((50, 95, 99), found, strict=True)}


def is_within(answer: Exchange, slo_ms: tuple[float, float]) -> bool:
    """Whether a good answer came in time."""
    gaps = gaps_ms(answer)
    first = (answer.stamps[0] - answer.started) * 1e3
    return first <= slo_ms[0] and (not gaps.size or np.percentile(gaps, 99) <= slo_ms[1])


def cell(rounds: Sequence[Round], shape: Shape) -> Row:
    """Return what some rounds of a load amount to.

    Speeds are medians of rounds, the rest is of all answers. Those that failed are errors, and
    their tokens count nowhere.
    """
    answers = [answer for each in rounds for answer in each.answers]
    good = [answer for answer in answers if not fault(answer, shape.new)]
    speeds = [
        sum(a.tokens or 0 for a in each.answers if not fault(a, shape.new)) / each.seconds
        for each in rounds
    ]
    gaps = [gaps_ms(answer) for answer in good]
    server = [each.server_cpu for each in rounds if each.server_cpu is not None]
    found = errors(answers, shape.new)
    tokens, chunks = sum(a.tokens or 0 for a in good), sum(len(a.stamps) for a in good)
    reads = sum(len(set(a.stamps)) for a in good)
    row: Row = {
        "requests": len(answers),
        "errors": found,
        "error_count": sum(found.values()),
        "tok_s": float(np.median(speeds)),
        "samples": speeds,
        **percentiles("ttft", [(a.stamps[0] - a.started) * 1e3 for a in good]),
        **percentiles("itl", np.concatenate(gaps) if gaps else []),
        **percentiles("e2e", [(a.ended - a.started) * 1e3 for a in good]),
        "tokens_per_chunk": tokens / chunks if chunks else None,
        "tokens_per_read": tokens / reads if reads else None,
        "client_cpu": float(np.median([each.client_cpu for each in rounds])),
        "server_cpu": float(np.median(server)) if server else None,
    }
    if shape.slo_ms:
        counts = [
            sum(not fault(a, shape.new) and is_within(a, shape.slo_ms) for a in each.answers)
            / each.seconds
            for each in rounds
        ]
        row |= {"slo_ms": list(shape.slo_ms), "goodput_rps": float(np.median(counts))}
    return row
