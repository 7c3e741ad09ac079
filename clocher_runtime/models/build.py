"""Turn a ModelSpec into a Plan. One builder serves every family."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from clocher_kernels.formats.base import Format
from clocher_kernels.ops.rewrite import quantize_for_ternary
from clocher_kernels.plan import Plan
from clocher_runtime.models.builder import COUNTS, ONES, Builder, tables_of
from clocher_runtime.models.rope import rope_tables
from clocher_runtime.models.selection import PAGE_CELLS, Selection
from clocher_runtime.models.spec import ModelSpec, QueryGrowth, RopeSpec

__all__ = ["COUNTS", "PAGE_CELLS", "build_plan", "lay_out", "page_table", "table_bytes", "tables"]


def build_plan(
    spec: ModelSpec,
    formats: Mapping[str, Format],
    *,
    tokens: int,
    rows: int,
    slots: int,
    context: int,
    kv_dtype: str = "f32",
    pages: int | None = None,
    window_pages: int = 0,
    selection: Selection | None = None,
    room: Callable[[int, int], None] = lambda buffers, tables: None,
) -> Plan:
    """Build the forward pass of a model.

    Args:
        spec: the model.
        formats: format of each matrix by tensor name; a ternary one gets int8 activations.
        tokens: capacity M of a step.
        rows: capacity R: tokens of a step whose logits are wanted.
        slots: sequences side by side.
        context: longest sequence.
        kv_dtype: f32, bf16, f16, e4m3, e5m2 or i8.
        pages: pages of the KV cache of each layer; None: `slots` whole contexts.
        window_pages: pages of layers with a sliding window, which have a page table of their own;
            0: they have the others' table and number of pages.
        selection: the pages that layers without a window read; None: all.
        room: raises unless there is memory for the bytes of the buffers and of the rotary tables;
            called before the tables are made.

    Returns:
        The Plan. Inputs: ids, slots, positions, ends, ancestors, pages, rows, masked, temperature,
        top_k, top_p, seeds, draws, allowed, and window_pages if these layers have a table of their
        own. Outputs: logits [R, V], sampled [R].
    """
    plan = lay_out(
        spec,
        formats,
        tokens=tokens,
        rows=rows,
        slots=slots,
        context=context,
        kv_dtype=kv_dtype,
        pages=pages,
        window_pages=window_pages,
        selection=selection,
    )
    room(plan.scratch_bytes(), table_bytes(spec, context))
    consts: dict[str, np.ndarray] = {}
    for name, (rope, growth) in tables(spec).items():
        cos, sin = rope_tables(rope, spec.head_dim, context, growth)
        consts |= {f"{name}.cos": cos, f"{name}.sin": sin}
    if spec.qk_norm == "after":
        consts[ONES] = np.ones(spec.head_dim, np.float32)
    return replace(plan, consts=consts)


def lay_out(
    spec: ModelSpec,
    formats: Mapping[str, Format],
    *,
    tokens: int,
    rows: int,
    slots: int,
    context: int,
    kv_dtype: str = "f32",
    pages: int | None = None,
    window_pages: int = 0,
    selection: Selection | None = None,
) -> Plan:
    """Return the Plan that `build_plan` builds of the same arguments, without its rotary tables.

    Nothing executes it: it says which buffers there are, and how large.
    """
    builder = Builder(spec, formats, tokens, rows, slots, context, kv_dtype)
    if pages is not None:
        builder.pages = pages
    builder.window_pages = window_pages
    builder.selection = selection
    return quantize_for_ternary(builder.build(), formats)


def tables(spec: ModelSpec) -> dict[str, tuple[RopeSpec | None, QueryGrowth | None]]:
    """Return what each pair of rotary tables is made of, by name, those of queries alone too."""
    found: dict[str, tuple[RopeSpec | None, QueryGrowth | None]] = {}
    for layer in range(spec.num_layers):
        for name, growth in tables_of(spec, layer).values():
            found[name] = spec.rope_of(layer), growth
    return found


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Return the bytes of the rotary tables for a context: cosines and sines of half a head."""
    halves = (rope.rotated if rope else 0 for rope, _ in tables(spec).values())
    return sum(4 * context * (size or spec.head_dim) for size in halves)


def page_table(slots: int, blocks: int) -> np.ndarray:
    """Return the plain page table [S, B] i32: slot s owns pages s*B .. s*B + B - 1."""
    return np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
