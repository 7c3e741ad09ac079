"""GGUF architectures: metadata -> config.json. Source: gguf-py, and llama.cpp's src/models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clocher_kernels.errors import UnsupportedModel
from clocher_runtime.checkpoints.gguf.metadata import FULL, SLIDING, Metadata, rope_parameters

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How an architecture's metadata become a config.

    `keys`: config field -> entry, a required integer, or entry and default. `more` derives fields
    from several entries; of the entries beyond `reads`, those that change the arithmetic are
    refused.
    """

    name: str
    keys: Mapping[str, str | tuple[str, int | float]] = field(default_factory=dict)
    more: Callable[[Metadata, Config], Config] = lambda meta, config: {}
    reads: tuple[str, ...] = ()

    def read(self, meta: Metadata) -> Config:
        """Return the fields of `keys`."""
        found: Config = {}
        for name, key in self.keys.items():
            entry, default = (key, None) if isinstance(key, str) else key
            of_float, whole = isinstance(default, float), None if default is None else int(default)
            found[name] = meta.number(entry, default) if of_float else meta.integer(entry, whole)
        return found

    @property
    def entries(self) -> set[str]:
        """Entries that are read."""
        keys = {key if isinstance(key, str) else key[0] for key in self.keys.values()}
        return keys | set(self.reads)


def _llama(meta: Metadata, config: Config) -> Config:
    if meta.integer("expert_count", 0):
        experts = {
            "num_local_experts": meta.integer("expert_count"),
            "num_experts_per_tok": meta.integer("expert_used_count"),
        }
        window = {"sliding_window": meta.window or None}
        return {"architectures": ["MixtralForCausalLM"], **experts, **window}
    if meta.window:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": meta.window}
    return {"mlp_bias": "blk.0.ffn_gate.bias" in meta.file.tensors}


def _no_window(meta: Metadata, config: Config) -> Config:
    if 0 < meta.window < config["max_position_embeddings"]:
        raise UnsupportedModel(
            f"{meta.where}: {meta.arch}.attention.sliding_window is {meta.window}; llama.cpp has "
            f"no window in {meta.arch} models, and the file does not say which layers have it"
        )
    return {}


def _gpt_oss(meta: Metadata, config: Config) -> Config:
    inner = meta.integer("expert_feed_forward_length", config["intermediate_size"])
    return {
        "intermediate_size": inner,
        "num_local_experts": meta.integer("expert_count", 0),
        "sliding_window": meta.window,
        "layer_types": meta.layer_types(2),
    }


def _experts(meta: Metadata, config: Config) -> Config:
    size = config["intermediate_size"]
    inner = size // max(config["num_experts_per_tok"], 1)
    shared = meta.integer("expert_shared_feed_forward_length", size)
    return {
        **_no_window(meta, config),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length", inner),
        "norm_topk_prob": meta.arch == "qwen3moe",
        **({"shared_expert_intermediate_size": shared} if meta.arch == "qwen2moe" else {}),
    }


_STORED_SUM = {"norm_offset": 0.0, "hidden_activation": "gelu_pytorch_tanh"}
"""In Gemma's files the norm weights include the added 1."""


def _gemma2(meta: Metadata, config: Config) -> Config:
    return {**_STORED_SUM, **_scores(meta, config, 46), "layer_types": meta.layer_types(2)}


def _gemma3(meta: Metadata, config: Config) -> Config:
    window = meta.window
    return {
        **_STORED_SUM,
        **_scores(meta, config, 62),
        "sliding_window": window or None,
        "layer_types": meta.layer_types(6) if window else [FULL] * meta.layers,
        "rope_parameters": _two_ropes(meta, meta.number("rope.freq_base_swa", 10000.0)),
    }


def _scores(meta: Metadata, config: Config, largest: int) -> Config:
    size = config["hidden_size"] // max(config["num_attention_heads"], 1)
    return {"query_pre_attn_scalar": size if meta.layers == largest else meta.head_dim}


def _two_ropes(meta: Metadata, theta: float) -> Config:
    """Return the rotations; layers with a window are not stretched."""
    return {FULL: rope_parameters(meta), SLIDING: {"rope_type": "default", "rope_theta": theta}}


def _olmo(meta: Metadata, config: Config) -> Config:
    if not meta.window:
        return {}
    theta = meta.number("rope.freq_base", 10000.0)
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": meta.window,
        "layer_types": meta.layer_types(4),
        "rope_parameters": _two_ropes(meta, meta.number("rope.freq_base_swa", theta)),
    }


def _phi3(meta: Metadata, config: Config) -> Config:
    # llama.cpp leaves the window out; the models have it.
    return {"sliding_window": meta.window or None}


