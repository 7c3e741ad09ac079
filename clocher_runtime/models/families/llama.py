"""Llama 2 and 3, and what is built like them: SmolLM3 leaves the rotation out of some layers."""

from typing import Annotated, Any

from msgspec import Meta

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.schema import shown
from clocher_runtime.models.config import Decoder, bitnet_settings, layer_windows, read_config
from clocher_runtime.models.config_fields import WHERE, Heads, Layers, Size, Theta
from clocher_runtime.models.family import Config, Family
from clocher_runtime.models.spec import ModelSpec


class _Llama(Decoder, kw_only=True):
    mlp_bias: bool = False


def llama(config: Config) -> ModelSpec:
    """Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU."""
    read = read_config(config, _Llama)
    bias = read.attention_bias
    return read.spec(
        "llama", qkv_bias=bias, o_bias=bias, mlp_bias=read.mlp_bias, **bitnet_settings(read)
    )


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
    """SmolLM3: Llama with every fourth layer not rotated.

    `no_rope_layers` has a 1 for each layer that is rotated.
    """
    read = read_config(config, _SmolLm3)
    layers = read.num_hidden_layers
    plain = unrotated(read.no_rope_layers, read.no_rope_layer_interval, layers)
    window = read.sliding_window if read.use_sliding_window else None
    names = ("sliding_attention", "full_attention")
    pattern = tuple(names[not (window and i in plain)] for i in range(layers))
    bias = read.attention_bias
    return read.spec(
        "smollm3",
        layer_windows(read.layer_types, layers, window, pattern),
        unrotated=plain,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.mlp_bias,
    )


def unrotated(listed: list[bool | int] | None, interval: int, layers: int) -> tuple[int, ...]:
    """Return the layers without a rotation: those with a 0 in a list, or every `interval`-th.

    Raises:
        FormatError: the list is too short.
    """
    rotated = listed or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(rotated) < layers:
        raise FormatError(f"{WHERE}: no_rope_layers is {shown(listed)}; expected {layers} numbers")
    return tuple(i for i in range(layers) if not rotated[i])


LLAMA = Family(llama)
SMOLLM3 = Family(smollm3)
