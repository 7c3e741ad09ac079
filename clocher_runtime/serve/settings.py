"""The settings of `clocher-serve`: model loading settings of a run, and its own."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.sources import Sources, settle, with_file
from clocher_runtime.config.values import (
    Setting,
    declared,
    defaults,
    every,
    flag,
    integer,
    number,
    redefault,
    switch,
    text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """The engine and the HTTP settings of a server."""

    command: ClassVar[str] = "serve"

    batch: int = redefault(EngineConfig, "batch", 8)

    host: str = flag(
        "Server",
        text("ADDRESS"),
        "address to listen on; others than this machine's need a key",
        default="127.0.0.1",
    )
    port: int = flag("Server", integer(0, 65535), "port to listen on; 0: a free one", default=8000)
    api_key: str | None = flag(
        "Server",
        text(),
        "what clients have to know; better given by its variable",
        "CLOCHER_API_KEY",
    )
    served_model_name: str | None = flag(
        "Server", text(), "what clients call the model (unset: the last part of its path)"
    )
    cors_origins: str | None = flag(
        "Server", text(), "origins whose pages may call, commas between them (unset: none)"
    )
    no_page: bool = flag("Server", switch(), "serve no chat page at /")
    queue: int = flag(
        "Server",
        integer(0, 65536),
        "requests that may wait beyond those in the batch; beyond this, requests get 429",
        default=64,
    )
    timeout: float = flag(
        "Server", number(1, 86400), "seconds that a request may take", default=1800.0
    )
    drain: float = flag(
        "Server",
        number(0, 3600),
        "graceful-shutdown timeout in seconds, after SIGTERM or Ctrl-C",
        default=30.0,
    )
    max_body_mb: int = flag("Server", integer(1, 1024), "MiB of the largest request", default=8)
    no_prefix_cache: bool = flag("Cache", switch(), "disable prefix caching")


TABLE: Mapping[str, Setting] = declared(ServeConfig)

DEFAULTS: Mapping[str, Any] = defaults(ServeConfig)

_ENGINE = {*dict(every(EngineConfig)), "no_prefix_cache"}
SCORE_ROWS = 64


def decide(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[ServeConfig, Sources]:
    """Return a server's settings and the sources of its engine's; raises UsageError."""
    sources = with_file(Sources(flags, environ), TABLE)
    config = settle(ServeConfig, sources)
    if config.api_key is not None and not (config.api_key.isascii() and config.api_key.strip()):
        raise UsageError("--api-key: expected ASCII characters that are not all spaces")
    if config.served_model_name == "":
        raise UsageError("--served-model-name is empty; give a name, or leave it out")
    if config.api_key is None and not is_local(config.host):
        raise UsageError(
            f"--host {config.host}: others could reach the server and there is no key; set "
            "CLOCHER_API_KEY, or listen on 127.0.0.1"
        )
    return config, sources.only({n: s for n, s in TABLE.items() if n in _ENGINE})


def engine_config(sources: Sources) -> EngineConfig:
    """Return the engine's configuration, from the sources of `decide`."""
    config = settle(ServeConfig, sources)
    return replace(
        config, prefix_cache=not config.no_prefix_cache, score_rows=SCORE_ROWS, keep_mapped=True
    )


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
