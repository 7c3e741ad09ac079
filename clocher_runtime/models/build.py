"""Turn a ModelSpec into a Plan. One builder serves every family."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from clocher_kernels.formats.base import Format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.sampling import words_for
from clocher_kernels.plan import Attr, Buffer, Call, Plan, Role, Rows
from clocher_runtime.models.inventory import EMBED, NORM, head_name, layer_name
from clocher_runtime.models.rewrite import quantize_for_ternary
from clocher_runtime.models.rope import rope_tables
from clocher_runtime.models.spec import ModelSpec

PAGE_CELLS = 64  # cells of a KV page

_TOKEN_ARGS = {n: n for n in ("slots", "positions", "ends", "ancestors")}


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
    )
    room(plan.scratch_bytes(), table_bytes(spec, context))
    positions = context if spec.windows else 0  # no layers turn nothing
    cos, sin = rope_tables(spec.rope, spec.head_dim, positions)
    return replace(plan, consts={"rope.cos": cos, "rope.sin": sin})


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
) -> Plan:
    """Return the Plan that `build_plan` builds of the same arguments, without its rotary tables.

    Nothing executes it: it says which buffers there are, and how large.
    """
    builder = _Builder(spec, formats, tokens, rows, slots, context, kv_dtype)
    if pages is not None:
        builder.pages = pages
    builder.window_pages = window_pages
    return builder.build()


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Return the bytes of the rotary tables for a context: cosines and sines of half a head."""
    return 4 * context * spec.head_dim


