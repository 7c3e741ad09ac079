"""A run whose logits are not finite ends with an error, and leaves nothing behind."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_cases import INTERPRETER
from planting import ODD, planted
from sessions import loss_of, make_session
from test_session import MODELS, ids_of, model_of
from weight_files import copy_model

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.errors import NonFinite
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.cli import main
from clocher_runtime.engine import binding
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Sampling

EMBED, LAST_NORM = "model.embed_tokens.weight", "model.norm.weight"
LAYER = "model.layers.1."
BAD = 7  # a token of which the prompts below have one
PROMPT = [*ids_of(0, 5), BAD, *ids_of(1, 6)]


def spoiled(name: str, weight: str, value: float, at: int = 0, factor: float = 0) -> Model:
    """Return a model with one odd value in a weight, or with a weight times a factor."""
    model = model_of(name)
    old = model.weights[weight]
    new: np.ndarray | QuantTensor | None
    if isinstance(old, np.ndarray):
        new = old.copy() if not factor else old * np.float32(factor)
        new.reshape(-1)[at] = value if not factor else new.reshape(-1)[at]
    else:
        made = (planted(old, plane, value, at) for plane in old.planes)
        new = next(found for found in made if found is not None)
    return replace(model, weights={**model.weights, weight: new})


def run(model: Model, prompts: list[list[int]], sampling: Sampling | None = None, **more) -> list:
    session = make_session(model, context=64, chunk=4, threads=2, batch=len(prompts), **more)
    try:
        with np.errstate(all="ignore"):
            return list(session.generate(prompts, 3, sampling, frozenset()))
    finally:
        session.close()


SAID = "got logits that are NaN or infinite within .*; .* activations are fp16"


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("model", "weight"),
    [
        ("llama", EMBED),
        ("llama", f"{LAYER}input_layernorm.weight"),
        ("llama", f"{LAYER}self_attn.q_proj.weight"),
        ("llama", f"{LAYER}mlp.gate_proj.weight"),
        ("llama", LAST_NORM),
        ("gptoss", f"{LAYER}mlp.experts.gate_up_proj_bias"),
        ("gptoss", f"{LAYER}self_attn.k_proj.weight"),
        ("bitnet", f"{LAYER}mlp.ffn_sub_norm.weight"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_weight_that_is_not_finite_ends_the_run(
    model: str, weight: str, odd: str, backend: str
) -> None:
    at = BAD * model_of(model).spec.hidden_size if weight == EMBED else 0
    bad = spoiled(model, weight, ODD[odd], at)
    if weight.endswith("gate_up_proj_bias"):
        bad.weights[weight][:, 0] = ODD[odd]  # whichever experts are chosen
    with pytest.raises(NonFinite, match=SAID):
        run(bad, [PROMPT], backend=backend)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}])
def test_a_fault_of_a_decode_step_is_found_too(settings: dict[str, float]) -> None:
    model = model_of("llama")
    made = [token.id for token in run(model, [PROMPT], Sampling(**settings))]
    at = made[0] * model.spec.hidden_size
    with pytest.raises(NonFinite, match=SAID) as caught:
        run(spoiled("llama", EMBED, np.nan, at), [PROMPT], Sampling(**settings))
    assert caught.value.__context__ is None  # no error of the queue stands before it


def test_an_overflow_ends_the_run() -> None:
    large = spoiled("llama", f"{LAYER}post_attention_layernorm.weight", 0, factor=1e38)
    with pytest.raises(NonFinite, match=SAID):
        run(large, [PROMPT])
    huge = spoiled("llama", EMBED, 1e30, BAD * model_of("llama").spec.hidden_size)
    with pytest.raises(NonFinite, match=SAID):  # its square is infinite
        run(huge, [PROMPT])


def test_one_sequence_of_a_batch_is_named_and_the_session_goes_on() -> None:
    good, other = [*ids_of(2, 9)], [*ids_of(3, 7)]
    assert BAD not in good + other
    bad = spoiled("llama", EMBED, np.nan, BAD * model_of("llama").spec.hidden_size)
    expected = run(model_of("llama"), [good, other])
    session = make_session(bad, context=64, chunk=4, threads=2, batch=3)
    try:
        with pytest.raises(NonFinite, match=SAID) as caught:
            list(session.generate([good, PROMPT, other], 3, stop_ids=frozenset()))
        assert caught.value.sequence == 1
        # What it left in the cache, NaN included, is not seen by those who come after.
        assert list(session.generate([good, other], 3, stop_ids=frozenset())) == expected
    finally:
        session.close()


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "f16", "e4m3", "e5m2", "i8"])
@pytest.mark.parametrize("odd", ODD)
def test_no_cache_hides_it(kv_dtype: str, odd: str) -> None:
    for name in "kv":
        bad = spoiled("llama", f"{LAYER}self_attn.{name}_proj.weight", ODD[odd])
        with pytest.raises(NonFinite, match=SAID):
            run(bad, [PROMPT], kv_dtype=kv_dtype)


def test_logits_and_perplexity_refuse() -> None:
    bad = spoiled("llama", EMBED, np.nan, BAD * model_of("llama").spec.hidden_size)
    session = make_session(bad, context=64, chunk=4, all_logits=True)
    try:
        with pytest.raises(NonFinite, match=SAID):
            session.logits(PROMPT)
        with pytest.raises(NonFinite, match=SAID):
            loss_of(session, PROMPT, len(PROMPT))
    finally:
        session.close()


def _spoil_file(folder: Path, dtype: str, name: str, at: int, value: float) -> None:
    """Cast the model to a float type, and plant a value in a tensor of it."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {key: t.to(getattr(torch, dtype)) for key, t in load_file(path).items()}
    tensors[name].reshape(-1)[at] = value
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("odd", ["nan", "inf"])
def test_the_command_exits_with_3_and_one_line(
    dtype: str, odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_model(MODELS["llama"], tmp_path / "model")
    _spoil_file(folder, dtype, f"{LAYER}self_attn.q_proj.weight", 0, ODD[odd])
    code = main(["--model-dir", str(folder), "--prompt-ids", "5,6,7", "--max-new", "2"])
    lines = capsys.readouterr().out.splitlines()
    line = json.loads(lines[-1])
    assert code == 3 and len(lines) == 1
    assert (line["status"], line["code"], line["type"]) == ("error", 3, "NonFinite")
    assert line["message"].startswith("prompt 1: got logits")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    def executor(plan, weights, *how, **more) -> CudaExecutor:
        return CudaExecutor(plan, weights, activations="f16", device=INTERPRETER)

    monkeypatch.setattr(binding, "make_executor", executor)
    return lambda model, prompts, **more: run(model, prompts, backend="cuda", **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "value", "prompt"),
    [
        (EMBED, np.inf, [5, BAD, 9]),
        (f"{LAYER}mlp.up_proj.weight", 60000.0, [5, 6, 9]),  # fp16 overflows
    ],
)
def test_cuda_ends_the_run_too(
    weight: str, value: float, prompt: list[int], interpreted: Callable[..., list]
) -> None:
    at = BAD * model_of("llama").spec.hidden_size if weight == EMBED else 0
    with pytest.raises(NonFinite, match=SAID):
        interpreted(spoiled("llama", weight, value, at), [prompt])
