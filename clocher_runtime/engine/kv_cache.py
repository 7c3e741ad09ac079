"""The KV cache as a caller of the Python API asks for it, and the memory that it takes."""

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
    """How large the KV cache of a model is to be: `load(..., kv_cache=KVCacheConfig(...))`.

    Layers, heads and their width are those of the model.

    Attributes:
        dtype: f32, bf16, f16, e4m3, e5m2 or i8; None: the back end's.
        context: longest sequence in tokens; None: the model's, at most 4096.
        batch: sequences generated side by side.
        pages: pages of 64 tokens that all sequences share; None: `batch` whole contexts.
    """

    dtype: str | None = None
    context: int | None = None
    batch: int = 1
    pages: int | None = None

    def memory_usage_mb(
        self, path: str | Path | None = None, device: str = "auto", attn: str = "dense"
    ) -> float:
        """Return the MiB that `load(path, device=device, kv_cache=self)` allocates for the cache.

        No weight is read. It is `kv_cache_mb` of the loaded model, and of the JSON line of a run.
        Where `attn` chooses pages by their keys, bounds of these are kept. Without a path it is the
        embedded model.

        Raises:
            ModelError: the model is missing, damaged or not supported.
            DeviceError: the device is not available.
            UsageError: a size is out of range, or an argument cannot be used.
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
        """Return the same as fields of `EngineConfig`."""
        sizes = {"context": self.context, "batch": self.batch, "kv_pages": self.pages}
        return {"kv_dtype": self.dtype, **sizes}


def with_kv_cache(settings: Mapping[str, Any], config: KVCacheConfig | None) -> dict[str, Any]:
    """Return keywords of `load`, with those of a cache's configuration. Raises UsageError."""
    if config is None:
        return dict(settings)
    if not isinstance(config, KVCacheConfig):
        raise UsageError(f"kv_cache: got {shown(config)}, expected a KVCacheConfig")
    options = config.options()
    if twice := sorted(set(settings) & set(options)):
        raise UsageError(f"got {twice[0]} and kv_cache, which sets it too; give one of them")
    return {**settings, **options}
