"""Gemma 1, 2 and 3, text only."""

from typing import Any, ClassVar

from msgspec.structs import replace

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.models.config import (
    ACTIVATIONS,
    LAYER_TYPES,
    WHERE,
    Decoder,
    Factor,
    Heads,
    Interval,
    Layers,
    Size,
    Theta,
)
from clocher_runtime.models.families import Family


class _Gemma(Decoder, kw_only=True):
    """Gemma (arXiv 2403.08295, section 2): GELU, norms around 1, scaled embeddings.

    `norm_offset`: added to stored norms; GGUF files hold the sum.
    """

    ACTIVATION: ClassVar[str] = "gelu_pytorch_tanh"

    vocab_size: Size = 256000
    hidden_size: Size = 3072
    intermediate_size: Size = 24576
    num_hidden_layers: Layers = 28
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads | None = 16
    head_dim: Heads | None = 256
    max_position_embeddings: Size = 8192
    tie_word_embeddings: bool = True
    norm_offset: float = 1.0
    use_bidirectional_attention: bool = False

    def more(self) -> dict[str, Any]:
        if self.use_bidirectional_attention:
            raise UnsupportedModel(
                f"{WHERE}: use_bidirectional_attention is true; Clocher's attention is causal, and "
                "a model of embeddings makes no text"
            )
        return {
            # The first hidden_act said "gelu" though the model was trained with the approximation.
            "act": ACTIVATIONS[self.hidden_activation or self.ACTIVATION],
            "norm_offset": self.norm_offset,
            "embedding_scale": float(self.hidden_size) ** 0.5,
        }


class _Gemma2(_Gemma, kw_only=True):
    """Gemma 2 (arXiv 2408.00118, section 2): post-norms, capped logits, alternating windows."""

    PATTERN: ClassVar[int] = 2

    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads | None = 4
    query_pre_attn_scalar: Factor = 256.0
    sliding_window: Size | None = 4096
    sliding_window_pattern: Interval | None = None
    attn_logit_softcapping: Factor | None = 50.0
    final_logit_softcapping: Factor | None = 30.0

    def more(self) -> dict[str, Any]:
        every = self.sliding_window_pattern or self.PATTERN
        return {
            **super().more(),
            "windows": self.windows(self.sliding_window, lambda layer: (layer + 1) % every),
            "post_norms": True,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "attention_softcap": self.attn_logit_softcapping or 0.0,
            "logit_softcap": self.final_logit_softcapping or 0.0,
        }


class _Gemma3(_Gemma2, kw_only=True):
    """Gemma 3 (arXiv 2503.19786, section 2): QK norms, own RoPE for sliding layers."""

    PATTERN: ClassVar[int] = 6

    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    rope_theta: Theta = 1000000.0
    rope_local_base_freq: Theta = 10000.0
    attn_logit_softcapping: Factor | None = None
    final_logit_softcapping: Factor | None = None

    def more(self) -> dict[str, Any]:
        local = replace(self, rope_theta=self.rope_local_base_freq, rope_scaling=None)
        window_rope = local.rope(LAYER_TYPES[0])
        return {**super().more(), "qk_norm": "heads", "window_rope": window_rope}


FAMILIES = {
    "GemmaForCausalLM": Family("gemma", _Gemma),
    "Gemma2ForCausalLM": Family("gemma2", _Gemma2),
    "Gemma3ForCausalLM": Family("gemma3", _Gemma3),
}
