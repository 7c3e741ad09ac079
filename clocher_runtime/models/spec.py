"""A model as data. A family turns config.json into a ModelSpec; `build` turns that into a Plan."""

from dataclasses import dataclass
from typing import Literal

Act = Literal["silu", "gelu", "gelu_tanh", "relu2"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and how it is stretched to long contexts.

    Attributes:
        kind: "default", "linear" (positions / factor), "dynamic" (a base that grows with the
            context), "llama3", "yarn" or "longrope" (a factor for each pair).
        original_positions: context of the training before stretching; all but default and linear.
        attention_factor: multiplies cosines and sines; yarn and longrope, 1 elsewhere.
        rotated: values of a head that are rotated, the first ones; 0 for all.
        short_factors: longrope's factor of each pair, in a context of at most `original_positions`.
        long_factors: the same in a longer one.
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
    """Mixture of experts: a gated MLP each, of which a router chooses some for every token.

    Attributes:
        experts, active: their number, and of those that a token has.
        inner: size of their hidden layers.
        act: "silu", or "clamped" (gpt-oss) with `limit` and `alpha`.
        score, normalise, factor, groups, group_top, group_best: of the op `route`.
        router_bias, expert_bias: the router is, the experts' are linears with biases.
        choice_bias: a bias that is added for the choice alone (DeepSeek-V3).
        scale_inputs: a weight multiplies what goes into an expert, not what comes out (Llama 4).
        shared: size of the hidden layer of the MLP that every token has besides; 0 for none.
        shared_gate: it is multiplied by the sigmoid of a linear of the token (Qwen2-MoE).
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
    """Latent attention: keys and values of all heads are linear in one short vector of a token.

    A head of queries and keys is `rotated` values, of which all heads share the key's, and then
    `plain` ones; a head of values has `value`.

    Attributes:
        query_rank: size of the vector that queries are made of; 0: of the token itself.
        rank: size of the vector that keys and values are made of; `norm_eps` of both.
        paired: in files, the values that are rotated together are neighbours.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
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
    """How a model that denoises blocks of masks does so.

    Attributes:
        block: positions of a block; blocks begin at its multiples.
        mask: id of the mask.
        context: what the keys of finished blocks were computed with: "causal", as of any decoder,
            or "block", where the tokens of a block see each other.
        shift: logits of a position are of the next one, so that the first token of a block comes
            from the last before it.
        part: a block is denoised in parts of so many positions, one after the other.
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
        chunks: positions of the chunks that a layer's tokens cannot look out of; 0 for one; () for
            no layer.
        rope: of all layers but those that follow.
        window_rope: of layers with a window, if they have their own (Gemma 3).
        unrotated: layers without a rotary embedding.
        query_growth: of queries with their position; of `unrotated` layers alone if there are any.
        act: activation of the dense gated MLP.
        moe: mixture of experts instead of the dense MLP.
        mla: how queries, keys and values are made, if not by one linear each; `head_dim` is then
            that of queries and keys.
        pre_norms: RMSNorm of what goes into attention and MLP.
        post_norms: RMSNorm of what they add (Gemma 2, OLMo 2).
        norm_offset: what is added to the weights of norms (Gemma: 1).
        qk_norm: RMSNorm of queries and keys: of each head, or of "rows" as a whole, before RoPE; or
            without weights of each head "after" it.
        sinks: one extra logit per head in the softmax (gpt-oss).
        sub_norms: RMSNorm before the attention and MLP output projections (BitNet).
        input_norm_eps: eps of an RMSNorm inside each ternary linear (`use_rms_norm`), 0 for none.
        ternarize: float weights of the block linears are ternarised at load (BitNet "online").
        attention_scale: factor of the dot products of queries and keys; 0 for head_dim^-0.5.
        attention_softcap, logit_softcap: limits of tanh capping; 0 for none.
        embedding_scale, logit_scale: factors of embeddings and of logits.
        residual_scale: factor of what attention and MLP add to the residual stream.
        tied: the head is the embedding table.
        eos_ids: tokens that end a sequence.
        diffusion: how it denoises blocks, if it was trained to.
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
