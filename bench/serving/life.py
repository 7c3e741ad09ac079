"""What a server survives: clients that leave, a full queue, hours of everything, a dead engine."""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from bench.measure import NotMeasured
from bench.ops.experiment import Row
from bench.serving.client import LEFT, Exchange, get, start
from bench.serving.load import Shape, fault, percentiles, seeds
from bench.serving.servers import Server

PAGES, RUNNING = "clocher:kv_cache_usage_perc", "clocher:num_requests_running"
_IDLE_S = 10.0
_LONG = 2000  # tokens of streams that only end because somebody ends them
_WARM_S = 120.0
_CHECK_S = 0.5

# What no server may answer with anything but 4xx.
_BAD: tuple[dict[str, Any], ...] = (
    {"max_tokens": -1},
    {"temperature": "hot"},
    {"top_p": 7},
    {"prompt": [10**9]},
    {"prompt": {}},
    {"stop": 5},
    {"n": 0},
)


async def disconnect(server: Server, shape: Shape, count: int, clients: int = 8) -> Row:
    """Leave at random moments, then see which pages are still in use.

    Args:
        server: that has the metrics of ours.
        shape: of the requests.
        count: how many leave.
        clients: side by side.
    """
    dice = random.Random(count)
    before = await _idle(server)
    answers: list[Exchange] = []

    async def client(requests: int, seed: int) -> None:
        for number in range(requests):
            request = shape.request(server, seed + number, max_tokens=_LONG)
            answer = await start(server.target, request)
            if dice.random() < 0.5:
                asyncio.get_running_loop().call_later(dice.expovariate(4.0), answer.leave)
                await answer.answered()
            else:
                await answer.has_tokens(dice.randint(1, 16))
                answer.leave()
            answers.append(answer)

    shares = [count // clients + (number < count % clients) for number in range(clients)]
    await asyncio.gather(*(client(share, seeds("disconnect", n)) for n, share in enumerate(shares)))
    settled = await _idle(server)
    free, step_ms = await _time_to_free(server, shape, server.slots)
    await _idle(server)
    left = [answer for answer in answers if answer.error == LEFT]
    found = Counter(w for a in answers if a.error != LEFT and (w := fault(a, _LONG)))
    early = sum(not answer.stamps for answer in left)
    leaked = settled[PAGES] + settled[RUNNING]
    row: Row = {
        "op": "disconnect",
        "server": server.name,
        "disconnects": len(left),
        "before_first_token": early,
        "errors": dict(found),
        "error_count": sum(found.values()),
        "kv_usage_before": before[PAGES],
        "kv_usage_after": settled[PAGES],
        "running_after": settled[RUNNING],
        "free_ms": median(free),
        "free_max_ms": max(free),
        "step_ms": step_ms,
        "correct": leaked == 0 and not found,
    }
    return row


async def _time_to_free(server: Server, shape: Shape, slots: int) -> tuple[list[float], float]:
    """Return ms from a disconnect to the first token of who waited for the place; ms of a step.

    Metrics are too seldom for it. A prompt of one token waits while all places are taken.
    """

    async def run(seed: int) -> Exchange:
        answer = await start(server.target, shape.request(server, seed, max_tokens=_LONG))
        if not await answer.has_tokens(4):
            raise NotMeasured(f"{server.name}: the stream ended: {answer.error}")
        return answer

    seed = seeds("free", 0)
    one = replace(shape, length=1)
    running = [await run(seed + number) for number in range(slots)]
    found, steps = [], []
    for number in range(10):
        waiting = await start(server.target, one.request(server, seed + number, max_tokens=1))
        await running[-1].has_tokens(len(running[-1].stamps) + 16)
        leaving = running.pop(0)
        if waiting.stamps or leaving.ended:
            raise NotMeasured(f"{server.name}: {slots} streams leave room for another")
        steps.append(median(np.diff(leaving.stamps)) * 1e3)
        leaving.leave()
        if why := fault(await waiting.answered(), 1):
            raise NotMeasured(f"{server.name}: who waited: {why}")
        found.append(1e3 * (waiting.stamps[0] - leaving.ended))
        running.append(await run(seed + slots + number))
    for answer in running:
        answer.leave()
    return found, median(steps)


async def _idle(server: Server) -> dict[str, float]:
    """Wait until nothing runs and no page is in use, for a time; return the last metrics."""
    until = time.perf_counter() + _IDLE_S
    while True:
        found = await server.metrics()
        if PAGES not in found or RUNNING not in found:
            raise NotMeasured(f"{server.name}: /metrics has no {PAGES} or {RUNNING}")
        if not (found[PAGES] or found[RUNNING]) or time.perf_counter() > until:
            return found
        await asyncio.sleep(0.002)


async def queue_full(server: Server, shape: Shape, most: int = 600, tries: int = 20) -> Row:
    """Fill the queue with streams that wait, and time the refusal of more."""
    held: list[Exchange] = []
    while len(held) < most and not (held and held[-1].status == 429):
        request = shape.request(server, seeds("queue", len(held)), max_tokens=_LONG)
        held.append(await start(server.target, request))
        await asyncio.wait([asyncio.ensure_future(held[-1].answered())], timeout=0.02)
    refused = []
    if held[-1].status == 429:
        for number in range(tries):
            request = shape.request(server, seeds("refused", number), max_tokens=_LONG)
            refused.append(await (await start(server.target, request)).answered())
    for answer in held:
        answer.leave()
    await _idle(server)
    times = [1e3 * (a.ended - a.started) for a in refused if a.status == 429]
    told = all("retry-after" in answer.headers for answer in refused)
    row: Row = {"op": "queue full", "server": server.name, "accepted": len(held) - 1}
    row |= {"refused": len(times), "retry_after": told, "correct": bool(times) and told}
    if not times:
        return row
    return row | {"refusal_ms": median(times), "refusal_max_ms": max(times)}


class Soak:
    """Streams of random sizes, of which some leave early and some are nonsense.

    Args:
        server: started here, or its memory is not known.
        shape: the largest request.
        streams: side by side.
        minutes: how long.
    """

    def __init__(self, server: Server, shape: Shape, streams: int, minutes: float) -> None:
        self.server, self.shape, self.streams = server, shape, streams
        self.seconds = 60 * minutes
        self.asked: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.health_ms: list[float] = []
        self.rss: list[tuple[float, int]] = []
        self.began = time.perf_counter()

    async def run(self) -> Row:
        """Return what came of it."""
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(*map(self._client, range(self.streams)))
        await watch
        warm_s = min(_WARM_S, self.seconds / 4)
        warm = [size for at, size in self.rss if at >= warm_s] or [size for _, size in self.rss]
        # Memory breathes with what runs; the first and the last tenth are compared.
        tenth = max(1, len(warm) // 10)
        first, last = median(warm[:tenth]), median(warm[-tenth:])
        growth = 100 * (last / first - 1) if first else None
        row: Row = {
            "op": "soak",
            "server": self.server.name,
            "streams": self.streams,
            "minutes": self.seconds / 60,
            "requests": self.asked.total(),
            "asked": dict(self.asked),
            "errors": dict(self.faults),
            "error_count": self.faults.total(),
            "rss_first_mb": first / 2**20,
            "rss_last_mb": last / 2**20,
            "rss_growth_percent": growth,
            **percentiles("health", self.health_ms),
            "correct": not self.faults,
        }
        return row

    def _left(self) -> float:
        return self.began + self.seconds - time.perf_counter()

    async def _client(self, number: int) -> None:
        dice = random.Random(number)
        while self._left() > 0:
            kind = dice.choices(("whole", "cancelled", "bad"), (6, 3, 1))[0]
            self.asked[kind] += 1
            seed = dice.randrange(1 << 60)
            if kind == "bad":
                why = await self._nonsense(dice.choice(_BAD), seed)
            else:
                why = await self._stream(dice, seed, kind == "cancelled")
            if why:
                self.faults[f"{kind}: {why}"] += 1

    async def _stream(self, dice: random.Random, seed: int, leaves: bool) -> str:
        length, new = dice.randint(1, self.shape.length), dice.randint(1, self.shape.new)
        shape = replace(self.shape, length=length, new=new)
        answer = await start(self.server.target, shape.request(self.server, seed))
        if leaves:
            asyncio.get_running_loop().call_later(dice.uniform(0, 5), answer.leave)
        await answer.answered()
        if answer.status == 429:
            self.asked["refused"] += 1
            await asyncio.sleep(dice.uniform(0, 1))
            return ""
        return "" if answer.error == LEFT else fault(answer, new)

    async def _nonsense(self, fields: dict[str, Any], seed: int) -> str:
        request = replace(self.shape, endpoint="completions").request(self.server, seed, **fields)
        answer = await (await start(self.server.target, request)).answered()
        if 400 <= answer.status < 500:
            return ""
        return f"{json.dumps(fields)} gave {answer.status or answer.error}"

    async def _watch(self) -> None:
        while self._left() > 0:
            answer = await get(self.server.target, "/health")
            self.health_ms.append(1e3 * (answer.ended - answer.started))
            if answer.status != 200:
                self.faults[f"/health: {answer.error or answer.status}"] += 1
            at = time.perf_counter() - self.began
            self.rss.append((at, self.server.rss_bytes()))
            await asyncio.sleep(_CHECK_S)


async def kill(server: Server, shape: Shape, streams: int = 16) -> Row:
    """Kill the engine under some streams; time until new requests are served."""
    pid = (await server.health()).get("engine_pid") or server.about.get("engine_pid")
    if not isinstance(pid, int):
        raise NotMeasured(f"{server.name}: neither /health nor the ready line has engine_pid")
    running = [
        await start(server.target, shape.request(server, seeds("kill", n), max_tokens=_LONG))
        for n in range(streams)
    ]
    # Those that wait for their turn have no token, and shall hear of it, too.
    await running[0].has_tokens(8)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*(answer.answered(60.0) for answer in running))
    told = sum(a.error.startswith("error event") for a in running)
    told_ms = 1e3 * (max(answer.ended for answer in running) - killed)
    between: Counter[str] = Counter()
    while True:
        answer = await start(server.target, shape.request(server, seeds("after", len(between))))
        if not (why := fault(await answer.answered(), shape.new)):
            break
        between[why] += 1
        if time.perf_counter() - killed > 300:
            raise NotMeasured(f"{server.name}: serves nothing 300 s after its engine died: {why}")
        await asyncio.sleep(0.05)
    served_s = answer.stamps[0] - killed
    others = Counter(a.error for a in running if not a.error.startswith("error event"))
    row: Row = {
        "op": "kill",
        "server": server.name,
        "streams": streams,
        "told": told,
        "told_ms": told_ms,
        "errors": dict(others),
        "error_count": others.total(),
        "between": dict(between),
        "served_s": served_s,
        "load_s": server.load_s,
        "correct": told == streams,
    }
    return row


def survival(
    server: Server, shape: Shape, cases: tuple[str, ...], disconnects: int, soak: Soak | None
) -> Iterator[Row]:
    """Yield the rows of the cases of this module, the deadly one last."""
    if "disconnect" in cases:
        yield asyncio.run(disconnect(server, shape, disconnects))
        yield asyncio.run(queue_full(server, shape))
    if soak is not None:
        yield asyncio.run(soak.run())
    if "kill" in cases:
        yield asyncio.run(kill(server, shape))
