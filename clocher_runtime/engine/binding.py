"""A model bound to a back end: its Plan, executor and KV pages, and what attention reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clocher_kernels.errors import UsageError
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.rewrite import round_activations, skip_zeros
from clocher_kernels.plan import Executor
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import one_of
from clocher_runtime.engine.backends import BACK_ENDS, Progress, make_executor
from clocher_runtime.engine.footprint import packed_names, with_codes
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import KvPages
from clocher_runtime.models.build import Sizes, build_plan
from clocher_runtime.models.inventory import in_scope


@dataclass(frozen=True, slots=True)
class Bound:
    """A model that can be stepped; `scope_is_kept`: exactly the requested weights are packed."""

    model: Model
    config: EngineConfig
    sizes: Sizes
    executor: Executor
    pages: KvPages
    act_prec: str
    scope_is_kept: bool


def bind(
    model: Model,
    config: EngineConfig,
    sizes: Sizes,
    *,
    calibration: Sequence[int] | None = None,
    progress: Progress | None = None,
    packing: Progress | None = None,
    beside: Executor | None = None,
) -> Bound:
    """Bind a model to the back end of a configuration. Raises UsageError, OutOfMemory.

    `calibration`: token ids, see `act_sparsity`; for the others see `make_executor`.
    """
    backend, scoped = config.backend, config.pretranspose
    known, formats, spec = BACK_ENDS[backend], model.formats, model.spec
    act_prec = config.act_prec or known.default_act_prec
    one_of(*known.activations).check(f"act_prec of the {backend} back end", act_prec)
    scope = in_scope(spec, scoped or "all")
    adapters = model.adapters
    adapted = adapters.linears if adapters else {}
    # The GPU's memory is checked where it is known.
    plan = build_plan(spec, formats, sizes, adapted, buffers=known.on_host)
    share = None
    if config.act_sparsity is not None:
        from clocher_runtime.engine.act_sparsity import act_sparsity, calibrate, drop_inputs

        dropped = act_sparsity(config.act_sparsity)
        share, on_host = dropped.drop, backend in ("cpu", "reference")
        if not on_host or act_prec != "int8" or scope != in_scope(spec, "all"):
            raise UsageError(
                f"act_sparsity on the {backend} back end with act_prec {act_prec} and pretranspose "
                f"{scoped}; expected the cpu back end, int8 and all"
            )
        plan = drop_inputs(plan, spec, formats, dropped)
    if act_prec == "int8":
        plan = with_codes(plan, formats, scope)
    if config.act_prec in known.rounds:
        plan = round_activations(plan, act_prec)
    if backend == "cpu":
        plan = skip_zeros(plan, formats, scope)
    weights = {**model.weights, **(adapters.weights if adapters else {})}
    for name in {call.args.get("lora_b", "") for call in plan.calls} - {""}:
        if isinstance(b := weights[name], QuantTensor):
            weights[name] = b.decode()
    executor = make_executor(
        plan,
        weights,
        config,
        copied=scope if scoped else frozenset(),
        progress=progress,
        packing=packing,
        beside=beside,
    )
    if share is not None:
        calibrate(executor, calibration, share, sizes.longest)
    stored = act_prec
    if not any(call.op == "fake_quantize" for call in plan.calls):
        integer = any(has_codes(call) for call in plan.calls)
        stored = "int8" if integer else "fp32" if act_prec == "int8" else act_prec
    salt = f"{spec} {sorted(formats.items())} {sizes.cache_dtype} {stored} {config.act_sparsity}"
    if sizes.selection is not None:  # keys of all but the first layer depend on what was read
        salt += f" {sizes.selection}"
    pages = KvPages(
        executor.array("pages"),
        sizes.pages if spec.windows else 0,
        window_table=executor.array("window_pages") if sizes.window_pages else None,
        window_pages=sizes.window_pages,
        window=max(spec.windows, default=0),
        salt=salt.encode(),
        reuse=config.prefix_cache,
    )
    is_kept = backend == "cpu" and packed_names(plan) <= scope
    return Bound(model, config, sizes, executor, pages, stored, is_kept)


class PagesRead(NamedTuple):
    """Pages that attention read, and pages available, summed over layers and heads."""

    listed: int
    seen: int

    def share(self, before: "PagesRead") -> float:
        """Return the share read since an earlier state; 1 if there was nothing to read."""
        seen = self.seen - before.seen
        return (self.listed - before.listed) / seen if seen else 1.0
