"""Llama and its relatives: SmolLM3, Phi, BitNet, OLMo and Granite."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import shown
from clocher_runtime.models.config import (
    LAYER_TYPES,
    Decoder,
    bitnet_settings,
    layer_windows,
    read_config,
)
from clocher_runtime.models.config_fields import (
    WHERE,
    Epsilon,
    Factor,
    Heads,
    Layers,
    Size,
    Theta,
)
from clocher_runtime.models.family import FUSED_QKV, Config, Family, From, fused_mlp
from clocher_runtime.models.spec import ModelSpec, RopeSpec


class _Llama(Decoder, kw_only=True):
    mlp_bias: bool = False


def llama(config: Config) -> ModelSpec:
    """Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""
    read = read_config(config, _Llama)
    return read.spec("llama", mlp_bias=read.mlp_bias, **bitnet_settings(read))


class _SmolLm3(_Llama, kw_only=True):
    vocab_size: Size = 128256
    hidden_size: Size = 2048
    num_hidden_layers: Layers = 36
    num_attention_heads: Heads = 16
    num_key_value_heads: Heads | None = 4
    max_position_embeddings: Size = 32768
    rope_theta: Theta = 2000000.0
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    no_rope_layers: list[bool | int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1, le=1024)] = 4
    layer_types: list[Any] | None = None


def smollm3(config: Config) -> ModelSpec:
    """SmolLM3: Llama with every fourth layer not rotated."""
    read = read_config(config, _SmolLm3)
    layers = read.num_hidden_layers
    plain = unrotated(read.no_rope_layers, read.no_rope_layer_interval, layers)
    window = read.sliding_window if read.use_sliding_window else None
    names = ("sliding_attention", "full_attention")
    pattern = tuple(names[not (window and i in plain)] for i in range(layers))
    return read.spec(
        "smollm3",
        layer_windows(read.layer_types, layers, window, pattern),
        unrotated=plain,
        mlp_bias=read.mlp_bias,
    )


def unrotated(listed: list[bool | int] | None, interval: int, layers: int) -> tuple[int, ...]:
    """Return layers with a 0 in a list, or every `interval`-th. Raises FormatError."""
    rotated = listed or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotated) < layers:
        raise FormatError(f"{WHERE}: no_rope_layers is {shown(listed)}; expected {layers} numbers")
    return tuple(i for i in range(layers) if not rotated[i])


LLAMA = Family(llama)
SMOLLM3 = Family(smollm3)


class _Phi3(Decoder, kw_only=True):
    vocab_size: Size = 32064
    hidden_size: Size = 3072
    intermediate_size: Size = 8192
    max_position_embeddings: Size = 4096
    original_max_position_embeddings: Size | None = 4096
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None


def phi3(config: Config) -> ModelSpec:
    """Phi-3, Phi-4 (arXiv 2404.14219, section 2): fused projections, LongRoPE, partial rotation."""
    read = read_config(config, _Phi3)
    rope = read.rope_scaling if read.rope_parameters is None else read.rope_parameters
    # The first long-context configs used this name.
    if rope is not None and "short_factor" in rope and rope.get("type") == "yarn":
        read = read_config({**config, "rope_scaling": {**rope, "type": "longrope"}}, _Phi3)
    window = read.sliding_window or 0
    return read.spec("phi3", (window,) * read.num_hidden_layers)


PHI3 = Family(phi3, {**FUSED_QKV, **fused_mlp("mlp.gate_up_proj")})


class _BitNet(Decoder, kw_only=True):
    ACTIVATION: ClassVar[str] = "relu2"

    vocab_size: Size = 128256
    hidden_size: Size = 2560
    intermediate_size: Size = 6912
    num_hidden_layers: Layers = 30
    num_attention_heads: Heads = 20
    num_key_value_heads: Heads | None = 5
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 500000.0


def bitnet(config: Config) -> ModelSpec:
    """BitNet b1.58 (arXiv 2504.12285): ternary linears, int8 activations, sub-norms, ReLU^2."""
    read = read_config(config, _BitNet)
    return read.spec("bitnet", sub_norms=True, **bitnet_settings(read))


