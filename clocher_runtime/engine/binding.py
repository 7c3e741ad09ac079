"""A model bound to a back end: its Plan, what executes it, and the pages of its KV cache."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Ternary
from clocher_kernels.formats.base import Format
from clocher_kernels.host_memory import require
from clocher_kernels.ops.collectives import Alone, Ranks, joined
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import round_activations, skip_zeros
from clocher_kernels.plan import Plan
from clocher_runtime.engine.act_sparsity import Walker, act_sparsity, calibrate, drop_inputs
from clocher_runtime.engine.arguments import one_of
from clocher_runtime.engine.backends import (
    BACK_ENDS,
    Executor,
    Progress,
    Tuning,
    Weights,
    make_executor,
)
from clocher_runtime.engine.footprint import Sizes, packed_names, with_codes
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import KvPages
from clocher_runtime.models.build import PAGE_CELLS, build_plan
from clocher_runtime.models.division import Division
from clocher_runtime.models.inventory import HEAD, SCOPES, head_name, in_scope


@dataclass(frozen=True, slots=True)
class Bound:
    """A model that can be stepped.

    Attributes:
        weights: those that the Plan reads, as far as they are this rank's.
        sizes: how large its Plan is.
        act_prec: what products read: "int8" if some are of integers and none was asked for.
        scope_is_kept: whether just the weights that were asked for are packed.
    """

    model: Model
    weights: Weights
    sizes: Sizes
    executor: Executor
    pages: KvPages
    act_prec: str
    scope_is_kept: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the context, unless the KV cache holds less."""
        return min(self.sizes.context, self.sizes.pages * PAGE_CELLS)


def bind(
    model: Model,
    sizes: Sizes,
    *,
    backend: str,
    threads: int,
    act_prec: str | None,
    tuning: Tuning | None,
    pretranspose: str | None,
    prefix_cache: bool,
    progress: Progress | None,
    packing: Progress | None,
    act_sparse: str | None = None,
    act_calibration: Sequence[int] | None = None,
    beside: Executor | None = None,
    ranks: Ranks | None = None,
) -> Bound:
    """Bind a model to a back end; the arguments are those of `Session`.

    Args:
        sizes: how large its Plan is.
        beside: an executor of another model, whose threads or stream this one uses too.
        ranks: who does it together, as one of them sees them; None: it alone.

    Raises:
        UsageError: the back end has no such precision, there is no such scope, or the model cannot
            be divided among the ranks.
        OutOfMemory: the KV cache, the buffers or the packed weights do not fit in memory.
    """
    known = BACK_ENDS[backend]
    room = partial(_check_room, known.on_host)
    asked, act_prec = act_prec, known.default_act_prec if act_prec is None else act_prec
    one_of(f"act_prec of the {backend} back end", act_prec, known.activations)
    if pretranspose is not None:
        one_of("pretranspose", pretranspose, SCOPES)
    scope = in_scope(model.spec, pretranspose or "all")
    share: Division | None = None
    formats: Mapping[str, Format] = model.formats
    weights = model.weights
    if ranks is not None:
        is_float = act_prec not in ("int8", "fp8")
        adds = is_float and not any(isinstance(fmt, Ternary) for fmt in formats.values())
        share = Division(model.spec, formats, ranks.rank, ranks.count, adds)
        formats = share.formats
        scope |= {HEAD} if head_name(model.spec) in scope else set()
    plan = build_plan(model.spec, model.formats, **asdict(sizes), share=share, room=room)
    if share is not None:
        weights = {name: share.part_of(weights, name) for name in plan.weights}
    sparse = None if act_sparse is None else act_sparsity(act_sparse)
    if sparse is not None:
        if backend != "cpu" or act_prec != "int8" or scope != in_scope(model.spec, "all"):
            raise UsageError(
                f"act_sparsity on the {backend} back end with act_prec {act_prec} and pretranspose "
                f"{pretranspose}; it is for the cpu back end, int8 and all"
            )
        plan = drop_inputs(plan, model.spec, model.formats, sparse)
    tuning = replace(tuning or Tuning(), copied=scope if pretranspose else frozenset())
    if act_prec == "int8":
        plan = with_codes(plan, formats, scope)
    if asked in known.rounds:
        plan = round_activations(plan, asked)
    if backend == "cpu":
        plan = skip_zeros(plan, formats, scope)
    stored = _act_prec(plan, act_prec)
    with joined(ranks or Alone()):
        executor = make_executor(
            backend, plan, weights, threads, progress, act_prec, tuning, packing, beside
        )
    if sparse is not None and sparse.drop is not None:
        longest = min(sizes.context, sizes.pages * PAGE_CELLS)
        calibrate(cast(Walker, executor), act_calibration, sparse.drop, longest)
    salt = f"{model.spec} {sorted(model.formats.items())} {sizes.kv_dtype} {stored} {act_sparse}"
    if sizes.selection is not None:  # keys of all but the first layer depend on what was read
        salt += f" {sizes.selection}"
    pages = KvPages(
        executor.array("pages") if model.spec.windows else None,
        sizes.pages,
        window_table=executor.array("window_pages") if sizes.window_pages else None,
        window_pages=sizes.window_pages,
        window=max(model.spec.windows, default=0),
        salt=salt.encode(),
        reuse=prefix_cache,
    )
    is_kept = backend == "cpu" and packed_names(plan) <= scope
    return Bound(model, weights, sizes, executor, pages, stored, is_kept)


def _act_prec(plan: Plan, stored: str) -> str:
    """Return what products read: "int8" if the Plan rounds nothing and has integer products."""
    if any(call.op == "fake_quantize" for call in plan.calls):
        return stored
    integer = any(has_codes(call) for call in plan.calls)
    return "int8" if integer else "fp32" if stored == "int8" else stored


def _check_room(on_host: bool, buffers: int, tables: int) -> None:
    """Refuse before anything is allocated that the machine does not have."""
    # The GPU's memory is checked where it is known.
    require(
        buffers + tables if on_host else tables,
        "KV cache and buffers need",
        "lower --context or --batch, or choose a smaller --kv-dtype",
    )
