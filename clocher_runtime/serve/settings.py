"""The settings of `clocher-serve`: those of a run that say what is loaded, and its own."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.command.env import Sources, resolve, settle
from clocher_runtime.command.parsing import integer, number, switch, text
from clocher_runtime.command.settings import (
    SETTINGS,
    RunConfig,
    Setting,
    declared,
    flag,
)

BATCH = 8
"""Sequences side by side, unless a setting says otherwise."""

_NOT_SERVED = {"stub", "prompt", "prompt_ids", "prompts_file", "max_new", "temperature", "top_k"}
_NOT_SERVED |= {"top_p", "seed", "ignore_eos", "tune", "rounds", "warmup", "prefetch", "aggregate"}
_NOT_SERVED |= {"outputs", "trace_ids", "trace_topk", "bytes_per_token", "stride_bytes"}
_NOT_SERVED |= {"verify_touch", "json", "min_p", "repetition_penalty"}
"""Settings of a run that are a request's, or a measurement's."""

_TEXT = text()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How the server serves. A None stands for what help says."""

    host: str = flag(
        "Server",
        text("ADDRESS"),
        "address to listen on; others than this machine's need a key",
        default="127.0.0.1",
    )
    port: int = flag("Server", integer(0, 65535), "port to listen on; 0: a free one", default=8000)
    api_key: str | None = flag(
        "Server",
        _TEXT,
        "what clients have to know; better given by its variable",
        "CLOCHER_API_KEY",
    )
    served_model_name: str | None = flag(
        "Server", _TEXT, "what clients call the model (unset: the last part of its path)"
    )
    cors_origins: str | None = flag(
        "Server", _TEXT, "origins whose pages may call, commas between them (unset: none)"
    )
    no_page: bool = flag("Server", switch(), "serve no chat page at /")
    queue: int = flag(
        "Server",
        integer(0, 65536),
        "sequences that may wait beyond those side by side; more are told to come later (429)",
        default=64,
    )
    timeout: float = flag(
        "Server", number(1, 86400), "seconds that a request may take", default=1800.0
    )
    drain: float = flag(
        "Server",
        number(0, 3600),
        "seconds that requests get to end once SIGTERM or Ctrl-C came",
        default=30.0,
    )
    max_body_mb: int = flag("Server", integer(1, 1024), "MiB of the largest request", default=8)
    kv_pages: int | None = flag(
        "Cache",
        integer(1, 1 << 30),
        "pages of 64 tokens that all sequences share (unset: --batch whole contexts)",
    )
    no_prefix_cache: bool = flag(
        "Cache", switch(), "compute the beginnings that texts have in common each time"
    )
    itl_ms: float = flag(
        "Cache",
        number(1, 60000),
        "while somebody's text goes on, prompts are taken in pieces that let a step end in this "
        "time, in milliseconds",
        default=100.0,
    )


LOADED: Mapping[str, Setting] = {n: s for n, s in SETTINGS.items() if n not in _NOT_SERVED}
"""Settings of a run that a server has too."""

OWN: Mapping[str, Setting] = dict(declared(ServeConfig))

TABLE: Mapping[str, Setting] = {**OWN, **LOADED}
"""Every flag and every environment variable of the server."""

DEFAULTS: Mapping[str, Any] = {
    **{each.name: each.default for each in (*fields(RunConfig), *fields(ServeConfig))},
    "batch": BATCH,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """A server, fully decided.

    Attributes:
        serve: how it serves.
        run: what is loaded.
        of_run: what `run` was made of, and what the process of the engine makes it of again.
        batch: sequences side by side.
    """

    serve: ServeConfig
    run: RunConfig
    of_run: Sources
    batch: int


def decide(flags: Mapping[str, str], environ: Mapping[str, str]) -> Settings:
    """Return the settings of a server: flag, variable, file, default.

    Args:
        flags: name of a setting -> what its flag was given.
        environ: environment variables.

    Raises:
        UsageError: a value is not what its setting takes, or an address of others has no key.
    """
    values, of_run = settle(OWN, LOADED, flags, environ)
    serve = ServeConfig(**values)
    _check(serve)
    run = resolve(*of_run)
    batch = run.batch if "batch" in run.given else BATCH
    return Settings(serve, run, of_run, batch)


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check(config: ServeConfig) -> None:
    if config.api_key is not None and not (config.api_key.isascii() and config.api_key.strip()):
        raise UsageError("--api-key: expected ASCII characters that are not all spaces")
    if config.served_model_name == "":
        raise UsageError("--served-model-name is empty; give a name, or leave it out")
    if config.api_key is None and not is_local(config.host):
        raise UsageError(
            f"--host {config.host}: others could reach the server and there is no key; set "
            "CLOCHER_API_KEY, or listen on 127.0.0.1"
        )
