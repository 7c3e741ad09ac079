"""Sampling on CUDA, in Triton's interpreter, against the NumPy reference."""

import numpy as np
import pytest
import torch
from masks import masks_of

from clocher_kernels.cuda.executor import LOWER, LOWER_GREEDY
from clocher_kernels.cuda.launch import INTERPRETER, execute
from clocher_kernels.cuda.step import InputBlock
from clocher_kernels.ops.sampling import NO_TOKEN, NONE_ALLOWED
from clocher_kernels.ops.sampling import sample as reference
from clocher_kernels.plan import Buffer, Plan

VOCABULARY = 4500
ROWS = 7


def draw(
    logits: np.ndarray, allowed: np.ndarray | None = None, **settings: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the interpreter and the reference choose for rows with the same settings."""
    rows = len(logits)
    values = {
        "logits": logits,
        "temperature": np.full(rows, settings.get("temperature", 1), np.float32),
        "top_k": np.full(rows, settings.get("top_k", 0), np.int32),
        "top_p": np.full(rows, settings.get("top_p", 1), np.float32),
        "min_p": np.full(rows, settings.get("min_p", 0), np.float32),
        "seeds": np.arange(rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1),
        "draws": np.arange(rows, dtype=np.int32) * 1000,
    }
    return choose(values, allowed)


def unedited(rows: int) -> dict[str, np.ndarray]:
    """Return lists of edits that no row has."""
    return {
        "edit_ids": np.zeros(2, np.int32),
        "edits": np.full((2, 3), 9, np.float32),
        "edit_begin": np.zeros(rows, np.int32),
        "edit_end": np.zeros(rows, np.int32),
    }


def choose(
    values: dict[str, np.ndarray], allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    rows, vocabulary = values["logits"].shape
    nothing = np.zeros((1, vocabulary), bool)
    values = {
        **unedited(rows),
        **values,
        "allowed": masks_of(nothing if allowed is None else allowed),
        "masked": (np.zeros(rows) if allowed is None else np.arange(rows) + 1).astype(np.int32),
    }
    signed = {
        name: v.view(f"i{v.itemsize}") if v.dtype.kind == "u" else v for name, v in values.items()
    }
    tensors = {name: torch.from_numpy(v.copy()) for name, v in signed.items()}
    got = torch.full((rows,), -1, dtype=torch.int32)
    lower = LOWER if values["temperature"].any() else LOWER_GREEDY
    execute(lower["sample"](**tensors, ids=got, device=INTERPRETER))
    expected = np.full(rows, -1, np.int32)
    values["logits"] = logits = values["logits"].copy()
    reference(**values, ids=expected)
    np.testing.assert_array_equal(tensors["logits"].numpy(), logits)
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
        "min_p": np.array([0.5, 0, 0.01, 0.1, 0.05, 0.2, 0], np.float32),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 50},
        {"top_p": 0.8},
        {"temperature": 1.2, "top_k": 300, "top_p": 0.9},
        {"temperature": 1e-6},
    ],
    ids=str,
)
def test_only_allowed_tokens_are_drawn(settings: dict[str, float]) -> None:
    logits = normal(5)
    allowed = np.random.default_rng(1).random(logits.shape) < 0.1
    allowed[0], allowed[1] = False, True
    allowed[2] = np.arange(VOCABULARY) == 4321
    allowed[3, logits[3] > -6] = False  # what is likely is forbidden
    got, expected = draw(logits, allowed, **settings)
    np.testing.assert_array_equal(got, expected)
    assert got[0] == NONE_ALLOWED and got[2] == 4321 and allowed[range(1, 5), got[1:]].all()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 0.7, "top_k": 50, "min_p": 0.3},
        {"temperature": 1.2, "top_k": 300, "top_p": 0.9, "min_p": 1e-4},
    ],
    ids=str,
)
def test_penalties_and_biases_are_those_of_the_reference(settings: dict[str, float]) -> None:
    rng, rows = np.random.default_rng(5), 6
    logits = normal(rows)
    logits[4, 3] = np.nan
    count = 2 * VOCABULARY
    edits = np.exp(rng.standard_normal((count, 3))).astype(np.float32) - np.float32([0, 1, 1])
    edits[rng.random(count) < 0.2, 2] = -np.inf
    edits[VOCABULARY:, 2] = -np.inf
    ids = np.concatenate([rng.permutation(VOCABULARY), rng.permutation(VOCABULARY)])
    ids[[5, 9]] = -1, VOCABULARY
    one = {name: np.full(rows, x) for name, x in settings.items()}
    values = {
        "logits": logits,
        "edit_ids": ids.astype(np.int32),
        "edits": edits,
        "edit_begin": np.array([0, 7, 100, -5, 0, VOCABULARY], np.int32),
        "edit_end": np.array([0, 8, 1700, 3000, 900, 1 << 30], np.int32),
        "temperature": one["temperature"].astype(np.float32),
        "top_k": one.get("top_k", np.zeros(rows)).astype(np.int32),
        "top_p": one.get("top_p", np.ones(rows)).astype(np.float32),
        "min_p": one.get("min_p", np.zeros(rows)).astype(np.float32),
        "seeds": np.arange(rows, dtype=np.uint64),
        "draws": np.arange(rows, dtype=np.int32),
    }
    for allowed in (None, rng.random(logits.shape) < 0.3):
        got, expected = choose(values, allowed)
        np.testing.assert_array_equal(got, expected)
        assert got[4] == NO_TOKEN and got[5] == NONE_ALLOWED


def test_a_fault_shows_behind_a_mask() -> None:
    logits = normal(2)
    logits[0, 9] = np.nan
    got, _ = draw(logits, np.zeros(logits.shape, bool), temperature=0.8)
    assert got.tolist() == [NO_TOKEN, NONE_ALLOWED]


def test_rows_share_masks_and_a_number_beyond_them_is_the_last() -> None:
    logits = normal(4, 700)
    allowed = np.zeros((2, 700), bool)
    allowed[0, 5], allowed[1, 600] = True, True
    values = {
        "logits": logits,
        "allowed": masks_of(allowed).view(np.int32),
        "masked": np.array([2, -5, 1, 9], np.int32),
        "temperature": np.ones(4, np.float32),
        "top_k": np.zeros(4, np.int32),
        "top_p": np.ones(4, np.float32),
        "min_p": np.zeros(4, np.float32),
        **unedited(4),
        "seeds": np.ones(4, np.int64),
        "draws": np.zeros(4, np.int32),
    }
    got = torch.zeros(4, dtype=torch.int32)
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    execute(LOWER["sample"](**tensors, ids=got, device=INTERPRETER))
    assert got[[0, 2, 3]].tolist() == [600, 5, 600]
    free, _ = draw(logits[1:2])  # whose seed is 1 too
    assert got[1] == free[0]


def test_a_choice_does_not_depend_on_other_rows() -> None:
    logits = normal(3, 700)
    together, _ = draw(logits, top_k=30, top_p=0.9)
    assert draw(logits[:1], top_k=30, top_p=0.9)[0][0] == together[0]


def test_counters_and_bins_are_left_at_zero() -> None:
    draw(normal(2, 700), top_k=30, top_p=0.9)
    names = ("sample_arrivals", "sample_counts", "sample_bin_masses")
    left = [t for key, t in INTERPRETER._scratch.items() if key[0] in names]
    assert left and not any(t.any() for t in left)


def test_masks_and_edits_are_sent_as_far_as_they_are_wanted() -> None:
    buffers = {
        "allowed": Buffer((3, 2), "u32", "", "input"),
        "edit_ids": Buffer((3,), "i32", "", "input"),
        "edits": Buffer((3, 3), "f32", "", "input"),
        "rows": Buffer((5,), "i32", "R", "input"),
    }
    block = InputBlock(Plan(5, 5, buffers, {}, (), ()), INTERPRETER)
    for array in block.host.values():
        array[...] = 7
    for masks, edits in ((0, 0), (2, 1), (0, 3), (None, None)):
        for tensor in block.tensors.values():
            tensor.zero_()
        block.upload(masks, edits)
        assert block.tensors["rows"].tolist() == [7] * 5
        for name, count in (("allowed", masks), ("edit_ids", edits), ("edits", edits)):
            sent = 3 if count is None else count
            assert (block.tensors[name][:sent] == 7).all(), name
            assert not block.tensors[name][sent:].any(), name
