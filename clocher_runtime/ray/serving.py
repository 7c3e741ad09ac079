"""Clocher's server on Ray Serve: replicas at one address (docs/ray.md)."""

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.types import ASGIApp

from clocher_kernels.errors import DeviceError, UsageError
from clocher_runtime.config.commands import TABLE, ServeConfig, settle
from clocher_runtime.config.values import integer
from clocher_runtime.ray.actors import TILE_CACHE
from clocher_runtime.serve.life import assemble

_OF_SERVE = {"host", "port", "threads"}
_COUNT = integer(1, 1 << 16)


class Replica:
    """A server with its own engine; arguments are settings of `clocher serve`, and CPUs."""

    async def __init__(self, flags: Mapping[str, str], cpus: int) -> None:  # type: ignore[misc]
        os.environ.setdefault(*TILE_CACHE)
        self._server = await assemble(_settings(flags, cpus), logging.getLogger("ray.serve").info)
        self._running = asyncio.create_task(self._server.engine.run())
        while self._server.engine.ready is None:
            await self.check_health()
            await asyncio.sleep(0.02)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server.app()

    async def check_health(self) -> None:
        """Raise if the engine is stuck or dead; Ray then replaces the replica."""
        engine = self._server.engine
        if engine.status == "failed" or engine.is_stuck or self._running.done():
            raise DeviceError(
                f"the engine is {'stuck' if engine.is_stuck else 'gone'}; see the log"
            )

    async def __del__(self) -> None:
        if server := getattr(self, "_server", None):
            server.engine.drain()
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            server.prompts.close()


def app(args: dict[str, str]) -> serve.Application:
    """Return the application for `serve run` and `serve build`."""
    flags = {name.replace("-", "_"): str(value) for name, value in args.items()}
    replicas, cpus = (_COUNT.read(name, flags.pop(name, "1")) for name in ("replicas", "cpus"))
    config = _settings(flags, cpus)
    options: dict[str, Any] = {
        "num_replicas": replicas,
        "max_ongoing_requests": min(config.batch + config.queue, 2 * config.batch),
        "ray_actor_options": {"num_cpus": cpus},
        "request_router_config": RequestRouterConfig(request_router_class=ConsistentHashRouter),
        "health_check_period_s": 5.0,
        "graceful_shutdown_timeout_s": config.drain,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    return serve.deployment(serve.ingress()(Replica)).options(**options).bind(flags, cpus)


def _settings(flags: Mapping[str, str], cpus: int) -> ServeConfig:
    if unknown := sorted(set(flags) - set(TABLE) | _OF_SERVE & set(flags)):
        known = ", ".join(sorted(set(TABLE) - _OF_SERVE))
        raise UsageError(f"{unknown[0]} is no setting of a replica; known: replicas, cpus, {known}")
    return settle(ServeConfig, {**flags, "threads": str(cpus)}, {})
