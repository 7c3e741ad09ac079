"""Tiny models of each family whose linears are stored as quantisers store them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from random_models import randomize
from safetensors.numpy import load_file
from test_hf_quantised import CASES, stored
from transformers import AutoModelForCausalLM, PreTrainedModel
from weight_files import rng, write_hf

_LINEAR = re.compile(r"(model\.layers\.\d+\..+)\.weight")
# What quantisers leave as floats: routers, and the gate of shared experts.
_ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "router", "shared_expert_gate")
_BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Family -> its config's class, and what it has of its own; None: a field that it does not have.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "smollm3": ("SmolLM3Config", {"head_dim": None}),
    "ministral3": ("Ministral3Config", {}),
    "mixtral": ("MixtralConfig", {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 128},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 16}),
    "phi3": ("Phi3Config", {"head_dim": None}),
    "olmo2": ("Olmo2Config", {"head_dim": None}),
    "olmo3": ("Olmo3Config", {"head_dim": None}),
    "granite": ("GraniteConfig", {"head_dim": None}),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "head_dim": None,
            "num_local_experts": 0,
            "shared_intermediate_size": 128,
            "layer_types": ["attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {"num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 128},
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_EXPERTS, **_LATENT, "head_dim": None}),
    "deepseek_v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "head_dim": None}),
}

# Layout -> its case in test_hf_quantised.py.
LAYOUTS = {
    "gptq, 4 bits": "gptq-v1-4-sym-g32",
    "gptq, 4 bits with zero points": "gptq-v1-4-asym-g32",
    "gptq, 4 bits, activation order": "gptq-v1-4-sym-order",
    "awq, 4 bits with zero points": "awq-gemm-g32",
    "awq, 4 bits": "awq-gemm-sym-g32",
    "compressed-tensors, 4 bits": "ct-pack-4-sym-g32",
    "compressed-tensors, int8 rows": "ct-int-channel",
    "compressed-tensors, fp8 rows": "ct-float-channel",
    "fp8, whole tensors": "fp8-tensor",
    "fp8, 128 x 128 blocks": "fp8-block",
}


def float_model(family: str) -> PreTrainedModel:
    """Make a random model whose matrices all have whole groups."""
    kind, own = CONFIGS[family]
    settings = {
        key: value for key, value in {**_BASE, **own}.items() if own.get(key, 0) is not None
    }
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**settings), dtype=torch.float32
    )
    randomize(model, rng(f"stored-{family}"))
    return model


def write_stored(family: str, layout: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """Write a model as a quantiser would, every linear but routers and the head.

    Returns:
        The folder, and transformers' model with the values that the file means, fp32.
    """
    floats, case = folder / "floats", CASES[LAYOUTS[layout]]
    float_model(family).save_pretrained(floats)
    arrays = load_file(floats / "model.safetensors")
    values, packed = {}, {}
    for name, array in arrays.items():
        linear = _LINEAR.fullmatch(name)
        if array.ndim != 2 or linear is None or linear[1].endswith(_ROUTERS):
            values[name] = packed[name] = stored(array, "F32")
            continue
        written = case.write(linear[1], array.shape)
        packed |= written.arrays
        values[name] = stored(np.ascontiguousarray(written.values), "F32")
    config = json.loads((floats / "config.json").read_text())
    write_hf(floats, values, config)
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    settings = config | {"quantization_config": case.settings}
    return write_hf(folder / "stored", packed, settings), model.eval()
