"""The questions of a simulation, asked of a real server at the same times."""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import NotMeasured
from bench.scale.load import Conversation, Load
from bench.scale.replica import Ask, Limits
from bench.serving import servers
from bench.serving.client import start
from bench.serving.load import Shape, fault
from bench.serving.servers import Server
from clocher_runtime.engine.timing import StepSums

_VOCAB, _FIRST_ID = 256, 5  # every vocabulary has these ids, and those before may be special


def replay(
    model_dir: Path, limits: Limits, load: Load, who: Sequence[Conversation]
) -> tuple[list[Ask], float, StepSums]:
    """Serve a model and ask it; return the questions, the share of time in steps, and the steps.

    Later prompts have other ids where the answers were, so the load has to be one that forgets.

    Raises:
        NotMeasured: the server does not start, or an answer is not what was asked for.
    """
    flags = f"--batch {limits.batch} --kv-pages {limits.kv_pages} --itl-ms {limits.itl_ms:g}"
    flags += f" --queue {limits.queue} --context {load.context}"
    with servers.clocher(model_dir, "clocher-serve", flags) as server:
        return asyncio.run(_played(server, load, who))


async def _played(
    server: Server, load: Load, who: Sequence[Conversation]
) -> tuple[list[Ask], float, StepSums]:
    # The first request of a process waits for memory that later ones find there.
    shape = Shape("completions", 32, 4, _VOCAB)
    await (await start(server.target, shape.request(server, 0))).answered()
    before = await server.metrics()
    began = time.perf_counter()
    asks: list[Ask] = []
    await asyncio.gather(*(_converse(server, each, began, load, asks) for each in who))
    after = await server.metrics()
    counted = {name: after[name] - before[name] for name in after}

    def total(name: str, unit: float = 1) -> int:
        return round(unit * counted[f"clocher:{name}_total"])

    sums = StepSums(
        decode_steps=total("decode_steps"),
        decode_tokens=total("decode_tokens"),
        decode_ns=total("decode_step_seconds", 1e9),
        prompt_steps=total("prompt_steps"),
        prompt_tokens=total("prompt_tokens"),
        prompt_ns=total("prompt_step_seconds", 1e9),
    )
    busy = (sums.decode_ns + sums.prompt_ns) / 1e9 / (time.perf_counter() - began)
    # Which question found how much is not told; all found so many.
    share = total("prefix_cache_hits") / max(1, sum(ask.prompt for ask in asks))
    for ask in asks:
        ask.found = round(share * ask.prompt)
    return sorted(asks, key=lambda ask: ask.arrived), busy, sums


async def _converse(
    server: Server, who: Conversation, began: float, load: Load, asks: list[Ask]
) -> None:
    """Ask the questions of a conversation, and think between them."""
    ids = _ids(f"system {who.system}", who.shared)
    await asyncio.sleep(max(0.0, began + who.starts - time.perf_counter()))
    for turn, (question, answer, thought) in enumerate(who.turns):
        arrived = time.perf_counter() - began
        if arrived >= load.seconds:
            return
        ids += _ids(f"{load.seed} {who.number} {turn}", question)
        shape = Shape("completions", len(ids), answer, _VOCAB)
        found = await (await start(server.target, shape.request(server, 0, prompt=ids))).answered()
        ask = Ask(who, turn, arrived, len(ids), answer, tries=1)
        if found.status == 429:
            ask.fate = "refused"
        elif why := fault(found, answer):
            raise NotMeasured(f"{server.name}: {why}")
        else:
            ask.fate, ask.first = "served", found.stamps[0] - began
            ask.ended = found.stamps[-1] - began
        asks.append(ask)
        ids += _ids(f"answer {who.number} {turn}", answer)
        await asyncio.sleep(thought)


def _ids(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(_FIRST_ID, _VOCAB), k=count)
