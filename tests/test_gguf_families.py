"""GGUF files of every family: the same logits, bit for bit, as the Hugging Face directory."""

from pathlib import Path

import numpy as np
import pytest
from gguf_families import ARCHITECTURES, make_family, write_family
from random_models import prompt_of
from sessions import make_session

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.engine.load import load_model


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    session = make_session(
        load_model(checkpoint), backend="cpu", threads=2, chunk=23, all_logits=True, act_prec="fp32"
    )
    try:
        return session.logits(ids)
    finally:
        session.close()


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_directory(family: str, seed: int, tmp_path: Path) -> None:
    config = make_family(family, seed, tmp_path / "model")
    path = write_family(family, tmp_path / "model", tmp_path / "a.gguf")
    ids = prompt_of(f"{family}-{seed}", config["vocab_size"])
    expected = logits(open_checkpoint(tmp_path / "model"), ids)
    assert np.abs(expected).max() > 0.01
    assert np.array_equal(logits(open_checkpoint(path, verify=True), ids), expected)


def test_joined_projections_and_experts_are_taken_apart(tmp_path: Path) -> None:
    """As the converter writes them when it is told to fuse."""
    config = make_family("mixtral", 0, tmp_path / "model")
    path = write_family("mixtral", tmp_path / "model", tmp_path / "a.gguf", fused=True)
    assert not any("attn_q." in name or "ffn_gate_exps" in name for name in GgufFile(path).tensors)
    ids = prompt_of("fused", config["vocab_size"])
    expected = logits(open_checkpoint(tmp_path / "model"), ids)
    assert np.array_equal(logits(open_checkpoint(path, verify=True), ids), expected)
