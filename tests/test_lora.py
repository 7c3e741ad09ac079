"""LoRA adapters: the sum of peft's arithmetic, and what is refused.

`delta` below is written from the text of peft (tuners/lora/layer.py: `get_delta_weight`,
`update_layer`), with torch, and not from our code.
"""

import json
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import here
from random_models import prompt_of, randomize
from safetensors.torch import load_file, save_file
from serving import serving
from sessions import make_session
from transformers import AutoModelForCausalLM, LlamaConfig
from weight_files import LLAMA, rng

import clocher_runtime
from clocher_kernels.errors import (
    FormatError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    UsageError,
)
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.hf.lora import with_lora
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.inventory import EMBED, HEAD

BENCH = ("-p", "0", "-n", "2", "-r", "1", "-t", "1", "-o", "json")
VOCAB, HIDDEN, INNER = 160, 64, 96
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MODULES = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
Adapter = dict[str, torch.Tensor]


def write_base(folder: Path, dtype: torch.dtype = torch.float32, tied: bool = False) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, rng("base"))
    model.to(dtype).save_pretrained(folder)
    return folder


def drawn(name: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(0.2 * rng(name).standard_normal(shape, np.float32))


def halves(module: str, shape: tuple[int, int], rank: int = 4) -> Adapter:
    return {
        f"base_model.model.{module}.lora_A.weight": drawn(f"{module} A", rank, shape[1]),
        f"base_model.model.{module}.lora_B.weight": drawn(f"{module} B", shape[0], rank),
    }


def write_adapter(folder: Path, tensors: Adapter | None = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if tensors is None:
        tensors = {}
        for module, shape in MODULES.items():
            tensors |= halves(module, shape)
    if tensors:
        save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "own/base",
        "r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def delta(a: torch.Tensor, b: torch.Tensor, alpha: float, rslora: bool = False) -> torch.Tensor:
    r = a.shape[0]
    scaling = alpha / math.sqrt(r) if rslora else alpha / r
    return (b @ a) * scaling


def weights(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    checkpoint = with_lora(open_checkpoint(base), adapter)
    return {name: checkpoint.tensor(name).decode() for name in checkpoint.names}


def stored(base: Path) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")


@pytest.mark.parametrize(
    ("settings", "alpha", "rslora"),
    [
        ({}, 16, False),
        ({"lora_alpha": 7.5}, 7.5, False),
        ({"use_rslora": True}, 16, True),
        ({"alpha_pattern": {"q_proj": 3, "v_proj": 3, "layers.0.mlp.down_proj": 3}}, None, False),
        ({"init_lora_weights": "gaussian", "modules_to_save": None, "use_dora": False}, 16, False),
    ],
    ids=["plain", "alpha", "rslora", "pattern", "gaussian"],
)
def test_weights_are_the_sum_that_peft_merges(
    settings: dict[str, Any], alpha: float | None, rslora: bool, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", **settings)
    got, before = weights(base, adapter), stored(base)
    halves_of = load_file(adapter / "adapter_model.safetensors")
    for name, value in before.items():
        module = name.removesuffix(".weight")
        if module in MODULES:
            scale = alpha or (16 if module == "model.layers.1.mlp.down_proj" else 3)
            pair = [halves_of[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB"]
            value = value + delta(*pair, scale, rslora)
            assert not torch.equal(value, before[name])
        np.testing.assert_allclose(got[name], value.numpy(), rtol=1e-5, atol=1e-6)


def test_logits_are_those_of_the_model_with_the_adapter_beside_it(tmp_path: Path) -> None:
    """As peft computes without merging: y = x W^T + s * (x A^T) B^T."""
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora")
    halves_of = load_file(adapter / "adapter_model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for module in MODULES:
        linear = reference.get_submodule(module)
        a, b = (halves_of[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        linear.register_forward_hook(
            lambda _, inputs, output, a=a, b=b: output + (inputs[0] @ a.T) @ b.T * (16 / 4)
        )
    ids = prompt_of("lora", VOCAB, 30)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    model = load_model(with_lora(open_checkpoint(base), adapter))
    with closing(
        make_session(model, threads=2, all_logits=True, act_prec="fp32", kv_dtype="f32")
    ) as session:
        got = session.logits(ids)
    assert np.abs(got - expected).max() <= 1e-4
    plain = load_model(open_checkpoint(base))
    with closing(make_session(plain, threads=2, all_logits=True, act_prec="fp32")) as session:
        assert np.abs(session.logits(ids) - expected).max() > 1e-2


def test_the_sum_keeps_the_type_of_its_base_and_is_rounded_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", torch.bfloat16)
    adapter = write_adapter(tmp_path / "lora")
    checkpoint = with_lora(open_checkpoint(base), adapter)
    name = "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.tensors[name].format.name == "bf16"
    halves_of = load_file(adapter / "adapter_model.safetensors")
    pair = [halves_of[f"base_model.model.{name[:-7]}.lora_{x}.weight"] for x in "AB"]
    exact = stored(base)[name].float() + delta(*pair, 16)
    np.testing.assert_array_equal(
        checkpoint.tensor(name).decode(), exact.to(torch.bfloat16).float().numpy()
    )
    assert len(checkpoint.files) == 2 and "LoRA, added to 6 tensors" in checkpoint.notes[-1]
    assert load_model(checkpoint, "int8w").precision.startswith("int8_row_f32")


def test_embeddings_heads_and_modules_to_save(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    norm, head = drawn("norm", HIDDEN), drawn("head", VOCAB, HIDDEN)
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": drawn("ea", 4, VOCAB),
        "base_model.model.model.embed_tokens.lora_embedding_B": drawn("eb", HIDDEN, 4),
        "base_model.model.model.norm.weight": norm,
        "base_model.model.lm_head.weight": head,
    }
    got = weights(base, write_adapter(tmp_path / "lora", tensors, modules_to_save=["lm_head"]))
    expected = stored(base)[EMBED] + delta(drawn("ea", 4, VOCAB), drawn("eb", HIDDEN, 4), 16).T
    np.testing.assert_allclose(got[EMBED], expected.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[HEAD], head.numpy())
    np.testing.assert_array_equal(got["model.norm.weight"], norm.numpy())


def test_a_head_of_its_own_leaves_a_tied_embedding_alone(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tied=True)
    embedding = stored(base)[EMBED]
    saved = write_adapter(
        tmp_path / "saved", {"base_model.model.lm_head.weight": drawn("h", 160, 64)}
    )
    added = write_adapter(tmp_path / "added", halves("lm_head", (VOCAB, HIDDEN)))
    for adapter in (saved, added):
        model = load_model(with_lora(open_checkpoint(base), adapter))
        assert not model.spec.tied
        found = weights(base, adapter)
        np.testing.assert_array_equal(found[EMBED], embedding.numpy())
        assert np.abs(found[HEAD] - embedding.numpy()).max() > 1e-2
    both = write_adapter(
        tmp_path / "both", {"base_model.model.model.embed_tokens.weight": embedding}
    )
    with pytest.raises(UnsupportedModel, match="which is the head of its base as well"):
        with_lora(open_checkpoint(base), both)


def named(name: str, *shape: int) -> Adapter:
    return {f"base_model.model.{name}": drawn(name, *shape)}


Q = "model.layers.0.self_attn.q_proj"
BAD: list[tuple[str, Adapter | None, dict[str, Any], type[ModelError], str]] = [
    ("dora", None, {"use_dora": True}, UnsupportedModel, "use_dora: DoRA.*merge_and_unload"),
    ("transposed", None, {"fan_in_fan_out": True}, UnsupportedModel, "stored transposed"),
    ("bias", None, {"bias": "all"}, UnsupportedModel, "bias 'all' is not known; known: none"),
    ("pissa", None, {"init_lora_weights": "pissa"}, UnsupportedModel, "init_lora_weights 'pissa'"),
    ("loha", None, {"peft_type": "LOHA"}, UnsupportedModel, "peft_type 'LOHA'"),
    ("experts", None, {"target_parameters": ["x"]}, UnsupportedModel, "that are no linears"),
    ("regex", None, {"alpha_pattern": {"(a+)+$": 1}}, UnsupportedModel, "are not run"),
    ("alpha", None, {"lora_alpha": "x"}, FormatError, "lora_alpha is 'x'; expected a number"),
    ("huge", None, {"lora_alpha": 1e300}, FormatError, "lora_alpha"),
    ("half", named(f"{Q}.lora_A.weight", 4, 64), {}, FormatError, "its other half is missing"),
    ("other half", named(f"{Q}.lora_B.weight", 64, 4), {}, UnsupportedModel, "not known in a LoRA"),
    ("magnitude", named(f"{Q}.lora_magnitude_vector", 64), {}, UnsupportedModel, "not known in a"),
    ("shape", halves(Q, (64, 32)), {}, FormatError, r"\[64, 32\], but .* is \[64, 64\]; is the ad"),
    (
        "ranks",
        named(f"{Q}.lora_A.weight", 4, 64) | named(f"{Q}.lora_B.weight", 64, 8),
        {},
        FormatError,
        "rank 4, but its other half has 8",
    ),
    (
        "flat",
        named(f"{Q}.lora_A.weight", 4) | named(f"{Q}.lora_B.weight", 4),
        {},
        FormatError,
        "2 d",
    ),
    ("layer", halves("model.layers.9.x_proj", (4, 4)), {}, FormatError, "has no tensor model.lay"),
    (
        "vocabulary",
        named("lm_head.weight", VOCAB + 8, HIDDEN),
        {},
        FormatError,
        r"\[168, 64\], exp",
    ),
    ("prefix", {"x.lora_A.weight": drawn("x", 4, 4)}, {}, FormatError, "begins with base_model"),
]


@pytest.mark.parametrize(
    ("tensors", "settings", "error", "message"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_what_is_no_such_sum_is_refused(
    tensors: Adapter | None,
    settings: dict[str, Any],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
) -> None:
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "lora", tensors, **settings)
    with pytest.raises(error, match=message):
        with_lora(open_checkpoint(base), adapter)


def test_numbers_that_are_not_finite_are_refused_when_they_are_read(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    pair = halves(Q, (64, 64))
    pair[f"base_model.model.{Q}.lora_A.weight"][1, 2] = math.nan
    checkpoint = with_lora(open_checkpoint(base), write_adapter(tmp_path / "lora", pair))
    with pytest.raises(FormatError, match=r"q_proj.*a LoRA adapter cannot hold nan"):
        checkpoint.tensor(f"{Q}.weight")


def test_a_quantised_base_is_refused_with_the_way_out(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    code, _, err = here("quantize", str(base), str(tmp_path / "q4"))
    assert code == 0, err
    adapter = write_adapter(tmp_path / "lora")
    with pytest.raises(UnsupportedModel, match=r"is int4_.*added to floats.*--precision int8w"):
        with_lora(open_checkpoint(tmp_path / "q4"), adapter)


def test_a_directory_that_is_no_adapter(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with pytest.raises(ModelNotFound, match=r"no adapter_config\.json"):
        with_lora(open_checkpoint(base), base)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"no adapter_model\.safetensors"):
        with_lora(open_checkpoint(base), tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=rf"^{tmp_path}: the adapter has no tensors"):
        with_lora(open_checkpoint(base), tmp_path)


@pytest.fixture
def llama_adapter(tmp_path: Path) -> Path:
    """Return an adapter of the tiny llama that has a tokenizer."""
    tensors = {}
    for name, tensor in open_checkpoint(LLAMA).tensors.items():
        if name.endswith("q_proj.weight"):
            tensors |= halves(name.removesuffix(".weight"), tensor.shape)
    return write_adapter(tmp_path / "lora", tensors, lora_alpha=64)


def test_load_takes_an_adapter(llama_adapter: Path) -> None:
    with clocher_runtime.load(LLAMA, device="cpu", threads=2, lora=llama_adapter) as changed:
        text = changed.generate("def f(x):", max_new=12)
    with clocher_runtime.load(LLAMA, device="cpu", threads=2) as plain:
        assert plain.generate("def f(x):", max_new=12) != text
    with pytest.raises(UsageError, match="lora: got 7, expected a path"):
        clocher_runtime.load(LLAMA, lora=7)


def test_run_takes_an_adapter(llama_adapter: Path) -> None:
    flags = ["--max-new", "8", "--json", "--prompt", "def f(x):"]
    made = []
    for more in ([], ["--lora", str(llama_adapter)]):
        code, out, err = here("run", str(LLAMA), *flags, *more)
        assert code == 0, err
        made.append(json.loads(out)["outputs"][0]["token_ids"])
        assert ("LoRA, added to" in err) == bool(more)
    assert made[0] != made[1]
    code, _, err = here("run", str(LLAMA), *flags, "--lora", "nowhere")
    assert code == 3 and "--lora: no adapter 'nowhere' here; give the directory of a LoRA" in err
    code, out, _ = here("bench", str(LLAMA), *BENCH, "--lora", str(llama_adapter))
    assert code == 0 and json.loads(out)[0]["lora"] == str(llama_adapter)
    code, _, err = here("run", str(llama_adapter), *flags)
    assert code == 3 and "clocher chat own/base --lora" in err


def test_the_server_takes_an_adapter_and_a_name_for_the_sum(llama_adapter: Path) -> None:
    with clocher_runtime.load(LLAMA, device="cpu", lora=llama_adapter) as changed:
        text = changed.generate("def f(x):", max_new=8)
    flags = ("--device", "cpu", "--lora", llama_adapter, "--served-model-name", "sum")
    with serving("--model-dir", LLAMA, *flags) as server:
        body = {"model": "sum", "prompt": "def f(x):", "max_tokens": 8, "temperature": 0}
        answer = server.ask("/v1/completions", **body).json()
        assert answer["choices"][0]["text"] == text
        assert sum("LoRA, added to" in line for line in server.log) == 1