def _granite(meta: Metadata, config: Config) -> Config:
    """A missing or zero factor means none."""
    config = {
        "embedding_multiplier": meta.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": meta.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": meta.number("logit_scale", 0.0) or 1.0,
        "attention_multiplier": meta.number("attention.scale", 0.0) or meta.head_dim**-0.5,
        "mlp_bias": "blk.0.ffn_gate.bias" in meta.file.tensors,
    }
    if meta.flag("rope.scaling.finetuned", True):
        return config
    return {  # Granite 4 without Mamba layers, whose config says that nothing is rotated
        **config,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": meta.integer("feed_forward_length"),
        "num_local_experts": 0,
        "layer_types": ["attention"] * meta.layers,
    }


def _llama4(meta: Metadata, config: Config) -> Config:
    known = {"intermediate_size": meta.integer("expert_feed_forward_length")}
    known |= {"use_qk_norm": config["num_local_experts"] != 128}
    if meta.has("attention.sliding_window") and not meta.window:
        plain = {"attention_chunk_size": None, "no_rope_layers": [1] * meta.layers}
        return {**known, **plain, "attn_temperature_tuning": False}
    return {**known, "attention_chunk_size": 8192, "no_rope_layer_interval": 4}


_SOFTMAX, _SIGMOID = 1, 2
_LITE = (26, 27)
"""Layer counts that llama.cpp reads without a `q_lora_rank`, whatever the file says."""


def _deepseek2(meta: Metadata, config: Config) -> Config:
    if "blk.0.attn_kv_b.weight" in meta.file.tensors:
        raise UnsupportedModel(
            f"{meta.where}: attn_kv_b is one tensor, as older converters wrote it; convert the "
            "model again, or load its Hugging Face directory"
        )
    gating = meta.integer("expert_gating_func", 0) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModel(
            f"{meta.where}: {meta.arch}.expert_gating_func is {gating}; Clocher knows {_SOFTMAX} "
            f"(softmax) and {_SIGMOID} (sigmoid)"
        )
    # Only what is rotated of a head has a rotation.
    rope = {k: v for k, v in rope_parameters(meta).items() if k != "partial_rotary_factor"}
    rotated, groups = meta.integer("rope.dimension_count"), meta.integer("expert_group_count", 1)
    rank = None if meta.layers in _LITE else meta.integer("attention.q_lora_rank", 0) or None
    softmax = {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        "architectures": [f"DeepseekV{3 if gating == _SIGMOID else 2}ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "rope_parameters": rope,
        "q_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": meta.integer("attention.key_length_mla") - rotated,
        "n_group": groups,
        "topk_group": meta.integer("expert_group_used_count", 1),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        **(softmax if gating == _SOFTMAX else {}),
    }


_ROUTED = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_LOCAL = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GRANITE = Architecture(
    "GraniteForCausalLM",
    more=_granite,
    reads=("embedding_scale", "residual_scale", "logit_scale", "attention.scale"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", more=_llama, reads=("expert_count",)),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        {
            **_LOCAL,
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        _llama4,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", more=_no_window),
    "qwen3": Architecture("Qwen3ForCausalLM", more=_no_window),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _ROUTED, _experts),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _ROUTED, _experts),
    "gemma": Architecture("GemmaForCausalLM", more=lambda meta, config: dict(_STORED_SUM)),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        {
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
            "sliding_window": ("attention.sliding_window", 4096),
        },
        _gemma2,
    ),
    "gemma3": Architecture("Gemma3ForCausalLM", more=_gemma3, reads=("final_logit_softcapping",)),
    "phi3": Architecture("Phi3ForCausalLM", more=_phi3),
    "smollm3": Architecture("SmolLM3ForCausalLM", more=_no_window),
    "olmo2": Architecture("Olmo2ForCausalLM", more=_olmo),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        {
            "kv_lora_rank": "attention.kv_lora_rank",
            "v_head_dim": "attention.value_length_mla",
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": ("expert_shared_count", 0),
            "moe_intermediate_size": "expert_feed_forward_length",
            "first_k_dense_replace": ("leading_dense_block_count", 0),
            "routed_scaling_factor": ("expert_weights_scale", 1.0),
        },
        _deepseek2,
        reads=("rope.scaling.yarn_log_multiplier",),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {"num_experts_per_tok": "expert_used_count"},
        _gpt_oss,
        reads=("expert_count",),
    ),
    **dict.fromkeys(
        ("bitnet", "bitnet-25", "bitnet-b1.58"), Architecture("BitNetForCausalLM", more=_no_window)
    ),
}
