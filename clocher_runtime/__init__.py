"""Clocher's runtime: models, weights, sessions and the `clocher-run` command.

`load`, `generate` and `stream_generate` are the Python API (see `clocher_runtime.api`). They are
imported when first used, so that importing this package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clocher_runtime.api import KVCacheConfig, LanguageModel, generate, load, stream_generate

__all__ = ["KVCacheConfig", "LanguageModel", "generate", "load", "stream_generate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clocher_runtime import api

    return getattr(api, name)
