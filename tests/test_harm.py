"""Harms: what is predicted from gradients is near what is measured, and needs no measuring."""

import numpy as np
import pytest
from calibration import make_plan, sequences
from weight_files import LLAMA

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quantize import harm
from clocher_runtime.quantize.alloc import TRELLISES, room_of
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.gptq import InputStats, uncompensated
from clocher_runtime.quantize.gradients import token_weights

RULE = {"pattern": r".*layers\..*_proj.*", "dtype": "tcq3", "method": "gptq"}


def test_what_is_predicted_is_near_what_is_measured(tmp_path, monkeypatch) -> None:
    checkpoint = open_checkpoint(LLAMA)
    text = sequences(checkpoint, 24, 128)
    room = room_of(make_plan(checkpoint, RULE), 3.4)
    found = token_weights(checkpoint, make_text(text), 2)
    file = tmp_path / "kept.jsonl"
    given = checkpoint, room.units, TRELLISES, room.base, text
    settings = 2, 0, lambda *_: None
    measured = harm.harms_of(*given, Kept(None, {}), dict, *settings)
    monkeypatch.setattr(harm, "measure_units", None)
    predicted = harm.harms_of(*given, Kept(file, {}), lambda: found, *settings)
    assert (measured.signal, predicted.signal) == ("kld", "gradients")
    pairs = [(measured.of[unit][room.base], predicted.of[unit][room.base]) for unit in room.units]
    ratios = np.log([a / b for a, b in pairs])
    assert abs(np.median(ratios)) < np.log(2)
    assert np.std(ratios) < 0.7
    assert np.corrcoef(np.log(pairs).T)[0, 1] > 0.8
    monkeypatch.setattr(harm, "_TOKENS", 1000)
    fewer = harm.harms_of(*given, Kept(None, {}), lambda: found, *settings)
    assert (predicted.tokens, fewer.tokens) == (24 * 128, 7 * 128)
    ratios = np.log([np.divide(fewer.of[unit], predicted.of[unit]) for unit in room.units])
    assert np.abs(ratios).max() < np.log(1.6) and np.std(ratios) < 0.25
    monkeypatch.setattr(harm, "_TOKENS", 8192)
    monkeypatch.setattr(harm, "predict", None)
    again = harm.harms_of(*given, Kept(file, {}), None, *settings)  # nor are gradients taken
    assert again == predicted


def test_some_tokens_are_of_all_the_text_and_none_is_held_out() -> None:
    text = make_text([[i] * 100 for i in range(32)])
    some, rows = text.some(1000)
    assert some.lengths == (100,) * 10 and not some.held.any() and text.held.any()
    assert (some.ids == text.ids[rows]).all()
    assert sorted(set(some.ids.tolist())) == [0, 3, 6, 9, 12, 16, 19, 22, 25, 28]
    assert text.some(10)[0].lengths == (100,)
    assert text.some(1 << 20)[0].lengths == text.lengths


def test_what_gptq_leaves_is_the_trace_of_the_diagonal_factor() -> None:
    rng = np.random.default_rng(0)
    stats = InputStats(64, hessian=True)
    inputs = rng.standard_normal((4096, 4), dtype=np.float32) @ rng.standard_normal((4, 64))
    stats.add(inputs.astype(np.float32), np.zeros(4096, bool))
    matrix = stats.hessian / 2
    left = uncompensated(matrix)
    # Four directions carry everything: besides them there is what damping adds.
    assert 0.05 * np.trace(matrix) < left < 0.2 * np.trace(matrix)
    assert uncompensated(np.eye(64, dtype=np.float32)) == pytest.approx(1.05 * 64)
    turned = uncompensated(matrix, 64)
    assert np.isfinite(turned) and turned < 0.2 * np.trace(matrix)
