"""BitNet b1.58."""

from typing import ClassVar

from clocher_runtime.models.config import Decoder, bitnet_settings, read_config
from clocher_runtime.models.config_fields import Epsilon, Heads, Layers, Size, Theta
from clocher_runtime.models.family import Config, Family
from clocher_runtime.models.spec import ModelSpec


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
    """BitNet b1.58: ternary linears with int8 activations, sub-norms, squared ReLU.

    Source: Ma et al. 2025, BitNet b1.58 2B4T (arXiv 2504.12285).
    """
    read = read_config(config, _BitNet)
    bias = read.attention_bias
    return read.spec("bitnet", qkv_bias=bias, o_bias=bias, sub_norms=True, **bitnet_settings(read))


BITNET = Family(bitnet)
