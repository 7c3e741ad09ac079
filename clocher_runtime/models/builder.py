"""The calls and buffers of a forward pass, layer by layer, for any ModelSpec."""

from collections.abc import Mapping
from dataclasses import dataclass

from clocher_kernels.formats.base import Format
from clocher_kernels.formats.ternary import Ternary
from clocher_kernels.ops.sampling import words_for
from clocher_kernels.plan import DRAW_INPUTS, TOKEN_INPUTS, Attr, Buffer, Call, Plan, Role, Rows
from clocher_runtime.models.spec import (
    EMBED,
    NORM,
    PAGE_CELLS,
    Kind,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    Need,
    QueryGrowth,
    Selection,
    head_name,
    layer_name,
)

DRAWN = 8
"""Tokens drawn per sequence and forward: one, and one after each draft token."""
MOST_BIASES = 1024
"""Biases of a sequence that are added where tokens are drawn; with more, the host draws."""
COUNTS = "selected"
"""Counters of pages read and pages available, where attention is sparse."""
ONES = "norm.ones"
"""Weights of a norm that has none."""
_ROUTERS = (".router", ".shared_expert_gate")

_TOKEN_ARGS = {n: n for n in TOKEN_INPUTS if n != "ids"}


def tables_of(spec: ModelSpec, layer: int) -> dict[str, tuple[str, QueryGrowth | None]]:
    """Return for "q" and "k" the layer's rotary table and its growth, if rotated."""
    rope, growth = spec.rope_of(layer), spec.query_growth
    if growth is not None and spec.unrotated and layer not in spec.unrotated:
        growth = None
    plain = "rope.window" if rope is not None and rope is spec.window_rope else "rope"
    found: dict[str, tuple[str, QueryGrowth | None]] = {}
    if rope is not None:
        found = {"q": (plain, None), "k": (plain, None)}
    if growth is not None:
        found["q"] = (f"{plain}.grown" if rope else "rope.growth"), growth
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Capacities of a Plan: tokens M of a step, `rows` R with logits, `slots` sequences.

    `context`: maximum sequence length; `cache_dtype`: f32, bf16, f16, e4m3, e5m2 or i8; `pages` per
    layer, 0 for `slots` full contexts; `window_pages` 0: layers with a window share the page table;
    `selection`: pages that the other layers read, None for all.
    """

    tokens: int
    rows: int
    slots: int
    context: int
    cache_dtype: str = "f32"
    pages: int = 0
    window_pages: int = 0
    selection: Selection | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pages", self.pages or self.slots * self.blocks)

    @property
    def blocks(self) -> int:
        """Pages of a full context."""
        return -(-self.context // PAGE_CELLS)

    @property
    def longest(self) -> int:
        """Maximum sequence length: the context, or less if the KV cache is smaller."""
        return min(self.context, self.pages * PAGE_CELLS)


class Builder:
    """Builds a Plan in fp32, without the rotary tables.

    `formats`: of each matrix; one that is missing may have any, and `needs` has all that it may
    read then. `needs`: the tensors that the calls read.
    """

    def __init__(self, spec: ModelSpec, formats: Mapping[str, Format], sizes: Sizes) -> None:
        self.spec, self.formats, self.sizes = spec, formats, sizes
        self.tokens, self.rows = sizes.tokens, sizes.rows
        self.buffers: dict[str, Buffer] = {}
        self.needs: dict[str, Need] = {}
        self.calls: list[Call] = []

    def build(self) -> Plan:
        """Return the Plan."""
        spec, hidden = self.spec, self.spec.hidden_size
        self._inputs()
        self._scratch("h", hidden)
        # The residual stream is stored divided by the residual factor.
        scale = spec.embedding_scale / spec.residual_scale
        self.needs[EMBED] = Need("embedding", (spec.vocab_size, hidden))
        self._call("embed", {"ids": "ids", "table": EMBED, "y": "h"}, scale=scale)
        for layer, window in enumerate(spec.windows):
            self._attention(layer, window)
            self._mlp(layer)
        self._buffer("last", (self.rows, hidden), "f32", "R")
        self._buffer("logits", (self.rows, spec.vocab_size), "f32", "R", "output")
        self._buffer("sampled", (self.rows,), "i32", "R", "output")
        self._call("gather_rows", {"x": "h", "rows": "rows", "y": "last"})
        # A separate buffer: what only matmuls read may be stored in fewer bits.
        self._buffer("last.normed", (self.rows, hidden), "f32", "R")
        self._norm("last", NORM, "last.normed", self._stream_eps())
        head = ("last.normed", head_name(spec), "logits")
        if spec.logit_softcap:
            self._linear(*head, activation="tanh", cap=spec.logit_softcap)
        else:
            self._linear(*head)
        draw = {n: n for n in ("logits", "allowed", "edit_ids", "edits", *DRAW_INPUTS)}
        self._call("sample", {**draw, "ids": "sampled"})
        step = {n: n for n in ("sampled", "rows", "ids", "positions", "ends", "draws")}
        self._call("advance", step)
        weights, calls = tuple(self.needs), tuple(self.calls)
        return Plan(self.tokens, self.rows, self.buffers, {}, weights, calls)

    def _inputs(self) -> None:
        for name, dtype in TOKEN_INPUTS.items():
            self._buffer(name, (self.tokens,), dtype, "M", "input")
        self._buffer("pages", (self.sizes.slots, self.sizes.blocks), "i32", "", "input")
        if self.sizes.window_pages:
            self._buffer("window_pages", (self.sizes.slots, self.sizes.blocks), "i32", "", "input")
        for name, dtype in {"rows": "i32", **DRAW_INPUTS}.items():
            self._buffer(name, (self.rows,), dtype, "R", "input")
        # Of these, only what is new is sent. Rows that score need no masks.
        edits = self.sizes.slots * min(self.spec.vocab_size, self.sizes.context + MOST_BIASES)
        self._buffer("edit_ids", (edits,), "i32", "", "input")
        self._buffer("edits", (edits, 3), "f32", "", "input")
        masks = min(self.rows, DRAWN * self.sizes.slots)
        self._buffer("allowed", (masks, words_for(self.spec.vocab_size)), "u32", "", "input")

    def _attention(self, layer: int, window: int) -> None:
        spec, dim = self.spec, self.spec.head_dim
        prefix = layer_name(layer, "self_attn.")
        self._scratch("attended", spec.num_heads * dim)
        x = self._entering(layer_name(layer, "input_layernorm.weight"))
        if spec.mla is None:
            for name in "qkv":
                size = (spec.num_heads if name == "q" else spec.num_kv_heads) * dim
                self._linear(x, f"{prefix}{name}_proj.weight", name, size, bias=spec.qkv_bias)
            self._turn_heads(layer, prefix)
        else:
            self._latent(x, layer, prefix, spec.mla)
        cache = self._cache(layer, window)
        kv: dict[str, Attr] = {"cache_dtype": self.sizes.cache_dtype}
        self._call("kv_append", {"k": "k", "v": "v", **cache}, **kv)
        args = {"q": "q", **cache, "y": "attended"}
        if spec.sinks:
            args["sinks"] = self._vector(f"{prefix}sinks", spec.num_heads)
        chunk = spec.chunks[layer] if spec.chunks else 0
        seen: dict[str, Attr] = {"window": window, "chunk": chunk}
        scale = spec.attention_scale or dim**-0.5
        if self.sizes.selection is not None and not window and not chunk:
            args["listed"] = self._selected(layer, cache, kv, scale, self.sizes.selection)
        self._call("attention", args, **kv, scale=scale, **seen, softcap=spec.attention_softcap)
        if spec.sub_norms:
            self._norm("attended", f"{prefix}attn_sub_norm.weight", "attended")
        y = "attended"
        if spec.mla is not None and spec.mla.value != dim:
            self._scratch("values", spec.num_heads * spec.mla.value)
            self._call("join_heads", {"first": y, "y": "values"}, heads=spec.num_heads)
            y = "values"
        self._adding(y, f"{prefix}o_proj.weight", layer, "attention", spec.o_bias)

    def _turn_heads(self, layer: int, prefix: str) -> None:
        spec, turned = self.spec, tables_of(self.spec, layer)
        for name in "qk":
            if spec.qk_norm in ("heads", "rows"):
                size = spec.head_dim if spec.qk_norm == "heads" else 0
                self._norm(name, f"{prefix}{name}_norm.weight", name, size=size)
            if name in turned:
                self._rope(name, turned[name][0])
            if spec.qk_norm == "after" and layer not in spec.unrotated:
                self._norm(name, ONES, name)

    def _rope(self, x: str, tables: str, head: int | None = None) -> None:
        args = {"x": x, "positions": "positions", "cos": f"{tables}.cos", "sin": f"{tables}.sin"}
        self._call("rope", args, head=self.spec.head_dim if head is None else head)

    def _latent(self, x: str, layer: int, prefix: str, mla: MlaSpec) -> None:
        spec, heads, bias = self.spec, self.spec.num_heads, self.spec.qkv_bias
        source, query = x, f"{prefix}q_proj.weight"
        if mla.query_rank:
            source, query = "query_latent", f"{prefix}q_b_proj.weight"
            self._linear(x, f"{prefix}q_a_proj.weight", source, mla.query_rank, bias=bias)
            self._norm(source, f"{prefix}q_a_layernorm.weight", source, mla.norm_eps)
        self._linear(source, query, "q", heads * spec.head_dim)
        self._linear(x, f"{prefix}kv_a_proj.weight", "latent", mla.rank, bias=bias)
        self._linear(x, f"{prefix}k_rope_proj.weight", "k_rope", mla.rotated, bias=bias)
        self._norm("latent", f"{prefix}kv_a_layernorm.weight", "latent", mla.norm_eps)
        self._linear("latent", f"{prefix}k_b_proj.weight", "k_plain", heads * mla.plain)
        values = "v" if mla.value == spec.head_dim else "v_latent"
        self._linear("latent", f"{prefix}v_b_proj.weight", values, heads * mla.value)
        self._scratch("k", heads * spec.head_dim)
        self._scratch("v", heads * spec.head_dim)
        turned = tables_of(spec, layer)
        self._rope("q", turned["q"][0])
        self._rope("k_rope", turned["k"][0], 0)
        self._call("join_heads", {"first": "k_rope", "second": "k_plain", "y": "k"}, heads=heads)
        if values != "v":
            self._call("join_heads", {"first": values, "y": "v"}, heads=heads)

    def _entering(self, norm: str) -> str:
        if not self.spec.pre_norms:
            return "h"
        self._scratch("x", self.spec.hidden_size)
        self._norm("h", norm, "x", self._stream_eps())
        return "x"

    def _adding(self, x: str, weight: str, layer: int, place: str, bias: bool) -> None:
        if not self.spec.post_norms:
            self._linear(x, weight, "h", bias=bias, residual="h")
            return
        self._linear(x, weight, "added", self.spec.hidden_size, bias=bias)
        norm = layer_name(layer, f"post_{place}_layernorm.weight")
        self._norm("added", norm, "h", residual="h")

    def _stream_eps(self) -> float:
        return self.spec.norm_eps / self.spec.residual_scale**2

    def _cache(self, layer: int, window: int) -> dict[str, str]:
        """Declare the KV cache of a layer; return its arguments by parameter."""
        has_own = window and self.sizes.window_pages
        pages = self.sizes.window_pages if has_own else self.sizes.pages
        shape = (pages, self.spec.num_kv_heads, PAGE_CELLS, self.spec.head_dim)
        args = {**_TOKEN_ARGS, "pages": "window_pages" if has_own else "pages"}
        for name in "kv":
            args[f"{name}_cache"] = f"kv.{layer}.{name}"
            self._buffer(f"kv.{layer}.{name}", shape, self.sizes.cache_dtype, "", "state")
            if self.sizes.cache_dtype == "i8":
                args[f"{name}_scale"] = f"kv.{layer}.{name}_scale"
                self._buffer(f"kv.{layer}.{name}_scale", shape[:3], "f32", "", "state")
        return args

    def _selected(
        self,
        layer: int,
        cache: Mapping[str, str],
        kv: Mapping[str, Attr],
        scale: float,
        selection: Selection,
    ) -> str:
        from clocher_kernels.ops.selection import WORD

        heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        self._buffer("listed", (self.tokens, heads, -(-self.sizes.blocks // WORD)), "u64", "M")
        self._buffer(COUNTS, (self.tokens, heads, 2), "i64", "M", "state")
        args = {**_TOKEN_ARGS, "pages": cache["pages"]}
        if selection.is_scored:
            bounds = f"kv.{layer}.bounds"
            self._buffer(bounds, (self.sizes.pages, heads, 2, dim), "f32", "", "state")
            keys = {name: cache[name] for name in ("k_cache", "k_scale") if name in cache}
            self._call("page_bounds", {**args, **keys, "bounds": bounds}, **kv)
            args["bounds"] = bounds
        args |= {"q": "q", "listed": "listed", "counts": COUNTS}
        self._call("select_pages", args, cells=PAGE_CELLS, scale=scale, **selection.attrs)
        return "listed"

    def _mlp(self, layer: int) -> None:
        spec, prefix = self.spec, layer_name(layer, "mlp.")
        # Llama names it after the attention that precedes it.
        norm = f"{'pre_feedforward' if spec.post_norms else 'post_attention'}_layernorm.weight"
        x = self._entering(layer_name(layer, norm))
        if not spec.has_experts(layer):
            self._gated(x, prefix, spec.intermediate_size, "inner")
            if spec.sub_norms:
                self._norm("inner", f"{prefix}ffn_sub_norm.weight", "inner")
            self._adding("inner", f"{prefix}down_proj.weight", layer, "feedforward", spec.mlp_bias)
            return
        assert spec.moe is not None
        self._experts(x, prefix, spec.moe)
        if spec.moe.shared:
            prefix = f"{prefix}shared_expert."
            self._gated(x, prefix, spec.moe.shared, "shared", spec.moe.shared_gate)
            down = f"{prefix}down_proj.weight"
            self._linear("shared", down, "h", bias=spec.mlp_bias, residual="h")

    def _gated(self, x: str, prefix: str, inner: int, y: str, scored: bool = False) -> None:
        """Compute the hidden layer of a gated MLP, times the sigmoid of the token's score."""
        spec, times = self.spec, "shared_score" if scored else ""
        if scored:
            gate = f"{prefix.removesuffix('.')}_gate.weight"
            self._linear(x, gate, times, 1, activation="sigmoid")
        self._linear(x, f"{prefix}up_proj.weight", y, inner, bias=spec.mlp_bias, times=times)
        gate = f"{prefix}gate_proj.weight"
        self._linear(x, gate, y, bias=spec.mlp_bias, times=y, activation=spec.act)

    def _experts(self, x: str, prefix: str, moe: MoeSpec) -> None:
        self._buffer("experts", (self.tokens, moe.active), "i32", "M")
        self._scratch("expert_weights", moe.active)
        self._buffer("gated", (self.tokens, moe.active, moe.inner), "f32", "M")
        self._linear(x, f"{prefix}router.weight", "router", moe.experts, bias=moe.router_bias)
        route = {"logits": "router", "ids": "experts", "weights": "expert_weights"}
        if moe.choice_bias:
            route["bias"] = self._vector(f"{prefix}router.choice_bias", moe.experts)
        groups = {"groups": moe.groups, "group_top": moe.group_top, "group_best": moe.group_best}
        scores: dict[str, Attr] = {"score": moe.score, "normalise": moe.normalise}
        self._call("route", route, **scores, factor=moe.factor, **groups)
        up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
        hidden = self.spec.hidden_size
        self.needs[up] = Need("linear", (moe.experts, 2 * moe.inner, hidden))
        self.needs[down] = Need("linear", (moe.experts, hidden, moe.inner))
        first = {"x": x, "ids": "experts", "w": up, "y": "gated"}
        second = {"x": "gated", "ids": "experts", "w": down, "residual": "h", "y": "h"}
        if moe.scale_inputs:
            first["factors"] = "expert_weights"
        else:
            second["weights"] = "expert_weights"
        if moe.expert_bias:
            first["bias"] = self._vector(f"{up}_bias", moe.experts, 2 * moe.inner)
            second["bias"] = self._vector(f"{down}_bias", moe.experts, hidden)
        limits: dict[str, Attr] = {"limit": moe.limit, "alpha": moe.alpha}
        self._call("moe_gate_up", first, act=moe.act, **limits)
        self._call("moe_down", second)

    def _linear(
        self,
        x: str,
        weight: str,
        y: str,
        size: int = 0,
        *,
        bias: bool = False,
        times: str = "",
        residual: str = "",
        **attrs: Attr,
    ) -> None:
        """Multiply into a buffer, or into a new one of `size` columns."""
        if size:
            self._scratch(y, size)
        tail = {"y": y}
        stem = weight.removesuffix(".weight")
        rows, columns = self.buffers[y].shape[-1], self.buffers[x].shape[-1]
        kind: Kind = "router" if stem.endswith(_ROUTERS) else "linear"
        kind = "head" if weight == head_name(self.spec) else kind
        self.needs.setdefault(weight, Need(kind, (rows, columns)))  # an embedding may be the head
        if bias:
            tail["bias"] = self._vector(f"{stem}.bias", rows)
        if times:
            tail["times"] = times
        if residual:
            tail["residual"] = residual
        fmt, source = self.formats.get(weight), x
        is_ternary = kind == "linear" if fmt is None else isinstance(fmt, Ternary)
        if self.spec.input_norm_eps and is_ternary:  # each has a norm of its own
            source = f"{x}.normed"
            self.buffers[source] = self.buffers[x]
            self._norm(x, f"{stem}.rms_norm.weight", source, self.spec.input_norm_eps)
        op = "bsr_linear" if fmt is not None and fmt.is_sparse else "linear"
        self._call(op, {"x": source, "w": weight, **tail}, **attrs)

    def _norm(
        self,
        x: str,
        weight: str,
        y: str,
        eps: float | None = None,
        residual: str = "",
        size: int = 0,
    ) -> None:
        if weight != ONES:
            shape = (size or self.buffers[x].shape[-1],)
            # The factor of the logits is applied before the head.
            scale = self.spec.logit_scale if weight == NORM else 1.0
            self.needs[weight] = Need("vector", shape, self.spec.norm_offset, scale)
        args = {"x": x, "weight": weight, "y": y}
        if residual:
            args["residual"] = residual
        self._call("rms_norm", args, eps=self.spec.norm_eps if eps is None else eps)

    def _scratch(self, name: str, size: int) -> None:
        self._buffer(name, (self.tokens, size), "f32", "M")

    def _buffer(
        self, name: str, shape: tuple[int, ...], dtype: str, rows: Rows, role: Role = "scratch"
    ) -> None:
        self.buffers[name] = Buffer(shape, dtype, rows, role)

    def _vector(self, name: str, *shape: int) -> str:
        self.needs[name] = Need("vector", shape)
        return name

    def _call(self, op: str, args: Mapping[str, str], **attrs: Attr) -> None:
        self.calls.append(Call(op, dict(args), attrs))
