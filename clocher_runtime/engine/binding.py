"""A model bound to a back end: its Plan, what executes it, and the pages of its KV cache."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

from clocher_kernels.errors import UsageError
from clocher_kernels.formats.base import Format
from clocher_kernels.host_memory import require
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import round_activations, skip_zeros
from clocher_kernels.plan import Plan
from clocher_runtime.engine.act_sparsity import Walker, act_sparsity, calibrate, drop_inputs
from clocher_runtime.engine.arguments import one_of
from clocher_runtime.engine.backends import (
    BACK_ENDS,
    Binding,
    Executor,
    Weights,
    make_executor,
)
from clocher_runtime.engine.footprint import Sizes, packed_names, with_codes
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import KvPages
from clocher_runtime.models.build import PAGE_CELLS, build_plan
from clocher_runtime.models.inventory import in_scope


@dataclass(frozen=True, slots=True)
class Bound:
    """A model that can be stepped.

    Attributes:
        weights: those that the Plan reads.
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
    how: Binding,
    sparse: str | None = None,
    calibration: Sequence[int] | None = None,
) -> Bound:
    """Bind a model to a back end.

    Args:
        model: from `load_model`.
        sizes: how large its Plan is.
        how: configuration, what it is bound beside, and whom to tell.
        sparse: which small activations are dropped (`engine.act_sparsity`); None: none.
        calibration: token ids that their thresholds are taken from.

    Raises:
        UsageError: the back end has no such precision of activations.
        OutOfMemory: the KV cache, the buffers or the packed weights do not fit in memory.
    """
    config = how.config
    backend, pretranspose = config.backend, config.pretranspose
    known = BACK_ENDS[backend]
    room = partial(_check_room, known.on_host)
    act_prec = config.act_prec or known.default_act_prec
    one_of(f"act_prec of the {backend} back end", act_prec, known.activations)
    scope = in_scope(model.spec, pretranspose or "all")
    formats: Mapping[str, Format] = model.formats
    plan = build_plan(model.spec, formats, **asdict(sizes), room=room)
    dropped = None if sparse is None else act_sparsity(sparse)
    if dropped is not None:
        on_host = backend in ("cpu", "reference")
        if not on_host or act_prec != "int8" or scope != in_scope(model.spec, "all"):
            raise UsageError(
                f"act_sparsity on the {backend} back end with act_prec {act_prec} and pretranspose "
                f"{pretranspose}; expected the cpu back end, int8 and all"
            )
        plan = drop_inputs(plan, model.spec, formats, dropped)
    if act_prec == "int8":
        plan = with_codes(plan, formats, scope)
    if config.act_prec in known.rounds:
        plan = round_activations(plan, act_prec)
    if backend == "cpu":
        plan = skip_zeros(plan, formats, scope)
    stored = _act_prec(plan, act_prec)
    copied = scope if pretranspose else frozenset()
    executor = make_executor(plan, model.weights, replace(how, copied=frozenset(copied)))
    if dropped is not None and dropped.drop is not None:
        longest = min(sizes.context, sizes.pages * PAGE_CELLS)
        calibrate(cast(Walker, executor), calibration, dropped.drop, longest)
    salt = f"{model.spec} {sorted(formats.items())} {sizes.kv_dtype} {stored} {sparse}"
    if sizes.selection is not None:  # keys of all but the first layer depend on what was read
        salt += f" {sizes.selection}"
    pages = KvPages(
        executor.array("pages") if model.spec.windows else None,
        sizes.pages,
        window_table=executor.array("window_pages") if sizes.window_pages else None,
        window_pages=sizes.window_pages,
        window=max(model.spec.windows, default=0),
        salt=salt.encode(),
        reuse=config.prefix_cache,
    )
    is_kept = backend == "cpu" and packed_names(plan) <= scope
    return Bound(model, model.weights, sizes, executor, pages, stored, is_kept)


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
