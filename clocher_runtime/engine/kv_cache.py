"""Public KV-cache configuration, and the memory it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import shown
from clocher_runtime.engine.backends import choose
from clocher_runtime.engine.diffusing import usual_width
from clocher_runtime.engine.footprint import kv_cache_bytes, sizes_of
from clocher_runtime.engine.load import describe


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Size of a model's KV cache, for `load(..., kv_cache=KVCacheConfig(...))`.

    `dtype`: f32, bf16, f16, e4m3, e5m2 or i8, None for the default; `context`: maximum sequence
    length in tokens, None for the model's, at most 4096; `batch`: sequences side by side; `pages`:
    shared pages of 64 tokens, None for `batch` full contexts.
    """

    dtype: str | None = None
    context: int | None = None
    batch: int = 1
    pages: int | None = None

    def memory_usage_mb(
        self, path: str | Path | None = None, device: str = "auto", attn: str = "dense"
    ) -> float:
        """Return the MiB that `load(path, device=device, kv_cache=self)` allocates for the cache.

        Reads no weights. Without a path: the embedded model. An `attn` that selects pages adds
        their bounds. Raises ModelError, DeviceError, UsageError.
        """
        backend, _ = choose(device)
        checkpoint = open_checkpoint(embedded_model() if path is None else locate(path, "path"))
        try:
            spec, _ = describe(checkpoint)
            config = EngineConfig(backend=backend, attn=attn, **self.options())
            return kv_cache_bytes(spec, sizes_of(spec, config, width=usual_width(spec))) / (1 << 20)
        finally:
            checkpoint.close()

    def options(self) -> dict[str, Any]:
        """Return these settings as fields of `EngineConfig`."""
        sizes = {"context": self.context, "batch": self.batch, "kv_pages": self.pages}
        return {"kv_dtype": self.dtype, **sizes}


def with_kv_cache(settings: Mapping[str, Any], config: KVCacheConfig | None) -> dict[str, Any]:
    """Merge a cache configuration into the keywords of `load`. Raises UsageError."""
    if config is None:
        return dict(settings)
    if not isinstance(config, KVCacheConfig):
        raise UsageError(f"kv_cache: got {shown(config)}, expected a KVCacheConfig")
    options = config.options()
    if twice := sorted(set(settings) & set(options)):
        raise UsageError(f"got {twice[0]} and kv_cache, which sets it too; give one of them")
    return {**settings, **options}
