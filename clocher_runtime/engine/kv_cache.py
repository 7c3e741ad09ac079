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

    Attributes:
        dtype: f32, bf16, f16, e4m3, e5m2 or i8; None: the back end's default.
        context: maximum sequence length in tokens; None: the model's, at most 4096.
        batch: sequences generated side by side.
        pages: pages of 64 tokens shared by all sequences; None: `batch` full contexts.
    """

    dtype: str | None = None
    context: int | None = None
    batch: int = 1
    pages: int | None = None

    def memory_usage_mb(
        self, path: str | Path | None = None, device: str = "auto", attn: str = "dense"
    ) -> float:
        """Return the MiB that `load(path, device=device, kv_cache=self)` allocates for the cache.

        Reads no weights. Equals `kv_cache_mb` of the loaded model and of a run's JSON line. An
        `attn` that selects pages by their keys needs room for their bounds. Without a path: the
        embedded model. Raises ModelError, DeviceError, UsageError.
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
