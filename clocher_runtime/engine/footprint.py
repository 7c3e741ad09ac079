"""How large a session is: its sizes, and the memory that they and the weights take.

What a listing of models promises and what a session asks for before it allocates come from here.
"""

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace

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
from clocher_runtime.models.build import PAGE_CELLS, lay_out, table_bytes
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


@dataclass(frozen=True, slots=True)
class Sizes:
    """The arguments of `build_plan` that say how large a session is, in its names."""

    tokens: int
    rows: int
    slots: int
    context: int
    kv_dtype: str
    pages: int
    window_pages: int
    selection: Selection | None = None


def sizes_of(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    speculates: bool = False,
    width: int = 0,
) -> Sizes:
    """Return the sizes of a session.

    Args:
        spec: the model.
        config: of the session.
        speculates: whether tokens are drafted, and forwards have a row for each.
        width: tokens and rows that a sequence takes in a forward which denoises blocks; 0: none.

    Raises:
        UsageError: a size is out of range, or the model or the back end has no such attention.
    """
    known = BACK_ENDS[config.backend]
    selection = selection_of(spec, config.backend, config.attn)
    kv_dtype, chunk = config.kv_dtype or known.kv_dtype, config.chunk or known.chunk
    batch, longest = config.batch, spec.max_positions
    context = min(longest, DEFAULT_CONTEXT) if config.context is None else config.context
    if context > longest:
        raise UsageError(f"context: got {context}, this model takes 1 to {longest}")
    blocks = -(-context // PAGE_CELLS)
    kv_pages = config.kv_pages or batch * blocks
    tokens = max(chunk, batch * max(1, width))
    drawn = min(rows_for(batch), tokens) if speculates else batch
    rows = max(drawn, batch * width, min(config.score_rows, tokens))
    window = max(spec.windows, default=0)
    few = window_pages(window, tokens, batch, context, kv_pages) if window else 0
    rows = tokens if config.all_logits else rows
    return Sizes(tokens, rows, batch, context, kv_dtype, kv_pages, few, selection)


def sizes_beside(sizes: Sizes, spec: ModelSpec, config: EngineConfig) -> Sizes:
    """Return the sizes of a draft model beside a session of these sizes."""
    context = min(sizes.context, spec.max_positions)
    beside = replace(
        config, context=context, attn="dense", all_logits=False, score_rows=0, given={}
    )
    return sizes_of(spec, beside)


def guesses(config: EngineConfig) -> bool:
    """Return whether the tokens of a session are drafted, unless blocks are denoised instead.

    Raises:
        UsageError: there is nothing to verify.
    """
    mode = config.speculate
    if config.backend == "stub" and mode not in ("auto", "off"):
        raise UsageError(f"speculate={mode}: the stub has nothing to verify; give off")
    return mode != "off" and config.backend != "stub"


def whole_layers(spec: ModelSpec) -> int:
    """Return how many layers see everything."""
    chunks = spec.chunks or (0,) * len(spec.windows)
    return sum(not window and not chunk for window, chunk in zip(spec.windows, chunks, strict=True))


def selection_of(spec: ModelSpec, backend: str, attn: str) -> Selection | None:
    """Return which pages a session reads; None: all.

    Raises:
        UsageError: `attn` is no way to read, or neither the model nor the back end has it.
    """
    selection = parse_selection(attn)
    if selection is None:
        return None
    if backend not in SPARSE_ON:
        raise UsageError(
            f"attn {attn}: the {backend} back end reads all pages; use dense, or --device cpu"
        )
    if not whole_layers(spec):
        raise UsageError(
            f"attn {attn}: no layer of this model sees more than a window, so there is nothing "
            "to leave out; use dense"
        )
    return selection


def with_codes(plan: Plan, formats: Mapping[str, Format], scope: Set[str]) -> Plan:
    """Return a Plan whose products with integer weights of a scope take int8 activations."""
    within = {name: fmt for name, fmt in formats.items() if name in scope}
    return quantize_activations(plan, within, ACT_GROUP)


def packed_names(plan: Plan) -> set[str]:
    """Return the weights that the CPU back end packs before the first step."""
    return {name for call in plan.calls if has_codes(call) for name in matrices(call)}


def expected_bytes(spec: ModelSpec, weights: int) -> int:
    """Return what a run would take of a model whose weights are not there yet.

    Args:
        spec: the model.
        weights: bytes of their files, which are taken to be used as they are stored.
    """
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
        kv: the KV cache.
        buffers: other buffers, and the rotary tables.
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
    """Return what a run on the CPU takes, with its defaults: one sequence, guessed or denoised.

    Args:
        spec: the model.
        weights: from `load.destined`.
        context: in tokens; None: the default.

    Raises:
        UsageError: the context is longer than the model's.
    """
    formats = {name: each.format for name, each in weights.items() if each.format is not None}
    width = usual_width(spec)
    config = EngineConfig(context=context)
    sizes = sizes_of(spec, config, speculates=not width, width=width)
    scope = in_scope(spec, "all")
    plan = with_codes(lay_out(spec, formats, **asdict(sizes)), formats, scope)
    plan = skip_zeros(plan, formats, scope)
    packed = packed_names(plan)
    kv = sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.role == "state")
    return Footprint(
        mapped=sum(w.nbytes for n, w in weights.items() if not w.made and n not in packed),
        made=sum(w.nbytes for w in weights.values() if w.made),
        packed=sum(weights[name].nbytes for name in (*packed, *twice_packed(plan))),
        kv=kv,
        buffers=plan.scratch_bytes() - kv + table_bytes(spec, sizes.context),
    )


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str | None = None) -> int:
    """Return the bytes that a token takes of the KV cache, until a window is full.

    Args:
        spec: the model.
        kv_dtype: None: the CPU back end's.
    """
    sizes = sizes_of(spec, EngineConfig(context=1, kv_dtype=kv_dtype))
    return kv_cache_bytes(spec, replace(sizes, pages=1, window_pages=0)) // PAGE_CELLS


def kv_cache_bytes(spec: ModelSpec, sizes: Sizes) -> int:
    """Return the memory of the KV cache of a session, tables and scales included."""
    plan = lay_out(spec, _plain(spec), **asdict(sizes))
    return sum(buffer.nbytes for buffer in plan.buffers.values() if buffer.role == "state")
