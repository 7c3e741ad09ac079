"""Sampling on CUDA, in Triton's interpreter, against the NumPy reference."""

import numpy as np
import pytest
import torch

from clocher_kernels.cuda.launch import INTERPRETER, execute
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.ops.sampling import sample as reference

VOCABULARY = 4500
ROWS = 7


def draw(logits: np.ndarray, **settings: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what the interpreter and the reference choose for rows with the same settings."""
    rows = len(logits)
    values = {
        "logits": logits,
        "temperature": np.full(rows, settings.get("temperature", 1), np.float32),
        "top_k": np.full(rows, settings.get("top_k", 0), np.int32),
        "top_p": np.full(rows, settings.get("top_p", 1), np.float32),
        "seeds": np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1),
        "draws": np.arange(rows, dtype=np.int32) * 1000,
    }
    return choose(values)


def choose(values: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    rows = len(values["logits"])
    tensors = {n: torch.from_numpy(v.copy()) for n, v in values.items() if n != "seeds"}
    tensors["seeds"] = torch.from_numpy(values["seeds"].view(np.int64).copy())
    got = torch.full((rows,), -1, dtype=torch.int32)
    execute(LOWER["sample"](**tensors, ids=got, device=INTERPRETER))
    expected = np.full(rows, -1, np.int32)
    reference(**values, ids=expected)
    return got.numpy(), expected


def normal(rows: int = ROWS, vocabulary: int = VOCABULARY) -> np.ndarray:
    rng = np.random.default_rng(vocabulary)
    return rng.standard_normal((rows, vocabulary), dtype=np.float32) * np.float32(4)


def test_rows_of_different_settings_and_several_programs() -> None:
    logits = normal()
    logits[2] = np.round(logits[2])
    values = {
        "logits": logits,
        "temperature": np.array([0, 1, 1.5, 0.3, 1, 0.8, 0], np.float32),
        "top_k": np.array([5, 0, 300, 1, VOCABULARY + 9, 2500, 0], np.int32),
        "top_p": np.array([0.5, 0.95, 0.8, 1, 1e-6, 0.9999, 1], np.float32),
        "seeds": np.arange(ROWS).astype(np.uint64) + np.uint64(1 << 63),
        "draws": np.arange(ROWS).astype(np.int32),
    }
    got, expected = choose(values)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("equal", {"top_k": 40}),
        ("equal", {"top_p": 0.3}),
        ("rounded", {"top_k": 100, "top_p": 0.7}),
        ("lowest", {"top_k": 50, "top_p": 0.99}),
        ("normal", {"temperature": 1e-6}),
        ("normal", {"temperature": 1e-30, "top_k": 3}),
        ("normal", {"temperature": 1e4, "top_k": 2049, "top_p": 0.5}),
        ("zeros", {"top_k": 2}),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{k}={x}" for k, x in v.items()),
)
def test_hard_rows(name: str, settings: dict[str, float]) -> None:
    logits = normal(2)
    if name == "equal":
        logits[:] = 2.5
    elif name == "rounded":
        logits[:] = np.round(logits)
    elif name == "lowest":
        logits[:, 10:] = -1e30
    elif name == "zeros":
        logits[:] = -1
        logits[:, 7], logits[:, 9], logits[:, 11] = -0.0, 0.0, 0.0
    got, expected = draw(logits, **settings)
    np.testing.assert_array_equal(got, expected)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = normal(4)
    for row, ids in enumerate([(4499, 17), (2048, 2047), (0, 4096), (3000, 2999)]):
        logits[row, list(ids)] = 99
    got, expected = draw(logits, temperature=0)
    np.testing.assert_array_equal(got, expected)
    assert got.tolist() == [17, 2047, 0, 2999]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_row_that_is_not_finite_gives_no_token(odd: float, temperature: float) -> None:
    logits = normal(4)
    clean, _ = draw(logits, temperature=temperature, top_k=20, top_p=0.9)
    logits[0, 4499], logits[2] = odd, odd
    got, expected = draw(logits, temperature=temperature, top_k=20, top_p=0.9)
    np.testing.assert_array_equal(got, expected)
    assert got.tolist() == [-1, clean[1], -1, clean[3]]
    # And what it skipped is ready for the next step.
    np.testing.assert_array_equal(draw(normal(4), temperature=0.8, top_k=20)[0] >= 0, True)


def test_a_choice_does_not_depend_on_other_rows() -> None:
    logits = normal(3, 700)
    together, _ = draw(logits, top_k=30, top_p=0.9)
    assert draw(logits[:1], top_k=30, top_p=0.9)[0][0] == together[0]


def test_counters_and_bins_are_left_at_zero() -> None:
    draw(normal(2, 700), top_k=30, top_p=0.9)
    names = ("sample_arrivals", "sample_counts", "sample_bin_masses")
    left = [t for key, t in INTERPRETER._scratch.items() if key[0] in names]
    assert left and not any(t.any() for t in left)
