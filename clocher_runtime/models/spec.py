"""A model as data: a family turns config.json into a ModelSpec, `build` that into a Plan.

Also `--attn` as data: which KV pages attention reads.
"""

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # a command line is read without it
    from clocher_kernels.plan import Attr

Act = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding and its long-context variant, in the terms of transformers.

    `rotated`: leading values of a head, 0 for all; `original_positions`: the training context;
    `attention_factor` multiplies cosines and sines; longrope has a factor per pair.
    """

    theta: float
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    rotated: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with position p by 1 + strength ln(1 + floor((p + after) / every)).

    Source: Nakanishi 2025 (arXiv 2501.19399), as in Llama 4 and Ministral 3.
    """

    strength: float
    every: int
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixture of experts: gated MLPs, of which a router chooses `active` for every token.

    `inner`, `shared`: intermediate sizes of an expert and of the shared expert; `act` "clamped" has
    `limit` and `alpha` (gpt-oss); `score` to `group_best` are those of the op `route`;
    `choice_bias`: for the choice alone (DeepSeek-V3); `scale_inputs`: weights multiply inputs, not
    outputs (Llama 4); `shared_gate`: a sigmoid (Qwen2-MoE); `dense_layers`: layers without experts.
    """

    experts: int
    active: int
    inner: int
    act: Literal["silu", "clamped"] = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    score: Literal["chosen", "softmax", "sigmoid"] = "chosen"
    normalise: bool = False
    factor: float = 1.0
    groups: int = 0
    group_top: int = 0
    group_best: int = 1
    router_bias: bool = False
    choice_bias: bool = False
    expert_bias: bool = False
    scale_inputs: bool = False
    shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Keys and values are linear in a vector of `rank` values per token, queries in one of
    `query_rank` (0: in the token). Heads of queries and keys have `rotated` values, keys' shared
    by all, then `plain` ones. `paired`: rotated pairs are neighbours in files.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    value: int
    norm_eps: float = 1e-6
    paired: bool = True


@dataclass(frozen=True, slots=True)
class BlockDiffusion:
    """How a model denoises blocks of masks.

    `context`: keys of finished blocks are "causal", or see their "block"; `shift`: logits predict
    the next position; `part`: positions denoised together.
    """

    block: int
    mask: int
    context: Literal["causal", "block"]
    shift: bool = False
    part: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Zero means none, unless stated.

    Attributes:
        windows: visible keys of each layer, the query included; 0 for all.
        chunks: attention chunk of each layer in positions; () for no layer.
        window_rope: of layers with a window, if different (Gemma 3).
        query_growth: of `unrotated` layers alone if there are any.
        mla: latent attention; `head_dim` is then that of queries and keys.
        pre_norms, post_norms: RMSNorm of the inputs, and of the outputs, of attention and MLP.
        norm_offset: added to the weights of norms (Gemma: 1).
        qk_norm: before RoPE, of each head, or of "rows" as a whole; or, without weights, "after".
        sinks: one extra logit per head in the softmax (gpt-oss).
        sub_norms: RMSNorm before the attention and MLP output projections (BitNet).
        input_norm_eps: of an RMSNorm inside each ternary linear (`use_rms_norm`).
        ternarize: float linears of the blocks are ternarised at load (BitNet "online").
        attention_scale: factor of query-key dot products; 0 for head_dim^-0.5.
        attention_softcap, logit_softcap: limits of tanh capping.
        residual_scale: factor of attention and MLP outputs.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    rope: RopeSpec
    max_positions: int
    norm_eps: float
    chunks: tuple[int, ...] = ()
    window_rope: RopeSpec | None = None
    unrotated: tuple[int, ...] = ()
    query_growth: QueryGrowth | None = None
    act: Act = "silu"
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    qk_norm: Literal["", "heads", "rows", "after"] = ""
    sinks: bool = False
    sub_norms: bool = False
    input_norm_eps: float = 0.0
    ternarize: bool = False
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    diffusion: BlockDiffusion | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Return the rotary embedding of a layer."""
        if layer in self.unrotated:
            return None
        return self.window_rope if self.window_rope and self.windows[layer] else self.rope


Kind = Literal["linear", "embedding", "head", "router", "vector"]
EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Need:
    """One tensor that a model reads; a "vector" becomes fp32, (stored + offset) * scale."""

    kind: Kind
    shape: tuple[int, ...]
    offset: float = 0.0
    scale: float = 1.0

    @property
    def elements(self) -> int:
        """Number of its values."""
        return prod(self.shape)


def head_name(spec: ModelSpec) -> str:
    """Return the name of the head's matrix."""
    return EMBED if spec.tied else HEAD


def layer_name(layer: int, name: str) -> str:
    """Return the full name of a tensor of a layer."""
    return f"model.layers.{layer}.{name}"


PAGE_CELLS = 64
LAST_PAGES = 2
"""Pages at the end that are always read: `ops.selection.LAST_PAGES`."""
LEAST_BUDGET = 4 * PAGE_CELLS
_MOST = 1 << 24
_COUNT, _REAL = "([0-9]{1,8})", r"([0-9]{1,7}(?:\.[0-9]{1,7})?|\.[0-9]{1,7})"
_SELECTION = re.compile(rf"topk:{_COUNT}|window:{_COUNT}\+{_COUNT}|(threshold|dynamic):{_REAL}")
TAKES = (
    "dense, topk:N (tokens that are read, "
    f"{LEAST_BUDGET} or more), threshold:T (of logits, above 0), window:S+W (first and last "
    "tokens) or dynamic:P (a share above 0 and below 1)"
)


class Selection(NamedTuple):
    """Pages that a token reads; the numbers are those of `ops.selection.select_pages`."""

    name: str
    first: int = 1
    last: int = LAST_PAGES
    budget: int = 0
    margin: float = 0.0
    mass: float = 0.0

    @property
    def is_scored(self) -> bool:
        """Whether pages are chosen by their keys, which needs bounds of these."""
        return bool(self.budget or self.margin or self.mass)

    @property
    def attrs(self) -> "dict[str, Attr]":
        """The same as attributes of a call."""
        return {key: value for key, value in self._asdict().items() if key != "name"}


def parse_selection(text: str) -> Selection | None:
    """Return what `--attn` selects; None: dense. Raises ValueError."""
    if text == "dense":
        return None
    if match := _SELECTION.fullmatch(text):
        *counts, kind, real = match.groups("0")
        tokens, first, last = map(int, counts)
        if LEAST_BUDGET <= tokens <= _MOST:
            return Selection(text, budget=-(-tokens // PAGE_CELLS))
        if kind == "threshold" and 0 < float(real) <= 1e6:
            return Selection(text, margin=float(real))
        if kind == "dynamic" and 0 < float(real) < 1:
            return Selection(text, mass=float(real))
        if first <= _MOST and 0 < last <= _MOST:
            pages = max(LAST_PAGES, -(-last // PAGE_CELLS) + 1)
            return Selection(text, first=max(1, -(-first // PAGE_CELLS)), last=pages)
    raise ValueError(text)
