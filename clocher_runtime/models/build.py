"""Turn a ModelSpec into a Plan. One builder serves every family."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from clocher_kernels.formats.base import Format
from clocher_kernels.ops.rewrite import quantize_for_ternary
from clocher_kernels.plan import Plan
from clocher_runtime.models.builder import COUNTS, ONES, Builder, Sizes, tables_of
from clocher_runtime.models.rope import rope_tables
from clocher_runtime.models.selection import PAGE_CELLS
from clocher_runtime.models.spec import ModelSpec, QueryGrowth, RopeSpec

__all__ = ["COUNTS", "PAGE_CELLS", "Sizes", "build_plan", "lay_out", "page_table", "table_bytes"]


def build_plan(
    spec: ModelSpec,
    formats: Mapping[str, Format],
    sizes: Sizes,
    room: Callable[[int, int], None] = lambda buffers, tables: None,
) -> Plan:
    """Build the forward pass of a model. Outputs: logits [R, V], sampled [R].

    `formats`: by tensor name; ternary matrices get int8 activations. `room(buffers, tables)` gets
    bytes before the rotary tables are made, and raises if memory is short.
    """
    plan = lay_out(spec, formats, sizes)
    room(plan.scratch_bytes(), table_bytes(spec, sizes.context))
    consts: dict[str, np.ndarray] = {}
    for name, (rope, growth) in _tables(spec).items():
        cos, sin = rope_tables(rope, spec.head_dim, sizes.context, growth)
        consts |= {f"{name}.cos": cos, f"{name}.sin": sin}
    if spec.qk_norm == "after":
        consts[ONES] = np.ones(spec.head_dim, np.float32)
    return replace(plan, consts=consts)


def lay_out(spec: ModelSpec, formats: Mapping[str, Format], sizes: Sizes) -> Plan:
    """Return the Plan of `build_plan` without its rotary tables, for sizes of buffers."""
    return quantize_for_ternary(Builder(spec, formats, sizes).build(), formats)


def _tables(spec: ModelSpec) -> dict[str, tuple[RopeSpec | None, QueryGrowth | None]]:
    found: dict[str, tuple[RopeSpec | None, QueryGrowth | None]] = {}
    for layer in range(spec.num_layers):
        for name, growth in tables_of(spec, layer).values():
            found[name] = spec.rope_of(layer), growth
    return found


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Return the bytes of the rotary tables for a context."""
    halves = (rope.rotated if rope else 0 for rope, _ in _tables(spec).values())
    return sum(4 * context * (size or spec.head_dim) for size in halves)


def page_table(slots: int, blocks: int) -> np.ndarray:
    """Return the identity page table [S, B] i32: slot s owns pages s*B .. s*B + B - 1."""
    return np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
