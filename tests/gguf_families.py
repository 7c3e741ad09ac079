"""Random tiny models of every family as GGUF files, following llama.cpp's converters.

Names come from the gguf package. What a file cannot say, because llama.cpp fixes it by the
architecture, the models here have as it is fixed there.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import permuted, rope_factors
from random_models import draw_config, randomize
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from weight_files import rng as rng_of

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3_long": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "granite_hybrid": "granite",
    "llama4": "llama4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_FIXED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"norm_topk_prob": False, "use_sliding_window": False},
    "qwen3_moe": {"norm_topk_prob": True, "use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4, "use_sliding_window": False, "num_hidden_layers": 5},
    "llama4": {
        "no_rope_layer_interval": 4,
        "num_hidden_layers": 5,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": True,
    },
}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_DERIVED = ("layer_types", "no_rope_layers", "moe_layers")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PERMUTED = ("mixtral", "smollm3", "granite", "granite_hybrid")


def make_family(family: str, seed: int, folder: Path) -> dict[str, Any]:
    """Save a random model as a Hugging Face directory; return its config.json."""
    rng = rng_of(f"gguf-{family}-{seed}")
    drawn = draw_config(family, rng)
    fields = {k: v for k, v in drawn.to_dict().items() if k not in _DERIVED}
    fields |= _FIXED.get(family, {})
    if family.endswith("_moe"):
        fields |= _EVERY_LAYER
    if family in ("gemma2", "gemma3"):
        fields["query_pre_attn_scalar"] = drawn.head_dim
    if family.startswith("granite"):
        fields.pop("head_dim", None)
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            fields[name] = float(str(np.float32(fields[name])))  # files hold fp32
        fields["attention_multiplier"] = float(str(np.float32(fields["attention_multiplier"])))
    if family == "granite_hybrid":
        fields["layer_types"] = drawn.layer_types
    if family == "gemma3":
        fields["layer_types"] = drawn.layer_types
    if getattr(drawn, "topk_method", "") == "greedy":
        fields |= {"n_group": 1, "topk_group": 1}
    model = AutoModelForCausalLM.from_config(type(drawn)(**fields))
    randomize(model, rng)
    model.save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write_family(family: str, folder: Path, path: Path, fused: bool = False) -> Path:
    """Write the model of a Hugging Face directory as a GGUF file in fp32.

    Args:
        family: of the model.
        folder: the directory.
        path: the file.
        fused: queries, keys and values are one tensor, gate and up of experts another.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in _settings(family, config).items():
        kinds = {bool: "bool", str: "string", float: "float32", int: "uint32", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(f"{arch}.{key}", value)
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    if family == "phi3_long":
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    tensors = _tensors(family, config, folder)
    for name, values in (_fused(tensors) if fused else tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(family: str, config: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if family not in ("deepseek_v2", "deepseek_v3"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    return values | _own_settings(family, config, head_dim)


def _own_settings(family: str, config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    experts = next(
        (
            config[k]
            for k in ("num_local_experts", "num_experts", "n_routed_experts")
            if config.get(k)
        ),
        0,
    )
    values: dict[str, Any] = {}
    if experts:
        values = {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    windows = family in ("gemma2", "gemma3", "phi3", "phi3_long", "mixtral", "olmo3")
    if windows and config.get("sliding_window"):
        values["attention.sliding_window"] = config["sliding_window"]
    if family in ("gemma3", "olmo3"):
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        values["attention.sliding_window_pattern"] = slides
    if family == "gemma3":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        values["rope.freq_base_swa"] = float(local)
    if family == "gemma2":
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            values[key] = config[key]
    if family.endswith("_moe"):
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if family == "qwen2_moe":
        values["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if family.startswith("phi3"):
        rope = config["rope_parameters"]
        values["rope.dimension_count"] = int(rope["partial_rotary_factor"] * head_dim)
        original = rope.get("original_max_position_embeddings", 4096)
        values["rope.scaling.original_context_length"] = original
    if family.startswith("granite"):
        values["embedding_scale"] = config["embedding_multiplier"]
        values["residual_scale"] = config["residual_multiplier"]
        values["logit_scale"] = config["logits_scaling"]
        values["attention.scale"] = config["attention_multiplier"]
    if family == "granite_hybrid":
        values["feed_forward_length"] = config["shared_intermediate_size"]
        values["rope.scaling.finetuned"] = config.get("position_embedding_type") == "rope"
    if family == "llama4":
        values["feed_forward_length"] = config["intermediate_size_mlp"]
        values["expert_feed_forward_length"] = config["intermediate_size"]
        values["interleave_moe_layer_step"] = config["interleave_moe_layer_step"]
    if family.startswith("deepseek"):
        values |= _latent_settings(family, config)
    return values


def _latent_settings(family: str, config: dict[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    mscale = config["rope_parameters"].get("mscale_all_dim")
    query = {"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}
    return {
        **query,
        **({"rope.scaling.yarn_log_multiplier": 0.1 * mscale} if mscale else {}),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2 if family == "deepseek_v3" else 1,
    }


def _tensors(family: str, config: dict[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Return what the file holds, by its names."""
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == ARCHITECTURES[family])
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    with safe_open(folder / "model.safetensors", "np") as file:
        source = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    found: dict[str, np.ndarray] = {}
    for name, values in _converted(family, config, _stacked(source)).items():
        stem, dot, tail = name.rpartition(".")
        if tail not in ("weight", "bias"):
            stem, dot, tail = name, ".", "weight"
        target = names.get_name(stem)
        assert target is not None, name
        found[target + dot + tail] = values
    return found


def _fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = dict(tensors)
    for layer in {name.split(".")[1] for name in tensors if name.startswith("blk.")}:
        block = f"blk.{layer}."
        parts = [found.pop(f"{block}attn_{part}.weight") for part in "qkv"]
        found[f"{block}attn_qkv.weight"] = np.concatenate(parts)
        parts = [found.pop(f"{block}ffn_{part}_exps.weight") for part in ("gate", "up")]
        found[f"{block}ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    return found


def _stacked(source: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the matrices of the experts of a layer."""
    found: dict[str, Any] = {}
    for name in sorted(source, key=lambda text: (len(text), text)):
        begin, middle, end = name.partition(".experts.")
        number, _, rest = end.partition(".")
        if number.isdigit():
            found.setdefault(f"{begin}{middle}{rest}", []).append(source[name])
        else:
            found[name] = source[name]
    return {name: np.stack(v) if isinstance(v, list) else v for name, v in found.items()}


def _converted(
    family: str, config: dict[str, Any], source: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return what llama.cpp's converter makes of the tensors, before they are renamed."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {}
    for name, values in source.items():
        part = name.split(".")[-2]
        if family.startswith("gemma") and name.endswith("norm.weight"):
            found[name] = values + np.float32(1)
        elif family in _PERMUTED and part in heads:
            found[name] = permuted(values, heads[part])
        elif family == "mixtral" and ".experts." in name:
            found[name.replace("block_sparse_moe", "feed_forward").removeprefix("model.")] = values
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(values, 2)
            stem = name.replace("shared_mlp.input_linear", "mlp.{}_proj")
            found |= {stem.format("gate"): gate, stem.format("up"): up}
        elif name.endswith("shared_mlp.output_linear.weight"):
            found[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = values
        elif family == "llama4" and name.endswith("experts.gate_up_proj"):
            gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
            stem = name.replace("gate_up_proj", "{}_proj.weight")
            found |= {stem.format("gate"): gate, stem.format("up"): up}
        elif family == "llama4" and name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values.swapaxes(1, 2)
        elif name.endswith("kv_b_proj.weight"):
            both = values.reshape(heads["q_proj"], -1, values.shape[1])
            k, v = np.split(both, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = k.swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = v
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = values
        elif name.endswith("shared_expert_gate.weight"):
            found[name] = values.reshape(-1)
        else:
            found[name] = values
    return found
