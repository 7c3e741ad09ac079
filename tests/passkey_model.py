"""A checkpoint by construction that answers a key with the token that followed it before.

The first layer writes what the previous token was beside each token: its queries are its keys
turned back by one position. The second compares the token with that, in columns that turn too
slowly to matter, and copies the token it finds. Nothing is trained, so what is not read is not
found.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, HIDDEN, DIM, HEADS = 64, 256, 128, 2
CONTEXT = 32768
THETA = 1e12
_FAST = DIM // 4
"""Pairs of columns that turn fast enough to tell neighbours apart."""
_NEAR, _ALIKE = 30.0, 40.0
"""Logit of the previous position, for each pair, and of a token that is alike."""


def make(folder: Path) -> Path:
    """Write the checkpoint and return its directory."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors")
    return folder


def _weights() -> dict[str, np.ndarray]:
    ids = np.arange(VOCABULARY)
    before, found = VOCABULARY + ids, 2 * VOCABULARY + ids  # columns of the stream
    embed = np.zeros((VOCABULARY, HIDDEN), np.float32)
    embed[ids, ids] = 1
    head = np.zeros((VOCABULARY, HIDDEN), np.float32)
    head[ids, found] = 20
    made = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    made["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    first, second = _empty(), _empty()

    # One column of the stream is 1, so a norm makes it the root of their number.
    angles = THETA ** (-np.arange(_FAST) / (DIM // 2))
    size = (_NEAR * DIM**0.5) ** 0.5 / HIDDEN**0.5
    for pair, angle in enumerate(angles):
        first["q_proj"][pair, ids] = size * np.cos(angle)
        first["q_proj"][DIM // 2 + pair, ids] = -size * np.sin(angle)
        first["k_proj"][pair, ids] = size
    first["v_proj"][ids, ids] = HIDDEN**-0.5
    first["o_proj"][before, ids] = 1

    slow = np.concatenate([np.arange(_FAST, DIM // 2), np.arange(DIM // 2 + _FAST, DIM)])
    size = (_ALIKE * DIM**0.5) ** 0.5 / (HIDDEN / 2) ** 0.5  # two columns are 1 by now
    second["q_proj"][slow, ids] = size
    second["k_proj"][slow, before] = size
    second["v_proj"][ids, ids] = (HIDDEN / 2) ** -0.5
    second["o_proj"][found, ids] = 1
    for index, layer in enumerate((first, second)):
        prefix = f"model.layers.{index}"
        made |= {f"{prefix}.self_attn.{name}.weight": w for name, w in layer.items()}
        for name in ("input", "post_attention"):
            made[f"{prefix}.{name}_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        for name, shape in (("gate", (32, HIDDEN)), ("up", (32, HIDDEN)), ("down", (HIDDEN, 32))):
            made[f"{prefix}.mlp.{name}_proj.weight"] = np.zeros(shape, np.float32)
    return made


def _empty() -> dict[str, np.ndarray]:
    sizes = {"q": (HEADS * DIM, HIDDEN), "k": (DIM, HIDDEN), "v": (DIM, HIDDEN)}
    sizes["o"] = (HIDDEN, HEADS * DIM)
    return {f"{name}_proj": np.zeros(shape, np.float32) for name, shape in sizes.items()}


def text_with_keys(length: int, depths: tuple[float, ...]) -> tuple[list[int], dict[int, int]]:
    """Return a text of so many tokens, and the keys in it, each with what follows it.

    Args:
        length: of the text.
        depths: where keys are, as shares of the text.
    """
    ids = np.random.default_rng(length).integers(1, 40, length).tolist()
    keys = {}
    for index, depth in enumerate(depths):
        at, key, value = int(depth * (length - 2)), 40 + index, 50 + index
        ids[at : at + 2] = [key, value]
        keys[key] = value
    return ids, keys
