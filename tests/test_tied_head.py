"""`tie_word_embeddings` beside an `lm_head.weight`: the head is the one that transformers uses."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import prompt_of, randomize, reference_greedy, reference_logits
from sessions import make_session
from transformers import AutoModelForCausalLM, LlamaConfig
from weight_files import convert, rng

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.engine.load import Model, describe, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.inventory import EMBED, HEAD

VOCAB = 160


def write(folder: Path, *, copied: bool = False, shard: str = "1GB") -> None:
    """Write a llama with a head of its own, or a copy of its embedding, that says it has none."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, rng("tied"))
    if copied:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.get_input_embeddings().weight)
    model.save_pretrained(folder, max_shard_size=shard)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))


def logits(model: Model, ids: list[int]) -> np.ndarray:
    with closing(bind(model, all_logits=True)) as session:
        return session.logits(ids)


def bind(model: Model, **options: bool) -> Session:
    return make_session(model, threads=2, act_prec="fp32", kv_dtype="f32", **options)


@pytest.mark.parametrize("shard", ["1GB", "30KB"])
def test_another_head_is_used_as_transformers_uses_it(shard: str, tmp_path: Path) -> None:
    write(tmp_path, shard=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = prompt_of("tied", VOCAB, 24)
    model = load_model(open_checkpoint(tmp_path))
    assert not model.spec.tied and HEAD in model.weights
    got, expected = logits(model, ids), reference_logits(reference, ids)
    assert np.abs(got - expected).max() <= 1e-4
    with closing(bind(model)) as session:
        made = [token.id for token in session.generate([ids], 16, stop_ids=frozenset())]
    assert made == reference_greedy(reference, ids, 16)


def test_a_converted_model_keeps_its_head(tmp_path: Path) -> None:
    write(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "iebin")
    copy = load_model(open_iebin(tmp_path / "iebin" / "model.ie.json"))
    ids = prompt_of("tied", VOCAB, 24)
    expected = logits(load_model(open_checkpoint(tmp_path / "hf")), ids)
    assert logits(copy, ids).tobytes() == expected.tobytes()


def test_a_copy_of_the_embedding_is_not_read_twice(tmp_path: Path) -> None:
    write(tmp_path, copied=True)
    spec, needs = describe(open_checkpoint(tmp_path))
    assert spec.tied and EMBED in needs and HEAD not in needs
