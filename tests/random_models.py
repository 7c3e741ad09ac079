"""Random tiny models of varied shapes, made by transformers, saved as Hugging Face directories."""

import json
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights
from weight_files import rng as rng_of

from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_oss")
MORE_FAMILIES = (
    "smollm3",
    "ministral3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_long",
    "olmo2",
    "olmo3",
    "granite",
    "granite_hybrid",
    "llama4",
    "deepseek_v2",
    "deepseek_v3",
)
BITNET = ("offline-autobitlinear", "offline-bitlinear", "online-autobitlinear")
CONTEXT = 160

torch._dynamo.config.disable = True  # transformers compiles BitNet's quantisers with a C++ compiler


def draw_config(family: str, rng: np.random.Generator):
    """Draw a configuration: heads, head_dim, window, RoPE, tied or not, odd vocabulary."""
    kv_heads = int(rng.choice([1, 2, 3]))
    heads = kv_heads * int(rng.choice([1, 2, 4]))
    head_dim = int(rng.choice([8, 16, 20, 32]))
    hidden = heads * int(rng.choice([8, 13, 20]))  # transformers wants a multiple of the heads
    window = int(rng.choice([4, 8, 13, 32]))
    layers = int(rng.choice([2, 3, 4]))
    tied = bool(rng.integers(2))
    base = {
        "vocab_size": int(rng.choice([61, 97, 128, 203])),
        "hidden_size": hidden,
        "intermediate_size": int(rng.choice([36, 64, 100])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "rope_parameters": draw_rope(rng),
    }
    flag = bool(rng.integers(2))
    if family == "llama":
        return LlamaConfig(**base, attention_bias=flag, mlp_bias=bool(rng.integers(2)))
    if family == "mistral":
        return MistralConfig(**base, sliding_window=window if flag else None)
    if family in ("qwen2", "qwen3"):
        kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
        if family == "qwen2":  # its attention has no head_dim of its own
            base |= {"hidden_size": heads * head_dim, "head_dim": head_dim}
        else:
            base["attention_bias"] = bool(rng.integers(2))
        return kind(**base, use_sliding_window=flag, sliding_window=window, max_window_layers=1)
    if family == "gpt_oss":
        base |= {"hidden_size": 32 * heads // gcd(32, heads), "tie_word_embeddings": False}
        base["intermediate_size"] = 32 * int(rng.choice([1, 2]))
        base["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
        return GptOssConfig(
            **base,
            sliding_window=window,
            num_local_experts=int(rng.choice([2, 4, 5])),
            num_experts_per_tok=int(rng.choice([1, 2])),
            swiglu_limit=float(rng.choice([7.0, 1.5])),
        )
    if family in MORE_FAMILIES:
        return draw_more(family, rng, base, flag, window)
    assert family == "bitnet", family
    base |= {"hidden_size": heads * head_dim, "intermediate_size": 4 * int(rng.choice([9, 16, 25]))}
    return BitNetConfig(**base)


def draw_more(
    family: str, rng: np.random.Generator, base: dict[str, Any], flag: bool, window: int
) -> PreTrainedConfig:
    """Draw what the families besides the first ones have of their own."""
    heads, layers = base["num_attention_heads"], base["num_hidden_layers"]
    experts = {"num_experts_per_tok": int(rng.choice([1, 2, 3]))}
    factor = [float(x) for x in rng.uniform(0.5, 2.0, 4)]
    plain = {**base, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if family == "smollm3":
        sliding = {"use_sliding_window": flag, "sliding_window": window}
        own = {k: v for k, v in base.items() if k != "head_dim"}
        own["hidden_size"] = heads * base["head_dim"]
        return SmolLM3Config(**own, **sliding, no_rope_layer_interval=int(rng.choice([2, 4])))
    if family == "ministral3":
        rope = {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        return Ministral3Config(**{**base, "rope_parameters": rope}, sliding_window=None)
    if family == "mixtral":
        own = {**base, **experts, "sliding_window": window if flag else None}
        return MixtralConfig(**own, num_local_experts=int(rng.choice([3, 4, 8])))
    if family in ("qwen2_moe", "qwen3_moe"):
        own = {**base, **experts, "num_experts": int(rng.choice([4, 7])), "norm_topk_prob": flag}
        own |= {"moe_intermediate_size": int(rng.choice([20, 48])), "sliding_window": window}
        own |= {"decoder_sparse_step": int(rng.choice([1, 2])), "mlp_only_layers": [0] * flag}
        if family == "qwen3_moe":
            return Qwen3MoeConfig(**own, use_sliding_window=flag)
        own["hidden_size"] = heads * base["head_dim"]
        shared = {"shared_expert_intermediate_size": int(rng.choice([24, 36]))}
        return Qwen2MoeConfig(**own, **shared, use_sliding_window=flag, max_window_layers=2)
    if family == "gemma":
        return GemmaConfig(**{**plain, "tie_word_embeddings": True})
    if family in ("gemma2", "gemma3"):
        own = {**plain, "tie_word_embeddings": True, "sliding_window": window}
        own |= {"query_pre_attn_scalar": int(rng.choice([16, 64])), "attn_implementation": "eager"}
        if family == "gemma2":
            caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
            return Gemma2Config(**own, **caps)
        stretched = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
        own["rope_parameters"] = {
            "full_attention": stretched if flag else {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        return Gemma3TextConfig(**own, sliding_window_pattern=int(rng.choice([2, 3])))
    if family.startswith("phi3"):
        own = {**base, "hidden_size": heads * 16, "sliding_window": window if flag else None}
        del own["head_dim"]
        own["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": float(rng.choice([0.5, 0.75, 1.0])),
        }
        if family == "phi3_long":
            pairs = int(16 * own["rope_parameters"]["partial_rotary_factor"]) // 2
            own["rope_parameters"] |= {
                "rope_type": "longrope",
                "short_factor": [float(x) for x in rng.uniform(1, 2, pairs)],
                "long_factor": [float(x) for x in rng.uniform(2, 6, pairs)],
                # Which factors count depends on the length of the text there, on the longest here.
                "original_max_position_embeddings": CONTEXT if flag else 16,
            }
            own["original_max_position_embeddings"] = CONTEXT if flag else 16
            own["max_position_embeddings"] = 4 * CONTEXT if flag else CONTEXT
        return Phi3Config(**own)
    if family in ("olmo2", "olmo3"):
        own = {**plain, "hidden_size": heads * base["head_dim"], "attention_bias": flag}
        del own["head_dim"]
        if family == "olmo2":
            return Olmo2Config(**own)
        del own["rope_parameters"]
        return Olmo3Config(**own, sliding_window=window)
    if family.startswith("granite"):
        own = {**base, "hidden_size": heads * base["head_dim"]}
        del own["head_dim"]
        own |= {"embedding_multiplier": 4 * factor[0], "logits_scaling": 4 * factor[1]}
        own |= {"residual_multiplier": 0.3 * factor[2], "attention_multiplier": 0.2 * factor[3]}
        if family == "granite":
            return GraniteConfig(**own, attention_bias=flag, mlp_bias=bool(rng.integers(2)))
        return GraniteMoeHybridConfig(
            **own,
            num_local_experts=0,
            shared_intermediate_size=int(rng.choice([36, 64])),
            layer_types=["attention"] * layers,
            position_embedding_type="rope" if flag else None,
            mamba_n_heads=heads,
        )
    if family == "llama4":
        own = {**plain, "intermediate_size_mlp": 44, "num_local_experts": int(rng.choice([2, 5]))}
        own |= {"interleave_moe_layer_step": int(rng.choice([1, 2])), "use_qk_norm": flag}
        own |= {"num_experts_per_tok": int(rng.choice([1, 2])), "attention_chunk_size": window}
        return Llama4TextConfig(**own, no_rope_layer_interval=2, floor_scale=16, attn_scale=0.4)
    own = {**plain, **experts, "num_key_value_heads": heads, "hidden_size": heads * 16}
    del own["head_dim"]
    own |= {"kv_lora_rank": int(rng.choice([16, 24])), "q_lora_rank": 12 if flag else None}
    own |= {"qk_nope_head_dim": int(rng.choice([8, 16])), "qk_rope_head_dim": 8}
    own |= {"v_head_dim": int(rng.choice([8, 16])), "moe_intermediate_size": 20}
    own |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
    if bool(rng.integers(2)):
        own["rope_parameters"] = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        }
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
    if family == "deepseek_v2":
        method = "group_limited_greedy" if flag else "greedy"
        return DeepseekV2Config(**own, **groups, topk_method=method)
    return DeepseekV3Config(**own, **groups, norm_topk_prob=flag, rope_interleave=True)


def draw_rope(rng: np.random.Generator) -> dict[str, object]:
    theta = float(rng.choice([10000.0, 500000.0]))
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    rope: dict[str, object] = {"rope_type": str(kind), "rope_theta": theta}
    if kind != "default":
        rope["factor"] = 4.0
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = 40
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope


def randomize(model: PreTrainedModel, rng: np.random.Generator) -> None:
    """Give every parameter values that make the softmaxes and norms matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = rng.standard_normal(parameter.shape, dtype=np.float32)
            if parameter.ndim == 1 and "norm" in name:
                values = (0 if "gemma" in model.config.model_type else 1) + 0.2 * values
            elif parameter.ndim == 1 or name.endswith("_bias"):
                values *= 0.3
            else:
                fan_in = parameter.shape[-2 if "experts" in name else -1]
                values *= 1.5 * fan_in**-0.5
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(rng.standard_normal(buffer.shape) * 0.1))


def make(family: str, seed: int, folder: Path) -> PreTrainedModel:
    """Make one random model, save it to `folder`, and return transformers' fp32 model."""
    rng = rng_of(f"{family}-{seed}")
    config = draw_config(family, rng)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family in MORE_FAMILIES and hasattr(config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the other wants rows of a multiple of 16 bytes
    randomize(model, rng)
    model.save_pretrained(folder)
    return model.eval()


def make_mxfp4(seed: int, folder: Path) -> PreTrainedModel:
    """Make a random gpt-oss checkpoint with MXFP4 experts; return what transformers loads from it.

    transformers dequantises the experts itself (to bf16, which holds MXFP4 values exactly).
    """
    rng = rng_of(f"mxfp4-{seed}")
    config = draw_config("gpt_oss", rng)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, rng)
    arrays = {}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor = encode(array.transpose(0, 2, 1), parse_format("mxfp4"))
            arrays[f"{name}_blocks"] = tensor.planes["blocks"]
            arrays[f"{name}_scales"] = tensor.planes["scales"]
        else:
            arrays[name] = np.ascontiguousarray(array)
    folder.mkdir(parents=True)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads(config.to_json_string())
    settings["architectures"] = ["GptOssForCausalLM"]
    settings["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_bitnet(kind: str, seed: int, folder: Path, use_rms_norm: bool = False) -> PreTrainedModel:
    """Make a random BitNet checkpoint; return a model of transformers' BitNet linears in fp32."""
    rng = rng_of(f"bitnet-{kind}-{seed}")
    mode, linear_class = kind.split("-")
    config = draw_config("bitnet", rng)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, rng)
    arrays: dict[str, torch.Tensor] = {}
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        n, k = linear.out_features, linear.in_features
        options = {"dtype": torch.float32, "use_rms_norm": use_rms_norm, "rms_norm_eps": 1e-6}
        if mode == "online":
            new = AutoBitLinear(k, n, False, online_quant=True, **options)
            new.weight.data = linear.weight.data
            arrays[f"{name}.weight"] = linear.weight.data
        else:
            codes = torch.from_numpy(rng.integers(-1, 2, (n, k)).astype(np.float32))
            scale = torch.tensor([1.3 * k**-0.5], dtype=torch.bfloat16)
            if linear_class == "autobitlinear":
                new = AutoBitLinear(k, n, False, **options)
                new.weight.data = codes
            else:
                scale = (1 / scale.float()).to(torch.bfloat16)
                new = BitLinear(k, n, False, **options)
                new.weight = pack_weights(codes.clone())
            new.weight_scale = scale.float()
            arrays[f"{name}.weight"] = pack_weights(codes.clone())  # it changes its argument
            arrays[f"{name}.weight_scale"] = scale
        if use_rms_norm:
            weight = torch.from_numpy(1 + 0.2 * rng.standard_normal(k)).float()
            new.rms_norm.weight.data = weight
            arrays[f"{name}.rms_norm.weight"] = weight
        model.set_submodule(name, new)
    for name, value in model.state_dict().items():
        if name not in arrays and not (config.tie_word_embeddings and name == "lm_head.weight"):
            arrays[name] = value.contiguous()
    folder.mkdir(parents=True)
    from safetensors.torch import save_file as save_torch

    save_torch({k: v.contiguous() for k, v in arrays.items()}, folder / "model.safetensors")
    settings = json.loads(config.to_json_string())
    settings["architectures"] = ["BitNetForCausalLM"]
    settings["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": mode,
        "use_rms_norm": use_rms_norm,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return model.eval()


def prompt_of(name: str, vocab: int, length: int = 60) -> list[int]:
    """Draw a prompt longer than every window."""
    return rng_of(f"prompt-{name}").integers(0, vocab, length).tolist()


def reference_logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def reference_greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Choose tokens greedily with transformers' own cache."""
    made: list[int] = []
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True)
        for _ in range(count):
            made.append(int(out.logits[0, -1].argmax()))
            out = model(
                torch.tensor([[made[-1]]]), past_key_values=out.past_key_values, use_cache=True
            )
    return made