class _Builder:
    def __init__(
        self,
        spec: ModelSpec,
        formats: Mapping[str, Format],
        tokens: int,
        rows: int,
        slots: int,
        context: int,
        kv_dtype: str,
    ) -> None:
        self.spec, self.formats = spec, formats
        self.tokens, self.rows, self.slots, self.context = tokens, rows, slots, context
        self.kv_dtype = kv_dtype
        self.blocks = -(-context // PAGE_CELLS)
        self.pages, self.window_pages = slots * self.blocks, 0
        self.buffers: dict[str, Buffer] = {}
        self.weights: dict[str, None] = {}
        self.calls: list[Call] = []

    def build(self) -> Plan:
        spec, hidden = self.spec, self.spec.hidden_size
        self._inputs()
        self._scratch("h", hidden)
        self._call("embed", {"ids": "ids", "table": EMBED, "y": "h"})
        for layer, window in enumerate(spec.windows):
            self._attention(layer, window)
            if spec.moe is None:
                self._dense_mlp(layer)
            else:
                self._experts(layer)
        self._buffer("last", (self.rows, hidden), "f32", "R")
        self._buffer("logits", (self.rows, spec.vocab_size), "f32", "R", "output")
        self._buffer("sampled", (self.rows,), "i32", "R", "output")
        self._call("gather_rows", {"x": "h", "rows": "rows", "y": "last"})
        # A buffer of its own: what only products read may be stored in fewer bits.
        self._buffer("last.normed", (self.rows, hidden), "f32", "R")
        self._norm("last", NORM, "last.normed")
        self._linear("last.normed", head_name(spec), "logits")
        settings = ("temperature", "top_k", "top_p", "seeds", "draws")
        draw = {n: n for n in ("logits", "allowed", "masked", *settings)}
        self._call("sample", {**draw, "ids": "sampled"})
        step = {n: n for n in ("sampled", "rows", "ids", "positions", "ends", "draws")}
        self._call("advance", step)
        plan = Plan(
            self.tokens, self.rows, self.buffers, {}, tuple(self.weights), tuple(self.calls)
        )
        return quantize_for_ternary(plan, self.formats)

    def _inputs(self) -> None:
        for name in ("ids", "slots", "positions", "ends"):
            self._buffer(name, (self.tokens,), "i32", "M", "input")
        self._buffer("ancestors", (self.tokens,), "u64", "M", "input")
        self._buffer("pages", (self.slots, self.blocks), "i32", "", "input")
        if self.window_pages:
            self._buffer("window_pages", (self.slots, self.blocks), "i32", "", "input")
        for name, dtype in (
            ("rows", "i32"),
            ("masked", "i32"),
            ("temperature", "f32"),
            ("top_k", "i32"),
            ("top_p", "f32"),
            ("seeds", "u64"),
            ("draws", "i32"),
        ):
            self._buffer(name, (self.rows,), dtype, "R", "input")
        # The last of the inputs: what of it is new is sent with them.
        masks = min(self.rows, self.slots), words_for(self.spec.vocab_size)
        self._buffer("allowed", masks, "u32", "", "input")

    def _attention(self, layer: int, window: int) -> None:
        spec, dim = self.spec, self.spec.head_dim
        prefix = layer_name(layer, "self_attn.")
        self._scratch("x", spec.hidden_size)
        self._scratch("q", spec.num_heads * dim)
        self._scratch("k", spec.num_kv_heads * dim)
        self._scratch("v", spec.num_kv_heads * dim)
        self._scratch("attended", spec.num_heads * dim)
        self._norm("h", layer_name(layer, "input_layernorm.weight"), "x")
        for name in "qkv":
            self._linear("x", f"{prefix}{name}_proj.weight", name, bias=spec.qkv_bias)
        for name in "qk":
            if spec.qk_norm:
                self._norm(name, f"{prefix}{name}_norm.weight", name)
            tables = {"cos": "rope.cos", "sin": "rope.sin"}
            self._call("rope", {"x": name, "positions": "positions", **tables})
        cache = self._cache(layer, window)
        kv: dict[str, Attr] = {"kv_dtype": self.kv_dtype}
        self._call("kv_append", {"k": "k", "v": "v", **cache}, **kv)
        args = {"q": "q", **cache, "y": "attended"}
        if spec.sinks:
            args["sinks"] = f"{prefix}sinks"
        self._call("attention", args, **kv, scale=dim**-0.5, window=window)
        if spec.sub_norms:
            self._norm("attended", f"{prefix}attn_sub_norm.weight", "attended")
        out = f"{prefix}o_proj.weight"
        self._linear("attended", out, "h", bias=spec.o_bias, residual="h")

    def _cache(self, layer: int, window: int) -> dict[str, str]:
        """Declare the KV cache of a layer; return its arguments by parameter."""
        has_own = window and self.window_pages
        pages = self.window_pages if has_own else self.pages
        shape = (pages, self.spec.num_kv_heads, PAGE_CELLS, self.spec.head_dim)
        args = {**_TOKEN_ARGS, "pages": "window_pages" if has_own else "pages"}
        for name in "kv":
            args[f"{name}_cache"] = f"kv.{layer}.{name}"
            self._buffer(f"kv.{layer}.{name}", shape, self.kv_dtype, "", "state")
            if self.kv_dtype == "i8":
                args[f"{name}_scale"] = f"kv.{layer}.{name}_scale"
                self._buffer(f"kv.{layer}.{name}_scale", shape[:3], "f32", "", "state")
        return args

    def _dense_mlp(self, layer: int) -> None:
        spec, prefix = self.spec, layer_name(layer, "mlp.")
        self._scratch("gate", spec.intermediate_size)
        self._scratch("up", spec.intermediate_size)
        self._norm("h", layer_name(layer, "post_attention_layernorm.weight"), "x")
        self._linear("x", f"{prefix}gate_proj.weight", "gate", bias=spec.mlp_bias)
        self._linear("x", f"{prefix}up_proj.weight", "up", bias=spec.mlp_bias)
        self._call("glu", {"gate": "gate", "up": "up", "y": "gate"}, act=spec.act)
        if spec.sub_norms:
            self._norm("gate", f"{prefix}ffn_sub_norm.weight", "gate")
        down = f"{prefix}down_proj.weight"
        self._linear("gate", down, "h", bias=spec.mlp_bias, residual="h")

    def _experts(self, layer: int) -> None:
        spec, moe, prefix = self.spec, self.spec.moe, layer_name(layer, "mlp.")
        assert moe is not None
        self._scratch("router", moe.experts)
        self._buffer("experts", (self.tokens, moe.active), "i32", "M")
        self._scratch("expert_weights", moe.active)
        self._buffer("gated", (self.tokens, moe.active, spec.intermediate_size), "f32", "M")
        self._norm("h", layer_name(layer, "post_attention_layernorm.weight"), "x")
        self._linear("x", f"{prefix}router.weight", "router", bias=True)
        route = {"logits": "router", "ids": "experts", "weights": "expert_weights"}
        self._call("topk_softmax", route)
        up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
        args = {"x": "x", "ids": "experts", "w": up, "bias": f"{up}_bias", "y": "gated"}
        self._call("moe_gate_up", args, limit=moe.limit, alpha=moe.alpha)
        args = {"x": "gated", "ids": "experts", "weights": "expert_weights", "w": down}
        self._call("moe_down", {**args, "bias": f"{down}_bias", "residual": "h", "y": "h"})

    def _linear(
        self, x: str, weight: str, y: str, *, bias: bool = False, residual: str = ""
    ) -> None:
        tail = {"y": y}
        stem = weight.removesuffix(".weight")
        if bias:
            tail["bias"] = f"{stem}.bias"
        if residual:
            tail["residual"] = residual
        fmt, source = self.formats[weight], x
        if self.spec.input_norm_eps and isinstance(fmt, Ternary):  # each has a norm of its own
            source = f"{x}.normed"
            self.buffers[source] = self.buffers[x]
            self._norm(x, f"{stem}.rms_norm.weight", source, self.spec.input_norm_eps)
        op = "bsr_linear" if isinstance(fmt, Bsr) else "linear"
        self._call(op, {"x": source, "w": weight, **tail})

    def _norm(self, x: str, weight: str, y: str, eps: float | None = None) -> None:
        args = {"x": x, "weight": weight, "y": y}
        self._call("rms_norm", args, eps=self.spec.norm_eps if eps is None else eps)

    def _scratch(self, name: str, size: int) -> None:
        self._buffer(name, (self.tokens, size), "f32", "M")

    def _buffer(
        self, name: str, shape: tuple[int, ...], dtype: str, rows: Rows, role: Role = "scratch"
    ) -> None:
        self.buffers[name] = Buffer(shape, dtype, rows, role)

    def _call(self, op: str, args: Mapping[str, str], **attrs: Attr) -> None:
        """Append a call; note the weights it reads."""
        for name in args.values():
            if name not in self.buffers and not name.startswith("rope."):
                self.weights[name] = None
        self.calls.append(Call(op, dict(args), attrs))


def page_table(slots: int, blocks: int) -> np.ndarray:
    """Return the plain page table [S, B] i32: slot s owns pages s*B .. s*B + B - 1."""
    return np.arange(slots * blocks, dtype=np.int32).reshape(slots, blocks)
