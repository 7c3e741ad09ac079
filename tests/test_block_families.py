"""SDAR, Fast-dLLM v2 and LLaDA2: logits and denoised texts equal a forward written out in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from block_models import CONFIGS, MASK, causal, decode, logits, write_model
from sessions import make_session
from weight_files import rng

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.families import spec_from_config


def prompt(kind: str, length: int) -> list[int]:
    return rng(f"prompt-{kind}").integers(1, MASK, length).tolist()


def session(folder: Path, diffusion: str, **more: Any) -> Session:
    model = load_model(open_checkpoint(folder))
    return make_session(
        model,
        threads=2,
        chunk=16,
        context=96,
        act_prec="fp32",
        kv_dtype="f32",
        diffusion=diffusion,
        **more,
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_causal_logits_equal_the_written_out_forward(kind: str, tmp_path: Path) -> None:
    tensors, ids = write_model(kind, tmp_path), prompt(kind, 45)
    running = session(tmp_path, "threshold:0.9", all_logits=True)
    try:
        got = running.logits(ids)
    finally:
        running.close()
    expected = logits(kind, tensors, ids, causal(len(ids)))
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error <= 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("tau", "length"), [(0.3, 21), (0.9, 21), (0.9, 24)])
def test_denoised_texts_equal_whole_recomputation(
    kind: str, tau: float, length: int, tmp_path: Path
) -> None:
    """The cached loop makes the ids of a loop that computes everything in every pass."""
    tensors, ids = write_model(kind, tmp_path), prompt(kind, length)
    running = session(tmp_path, f"threshold:{tau}")
    try:
        made = [t.id for t in running.generate([ids], 24, stop_ids=frozenset())]
    finally:
        running.close()
    expected, passes = decode(kind, tensors, ids, 24, tau)
    assert made == expected
    assert tau > 0.5 or passes < 24  # at the low threshold some passes write several


def test_published_fields_are_read() -> None:
    spec = spec_from_config(CONFIGS["llada2"])
    assert spec.diffusion is not None and spec.moe is not None
    assert (spec.diffusion.block, spec.diffusion.mask, spec.diffusion.context) == (8, MASK, "block")
    assert spec.rope.rotated == 8 and spec.qk_norm == "heads" and spec.num_kv_heads == 2
    assert (spec.moe.groups, spec.moe.group_top, spec.moe.dense_layers) == (4, 2, (0,))
    fast = spec_from_config(CONFIGS["fast_dllm"])
    assert fast.diffusion is not None and fast.qkv_bias
    assert (fast.diffusion.block, fast.diffusion.part, fast.diffusion.shift) == (8, 4, True)
    many = spec_from_config({**CONFIGS["llada2"], "num_key_value_heads": 0})
    assert many.num_kv_heads == many.num_heads


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"norm_head": True}, UnsupportedModel, "norm_head"),
        ({"moe_intermediate_size": None}, FormatError, "moe_intermediate_size"),
        ({"n_group": 3}, FormatError, "n_group"),
        ({"block_size": 5}, FormatError, "block_size"),
        ({"mask_token_id": 96}, FormatError, "mask token"),
    ],
)
def test_refusals_name_the_field(changes: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        spec_from_config({**CONFIGS["llada2"], **changes})
