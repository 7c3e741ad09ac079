"""POST /v1/embeddings: pooled hidden states of unit length (OpenAI API reference)."""

import asyncio
import base64
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from clocher_runtime.serve.errors import invalid
from clocher_runtime.serve.messages import Scored, Submit
from clocher_runtime.serve.prompts import room_for
from clocher_runtime.serve.schemas import MAX_TOKENS, Inputs, Schema, ShortText

if TYPE_CHECKING:
    from clocher_runtime.serve.app import Server

POOLINGS = ("mean", "cls", "last")


class EmbeddingsRequest(Schema):
    """POST /v1/embeddings."""

    model: ShortText | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="of the vectors: the first ones, at unit length"
    )


async def embed(server: "Server", asked: EmbeddingsRequest) -> dict[str, Any]:
    """Return the response to a request; raises ApiError. A batch is with the engine at a time."""
    engine, prompts, side = server.engine, server.prompts, server.config.batch
    adapter = server.adapter(asked.model)
    if prompts.pooling not in POOLINGS:
        raise invalid(
            f"the embeddings of this model are pooled by {prompts.pooling}; only "
            f"{', '.join(POOLINGS)} are supported",
            "model",
        )
    ready, loop = engine.serving(), asyncio.get_running_loop()
    inputs = [await prompts.ids(each, True, ready.longest) for each in asked.input]
    for ids in inputs:
        room_for(ids, 0, ready.longest, ready.vocab_size, "input")
    end, found = loop.time() + server.config.timeout, [b""] * len(inputs)
    with engine.reserve(min(side, len(inputs))):  # what is let in is not refused halfway
        pass
    for begin in range(0, len(inputs), side):
        part = inputs[begin : begin + side]
        how: dict[str, Any] = {"pooling": prompts.pooling, "adapter": adapter}
        job = engine.submit([Submit(ids=ids, max_new=0, sampling={}, **how) for ids in part])
        job.expire(end - loop.time())
        try:
            while news := await job.read():
                for at, what in news:
                    assert isinstance(what, Scored)
                    found[begin + at] = what.pooled
        finally:
            job.close()
    vectors = await prompts.apart(lambda: [_finished(asked, pooled) for pooled in found])
    named = enumerate(vectors)
    data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in named]
    count = sum(map(len, inputs))
    return {
        "object": "list",
        "model": adapter or server.name,
        "data": data,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _finished(asked: EmbeddingsRequest, pooled: bytes) -> str | list[float]:
    vector = np.frombuffer(pooled, "<f4").astype(np.float64)
    if (wanted := asked.dimensions or vector.size) > vector.size:
        raise invalid(
            f"dimensions is {wanted}; the embeddings of this model have {vector.size}", "dimensions"
        )
    vector = vector[:wanted]
    vector /= max(float(np.linalg.norm(vector)), 1e-12)
    unit = vector.astype("<f4")
    if asked.encoding_format == "base64":
        return base64.b64encode(unit.tobytes()).decode()
    values: list[float] = unit.tolist()
    return values
