"""Gemma 1, 2 and 3, text only."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.models.config import LAYER_TYPES, Decoder, layer_windows, read_config
from clocher_runtime.models.config_fields import WHERE, Factor, Heads, Layers, Size, Theta
from clocher_runtime.models.family import Config, Family
from clocher_runtime.models.spec import ModelSpec


class _Gemma(Decoder, kw_only=True):
    """`norm_offset`: added to stored norms; GGUF files hold the sum."""

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

    def gemma(self, family: str, windows: tuple[int, ...] = (), **more: Any) -> ModelSpec:
        if self.use_bidirectional_attention:
            raise UnsupportedModel(
                f"{WHERE}: use_bidirectional_attention is true; Clocher's attention is causal, and "
                "a model of embeddings makes no text"
            )
        return self.spec(
            family,
            windows,
            norm_offset=self.norm_offset,
            embedding_scale=float(self.hidden_size) ** 0.5,
            **more,
        )


def gemma(config: Config) -> ModelSpec:
    """Gemma (arXiv 2403.08295, section 2): GELU, norms around 1, scaled embeddings."""
    # The first configs said "gelu" though the model was trained with the approximation.
    if config.get("hidden_activation") is None:
        config = {**config, "hidden_act": "gelu_pytorch_tanh"}
    return read_config(config, _Gemma).gemma("gemma")


class _Gemma2(_Gemma, kw_only=True):
    PATTERN: ClassVar[int] = 2

    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Heads = 8
    num_key_value_heads: Heads | None = 4
    query_pre_attn_scalar: Factor = 256.0
    sliding_window: Size | None = 4096
    layer_types: list[Any] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1, le=1024)] | None = None
    final_logit_softcapping: Factor | None = None
    attn_logit_softcapping: Factor | None = None

    def windows(self) -> tuple[int, ...]:
        layers, every = self.num_hidden_layers, self.sliding_window_pattern or self.PATTERN
        pattern = tuple(LAYER_TYPES[(i + 1) % every == 0] for i in range(layers))
        window = self.sliding_window
        return layer_windows(self.layer_types, layers, window, pattern)

    def gemma2(self, family: str, **more: Any) -> ModelSpec:
        return self.gemma(
            family,
            self.windows(),
            post_norms=True,
            attention_scale=self.query_pre_attn_scalar**-0.5,
            attention_softcap=self.attn_logit_softcapping or 0.0,
            logit_softcap=self.final_logit_softcapping or 0.0,
            **more,
        )


def gemma2(config: Config) -> ModelSpec:
    """Gemma 2 (arXiv 2408.00118, section 2): post-norms, capped logits, alternating windows."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return read_config({**caps, **config}, _Gemma2).gemma2("gemma2")


class _Gemma3(_Gemma2, kw_only=True):
    PATTERN: ClassVar[int] = 6

    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    rope_theta: Theta = 1000000.0
    rope_local_base_freq: Theta = 10000.0


def gemma3(config: Config) -> ModelSpec:
    """Gemma 3 (arXiv 2503.19786, section 2): QK norms, own RoPE for sliding layers."""
    read = read_config(config, _Gemma3)
    local = {**config, "rope_theta": read.rope_local_base_freq, "rope_scaling": None}
    window_rope = read_config(local, _Gemma3).rope(LAYER_TYPES[0])
    return read.gemma2("gemma3", qk_norm="heads", window_rope=window_rope)


GEMMA = Family(gemma)
GEMMA2 = Family(gemma2)
GEMMA3 = Family(gemma3)
