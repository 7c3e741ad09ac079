"""Whole models on the CUDA back end's own kernels, in Triton's interpreter, against the reference.

Each takes half a minute, so the default run leaves them out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cases import INTERPRETER
from random_models import make, make_bitnet, make_mxfp4
from sessions import make_session

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.plan import Plan
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine import binding
from clocher_runtime.engine.load import Model, load_model

IDS = list(range(5, 17))


def logits(model: Model, backend: str, **options: Any) -> np.ndarray:
    session = make_session(
        model, backend=backend, context=64, chunk=8, all_logits=True, kv_dtype="bf16", **options
    )
    try:
        return session.logits(IDS)
    finally:
        session.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "activations", "limit"),
    [
        ("mxfp4", "f32", 1e-3),
        ("mxfp4", "f16", 1e-2),
        ("bitnet", "f16", 2e-2),
        ("llama", "f32", 1e-4),
        ("qwen3", "f16", 1e-2),
    ],
)
def test_a_model_equals_the_reference(
    family: str, activations: str, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    if family == "mxfp4":
        make_mxfp4(3, folder)
    elif family == "bitnet":
        make_bitnet("offline-bitlinear", 3, folder)
    else:
        make(family, 3, folder)
    model = load_model(open_checkpoint(folder))
    expected = logits(model, "reference", act_prec="fp32")

    def executor(
        plan: Plan, weights: Mapping[str, Any], *how: object, **more: object
    ) -> CudaExecutor:
        return CudaExecutor(plan, weights, activations=activations, device=INTERPRETER)

    monkeypatch.setattr(binding, "make_executor", executor)
    got = logits(model, "cuda")
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)) < limit
    assert np.mean(got.argmax(axis=1) == expected.argmax(axis=1)) > 0.9
