"""Whole models on the CUDA back end's own kernels, in Triton's interpreter, against the reference.

Each takes half a minute, so the default run leaves them out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_cases import INTERPRETER
from gguf_files import F32, Kind, raw_blocks, write_gguf
from random_models import make, make_bitnet, make_mxfp4
from sessions import make_session

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.plan import Plan
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.engine import binding
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import Model, load_model

IDS = list(range(5, 17))
LLAMA = Path(__file__).parent / "data/clocher-tiny-llama"


def logits(model: Model, backend: str, **options: Any) -> np.ndarray:
    session = make_session(
        model, backend=backend, context=64, chunk=8, all_logits=True, kv_dtype="bf16", **options
    )
    try:
        return session.logits(IDS)
    finally:
        session.close()


def interpreted(patch: pytest.MonkeyPatch, activations: str) -> None:
    """Let sessions run on the CUDA executor, in the interpreter."""

    def executor(
        plan: Plan, weights: Mapping[str, Any], *how: object, **more: object
    ) -> CudaExecutor:
        return CudaExecutor(plan, weights, activations=activations, device=INTERPRETER)

    patch.setattr(binding, "make_executor", executor)


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
    interpreted(monkeypatch, activations)
    got = logits(model, "cuda")
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)) < limit
    assert np.mean(got.argmax(axis=1) == expected.argmax(axis=1)) > 0.9


SHAPES = {
    "token_embd": (64, 256, Kind.Q5_1),
    "output_norm": (256,),
    "output": (64, 256, Kind.Q6_K),
    "blk.0.attn_norm": (256,),
    "blk.0.ffn_norm": (256,),
    "blk.0.attn_q": (256, 256, Kind.Q4_K),
    "blk.0.attn_k": (128, 256, Kind.Q4_K),
    "blk.0.attn_v": (128, 256, Kind.Q6_K),
    "blk.0.attn_output": (256, 256, Kind.Q5_0),
    "blk.0.ffn_gate": (256, 256, Kind.Q4_1),
    "blk.0.ffn_up": (256, 256, Kind.Q4_1),
    "blk.0.ffn_down": (256, 256, Kind.Q5_K),
}
"""A Llama of one layer, each type of blocks in it."""


@pytest.mark.slow
def test_a_file_of_ggmls_blocks_gives_the_ids_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 256, "vocab_size": 64}
    rng, tensors = np.random.default_rng(4), {}
    for name, (*shape, kind) in SHAPES.items():
        if not shape:
            tensors[f"{name}.weight"] = np.ones(256, np.float32), F32
        else:
            tensors[f"{name}.weight"] = raw_blocks(kind, rng.standard_normal(shape) / 16)
    path = write_gguf(tmp_path / "a.gguf", open_checkpoint(LLAMA).config | sizes, tensors)
    model = load_model(open_checkpoint(path))

    def generated(backend: str) -> list[int]:
        options = {"context": 64, "chunk": 64, "kv_dtype": "bf16", "itl_ms": 1e9}
        session = make_session(model, backend=backend, act_prec="fp32", **options)
        try:
            tokens = session.generate([list(range(40))], 8, Sampling(temperature=0.0))
            return [token.id for token in tokens]
        finally:
            session.close()

    expected = generated("cpu")
    interpreted(monkeypatch, "f32")
    assert len(expected) == 8 and generated("cuda") == expected
