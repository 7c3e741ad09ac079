"""Clocher's server as an application of Ray Serve: many replicas behind one address.

    serve run clocher_runtime.ray.serving:app model_dir=models/llama replicas=4 cpus=8

A replica is the server of `clocher serve`, without its socket: the same routes, the same process
of the engine behind them, CPUs of its own (`cpus`). Before the replicas stands a front, which reads
a request's body and names its beginning (`prefix`); requests that begin alike go to one replica,
which has the keys of that beginning in its cache. If that one has as many requests as it takes, the
least loaded of the others gets it.

Health is the heartbeat of the engine: a replica whose engine is stuck, or has failed for good, is
replaced. One that is to end gets no more requests and lets those that it has come to their end.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from clocher_kernels.errors import DeviceError, UsageError
from clocher_runtime.config.sources import Sources
from clocher_runtime.ray import cpus as seats
from clocher_runtime.ray.prefix import prefix_key
from clocher_runtime.serve.edge import error_response
from clocher_runtime.serve.errors import body_too_large, unavailable
from clocher_runtime.serve.life import assemble
from clocher_runtime.serve.settings import TABLE, ServeConfig, decide

_log = logging.getLogger("ray.serve")
_SENT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
_HEALTH_S = 5.0


class PrefixRouter(ConsistentHashRouter):  # type: ignore[misc]
    """The replica that a key's hash names, else the least loaded one."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Return the first choice, and then all others, of which Ray takes the shortest queue."""
        ranks: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        first = ranks[0] if ranks else []
        others = [each for each in candidate_replicas if each not in first]
        return [rank for rank in (first, others) if rank]


class Replica:
    """A server with an engine of its own.

    Args:
        flags: settings of `clocher serve`, by name.
        cpus: CPUs of its own, and threads of the engine.

    Raises:
        ClocherError: the model cannot be served.
    """

    async def __init__(self, flags: Mapping[str, str], cpus: int) -> None:  # type: ignore[misc]
        self.cpus = seats.pin(cpus)
        seats.share_weights()
        self._server = await assemble(*_settings(flags, cpus), _log.info)
        self._app, engine = self._server.app(), self._server.engine
        self._running = asyncio.create_task(engine.run())
        while engine.ready is None:
            if engine.status == "failed" or self._running.done():
                raise DeviceError("the engine cannot be started; the log of the replica says why")
            await asyncio.sleep(0.02)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a response as they come.

        Args:
            scope: of the request, what `_SENT` names.
            body: of the request, whole.
        """
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        asked: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self._app(dict(scope), receive, said.put))
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                yield message
            await task
        finally:  # the client may be gone: the server hears it, and the engine stops
            gone.set()

    async def check_health(self) -> None:
        """Raise unless the engine was heard of lately; Ray then replaces the replica."""
        engine = self._server.engine
        if engine.status == "failed" or engine.is_stuck or self._running.done():
            raise DeviceError(f"the engine is {'stuck' if engine.is_stuck else 'gone'}")

    async def about(self) -> dict[str, Any]:
        """Return the state of the replica, for tests and for who looks into a cluster."""
        engine = self._server.engine
        return {"engine_pid": engine.pid, "cpus": self.cpus, "sequences": engine.sequences}

    async def __del__(self) -> None:
        """End the engine: Ray calls it when no request is left, or the time for them is over."""
        if server := getattr(self, "_server", None):
            server.engine.drain()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            server.prompts.close()
            server.grammars.close()
        seats.leave()


class Front:
    """Takes requests and passes them on to the replica that their beginning names.

    Args:
        replicas: where they go.
        most: bytes of the largest body.
    """

    def __init__(self, replicas: DeploymentHandle[Any], most: int) -> None:
        self._replicas, self._most = replicas, most

    async def __call__(self, request: Request) -> Response:
        """Answer a request, piece by piece if the replica does."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._most:
                return error_response(body_too_large(self._most))
        key = prefix_key(bytes(body)) if request.method == "POST" else None
        handle = self._replicas.options(stream=True, session_id=key or "")
        scope = {name: request.scope[name] for name in _SENT}
        messages = handle.answer.remote(scope, bytes(body))
        try:
            start = await anext(messages)
        except Exception as error:  # whatever Ray makes of a replica that died
            _log.warning("a replica has not answered: %s", type(error).__name__)
            return error_response(unavailable("loading"))
        response = StreamingResponse(_bodies(messages), start["status"])
        response.raw_headers = list(start["headers"])
        return response


async def _bodies(messages: Any) -> AsyncIterator[bytes]:
    try:
        async for message in messages:
            yield message.get("body", b"")
    finally:
        messages.cancel()


def app(args: dict[str, str]) -> serve.Application:
    """Return the application for `serve run` and `serve build`.

    Args:
        args: settings of `clocher serve` by name (model_dir, context, precision, api_key, ...), and
            `replicas`, `cpus` of each. Host and port are those of Ray Serve.

    Raises:
        UsageError: an argument is unknown or cannot be used.
    """
    flags = {name.replace("-", "_"): str(value) for name, value in args.items()}
    replicas, cpus = (_count(flags.pop(name, "1"), name) for name in ("replicas", "cpus"))
    config, _ = _settings(flags, cpus)
    most = config.batch + config.queue
    served = serve.deployment(Replica).options(
        name="Replica",
        num_replicas=replicas,
        max_ongoing_requests=min(most, 2 * config.batch),
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.2,
    )
    front = serve.deployment(Front).options(
        name="Front",
        max_ongoing_requests=max(100, replicas * most),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.drain,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return front.bind(served.bind(flags, cpus), config.max_body_mb << 20)


def _settings(flags: Mapping[str, str], cpus: int) -> tuple[ServeConfig, Sources]:
    """Return the settings of a replica.

    Raises:
        UsageError: one is unknown, is not a replica's, or cannot be used.
    """
    refused = {"host", "port", "threads"} & set(flags)
    if unknown := sorted(set(flags) - set(TABLE)) or sorted(refused):
        known = ", ".join(sorted(set(TABLE) - {"host", "port", "threads", "model_dir"}))
        raise UsageError(
            f"{unknown[0]} is no setting of a replica; known: replicas, cpus, model_dir, {known}"
        )
    return decide({**flags, "threads": str(cpus)}, {})


def _count(given: str, name: str) -> int:
    if not (given.isascii() and given.isdigit() and int(given)):
        raise UsageError(f"{name} is {given!r:.40}; expected a whole number from 1")
    return int(given)
