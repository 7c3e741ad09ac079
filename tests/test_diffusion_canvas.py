"""The rule `canvas` beside the sampler of DiffusionGemma that transformers has."""

import numpy as np
import pytest
import torch
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from clocher_runtime.diffusion.canvas import Canvas
from clocher_runtime.diffusion.rules import rule_of
from clocher_runtime.models.spec import BlockDiffusion

BLOCK, VOCABULARY, MASK = 16, 50, 7


BLOCKS = BlockDiffusion(BLOCK, MASK, "block", part=BLOCK)


def begun(rule: str, known: list[int], seed: int = 3) -> Canvas:
    canvas = Canvas(BLOCKS, rule_of(rule), VOCABULARY, seed)
    canvas.begin(known)
    return canvas


def logits(shown: list[int], scale: float) -> np.ndarray:
    """Return logits [B, V] fp32 that depend on what is shown."""
    rng = np.random.default_rng(5)
    table = rng.standard_normal((VOCABULARY, VOCABULARY))
    own = rng.standard_normal((BLOCK, VOCABULARY))
    rows = scale * (own + 0.02 * table[shown])
    return rows.astype(np.float32)


@pytest.mark.parametrize("known", [[], [4, 9, 2]])
@pytest.mark.parametrize(("scale", "bound", "most"), [(2, 1.5, 6), (4, 0.5, 6), (60, 0.1, 48)])
def test_a_canvas_is_accepted_and_ends_as_in_transformers(
    scale: float, bound: float, most: int, known: list[int]
) -> None:
    canvas, rng = begun(f"canvas:{bound},{most}", known), np.random.default_rng(0)
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), BLOCK, VOCABULARY, most)
    warmth = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, most)
    calm = StableAndConfidentStoppingCriteria(1, 0.005)
    own = slice(len(known), None)
    drawn = np.zeros(BLOCK, int)
    renewed: list[bool] = []

    def draw(row: np.ndarray, at: int) -> int:
        chance = np.exp(row.astype(np.float64) - row.max())
        drawn[at] = rng.choice(VOCABULARY, p=chance / chance.sum())
        return int(drawn[at])

    for step in range(most, 0, -1):
        shown = list(canvas.shown)
        assert shown[: len(known)] == known and MASK not in shown
        rows = logits(shown, scale)
        canvas.see(rows, draw, keep=True)
        without = torch.tensor(rows[None, own]).double()
        without[..., MASK] = -np.inf
        warm = warmth(None, without, step)
        likeliest = warm.argmax(dim=-1)
        if calm(likeliest, warm) or step == 1:
            assert canvas.ids[own] == likeliest[0].tolist()
            assert set(canvas.logits) == set(range(len(known), BLOCK))
            break
        fresh = torch.full_like(likeliest, -1)
        accepted = sampler.accept_canvas(fresh, torch.tensor(drawn[None, own]), warm, step)[0]
        took = sampler.accepted_token_mask[0].numpy()
        after = np.array(canvas.shown)[own]
        assert (after[took] == accepted.numpy()[took]).all()
        before = np.array(shown)[own]
        renewed += (after != before)[~took].tolist()
        assert canvas.sure() == []
    assert canvas.sure() == likeliest[0].tolist()
    assert step == 1 or scale == 60
    assert len(renewed) < 10 or np.mean(renewed) > 0.8  # ids may come twice


def test_noise_is_of_the_seed_and_never_the_mask() -> None:
    shown = begun("canvas", [4]).shown
    assert shown == begun("canvas", [4]).shown != begun("canvas", [4], seed=4).shown
    many = {i for seed in range(200) for i in begun("canvas", [], seed).shown}
    assert many == set(range(VOCABULARY)) - {MASK}
