"""The sizes of a session, and the memory that it and its weights take."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import matrices
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import quantize_activations, skip_zeros, twice_packed
from clocher_kernels.plan import Plan
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import Given, shown
from clocher_runtime.engine.backends import BACK_ENDS, choose
from clocher_runtime.engine.load import Destined, describe
from clocher_runtime.engine.pages import window_pages
from clocher_runtime.models.build import PAGE_CELLS, Sizes, lay_out, table_bytes
from clocher_runtime.models.inventory import in_scope, inventory
from clocher_runtime.models.spec import ModelSpec, Selection, parse_selection
from clocher_runtime.speculation.speculator import rows_for

DEFAULT_CONTEXT = 4096
PROGRAM_BYTES = 128 << 20
"""Measured, rounded: Python, its libraries and the compiled kernels."""
SPARSE_ON = ("cpu", "cuda", "reference")
"""Back ends that read lists of pages."""


def sizes_of(
    spec: ModelSpec, config: EngineConfig, *, speculates: bool = False, width: int = 0
) -> Sizes:
    """Return a session's sizes; `width`: block-diffusion tokens per forward. Raises UsageError."""
    known, batch, longest = BACK_ENDS[config.backend], config.batch, spec.max_positions
    context = min(longest, DEFAULT_CONTEXT) if config.context is None else config.context
    if context > longest:
        flag = config.given.get("context", Given("context", "")).source
        raise UsageError(f"{flag}: got {context}, this model takes 1 to {longest}")
    tokens = max(config.chunk or known.chunk, batch * max(1, width))
    drawn = min(rows_for(batch), tokens) if speculates else batch
    rows = max(drawn, batch * width, min(config.score_rows, tokens))
    sizes = Sizes(
        tokens=tokens,
        rows=tokens if config.all_logits else rows,
        slots=batch,
        context=context,
        cache_dtype=config.kv_dtype or known.cache_dtype,
        pages=config.kv_pages or 0,
        selection=_selection(spec, config),
    )
    if window := max(spec.windows, default=0):
        few = window_pages(window, tokens, batch, context, sizes.pages)
        sizes = replace(sizes, window_pages=few)
    return sizes


def usual_width(spec: ModelSpec) -> int:
    """Return the tokens of a sequence in a forward that denoises: two blocks; 0 without."""
    return 2 * spec.diffusion.block if spec.diffusion else 0


def draft_config(config: EngineConfig, sizes: Sizes, spec: ModelSpec) -> EngineConfig:
    """Return the configuration of a draft model beside a session of these sizes."""
    return replace(
        config,
        context=min(sizes.context, spec.max_positions),
        attn="dense",
        act_sparsity=None,
        all_logits=False,
        score_rows=0,
        given={},
    )


def _selection(spec: ModelSpec, config: EngineConfig) -> Selection | None:
    attn, selection = config.attn, parse_selection(config.attn)
    if selection is None:
        return None
    if config.backend not in SPARSE_ON:
        raise UsageError(
            f"attn {attn}: the {config.backend} back end reads all pages; use dense, or "
            "--device cpu"
        )
    chunks = spec.chunks or spec.windows
    if all(window or chunk for window, chunk in zip(spec.windows, chunks, strict=True)):
        raise UsageError(
            f"attn {attn}: no layer of this model sees more than a window, so there is nothing "
            "to leave out; use dense"
        )
    return selection


def with_codes(plan: Plan, formats: Mapping[str, Format], scope: Set[str]) -> Plan:
    """Return a Plan whose matmuls with integer weights in `scope` take int8 activations."""
    within = {name: fmt for name, fmt in formats.items() if name in scope}
    return quantize_activations(plan, within)


def packed_names(plan: Plan) -> set[str]:
    """Return the weights that the CPU back end packs before the first step."""
    return {name for call in plan.calls if has_codes(call) for name in matrices(call)}


def expected_bytes(spec: ModelSpec, weights: int) -> int:
    """Return the memory of a run of a model not yet downloaded, given the bytes of its weights."""
    empty = {name: Destined(fmt, 0, made=False) for name, fmt in _plain(spec).items()}
    return footprint(spec, empty).total + weights


def _plain(spec: ModelSpec) -> dict[str, Format]:
    stored = parse_format("bf16")
    return {name: stored for name, need in inventory(spec).items() if need.kind != "vector"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a run on the CPU: weights used in place, decoded and packed; KV; buffers."""

    mapped: int
    made: int
    packed: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it, with the program."""
        weights = self.mapped + self.made + self.packed
        return weights + self.kv + self.buffers + PROGRAM_BYTES


def footprint(
    spec: ModelSpec, weights: Mapping[str, Destined], context: int | None = None
) -> Footprint:
    """Return what a run of one sequence takes on the CPU with defaults. Raises UsageError."""
    formats = {name: each.format for name, each in weights.items() if each.format is not None}
    width = usual_width(spec)
    sizes = sizes_of(spec, EngineConfig(context=context), speculates=not width, width=width)
    scope = in_scope(spec, "all")
    plan = skip_zeros(with_codes(lay_out(spec, formats, sizes), formats, scope), formats, scope)
    packed, kv = packed_names(plan), state_bytes(plan)
    return Footprint(
        mapped=sum(w.nbytes for n, w in weights.items() if not w.made and n not in packed),
        made=sum(w.nbytes for w in weights.values() if w.made),
        packed=sum(weights[name].nbytes for name in (*packed, *twice_packed(plan))),
        kv=kv,
        buffers=plan.scratch_bytes() - kv + table_bytes(spec, sizes.context),
    )


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Return the KV bytes per token on the CPU, while windows are not full."""
    sizes = sizes_of(spec, EngineConfig(context=1))
    return kv_cache_bytes(spec, replace(sizes, pages=1, window_pages=0)) // PAGE_CELLS


def kv_cache_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Return the bytes of a session's KV cache, tables and scales included."""
    return state_bytes(lay_out(spec, _plain(spec), sizes))


def state_bytes(plan: Plan) -> int:
    """Return the bytes that survive steps: the KV cache, tables and scales included."""
    return sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.role == "state")


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
            checkpoint.release()

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
