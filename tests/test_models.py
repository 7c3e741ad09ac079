"""Every family equals transformers on random tiny models: logits and greedy ids."""

from pathlib import Path

import numpy as np
import pytest
from random_models import (
    BITNET,
    FAMILIES,
    make,
    make_bitnet,
    make_mxfp4,
    prompt_of,
    reference_greedy,
    reference_logits,
)

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session

COUNT = 20
GREEDY = 64
FP32_RMS = 1e-4

# Both sides quantise activations to int8. Where x * 127 / absmax is within fp32 rounding of a half,
# they may round to neighbouring codes; one such flip moves logits by up to about this much.
INT8_RMS = 2e-2


def compare(model, folder: Path, name: str, limit: float, backend: str = "cpu") -> None:
    """Compare logits of a prompt, then greedy ids, with those of transformers.

    In fp32 the ids must be the same. With int8 activations each id must be one whose logit, by
    transformers for the same text, is within the limit of the best.
    """
    spec_vocab = model.config.vocab_size
    ids = prompt_of(name, spec_vocab)
    loaded = load_model(open_checkpoint(folder))
    session = Session(
        loaded,
        backend=backend,
        threads=2,
        chunk=23,
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
        else:
            logits = reference_logits(model, ids + made[:-1])[len(ids) - 1 :]
            behind = logits.max(axis=1) - logits[np.arange(GREEDY), made]
            assert np.all(behind <= 3 * limit * np.sqrt(np.mean(logits**2, axis=1)))
    finally:
        session.close()


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family: str, seed: int, tmp_path: Path) -> None:
    compare(
        make(family, seed, tmp_path / "model"), tmp_path / "model", f"{family}-{seed}", FP32_RMS
    )


@pytest.mark.parametrize("seed", range(COUNT))
def test_gpt_oss_mxfp4_equals_transformers_dequantised(seed: int, tmp_path: Path) -> None:
    model = make_mxfp4(seed, tmp_path / "model")
    compare(model, tmp_path / "model", f"mxfp4-{seed}", FP32_RMS)


@pytest.mark.parametrize("seed", range(COUNT // 2))
@pytest.mark.parametrize("kind", BITNET)
def test_bitnet_equals_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    model = make_bitnet(kind, seed, tmp_path / "model")
    compare(model, tmp_path / "model", f"bitnet-{kind}-{seed}", INT8_RMS)


@pytest.mark.parametrize("kind", BITNET)
def test_bitnet_with_input_norms(kind: str, tmp_path: Path) -> None:
    model = make_bitnet(kind, 100, tmp_path / "model", use_rms_norm=True)
    compare(model, tmp_path / "model", f"bitnet-norm-{kind}", INT8_RMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_back_end_equals_transformers(family: str, tmp_path: Path) -> None:
    model = make(family, 1000, tmp_path / "model")
    compare(model, tmp_path / "model", f"{family}-reference", FP32_RMS, "reference")
