"""gpt-oss in OpenAI's own layout is the same model, bit for bit, as in that of transformers."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sessions import loss_of, make_session
from weight_files import GPTOSS, Array, array, read_with_the_library, write_safetensors

from clocher_kernels.errors import ClocherError, FormatError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import load_model
from clocher_runtime.quality.tensor_error import same
from clocher_runtime.text.tokenizer import Tokenizer

CONFIG = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "experts_per_token": 2,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 256,
    "swiglu_limit": 7.0,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 128,
    "initial_context_length": 512,
    "rope_theta": 150000,
    "rope_scaling_factor": 8.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
WHOLE = {"model.embed_tokens": "embedding", "lm_head": "unembedding"}
WITHIN = {
    "input_layernorm.weight": "attn.norm.scale",
    "self_attn.o_proj": "attn.out",
    "self_attn.sinks": "attn.sinks",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}


def originals() -> dict[str, Array]:
    """Return the tensors of the embedded model under OpenAI's names."""
    stored = read_with_the_library(GPTOSS / "model.safetensors")
    found: dict[str, Array] = {}
    for name, each in stored.items():
        entry = (each["dtype"], tuple(each["shape"]), bytes(each["data"]))
        if name == "model.norm.weight":
            found["norm.scale"] = entry
        elif not name.startswith("model.layers."):
            base, _, end = name.rpartition(".")
            found[f"{WHOLE[base]}.{end}"] = entry
        else:
            layer, _, inner = name.removeprefix("model.layers.").partition(".")
            old = next((key for key in WITHIN if inner.startswith(key)), None)
            if old is not None:
                found[f"block.{layer}.{WITHIN[old]}{inner.removeprefix(old)}"] = entry
    for layer in range(4):
        for end in ("weight", "bias"):
            parts = [stored[f"model.layers.{layer}.self_attn.{p}_proj.{end}"] for p in "qkv"]
            rows = sum(part["shape"][0] for part in parts)
            data = b"".join(bytes(part["data"]) for part in parts)
            shape = (rows, *parts[0]["shape"][1:])
            found[f"block.{layer}.attn.qkv.{end}"] = (parts[0]["dtype"], shape, data)
    return found


def write(folder: Path, arrays: dict[str, Array], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def test_it_is_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    arrays = originals()
    assert not any(name.startswith("model.") for name in arrays)
    folder = write(tmp_path / "gpt-oss" / "original", arrays)
    shutil.copy(GPTOSS / "tokenizer.json", folder.parent)
    here, there = open_checkpoint(folder), open_checkpoint(GPTOSS)
    assert here.tokenizer_json == folder.parent / "tokenizer.json"
    one, two = load_model(here), load_model(there)
    assert set(one.weights) == set(two.weights)
    assert all(same(one.weights[name], two.weights[name]) for name in one.weights)
    text = (GPTOSS / "README.md").read_text(encoding="utf-8")
    ids = Tokenizer(here.tokenizer_source, here.tokenizer_config).encode(text)[:256]
    losses = []
    for model in (one, two):
        session = make_session(model, threads=1, context=256, chunk=64, all_logits=True)
        with closing(session):
            losses.append(loss_of(session, ids, len(ids)))
    assert losses[0] == losses[1]


def test_a_model_directory_may_hold_it_in_original(tmp_path: Path) -> None:
    write(tmp_path / "original", originals())
    assert open_checkpoint(tmp_path).config["model_type"] == "gpt_oss"


def test_the_published_size_has_its_ends_and_context(tmp_path: Path) -> None:
    folder = write(tmp_path, originals(), vocab_size=201_088)
    config = open_checkpoint(folder).config
    assert config["eos_token_id"] == [200002, 199999, 200012]
    assert config["max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        (
            {"block.0.attn.qkv.bias": array("BF16", 383)},
            {},
            r"qkv_proj.bias has shape \[383\].*asks for \[384\]",
        ),
        ({"block.0.attn.qkv.weight": array("BF16")}, {}, r"qkv_proj.weight has 1 elements"),
        ({}, {"head_dim": 0}, "head_dim"),
        ({}, {"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({}, {"rope_scaling_factor": 0.5}, "rope_scaling_factor"),
        ({}, {"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ],
)
def test_what_contradicts_itself_is_refused(
    changes: dict[str, Array], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=message):
        load_model(open_checkpoint(write(tmp_path, originals() | changes, **config)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    arrays = originals()
    del arrays["block.2.mlp.gate.bias"]
    with pytest.raises(ClocherError, match=r"model\.layers\.2\.mlp\.router\.bias"):
        load_model(open_checkpoint(write(tmp_path, arrays)))
