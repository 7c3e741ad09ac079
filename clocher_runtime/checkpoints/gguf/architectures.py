"""A GGUF model's metadata -> config.json, by architecture.

Source: gguf-py's constants.py; llama.cpp's llama-model.cpp and src/models.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.gguf.blocks import F32
from clocher_runtime.checkpoints.gguf.file import FULL, SLIDING, Metadata
from clocher_runtime.models.build import inverse_frequencies
from clocher_runtime.models.spec import RopeSpec

Config = dict[str, Any]

ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (ROPE_FACTORS, LONG, SHORT)
"""RoPE tensors, not weights."""


def rope_parameters(meta: Metadata) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json; raises UnsupportedModel, FormatError."""
    theta = meta.get("rope.freq_base", float, 10000.0)
    rotated = meta.get("rope.dimension_count", int, meta.head_dim)
    base = {"rope_theta": theta}
    if rotated != meta.head_dim:
        base["partial_rotary_factor"] = rotated / meta.head_dim
    kind = meta.file.get(f"{meta.arch}.rope.scaling.type", str, "linear")
    if LONG in meta.file.tensors:
        original = meta.get("rope.scaling.original_context_length", int)
        if meta.value("rope.scaling.attn_factor") is not None:
            base["attention_factor"] = meta.get("rope.scaling.attn_factor", float)
        return {
            **base,
            "rope_type": "longrope",
            "long_factor": _table(meta, LONG, rotated // 2).tolist(),
            "short_factor": _table(meta, SHORT, rotated // 2).tolist(),
            "original_max_position_embeddings": original,
        }
    factor = 1.0
    if kind != "none":
        older = meta.get("rope.scale_linear", float, 1.0) or 1.0
        factor = meta.get("rope.scaling.factor", float, older) or 1.0
    if ROPE_FACTORS in meta.file.tensors:
        if meta.arch == "gpt-oss" or kind == "yarn" or factor != 1.0:
            raise UnsupportedModel(
                f"{meta.where}: {ROPE_FACTORS} in a {meta.arch} model with rope scaling "
                f"{kind!r:.60}; Clocher knows it from Llama 3, without other scaling"
            )
        return {**base, **_llama3(meta, theta)}
    if kind in ("none", "linear"):
        if factor == 1.0:
            return {"rope_type": "default", **base}
        return {"rope_type": "linear", **base, "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{meta.where}: rope scaling {kind!r:.60}; Clocher knows none, linear, yarn, "
            f"Llama 3's ({ROPE_FACTORS}) and longrope ({LONG})"
        )
    return {**base, **_yarn(meta, factor)}


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length", int),
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast", float, 32.0),
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow", float, 1.0),
        # Of the model, not of the file: gpt-oss alone does not round the two bounds.
        "truncate": meta.arch != "gpt-oss",
    }
    scale = meta.get("rope.scaling.attn_factor", float, 1.0)
    scale *= meta.get("rope.scaling.yarn_attn_factor", float, 1.0)
    if scale != 1.0:
        rope["attention_factor"] = scale * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    # llama.cpp's converter writes a tenth of it, and only DeepSeek's is computed here.
    key = "rope.scaling.yarn_log_multiplier"
    if meta.arch == "deepseek2" and (multiplier := meta.get(key, float, 0.0)):
        mscale = round(10 * multiplier, 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def _table(meta: Metadata, name: str, pairs: int) -> np.ndarray:
    info = meta.file.tensors.get(name)
    if info is None:
        raise FormatError(f"{meta.where}: tensor {name!r} is missing")
    if info.kind != F32 or info.shape != (pairs,):
        raise FormatError(
            f"{meta.where}: {name} is {info.kind.name} {list(info.shape)}; expected f32 [{pairs}]"
        )
    factors = meta.file.data(name).view(np.float32).astype(np.float64)
    if not (np.isfinite(factors).all() and factors.min() > 0):
        raise FormatError(f"{meta.where}: {name} has a factor that is not a positive number")
    return factors


def _llama3(meta: Metadata, theta: float) -> dict[str, Any]:
    """Return the Llama 3 scaling that gives the file's table of factors."""
    factors = _table(meta, ROPE_FACTORS, meta.head_dim // 2)
    largest = float(factors.max())
    if factors.min() < 1 or not 1 <= theta <= 1e12:
        raise FormatError(
            f"{meta.where}: {ROPE_FACTORS} has a factor below 1, or the base frequency {theta} is "
            "absurd"
        )
    if largest == 1:
        return {"rope_type": "default"}
    plain = inverse_frequencies(RopeSpec(theta), meta.head_dim)
    wavelengths = 2 * np.pi / plain.astype(np.float64)
    between = (factors > 1.0001) & (factors < largest * 0.9999)
    blend = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    if between.any():
        original = np.median(wavelengths[between] * (3 * blend + 1))
    else:  # any number of positions between the two kinds gives the table
        shortest = 4 * wavelengths[factors <= 1.0001].max(initial=1.0)
        longest = wavelengths[factors >= largest * 0.9999].min(initial=float(1 << 24))
        original = np.sqrt(shortest * longest)
    spec = RopeSpec(theta, "llama3", largest, int(np.rint(original)))
    if not np.allclose(plain / inverse_frequencies(spec, meta.head_dim), factors, rtol=1e-4):
        raise UnsupportedModel(
            f"{meta.where}: {ROPE_FACTORS} are not those of Llama 3's scaling with low_freq_factor "
            "1 and high_freq_factor 4"
        )
    return {
        "rope_type": "llama3",
        "factor": largest,
        "original_max_position_embeddings": spec.original_positions,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


def _routed(meta: Metadata, experts: str) -> Config:
    count = meta.get("expert_count", int)
    return {experts: count, "num_experts_per_tok": meta.get("expert_used_count", int)}


def _llama(meta: Metadata, config: Config) -> Config:
    if meta.get("expert_count", int, 0):
        experts = _routed(meta, "num_local_experts")
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
    inner = meta.get("expert_feed_forward_length", int, config["intermediate_size"])
    window = {"sliding_window": meta.window, "layer_types": meta.layer_types(2)}
    return {**_routed(meta, "num_local_experts"), "intermediate_size": inner, **window}


def _experts(meta: Metadata, config: Config) -> Config:
    size, routed = config["intermediate_size"], _routed(meta, "num_experts")
    inner = size // max(routed["num_experts_per_tok"], 1)
    shared = meta.get("expert_shared_feed_forward_length", int, size)
    return {
        **routed,
        **_no_window(meta, config),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", int, inner),
        "norm_topk_prob": meta.arch == "qwen3moe",
        **({"shared_expert_intermediate_size": shared} if meta.arch == "qwen2moe" else {}),
    }


_STORED_SUM = {"norm_offset": 0.0, "hidden_activation": "gelu_pytorch_tanh"}
"""In Gemma's files the norm weights include the added 1."""


def _gemma2(meta: Metadata, config: Config) -> Config:
    return {
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": meta.get("final_logit_softcapping", float, 30.0),
        "sliding_window": meta.get("attention.sliding_window", int, 4096),
        **_STORED_SUM,
        **_scores(meta, config, 46),
        "layer_types": meta.layer_types(2),
    }


def _gemma3(meta: Metadata, config: Config) -> Config:
    window = meta.window
    meta.read.add("final_logit_softcapping")  # which llama.cpp does not apply
    return {
        **_STORED_SUM,
        **_scores(meta, config, 62),
        "sliding_window": window or None,
        "layer_types": meta.layer_types(6) if window else [FULL] * meta.layers,
        "rope_parameters": _two_ropes(meta, 10000.0),
    }


def _scores(meta: Metadata, config: Config, largest: int) -> Config:
    size = config["hidden_size"] // max(config["num_attention_heads"], 1)
    return {"query_pre_attn_scalar": size if meta.layers == largest else meta.head_dim}


def _two_ropes(meta: Metadata, default: float) -> Config:
    """Return the rotations; layers with a window are not stretched."""
    theta = meta.get("rope.freq_base_swa", float, default)
    return {FULL: rope_parameters(meta), SLIDING: {"rope_type": "default", "rope_theta": theta}}


def _olmo(meta: Metadata, config: Config) -> Config:
    if not meta.window:
        return {}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": meta.window,
        "layer_types": meta.layer_types(4),
        "rope_parameters": _two_ropes(meta, meta.get("rope.freq_base", float, 10000.0)),
    }


def _granite(meta: Metadata, config: Config) -> Config:
    """A missing or zero factor means none."""
    config = {
        "embedding_multiplier": meta.get("embedding_scale", float, 0.0) or 1.0,
        "residual_multiplier": meta.get("residual_scale", float, 0.0) or 1.0,
        "logits_scaling": meta.get("logit_scale", float, 0.0) or 1.0,
        "attention_multiplier": meta.get("attention.scale", float, 0.0) or meta.head_dim**-0.5,
        "mlp_bias": "blk.0.ffn_gate.bias" in meta.file.tensors,
    }
    if meta.get("rope.scaling.finetuned", bool, True):
        return config
    return {  # Granite 4 without Mamba layers, whose config says that nothing is rotated
        **config,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "shared_intermediate_size": meta.get("feed_forward_length", int),
        "num_local_experts": 0,
        "layer_types": ["attention"] * meta.layers,
    }


def _llama4(meta: Metadata, config: Config) -> Config:
    known = {
        **_routed(meta, "num_local_experts"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": meta.get("interleave_moe_layer_step", int),
        "intermediate_size": meta.get("expert_feed_forward_length", int),
    }
    known["use_qk_norm"] = known["num_local_experts"] != 128
    if meta.value("attention.sliding_window") == 0:
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
    gating = meta.get("expert_gating_func", int, 0) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModel(
            f"{meta.where}: {meta.arch}.expert_gating_func is {gating}; Clocher knows {_SOFTMAX} "
            f"(softmax) and {_SIGMOID} (sigmoid)"
        )
    # Only what is rotated of a head has a rotation.
    rope = {k: v for k, v in rope_parameters(meta).items() if k != "partial_rotary_factor"}
    rotated, groups = meta.get("rope.dimension_count", int), meta.get("expert_group_count", int, 1)
    rank = None if meta.layers in _LITE else meta.get("attention.q_lora_rank", int, 0) or None
    softmax = {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        "kv_lora_rank": meta.get("attention.kv_lora_rank", int),
        "v_head_dim": meta.get("attention.value_length_mla", int),
        **_routed(meta, "n_routed_experts"),
        "n_shared_experts": meta.get("expert_shared_count", int, 0),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", int),
        "first_k_dense_replace": meta.get("leading_dense_block_count", int, 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", float, 1.0),
        "architectures": [f"DeepseekV{3 if gating == _SIGMOID else 2}ForCausalLM"],
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": None,
        "rope_parameters": rope,
        "q_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": meta.get("attention.key_length_mla", int) - rotated,
        "n_group": groups,
        "topk_group": meta.get("expert_group_used_count", int, 1),
        "norm_topk_prob": meta.get("expert_weights_norm", bool, False),
        **(softmax if gating == _SOFTMAX else {}),
    }


ARCHITECTURES: Mapping[str, tuple[str, Callable[[Metadata, Config], Config]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "qwen2": ("Qwen2ForCausalLM", _no_window),
    "qwen3": ("Qwen3ForCausalLM", _no_window),
    "qwen2moe": ("Qwen2MoeForCausalLM", _experts),
    "qwen3moe": ("Qwen3MoeForCausalLM", _experts),
    "gemma": ("GemmaForCausalLM", lambda meta, config: dict(_STORED_SUM)),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    # llama.cpp leaves the window out; the models have it.
    "phi3": ("Phi3ForCausalLM", lambda meta, config: {"sliding_window": meta.window or None}),
    "smollm3": ("SmolLM3ForCausalLM", _no_window),
    "olmo2": ("Olmo2ForCausalLM", _olmo),
    **dict.fromkeys(("granite", "granitemoe"), ("GraniteForCausalLM", _granite)),
    "deepseek2": ("DeepseekV2ForCausalLM", _deepseek2),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    **dict.fromkeys(("bitnet", "bitnet-25", "bitnet-b1.58"), ("BitNetForCausalLM", _no_window)),
}
"""Architecture -> transformers' name, and what the metadata give beyond what all have.

Of the entries that are not read, those that change the arithmetic are refused.
"""
