"""The candidates of a row are what a sort of it gives, on the CPU and in Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from one_op import run

from clocher_kernels.cuda.launch import INTERPRETER, execute
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.ops.sampling import NO_TOKEN
from clocher_kernels.ops.top_tokens import top_tokens as reference


def on_cpu(logits: np.ndarray, k: int) -> np.ndarray:
    sizes = {"R": logits.shape[0], "V": logits.shape[1], "K": k}
    return run("top_tokens", sizes, {}, {"logits": logits})["candidates"]


def on_cuda(logits: np.ndarray, k: int) -> np.ndarray:
    got = torch.full((len(logits), k), 7, dtype=torch.int32)
    tensor = torch.from_numpy(logits.copy())
    execute(LOWER["top_tokens"](logits=tensor, candidates=got, device=INTERPRETER))
    return got.numpy()


def expected(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the same by Python's sort."""
    rows = []
    for row in logits.tolist():
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        odd = not np.isfinite(row).all()
        rows.append([NO_TOKEN] * k if odd else order + [NO_TOKEN] * (k - len(order)))
    return np.array(rows, np.int32)


def test_the_reference_sorts() -> None:
    logits = np.float32([[1, 3, 2, 3, -0.0, 0.0], [0, 0, np.nan, 0, 0, 0], [-1, -2, 0, -0.0, 9, 8]])
    got = np.full((3, 4), 7, np.int32)
    reference(logits=logits, candidates=got)
    assert got.tolist() == [[1, 3, 2, 0], [NO_TOKEN] * 4, [4, 5, 2, 3]]
    np.testing.assert_array_equal(got, expected(logits, 4))


@settings(max_examples=150)
@given(
    st.integers(1, 300),
    st.integers(1, 9),
    st.sampled_from(["plain", "ties", "equal", "rising", "falling", "lowest", "odd"]),
    st.integers(0, 2**32),
)
def test_the_cpu_gives_what_a_sort_gives(v: int, k: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rows_of(kind, v, rng)
    np.testing.assert_array_equal(on_cpu(logits, k), expected(logits, k))


def rows_of(kind: str, v: int, rng: np.random.Generator) -> np.ndarray:
    logits = rng.standard_normal((3, v)).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "equal":
        return np.full_like(logits, -2.5)
    if kind in ("rising", "falling"):
        return np.sort(logits, axis=1)[:, :: 1 if kind == "rising" else -1].copy()
    if kind == "lowest":
        logits[:, v // 8 :] = np.finfo(np.float32).min
    if kind == "odd":
        logits[1, rng.integers(v)] = rng.choice([np.nan, np.inf, -np.inf])
    return logits


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "rising", "lowest", "odd"])
@pytest.mark.parametrize(("v", "k"), [(4500, 4), (2049, 8), (3, 4)])
def test_cuda_gives_what_a_sort_gives(kind: str, v: int, k: int) -> None:
    logits = rows_of(kind, v, np.random.default_rng(v))
    np.testing.assert_array_equal(on_cuda(logits, k), expected(logits, k))
    # The counters are ready for the next step.
    np.testing.assert_array_equal(on_cuda(logits[::-1].copy(), k), expected(logits[::-1], k))


def test_a_real_vocabulary() -> None:
    logits = rows_of("ties", 201_088, np.random.default_rng(5))
    np.testing.assert_array_equal(on_cpu(logits, 4), expected(logits, 4))
