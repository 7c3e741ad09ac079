"""Every family equals transformers on random tiny models: logits and greedy ids."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from random_models import (
    BITNET,
    CONTEXT,
    FAMILIES,
    MORE_FAMILIES,
    make,
    make_bitnet,
    make_mxfp4,
    prompt_of,
    reference_greedy,
    reference_logits,
)
from sessions import make_session

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import load_model

COUNT = 20
GREEDY = 64
FP32_RMS = 1e-4

# Both sides quantise activations to int8. Where x * 127 / absmax is within fp32 rounding of a half,
# they may round to neighbouring codes; one such flip moves logits by up to about this much.
INT8_RMS = 2e-2

TRANSFORMERS = f"transformers {transformers.__version__}"
Saw = Callable[..., None]


def compare(
    model, folder: Path, name: str, limit: float, backend: str = "cpu"
) -> tuple[float, bool]:
    """Compare logits of a prompt, then greedy ids, with those of transformers.

    In fp32 the ids must be the same. With int8 activations each id must be one whose logit, by
    transformers for the same text, is within the limit of the best.

    Returns:
        The relative RMS of the differences of logits, and whether all ids were the same.
    """
    spec_vocab = model.config.vocab_size
    ids = prompt_of(name, spec_vocab)
    loaded = load_model(open_checkpoint(folder))
    session = make_session(
        loaded,
        backend=backend,
        threads=2,
        chunk=23,
        context=CONTEXT,
        all_logits=True,
        act_prec="fp32",
        kv_dtype="f32",
    )
    try:
        expected, got = reference_logits(model, ids), session.logits(ids)
        error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
        assert error <= limit, f"relative RMS {error:.2e}"
        made = [t.id for t in session.generate([ids], GREEDY, stop_ids=frozenset())]
        if limit == FP32_RMS:
            assert made == reference_greedy(model, ids, GREEDY)
            same = True
        else:
            logits = reference_logits(model, ids + made[:-1])[len(ids) - 1 :]
            behind = logits.max(axis=1) - logits[np.arange(GREEDY), made]
            assert np.all(behind <= 3 * limit * np.sqrt(np.mean(logits**2, axis=1)))
            same = not behind.any()
    finally:
        session.close()
    return float(error), same


def architecture(folder: Path) -> str:
    """Return what config.json names."""
    name: str = open_checkpoint(folder).config["architectures"][0]
    return name


def note(saw: Saw, folder: Path, seen: tuple[float, bool], reader: str, form: str, by: str) -> None:
    """Take note of what `compare` has found."""
    family, (difference, same) = architecture(folder), seen
    saw(family, reader, form, by, TRANSFORMERS, difference=difference, same_ids=int(same))


def seeds(quick: int) -> list[Any]:
    """Return all seeds; those after the first few are slow."""
    return [pytest.param(n, marks=pytest.mark.slow) if n >= quick else n for n in range(COUNT)]


def family_equals_transformers(family: str, seed: int, folder: Path, saw: Saw) -> None:
    seen = compare(make(family, seed, folder), folder, f"{family}-{seed}", FP32_RMS)
    form = {"phi3_long": "float, longrope"}.get(family, "float")
    note(saw, folder, seen, "float", form, f"{TRANSFORMERS}, save_pretrained")


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family: str, seed: int, tmp_path: Path, saw: Saw) -> None:
    family_equals_transformers(family, seed, tmp_path / "model", saw)


@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_other_family_equals_transformers(family: str, seed: int, tmp_path: Path, saw: Saw) -> None:
    family_equals_transformers(family, seed, tmp_path / "model", saw)


@pytest.mark.parametrize("seed", seeds(6))
def test_gpt_oss_mxfp4_equals_transformers_dequantised(seed: int, tmp_path: Path, saw: Saw) -> None:
    model = make_mxfp4(seed, tmp_path / "model")
    seen = compare(model, tmp_path / "model", f"mxfp4-{seed}", FP32_RMS)
    note(saw, tmp_path / "model", seen, "mxfp4", "experts in MXFP4", "the test, as OpenAI's files")


@pytest.mark.parametrize("seed", seeds(3)[: COUNT // 2])
@pytest.mark.parametrize("kind", BITNET)
def test_bitnet_equals_transformers(kind: str, seed: int, tmp_path: Path, saw: Saw) -> None:
    model = make_bitnet(kind, seed, tmp_path / "model")
    seen = compare(model, tmp_path / "model", f"bitnet-{kind}-{seed}", INT8_RMS)
    form = f"{kind.replace('-', ', ')}; int8 activations"
    note(saw, tmp_path / "model", seen, "bitnet", form, "the test, by transformers' pack_weights")


@pytest.mark.parametrize("kind", BITNET)
def test_bitnet_with_input_norms(kind: str, tmp_path: Path) -> None:
    model = make_bitnet(kind, 100, tmp_path / "model", use_rms_norm=True)
    compare(model, tmp_path / "model", f"bitnet-norm-{kind}", INT8_RMS)


@pytest.mark.parametrize("family", (*FAMILIES, *MORE_FAMILIES))
@pytest.mark.one_in(3)
def test_reference_back_end_equals_transformers(family: str, tmp_path: Path) -> None:
    model = make(family, 1000, tmp_path / "model")
    compare(model, tmp_path / "model", f"{family}-reference", FP32_RMS, "reference")
