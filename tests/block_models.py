"""SDAR, Fast-dLLM v2 and LLaDA2 written out in NumPy.

The whole text at once, every mask explicit, no cache.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from weight_files import rng

Tensors = dict[str, np.ndarray]
VOCAB, HIDDEN, LAYERS, HEADS, KV, DIM, INNER = 96, 64, 3, 4, 2, 16, 48
MASK = VOCAB - 1
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "mask_token_id": MASK,
    "eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sdar": {
        **_SHARED,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": 4,
        "attention_bias": False,
    },
    "fast_dllm": {
        **_SHARED,
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8,
        "small_block_size": 4,
    },
    "llada2": {
        **_SHARED,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "block_size": 8,
        "use_bias": False,
        "use_qkv_bias": False,
        "partial_rotary_factor": 0.5,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}
_QWEN = ("sdar", "fast_dllm")


def _shapes(kind: str) -> dict[str, tuple[int, ...]]:
    q, kv, config = HEADS * DIM, KV * DIM, CONFIGS[kind]
    is_qwen = kind in _QWEN
    embedding = "model.embed_tokens" if is_qwen else "model.word_embeddings"
    shapes: dict[str, tuple[int, ...]] = {
        f"{embedding}.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }

    def mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}gate_proj.weight"] = shapes[f"{prefix}up_proj.weight"] = (inner, HIDDEN)
        shapes[f"{prefix}down_proj.weight"] = (HIDDEN, inner)

    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes[f"{at}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
        if is_qwen:
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
                if kind == "fast_dllm":
                    shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, q)
            if kind == "sdar":
                shapes[f"{at}self_attn.q_norm.weight"] = (DIM,)
                shapes[f"{at}self_attn.k_norm.weight"] = (DIM,)
            mlp(f"{at}mlp.", INNER)
            continue
        shapes[f"{at}attention.query_key_value.weight"] = (q + 2 * kv, HIDDEN)
        shapes[f"{at}attention.dense.weight"] = (HIDDEN, q)
        shapes[f"{at}attention.query_layernorm.weight"] = (DIM,)
        shapes[f"{at}attention.key_layernorm.weight"] = (DIM,)
        if layer < config["first_k_dense_replace"]:
            mlp(f"{at}mlp.", INNER)
            continue
        shapes[f"{at}mlp.gate.weight"] = (config["num_experts"], HIDDEN)
        shapes[f"{at}mlp.gate.expert_bias"] = (config["num_experts"],)
        for expert in range(config["num_experts"]):
            mlp(f"{at}mlp.experts.{expert}.", config["moe_intermediate_size"])
        mlp(f"{at}mlp.shared_experts.", config["moe_intermediate_size"])
    return shapes


def write_model(kind: str, folder: Path) -> Tensors:
    """Write a random model as its publisher does; return its tensors."""
    draw, tensors = rng(f"blocks-{kind}"), {}
    for name, shape in _shapes(kind).items():
        values = draw.standard_normal(shape)
        if name.endswith("bias"):
            values *= 0.1
        elif len(shape) == 1:
            values = 1 + 0.2 * values
        else:
            values *= (4.0 if name.startswith("lm_head") else 1.5) * shape[-1] ** -0.5
        tensors[name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return tensors


def causal(length: int) -> np.ndarray:
    """Return what a decoder's tokens see."""
    return np.tri(length, dtype=bool)


def block_causal(length: int, block: int) -> np.ndarray:
    """Return what tokens see whose blocks see themselves and all before."""
    of = np.arange(length) // block
    return np.asarray(of[None] <= of[:, None])


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight)


