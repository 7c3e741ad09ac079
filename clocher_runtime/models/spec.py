"""A model as data: a family turns config.json into a ModelSpec, `build` that into a Plan."""

from dataclasses import dataclass
from typing import Literal

Act = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding and its long-context variant.

    Attributes:
        kind: "default", "linear", "dynamic" (base grows with the context), "llama3", "yarn",
            "longrope" (a factor per pair).
        original_positions: training context before stretching; unused by default and linear.
        attention_factor: multiplies cosines and sines (yarn, longrope).
        rotated: leading values of a head that are rotated; 0 for all.
        short_factors, long_factors: longrope's, up to `original_positions` and beyond.
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
    """Queries grow with their position p, by 1 + strength ln(1 + floor((p + after) / every)).

    Source: Nakanishi 2025 (arXiv 2501.19399), as Llama 4 and Ministral 3 have it.
    """

    strength: float
    every: int
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Mixture of experts: gated MLPs, of which a router chooses `active` for every token.

    Attributes:
        inner, shared: intermediate sizes of an expert, and of the shared expert (0: none).
        act: "silu", or "clamped" (gpt-oss) with `limit` and `alpha`.
        score, normalise, factor, groups, group_top, group_best: of the op `route`.
        router_bias, expert_bias: whether these linears have biases.
        choice_bias: a bias for the choice alone (DeepSeek-V3).
        scale_inputs: weights multiply expert inputs, not outputs (Llama 4).
        shared_gate: the shared expert is gated by a sigmoid (Qwen2-MoE).
        dense_layers: layers that have the dense MLP instead.
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

    Keys and values of all heads are linear in one vector of `rank` values per token, queries in one
    of `query_rank` (0: in the token). Heads of queries and keys are `rotated` values, the key's
    shared by all heads, then `plain` ones; a head of values has `value`. `paired`: rotated pairs
    are neighbours in files.
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

    Attributes:
        block: positions of a block; blocks begin at its multiples.
        context: how keys of finished blocks were computed: "causal", or "block", where the tokens
            of a block see each other.
        shift: logits of a position predict the next one; the first token of a block comes from the
            last before it.
        part: positions denoised together, one part of a block after the other.
    """

    block: int
    mask: int
    context: Literal["causal", "block"]
    shift: bool = False
    part: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: name of the row of `families.FAMILIES`.
        windows: visible keys of each layer, the query included; 0 for all.
        chunks: attention chunk of each layer in positions, 0 for none; () for no layer.
        rope, window_rope: of all layers; of layers with a window, if different (Gemma 3).
        unrotated: layers without a rotary embedding.
        query_growth: of `unrotated` layers alone if there are any.
        act: activation of the dense gated MLP.
        mla: latent attention; `head_dim` is then that of queries and keys.
        pre_norms, post_norms: RMSNorm of inputs, outputs of attention and MLP (post: Gemma 2, OLMo
            2).
        norm_offset: added to the weights of norms (Gemma: 1).
        qk_norm: RMSNorm of queries and keys before RoPE: of each head, or of "rows" as a whole; or
            without weights, of each head "after" it.
        sinks: one extra logit per head in the softmax (gpt-oss).
        sub_norms: RMSNorm before the attention and MLP output projections (BitNet).
        input_norm_eps: eps of an RMSNorm inside each ternary linear (`use_rms_norm`), 0 for none.
        ternarize: float linears of the blocks are ternarised at load (BitNet "online").
        attention_scale: factor of query-key dot products; 0 for head_dim^-0.5.
        attention_softcap, logit_softcap: limits of tanh capping; 0 for none.
        residual_scale: factor of attention and MLP outputs.
        tied: the head is the embedding table.
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
