"""How large a session is: its sizes, and the memory that they and the weights take.

What a listing of models promises and what a session asks for before it allocates come from here.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import matrices
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import quantize_activations, skip_zeros, twice_packed
from clocher_kernels.plan import Plan
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.backends import BACK_ENDS
from clocher_runtime.engine.diffusing import usual_width
from clocher_runtime.engine.load import Destined
from clocher_runtime.engine.pages import window_pages
from clocher_runtime.models.build import PAGE_CELLS, Sizes, lay_out, table_bytes
from clocher_runtime.models.inventory import in_scope, inventory
from clocher_runtime.models.selection import Selection, parse_selection
from clocher_runtime.models.spec import ModelSpec
from clocher_runtime.speculation.speculator import rows_for

DEFAULT_CONTEXT = 4096
ACT_GROUP = 128
"""Columns per scale of int8 activations."""
PROGRAM_BYTES = 128 << 20
"""What Python, its libraries and the compiled kernels take beside any model: measured, rounded."""
SPARSE_ON = ("cpu", "cuda", "reference")
"""Back ends that read lists of pages."""


def sizes_of(
    spec: ModelSpec, config: EngineConfig, *, speculates: bool = False, width: int = 0
) -> Sizes:
    """Return the sizes of a session. Raises UsageError.

    Args:
        speculates: whether tokens are drafted, and forwards have a row for each.
        width: tokens and rows that a sequence takes in a forward which denoises blocks; 0: none.
    """
    known, batch, longest = BACK_ENDS[config.backend], config.batch, spec.max_positions
    context = min(longest, DEFAULT_CONTEXT) if config.context is None else config.context
    if context > longest:
        raise UsageError(f"context: got {context}, this model takes 1 to {longest}")
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


def whole_layers(spec: ModelSpec) -> int:
    """Return how many layers see everything."""
    chunks = spec.chunks or (0,) * len(spec.windows)
    return sum(not window and not chunk for window, chunk in zip(spec.windows, chunks, strict=True))


def _selection(spec: ModelSpec, config: EngineConfig) -> Selection | None:
    """Return which pages a session reads; None: all."""
    attn, selection = config.attn, parse_selection(config.attn)
    if selection is None:
        return None
    if config.backend not in SPARSE_ON:
        raise UsageError(
            f"attn {attn}: the {config.backend} back end reads all pages; use dense, or "
            "--device cpu"
        )
    if not whole_layers(spec):
        raise UsageError(
            f"attn {attn}: no layer of this model sees more than a window, so there is nothing "
            "to leave out; use dense"
        )
    return selection


def with_codes(plan: Plan, formats: Mapping[str, Format], scope: Set[str]) -> Plan:
    """Return a Plan whose matmuls with integer weights of a scope take int8 activations."""
    within = {name: fmt for name, fmt in formats.items() if name in scope}
    return quantize_activations(plan, within, ACT_GROUP)


def packed_names(plan: Plan) -> set[str]:
    """Return the weights that the CPU back end packs before the first step."""
    return {name for call in plan.calls if has_codes(call) for name in matrices(call)}


def expected_bytes(spec: ModelSpec, weights: int) -> int:
    """Return what a run would take of a model that is not there yet, but for `weights` bytes."""
    empty = {name: Destined(fmt, 0, made=False) for name, fmt in _plain(spec).items()}
    return footprint(spec, empty).total + weights


def _plain(spec: ModelSpec) -> dict[str, Format]:
    """Return formats of a model's matrices for what does not depend on them."""
    stored = parse_format("bf16")
    return {name: stored for name, need in inventory(spec).items() if need.kind != "vector"}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of memory that a run on the CPU takes.

    Attributes:
        mapped: weights that are read where they lie in their file, by way of the page cache.
        made: weights that are decoded or converted at load.
        packed: weights that are packed before the first step, beside those that were made; those
            of which zeros are skipped are packed twice.
        kv, buffers: the KV cache; other buffers and the rotary tables.
    """

    mapped: int
    made: int
    packed: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it, and the program."""
        weights = self.mapped + self.made + self.packed
        return weights + self.kv + self.buffers + PROGRAM_BYTES


def footprint(
    spec: ModelSpec, weights: Mapping[str, Destined], context: int | None = None
) -> Footprint:
    """Return what a run of one sequence takes on the CPU with its defaults. Raises UsageError."""
    formats = {name: each.format for name, each in weights.items() if each.format is not None}
    width = usual_width(spec)
    sizes = sizes_of(spec, EngineConfig(context=context), speculates=not width, width=width)
    scope = in_scope(spec, "all")
    plan = skip_zeros(with_codes(lay_out(spec, formats, sizes), formats, scope), formats, scope)
    packed, kv = packed_names(plan), _state_bytes(plan)
    return Footprint(
        mapped=sum(w.nbytes for n, w in weights.items() if not w.made and n not in packed),
        made=sum(w.nbytes for w in weights.values() if w.made),
        packed=sum(weights[name].nbytes for name in (*packed, *twice_packed(plan))),
        kv=kv,
        buffers=plan.scratch_bytes() - kv + table_bytes(spec, sizes.context),
    )


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Return the bytes that a token takes of the CPU's KV cache, until a window is full."""
    sizes = sizes_of(spec, EngineConfig(context=1))
    return kv_cache_bytes(spec, replace(sizes, pages=1, window_pages=0)) // PAGE_CELLS


def kv_cache_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Return the memory of the KV cache of a session, tables and scales included."""
    return _state_bytes(lay_out(spec, _plain(spec), sizes))


def _state_bytes(plan: Plan) -> int:
    return sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.role == "state")
