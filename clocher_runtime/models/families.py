"""Model families: each turns a config.json into a ModelSpec, with the published defaults.

Adding one is adding a `Decoder`, a function and a line of `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.schema import shown, unknown
from clocher_runtime.models.config import (
    LAYER_TYPES,
    WHERE,
    Decoder,
    Epsilon,
    Heads,
    Layers,
    Size,
    Theta,
    bitnet_settings,
    layer_windows,
    read_config,
)
from clocher_runtime.models.spec import ModelSpec, MoeSpec, RopeSpec

_Config = Mapping[str, Any]


class _Llama(Decoder, kw_only=True):
    mlp_bias: bool = False


def llama(config: _Config) -> ModelSpec:
    """Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""
    read = read_config(config, _Llama)
    bias = read.attention_bias
    return read.spec(
        "llama", qkv_bias=bias, o_bias=bias, mlp_bias=read.mlp_bias, **bitnet_settings(read)
    )


class _Mistral(Decoder, kw_only=True):
    intermediate_size: Size = 14336
    num_key_value_heads: Heads | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: Size | None = 4096


def mistral(config: _Config) -> ModelSpec:
    """Mistral: Llama with a sliding window on every layer; a `sliding_window` of null is none."""
    read = read_config(config, _Mistral)
    return read.spec("mistral", (read.sliding_window or 0,) * read.num_hidden_layers)


class _Qwen2(Decoder, kw_only=True):
    vocab_size: Size = 151936
    intermediate_size: Size = 22016
    num_key_value_heads: Heads | None = 32
    max_position_embeddings: Size = 32768
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: Annotated[int, Meta(ge=0, le=1 << 24)] = 28
    layer_types: list[Any] | None = None

    def windows(self) -> tuple[int, ...]:
        """Return the window of each layer; those below `max_window_layers` never slide."""
        layers = self.num_hidden_layers
        window = self.sliding_window if self.use_sliding_window else None
        full = self.max_window_layers if window else layers
        pattern = tuple(LAYER_TYPES[i < full] for i in range(layers))
        return layer_windows(self.layer_types, layers, window, pattern)


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Heads | None = 128


def qwen2(config: _Config) -> ModelSpec:
    """Qwen2: biases on q, k, v."""
    read = read_config(config, _Qwen2)
    return read.spec("qwen2", read.windows(), qkv_bias=True)


def qwen3(config: _Config) -> ModelSpec:
    """Qwen3: norms on query and key heads."""
    read = read_config(config, _Qwen3)
    bias = read.attention_bias
    return read.spec("qwen3", read.windows(), qk_norm=True, qkv_bias=bias, o_bias=bias)


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


def bitnet(config: _Config) -> ModelSpec:
    """BitNet b1.58: ternary linears with int8 activations, sub-norms, squared ReLU.

    Source: Ma et al. 2025, BitNet b1.58 2B4T (arXiv 2504.12285).
    """
    read = read_config(config, _BitNet)
    bias = read.attention_bias
    return read.spec("bitnet", qkv_bias=bias, o_bias=bias, sub_norms=True, **bitnet_settings(read))


class _GptOss(Decoder, kw_only=True):
    ROPE: ClassVar[RopeSpec | None] = RopeSpec(
        150000.0, "yarn", 32.0, 4096, truncate=False, attention_factor=0.1 * log(32.0) + 1.0
    )

    vocab_size: Size = 201088
    hidden_size: Size = 2880
    intermediate_size: Size = 2880
    num_hidden_layers: Layers = 36
    num_attention_heads: Heads = 64
    num_key_value_heads: Heads | None = 8
    head_dim: Heads | None = 64
    max_position_embeddings: Size = 131072
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 150000.0
    attention_bias: bool = True
    sliding_window: Size | None = 128
    layer_types: list[Any] | None = None
    num_local_experts: Annotated[int, Meta(ge=1, le=65536)] | None = None
    num_experts: Size = 128
    num_experts_per_tok: Size | None = None
    experts_per_token: Size = 4
    swiglu_limit: Annotated[float, Meta(ge=1e-3, le=1e6)] = 7.0
    swiglu_alpha: Annotated[float, Meta(ge=1e-3, le=1e3)] = 1.702


def gpt_oss(config: _Config) -> ModelSpec:
    """gpt-oss: MXFP4 experts, attention sinks, alternating window, YaRN, clamped SwiGLU.

    Defaults are those of the published 120b. The count of experts is spelled `num_local_experts`
    (Hugging Face) or `num_experts` (OpenAI), that of active ones `num_experts_per_tok` or
    `experts_per_token`.
    """
    read = read_config(config, _GptOss)
    layers, bias = read.num_hidden_layers, read.attention_bias
    pattern = tuple(LAYER_TYPES[i % 2] for i in range(layers))
    experts = read.num_local_experts or read.num_experts
    active = read.num_experts_per_tok or read.experts_per_token
    return read.spec(
        "gpt_oss",
        layer_windows(read.layer_types, layers, read.sliding_window, pattern),
        moe=MoeSpec(experts, min(active, experts), read.swiglu_limit, read.swiglu_alpha),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
    )


FAMILIES: Mapping[str, Callable[[_Config], ModelSpec]] = MappingProxyType(
    {
        "GptOssForCausalLM": gpt_oss,
        "BitNetForCausalLM": bitnet,
        "BitnetForCausalLM": bitnet,
        "LlamaForCausalLM": llama,
        "MistralForCausalLM": mistral,
        "Qwen2ForCausalLM": qwen2,
        "Qwen3ForCausalLM": qwen3,
    }
)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a config.json into a ModelSpec.

    Raises:
        UnsupportedModel: the architecture or one of its settings is not known.
        FormatError: a field is missing, of the wrong type or out of range.
    """
    names = config.get("architectures")
    if names is None:
        names = [_by_model_type(str(config.get("model_type")))]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise FormatError(f"{WHERE}: architectures is {shown(names)}; expected a list of one name")
    if names[0] not in FAMILIES:
        raise unknown("architecture", names[0], FAMILIES, WHERE)
    spec = FAMILIES[names[0]](config)
    if spec.num_heads % spec.num_kv_heads:
        raise FormatError(
            f"{WHERE}: {spec.num_heads} attention heads do not divide into "
            f"{spec.num_kv_heads} key/value heads"
        )
    if spec.head_dim % 2:
        raise FormatError(f"{WHERE}: head_dim is {spec.head_dim}; RoPE needs an even one")
    return spec


def _by_model_type(name: str) -> str:
    """Return the architecture that a model type names: "GptOss.." for "gpt_oss"; or the name."""
    wanted = name.replace("_", "") + "forcausallm"
    return next((known for known in FAMILIES if known.lower() == wanted), name)
