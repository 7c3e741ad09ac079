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
    Interval,
    Size,
    Theta,
    Usual,
)
from clocher_runtime.models.families import Family


class _Gemma(Decoder, kw_only=True):
    """Gemma (arXiv 2403.08295, section 2): GELU, norms around 1, scaled embeddings.

    `norm_offset`: added to stored norms; GGUF files hold the sum.
    """

    USUAL = Usual(256000, 3072, 24576, 28, 16, 16, 256, 8192)
    ACTIVATION: ClassVar[str] = "gelu_pytorch_tanh"

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

    USUAL = Usual(256000, 2304, 9216, 26, 8, 4, 256, 8192)
    PATTERN: ClassVar[int] = 2

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

    USUAL = Usual(262208, 2304, 9216, 26, 8, 4, 256, 131072, 1e-6, 1000000.0)
    PATTERN: ClassVar[int] = 6

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
