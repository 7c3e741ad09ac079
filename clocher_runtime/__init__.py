"""Clocher's runtime, and the Python API (`clocher_runtime.api`), imported when first used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clocher_runtime.api import KVCacheConfig, LanguageModel, generate, load, stream_generate

__all__ = ["KVCacheConfig", "LanguageModel", "generate", "load", "stream_generate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clocher_runtime import api

    return getattr(api, name)