BITNET = Family(bitnet)


class _Olmo2(Decoder, kw_only=True):
    vocab_size: Size = 50304
    rms_norm_eps: Epsilon = 1e-5

    def olmo(self, family: str, windows: tuple[int, ...] = (), **more: Any) -> ModelSpec:
        return self.spec(
            family,
            windows,
            pre_norms=False,
            post_norms=True,
            qk_norm="rows",
            **more,
        )


def olmo2(config: Config) -> ModelSpec:
    """OLMo 2 (arXiv 2501.00656, section 2.1): post-norms only, norms of whole queries and keys."""
    return read_config(config, _Olmo2).olmo("olmo2")


class _Olmo3(_Olmo2, kw_only=True):
    rope_theta: Theta = 500000.0
    sliding_window: Size | None = 4096
    layer_types: list[Any] | None = None


def olmo3(config: Config) -> ModelSpec:
    """OLMo 3: OLMo 2 where three of four layers slide, with the plain rotation."""
    read = read_config(config, _Olmo3)
    layers = read.num_hidden_layers
    pattern = tuple(LAYER_TYPES[(i + 1) % 4 == 0] for i in range(layers))
    windows = layer_windows(read.layer_types, layers, read.sliding_window, pattern)
    rope = read.rope(LAYER_TYPES[0])
    if read.rope_parameters is None:  # what stretches others is not for them
        rope = RopeSpec(read.rope_theta)
    return read.olmo("olmo3", windows, window_rope=rope)


OLMO2 = Family(olmo2)
OLMO3 = Family(olmo3)


class _Granite(Decoder, kw_only=True):
    mlp_bias: bool = False
    embedding_multiplier: Factor = 1.0
    logits_scaling: Factor = 1.0
    residual_multiplier: Factor = 1.0
    attention_multiplier: Factor = 1.0

    def granite(self, family: str, **more: Any) -> ModelSpec:
        return self.spec(
            family,
            embedding_scale=self.embedding_multiplier,
            logit_scale=1 / self.logits_scaling,
            residual_scale=self.residual_multiplier,
            attention_scale=self.attention_multiplier,
            **more,
        )


def granite(config: Config) -> ModelSpec:
    """Granite 3: Llama with factors for embeddings, residuals, attention and logits."""
    read = read_config(config, _Granite)
    return read.granite("granite", mlp_bias=read.mlp_bias)


class _Hybrid(_Granite, kw_only=True):
    shared_intermediate_size: Size = 1024
    num_local_experts: Annotated[int, Meta(ge=0, le=65536)] = 8
    layer_types: list[Any] | None = None
    position_embedding_type: str | None = None


def granite_hybrid(config: Config) -> ModelSpec:
    """Granite 4 without Mamba layers and experts: Granite 3 with other tensor names."""
    read = read_config(config, _Hybrid)
    kinds = {"attention", "full_attention"}
    if read.layer_types is None or not kinds.issuperset(map(str, read.layer_types)):
        raise UnsupportedModel(
            f"{WHERE}: layers of Mamba; Clocher runs the Granite 4 models whose layers are all "
            "attention (micro, 350m, 1b)"
        )
    if read.num_local_experts:
        raise UnsupportedModel(
            f"{WHERE}: num_local_experts is {read.num_local_experts}; Clocher runs the Granite 4 "
            "models without experts (micro, 350m, 1b)"
        )
    layers = range(read.num_hidden_layers)
    return read.granite(
        "granite_hybrid",
        intermediate_size=read.shared_intermediate_size,
        unrotated=() if read.position_embedding_type == "rope" else tuple(layers),
    )


GRANITE = Family(granite)
GRANITE_HYBRID = Family(
    granite_hybrid,
    {**fused_mlp("shared_mlp.input_linear"), "mlp.down_proj": (From("shared_mlp.output_linear"),)},
)
