"""Perplexity on held-out text equals what transformers gives; quantised loads stay near it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sessions import loss_of, make_session
from transformers import AutoModelForCausalLM

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.load import load_model
from clocher_runtime.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
MODELS = {
    "gptoss": embedded_model(),
    "bitnet": DATA / "clocher-tiny-bitnet",
    "llama": DATA / "clocher-tiny-llama",
}
# Mean loss by transformers 5.23.0 (torch 2.13.0, CPU) over the same 61 windows of 256 tokens of the
# first 60 000 characters of valid.txt; fp32, BitNet in bf16, which is what transformers runs it in.
TRANSFORMERS_LOSS = {
    "gptoss": 2.9177955779872957,
    "bitnet": 3.3427704045029936,
    "llama": 3.409585802281489,
}


def held_out_ids(name: str) -> list[int]:
    checkpoint = open_checkpoint(MODELS[name])
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    return tokenizer.encode((DATA / "valid.txt").read_text(encoding="utf-8")[:60_000])


def score(name: str, precision: str | None = None, limit: int | None = None) -> float:
    model = load_model(open_checkpoint(MODELS[name]), precision)
    session = make_session(
        model,
        threads=2,
        context=256,
        chunk=256,
        all_logits=True,
        act_prec="fp32",
        kv_dtype="f32",
    )
    try:
        ids = held_out_ids(name)[: limit and 256 * limit]
        return float(np.exp(loss_of(session, ids, 256)))
    finally:
        session.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_to_three_digits(name: str) -> None:
    assert f"{score(name):.3g}" == f"{np.exp(TRANSFORMERS_LOSS[name]):.3g}"
    assert score(name) == pytest.approx(np.exp(TRANSFORMERS_LOSS[name]), rel=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "increase"), [("int8w", 0.005), ("int4w", 0.10)])
@pytest.mark.parametrize("name", ["gptoss", "llama"])
def test_weight_only_increase(name: str, precision: str, increase: float) -> None:
    assert score(name, precision) < (1 + increase) * np.exp(TRANSFORMERS_LOSS[name])


@pytest.mark.parametrize("name", ["gptoss", "llama"])
def test_first_windows_equal_transformers(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32)
    windows = torch.tensor(held_out_ids(name)[: 3 * 256]).view(3, 256)
    with torch.no_grad():
        loss = float(np.mean([model(w[None], labels=w[None]).loss.item() for w in windows]))
    assert score(name, limit=3) == pytest.approx(np.exp(loss), rel=1e-5)


@pytest.mark.parametrize("name", ["gptoss", "llama"])
def test_int8w_first_windows(name: str) -> None:
    assert score(name, "int8w", limit=3) == pytest.approx(score(name, limit=3), rel=0.005)
