"""A model as data. A family turns config.json into a ModelSpec; `build` turns that into a Plan."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base frequency and how it is stretched to long contexts.

    Attributes:
        kind: "default", "linear" (positions / factor), "llama3" or "yarn".
        original_positions: context of the training before stretching; llama3 and yarn.
        attention_factor: multiplies cosines and sines; yarn, 1 elsewhere.
    """

    theta: float
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts of gpt-oss: clamped SwiGLU, gate and up rows interleaved."""

    experts: int
    active: int
    limit: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: name in `families.FAMILIES`.
        windows: visible keys of each layer, the query included; 0 for all.
        act: activation of the dense gated MLP.
        moe: mixture of experts instead of the dense MLP.
        qk_norm: RMSNorm of each query and key head before RoPE (Qwen3).
        sinks: one extra logit per head in the softmax (gpt-oss).
        sub_norms: RMSNorm before the attention and MLP output projections (BitNet).
        input_norm_eps: eps of an RMSNorm inside each ternary linear (`use_rms_norm`), 0 for none.
        ternarize: float weights of the block linears are ternarised at load (BitNet "online").
        tied: the head is the embedding table.
        eos_ids: tokens that end a sequence.
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
    act: Literal["silu", "relu2"] = "silu"
    moe: MoeSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    sub_norms: bool = False
    input_norm_eps: float = 0.0
    ternarize: bool = False
    tied: bool = False
    eos_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)
