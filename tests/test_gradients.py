"""How much tokens count: gradients equal torch's, by the same draws; GPTQ spares tokens that do."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from calibration import make_plan, sequences
from random_models import make
from torch.nn.functional import cross_entropy
from weight_files import GPTOSS, LLAMA, write_first_layers

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.q4_map import parse_q4_map
from clocher_runtime.quantize import gradients, job
from clocher_runtime.quantize.calibrate import LayerJob
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.capture import Walk


def gradients_of(model: torch.nn.Module, texts: list[list[int]], drawn: np.ndarray) -> dict:
    """Return |g|^2 of each token by linear; `drawn` are the tokens that are scored."""
    found: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def note(_, inputs, outputs, name=f"{name}.weight"):
                found.setdefault(name, []).append(outputs[0][0].square().sum(1).numpy())

            module.register_full_backward_hook(note)
    model.requires_grad_(False)
    embedded = model.get_input_embeddings()
    embedded.register_forward_hook(lambda module, given, made: made.requires_grad_(True))
    for ids in texts:
        logits = model(torch.tensor([ids])).logits[0]
        own, drawn = drawn[: len(ids)], drawn[len(ids) :]
        cross_entropy(logits, torch.tensor(own), reduction="sum").backward()
    return {name: np.concatenate(each) for name, each in found.items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "olmo2", "granite"])
def test_they_are_those_of_torch(family: str, tmp_path: Path, monkeypatch) -> None:
    model, drawn = make(family, 0, tmp_path / "model"), list[np.ndarray]()
    draw = gradients._drawn

    def noted(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        found = draw(logits, rng)
        drawn.append(found.argmin(axis=1))  # the only negative one: p - 1
        return found

    monkeypatch.setattr(gradients, "_drawn", noted)
    monkeypatch.setattr(gradients, "PART_TOKENS", 100)  # two parts
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, model.config.vocab_size, count).tolist() for count in (40, 17, 90)]
    found = gradients.token_weights(open_checkpoint(tmp_path / "model"), make_text(texts), 2)
    wanted = gradients_of(model, texts, np.concatenate(drawn))
    same = {"model.embed_tokens.weight": "lm_head.weight"}  # if tied
    for name, counts in found.items():
        expected = wanted.get(name, wanted.get(same.get(name, ""), np.zeros(0)))
        if family == "granite":  # its stream is stored divided by a factor
            counts, expected = counts / counts.mean(), expected / expected.mean()
        assert counts.shape == expected.shape, name
        assert np.abs(counts - expected).max() <= 0.01 * expected.max(), name
    assert len(found) == len(wanted)


def test_tokens_are_drawn_as_likely_as_they_are() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1]], np.float32)).repeat(20_000, axis=0)
    slopes = gradients._drawn(logits, np.random.default_rng(0))
    assert np.abs(slopes.mean(axis=0)).max() < 0.02  # the score has mean zero
    assert np.abs((slopes < 0).mean(axis=0) - [0.7, 0.2, 0.1]).max() < 0.02


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gemma2"])
def test_without_a_derivative_all_tokens_count_alike(family: str, tmp_path: Path) -> None:
    make(family, 0, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    assert gradients.token_weights(checkpoint, make_text([[1, 2, 3], [4, 5]])) == {}


def test_gptq_spares_the_tokens_that_count() -> None:
    checkpoint = open_checkpoint(LLAMA)
    name = "model.layers.1.mlp.down_proj.weight"
    plan = make_plan(checkpoint, {"pattern": name, "dtype": "tcq2", "method": "gptq"})
    walk = Walk(checkpoint, make_text(sequences(checkpoint, 16, 64)), 2)
    walk.layers([0])
    spared = np.zeros(len(walk.text.ids), bool)
    spared[::4] = True
    inputs, errors = {}, []

    class Inputs(LayerJob):
        def linear(self, weights, x, rows):
            inputs.setdefault(weights[0], []).append(x.copy())
            super().linear(weights, x, rows)

    for counts in ({}, {name: np.where(spared, 3.7, 0.1).astype(np.float32)}):
        walk.counts = counts
        job = Inputs(walk, plan.tensors, 2, 0)
        walk.layer(1, job)
        wrong = job.finish()[name].decode() - checkpoint.tensor(name).decode()
        lost = np.square(np.concatenate(inputs.pop(name)) @ wrong.T).sum(axis=1)
        errors.append((lost[spared].mean(), lost[~spared].mean()))
    (before, other), (after, more) = errors
    assert after < 0.9 * before
    assert more > other


@pytest.mark.parametrize(("model", "signal"), [(LLAMA, "gradients"), (GPTOSS, "kld")])
def test_a_job_takes_the_gradients_once_or_says_that_there_are_none(
    model: Path, signal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_first_layers(model, tmp_path / "model", 1))
    rule = {"pattern": ".*_proj.weight", "dtype": "int4", "group": 128, "method": "gptq"}
    rules = parse_q4_map({"version": 1, "rules": [rule]}, tmp_path / "rules.json")
    record = {"name": "t", "nbytes": 1, "sha256": "0" * 64, "sequences": 4, "seq_len": 64} | {
        "tokens": 256, "tokens_sha256": "0" * 64, "bos": False, "seed": 0
    }  # fmt: skip
    text = job.CalibrationText(tuple(map(tuple, sequences(checkpoint, 4, 64))), record)
    asked = job.Job(checkpoint, tmp_path / "q4.json", rules, calibration=text, target_bpw=5)
    taken, said = [], list[str]()

    def noted(*given, **more):
        taken.append(gradients.token_weights(*given, **more))
        return taken[-1]

    monkeypatch.setattr(job, "token_weights", noted)
    outcome = job.run_job(asked, asked.plan(), note=said.append)
    assert len(taken) == 1
    assert bool(taken[0]) == (signal == "gradients")
    assert (job.ALIKE in said) == (signal == "kld")
    assert outcome.allocation["signal"] == signal
    plain = replace(asked, out=tmp_path / "plain.json", target_bpw=None)
    job.run_job(plain, plain.plan())
    assert len(taken) == 1, "where no format is chosen there are none"
    assert all(unit["kld_alone"] > 0 for unit in outcome.allocation["units"])