def _rotate(x: np.ndarray, part: int) -> np.ndarray:
    """Rotate the first `part` values of heads [T, heads, DIM], halves together."""
    angle = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, part, 2) / part)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b, rest = np.split(x, [part // 2, part], axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _mlp(w: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    gate = x @ w[f"{prefix}gate_proj.weight"].T
    up = x @ w[f"{prefix}up_proj.weight"].T
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ w[f"{prefix}down_proj.weight"].T)


def _experts(w: Tensors, prefix: str, x: np.ndarray) -> np.ndarray:
    """Add up the experts of each token, chosen from the best groups, and the shared one."""
    config = CONFIGS["llada2"]
    groups, active = config["n_group"], config["num_experts_per_tok"]
    out = _mlp(w, f"{prefix}shared_experts.", x)
    scores = 1 / (1 + np.exp(-(x @ w[f"{prefix}gate.weight"].T)))
    for token, score in enumerate(scores):
        biased = (score + w[f"{prefix}gate.expert_bias"]).reshape(groups, -1)
        best_two = np.sort(biased, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-best_two)[: config["topk_group"]]
        allowed = np.full_like(biased, -np.inf)
        allowed[kept] = biased[kept]
        chosen = np.argsort(-allowed.reshape(-1))[:active]
        weights = score[chosen] / score[chosen].sum() * config["routed_scaling_factor"]
        for expert, weight in zip(chosen, weights, strict=True):
            out[token] += weight * _mlp(w, f"{prefix}experts.{expert}.", x[token])
    return out


def logits(kind: str, tensors: Tensors, ids: list[int], sees: np.ndarray) -> np.ndarray:
    """Return the logits of every position, [T, V] f64.

    Args:
        kind: a key of CONFIGS.
        tensors: as `write_model` returns them.
        ids: the whole text, masks included.
        sees: [T, T] bool, which keys each row sees.
    """
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    length = len(ids)
    is_qwen = kind in _QWEN
    x = w["model.embed_tokens.weight" if is_qwen else "model.word_embeddings.weight"][ids]
    part = DIM if is_qwen else DIM // 2
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        h = _norm(x, w[f"{at}input_layernorm.weight"])
        if is_qwen:
            own = f"{at}self_attn."
            q, k, v = (
                h @ w[f"{own}{n}_proj.weight"].T + w.get(f"{own}{n}_proj.bias", 0.0) for n in "qkv"
            )
            norms, output = (f"{own}q_norm", f"{own}k_norm"), f"{own}o_proj"
        else:
            own = f"{at}attention."
            fused = h @ w[f"{own}query_key_value.weight"].T
            q, k, v = np.split(fused, [HEADS * DIM, (HEADS + KV) * DIM], axis=-1)
            norms, output = (f"{own}query_layernorm", f"{own}key_layernorm"), f"{own}dense"
        q, k = q.reshape(length, HEADS, DIM), k.reshape(length, KV, DIM)
        if kind != "fast_dllm":
            q, k = (_norm(x, w[f"{norm}.weight"]) for x, norm in zip((q, k), norms, strict=True))
        q, k = _rotate(q, part), _rotate(k, part)
        v = v.reshape(length, KV, DIM)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV)
            score = q[:, head] @ k[:, shared].T * DIM**-0.5
            score = np.where(sees, score, -np.inf)
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            heads.append(weight / weight.sum(axis=1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, axis=1) @ w[f"{output}.weight"].T
        h = _norm(x, w[f"{at}post_attention_layernorm.weight"])
        is_dense = is_qwen or layer < CONFIGS[kind]["first_k_dense_replace"]
        x = x + (_mlp if is_dense else _experts)(w, f"{at}mlp.", h)
    return np.asarray(_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T)


def decode(
    kind: str, tensors: Tensors, prompt: list[int], count: int, tau: float
) -> tuple[list[int], int]:
    """Denoise whole blocks by the threshold rule, computing the whole text in each pass.

    Fast-dLLM v2 takes the token of a position from the logits before it, the first one of a block
    from a pass over the finished text, and denoises one sub-block after the other.

    Returns:
        The `count` ids after the prompt, and the passes that their blocks took.
    """
    config, ids, passes = CONFIGS[kind], list(prompt), 0
    shift = kind == "fast_dllm"
    block = config["bd_size" if shift else "block_size"]
    part = config["small_block_size"] if shift else block

    def chances(text: list[int]) -> np.ndarray:
        rows = logits(kind, tensors, text, block_causal(len(text), block))
        rows[:, MASK] = -np.inf
        chance = np.exp(rows - rows.max(axis=1, keepdims=True))
        return np.asarray(chance / chance.sum(axis=1, keepdims=True))

    while len(ids) < len(prompt) + count:
        if shift and len(ids) % block == 0:
            ids.append(int(chances(ids)[-1].argmax()))
            passes += 1
        start = len(ids) // block * block
        text = ids + [MASK] * (start + block - len(ids))
        while MASK in text[len(ids) :]:
            chance = chances(text)
            if shift:
                chance = np.concatenate([chance[:1], chance[:-1]])
            passes += 1
            open_ = [i for i in range(len(ids), len(text)) if text[i] == MASK]
            open_ = [i for i in open_ if i // part == open_[0] // part]
            sure = [i for i in open_ if chance[i].max() > tau]
            for i in sure or [max(open_, key=lambda i: chance[i].max())]:
                text[i] = int(chance[i].argmax())
        ids = text
    return ids[len(prompt) : len(prompt) + count], passes
