"""Configurations of published models as data, and tiny models of the same kinds for tests.

A preset says everything about a model but its weights: speed is measured at real shapes without a
download. `llama-1b` is the one without a published counterpart.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from clocher_kernels.errors import UsageError

_GPT_OSS_QUANTISATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_BITNET_QUANTISATION = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
}


@dataclass(frozen=True, slots=True)
class Preset:
    """A model without weights.

    Attributes:
        name: on command lines.
        summary: one line for people.
        settings: contents of its config.json, for all layers.
    """

    name: str
    summary: str
    settings: Mapping[str, Any]

    def config(self, layers: int | None = None) -> dict[str, Any]:
        """Return a config.json.

        Args:
            layers: keep this many layers, the first ones; None keeps all.

        Raises:
            UsageError: the model has fewer layers.
        """
        config = copy.deepcopy(dict(self.settings))
        most = config["num_hidden_layers"]
        if layers is not None and not 1 <= layers <= most:
            raise UsageError(f"{self.name} has {most} layers, got {layers}; expected 1 to {most}")
        config["num_hidden_layers"] = layers or most
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
        return config


def _gpt_oss(**sizes: Any) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "attention_bias": True,
        "hidden_act": "silu",
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "max_position_embeddings": 131072,
        "quantization_config": _GPT_OSS_QUANTISATION,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        **sizes,
    }


def _bitnet(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "dtype": "bfloat16",
        "attention_bias": False,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "quantization_config": _BITNET_QUANTISATION,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        **sizes,
    }


def _llama(**sizes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        **sizes,
    }


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(
                "gpt-oss-20b",
                "openai/gpt-oss-20b: 24 layers of 32 experts, 4 of them active",
                _gpt_oss(
                    hidden_size=2880,
                    intermediate_size=2880,
                    num_hidden_layers=24,
                    num_attention_heads=64,
                    num_key_value_heads=8,
                    head_dim=64,
                    num_local_experts=32,
                    num_experts_per_tok=4,
                    vocab_size=201088,
                    eos_token_id=200002,
                ),
            ),
            Preset(
                "bitnet-2b",
                "microsoft/bitnet-b1.58-2B-4T: 30 layers, ternary",
                _bitnet(
                    hidden_size=2560,
                    intermediate_size=6912,
                    num_hidden_layers=30,
                    num_attention_heads=20,
                    num_key_value_heads=5,
                    vocab_size=128256,
                    eos_token_id=128001,
                ),
            ),
            Preset(
                "llama-1b",
                "a Llama of 1.1 billion weights: 16 layers, untied head",
                _llama(
                    hidden_size=2048,
                    intermediate_size=8192,
                    num_hidden_layers=16,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    head_dim=64,
                    vocab_size=32000,
                    eos_token_id=2,
                ),
            ),
            Preset(
                "llama-8b",
                "meta-llama/Llama-3.1-8B: 32 layers",
                _llama(
                    hidden_size=4096,
                    intermediate_size=14336,
                    num_hidden_layers=32,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    head_dim=128,
                    vocab_size=128256,
                    eos_token_id=128001,
                    max_position_embeddings=131072,
                    rope_parameters={
                        "rope_type": "llama3",
                        "rope_theta": 500000.0,
                        "factor": 8.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192,
                    },
                ),
            ),
            Preset(
                "tiny-gpt-oss",
                "gpt-oss in small: 2 layers of 4 experts, 2 of them active",
                _gpt_oss(
                    hidden_size=64,
                    intermediate_size=96,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    head_dim=32,
                    num_local_experts=4,
                    num_experts_per_tok=2,
                    vocab_size=320,
                    eos_token_id=257,
                ),
            ),
            Preset(
                "tiny-bitnet",
                "BitNet in small: 2 layers",
                _bitnet(
                    hidden_size=256,
                    intermediate_size=512,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    vocab_size=320,
                    eos_token_id=257,
                ),
            ),
            Preset(
                "tiny-llama",
                "Llama in small: 2 layers",
                _llama(
                    hidden_size=256,
                    intermediate_size=512,
                    num_hidden_layers=2,
                    num_attention_heads=8,
                    num_key_value_heads=4,
                    head_dim=32,
                    vocab_size=320,
                    eos_token_id=257,
                ),
            ),
        )
    }
)
"""Presets by name."""


def find_preset(name: str) -> Preset:
    """Return the preset with this name.

    Raises:
        UsageError: there is none.
    """
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]
