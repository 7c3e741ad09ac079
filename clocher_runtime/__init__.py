"""Clocher's runtime: models, weights, sessions, and the Python API (`clocher_runtime.api`).

The API is imported when first used, so that importing this package is cheap.
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
