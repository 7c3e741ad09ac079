"""Phi-3 and Phi-4."""

from clocher_runtime.models.config import Decoder, read_config
from clocher_runtime.models.config_fields import Epsilon, Size
from clocher_runtime.models.family import FUSED_QKV, Config, Family, fused_mlp
from clocher_runtime.models.spec import ModelSpec


class _Phi3(Decoder, kw_only=True):
    vocab_size: Size = 32064
    hidden_size: Size = 3072
    intermediate_size: Size = 8192
    max_position_embeddings: Size = 4096
    original_max_position_embeddings: Size | None = 4096
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: Size | None = None


def phi3(config: Config) -> ModelSpec:
    """Phi-3, Phi-4 and their minis: fused projections, LongRoPE, a part of each head rotated.

    Source: Phi-3 (arXiv 2404.14219), section 2.
    """
    read = read_config(config, _Phi3)
    rope = read.rope_scaling if read.rope_parameters is None else read.rope_parameters
    # The first files of the long models called their scaling so.
    if rope is not None and "short_factor" in rope and rope.get("type") == "yarn":
        read = read_config({**config, "rope_scaling": {**rope, "type": "longrope"}}, _Phi3)
    window = read.sliding_window or 0
    bias = read.attention_bias
    return read.spec("phi3", (window,) * read.num_hidden_layers, qkv_bias=bias, o_bias=bias)


PHI3 = Family(phi3, {**FUSED_QKV, **fused_mlp("mlp.gate_up_proj")})
