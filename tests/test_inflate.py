"""A small model inside of a larger shape computes what it computed before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_script
from sessions import make_session
from weight_files import BITNET, GPTOSS, LLAMA

from clocher_kernels.errors import UnsupportedModel, UsageError
from clocher_kernels.formats import Float, Ternary
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.gguf.checkpoint import open_gguf
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.convert import synthetic
from clocher_runtime.convert.fit import NEVER
from clocher_runtime.convert.inflate import plan_inflation
from clocher_runtime.convert.synthetic import GGUF_NAME, PRESETS, Precision, Preset
from clocher_runtime.convert.to_iebin import vocabulary
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import describe, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.text.tokenizer import Tokenizer

TOKENS = 4096
# Like the published ones in all that sizes do to a model, and as small as that allows: other
# numbers of heads in a group, wider heads, a head and a layer too many, experts more than once.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama-1b",
        {
            "hidden_size": 672,
            "intermediate_size": 1024,
            "num_hidden_layers": 7,
            "num_attention_heads": 20,
            "num_key_value_heads": 5,
            "vocab_size": 4224,
        },
    ),
    "bitnet": (
        "bitnet-2b",
        {
            "hidden_size": 1536,
            "intermediate_size": 1152,
            "num_hidden_layers": 7,
            "num_attention_heads": 12,
            "num_key_value_heads": 3,
            "vocab_size": 4224,
        },
    ),
    "gpt-oss": (
        "gpt-oss-20b",
        {
            "hidden_size": 640,
            "intermediate_size": 320,
            "num_hidden_layers": 24,
            "num_attention_heads": 24,
            "num_key_value_heads": 3,
            "num_local_experts": 20,
            "vocab_size": 4224,
        },
    ),
}
MODELS = {"llama": LLAMA, "bitnet": BITNET, "gpt-oss": GPTOSS}
STORED = [
    *[("llama", precision) for precision in ("bf16", "int8w", "int4", "mxfp4", "ternary")],
    ("bitnet", "native"),
    *[("gpt-oss", precision) for precision in ("native", "int8w", "int4")],
]


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        name: Preset(name, "", {**PRESETS[preset].settings, **sizes})
        for name, (preset, sizes) in SHAPES.items()
    }
    monkeypatch.setattr(synthetic, "PRESETS", {**PRESETS, **small})


def inflate(name: str, precision: str, out_dir: Path, **options: Any) -> Path:
    layers = 5 if name == "gpt-oss" else None
    stored = Precision(precision)
    plan_inflation(MODELS[name], name, stored, out_dir, layers=layers, **options).run()
    return out_dir


def rewritten(source: Path, out_dir: Path, stored: Callable[[str, Any], Any]) -> Path:
    """Write a model whose tensors are what `stored` makes of a name and a tensor."""
    small = open_checkpoint(source)
    out_dir.mkdir(parents=True)
    with IebinWriter(out_dir) as writer:
        for name in describe(small)[1]:
            writer.add(name, stored(name, small.tensor(name)))
        settings = small.config, small.generation_config, small.tokenizer_config
        writer.commit(*settings, vocabulary(small), {})
    return out_dir


def quantised(name: str, precision: str, out_dir: Path) -> Path:
    """Write the small model in a precision."""
    formats = Precision(precision).formats(describe(open_checkpoint(MODELS[name]))[0])

    def stored(tensor_name: str, tensor: Any) -> Any:
        fmt = formats[tensor_name]
        same = tensor.format.name == fmt.name or len(tensor.shape) == 1
        return tensor if same else encode(tensor.decode(), fmt)

    return rewritten(MODELS[name], out_dir, stored)


def in_floats(model: Path, out_dir: Path) -> Path:
    """Write a model with its ternary matrices as floats.

    Ternary products round activations to int8: the last bit of a norm may then be a whole step.
    """

    def stored(_: str, tensor: Any) -> Any:
        if not isinstance(tensor.format, Ternary):
            return tensor
        return encode(tensor.decode(), Float("f32"))

    return rewritten(model, out_dir, stored)


def pair(name: str, precision: str, folder: Path) -> Iterator[tuple[Session, list[int]]]:
    """Yield sessions of the small model and of the inflated one, with ids to try."""
    paths = quantised(name, precision, folder / "small"), inflate(name, precision, folder / "large")
    if "ternary" in (precision, "ternary" if name == "bitnet" else ""):
        paths = tuple(in_floats(path, folder / f"{path.name}-floats") for path in paths)
    for path in paths:
        checkpoint = open_checkpoint(path)
        tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
        ids = tokenizer.encode(
            "def parse(self, text):\n    for line in text:\n        if not line:"
        )
        options: dict[str, Any] = {"context": 128, "chunk": 32, "act_prec": "fp32"}
        session = make_session(load_model(checkpoint), kv_dtype="f32", all_logits=True, **options)
        try:
            yield session, ids
        finally:
            session.close()


def made(session: Session, ids: list[int], sampling: Sampling) -> list[int]:
    return [token.id for token in session.generate([ids], 64, sampling, frozenset())]


@pytest.mark.parametrize(("name", "precision"), STORED, ids=str)
@pytest.mark.one_in(3)
def test_logits_and_text_are_the_small_models(name: str, precision: str, tmp_path: Path) -> None:
    logits, texts = [], []
    for session, ids in pair(name, precision, tmp_path):
        logits.append(session.logits(ids))
        texts.append([made(session, ids, Sampling(t, seed=7)) for t in (0.0, 1.0)])
    small, large = logits
    assert small.shape[1] == TOKENS < large.shape[1]
    assert small.std() > 0.5
    np.testing.assert_allclose(large[:, :TOKENS], small, rtol=0, atol=1e-4)
    assert large[:, TOKENS:].max() <= NEVER
    assert np.isfinite(large).all()
    assert texts[0] == texts[1]
    assert len(set(texts[0][1])) > 8


@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_beyond_the_vocabulary_never_come(name: str, tmp_path: Path) -> None:
    inflate(name, "native", tmp_path)
    session = make_session(load_model(open_checkpoint(tmp_path)), context=128, chunk=32)
    try:
        hot = made(session, [5, 6, 7], Sampling(temperature=50.0, seed=3))
    finally:
        session.close()
    assert len(hot) == 64
    assert max(hot) < TOKENS
    assert len(set(hot)) > 48


def test_the_layers_beyond_are_random_and_add_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(inflate("llama", "int4", tmp_path), verify=True)
    values = {
        name: checkpoint.tensor(f"model.layers.6.{name}.weight").decode()
        for name in ("self_attn.q_proj", "mlp.gate_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    deviations = [value.std() for value in values.values()]
    assert deviations[:2] == pytest.approx([672**-0.5] * 2, rel=0.1)
    assert deviations[2:] == [0, 0]


def test_an_expert_and_its_twin_are_the_same(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(inflate("gpt-oss", "native", tmp_path))
    blocks = checkpoint.tensor("model.layers.3.mlp.experts.gate_up_proj").planes["blocks"]
    np.testing.assert_array_equal(blocks[:8], blocks[8:16])
    assert blocks[:8].any(axis=(1, 2, 3)).all()
    assert not blocks[16:].any()
    bias = checkpoint.tensor("model.layers.3.mlp.router.bias").decode()
    np.testing.assert_array_equal(bias[:8], bias[8:16])
    assert (bias[16:] == NEVER).all()


def test_settings_and_tokenizer_are_the_small_models(tmp_path: Path) -> None:
    small, large = open_checkpoint(LLAMA), open_checkpoint(inflate("llama", "bf16", tmp_path))
    assert large.tokenizer_config == small.tokenizer_config
    assert large.generation_config == small.generation_config
    assert vocabulary(large) == vocabulary(small)
    own, spec = describe(small)[0], describe(large)[0]
    assert (spec.eos_ids, spec.max_positions, spec.rope) == (
        own.eos_ids,
        own.max_positions,
        own.rope,
    )
    assert (spec.hidden_size, spec.head_dim, spec.num_layers) == (672, 64, 7)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        inflate("gpt-oss", "native", tmp_path / name)
    for file in ("model.ie.json", "model.ie.bin", "vocab.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_directory_of_the_small_model_is_refused(tmp_path: Path) -> None:
    quantised("llama", "int4", tmp_path / "small")
    with pytest.raises(UsageError, match="holds the small model itself"):
        plan_inflation(tmp_path / "small", "llama", Precision(), tmp_path / "small")
    plan_inflation(tmp_path / "small", "llama", Precision("int4"), tmp_path / "other")


@pytest.mark.parametrize(("name", "precision"), [("llama", "int4"), ("gpt-oss", "native")])
def test_a_gguf_file_is_the_same_model(name: str, precision: str, tmp_path: Path) -> None:
    inflate(name, precision, tmp_path, gguf="same", pre="dbrx")
    found = []
    text = "class Reader:\n    def __init__(self):"
    for checkpoint in (open_checkpoint(tmp_path), open_gguf(tmp_path / GGUF_NAME)):
        tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
        model = load_model(checkpoint)
        session = make_session(model, context=64, chunk=32, all_logits=True, act_prec="fp32")
        try:
            found.append((tokenizer.encode(text), session.logits(tokenizer.encode(text))))
        finally:
            session.close()
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0, atol=2e-4)
    assert found[0][1].shape[1] == 4224


REFUSED: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", "gpt-oss", {}, {}, r"is a llama model, gpt-oss a gpt_oss one"),
    ("llama", "tiny-llama", {}, {}, "tiny-llama has 2 layers, the model needs 6"),
    ("llama", "llama", {"layers": 4}, {}, "has 4 layers, the model needs 6"),
    ("llama", "llama", {}, {"vocab_size": 4000}, "4000 tokens, the model needs 4096"),
    ("llama", "llama", {}, {"hidden_size": 512}, "512 channels, the model needs 544"),
    ("llama", "llama", {}, {"intermediate_size": 736}, "736 inner channels, .* needs 768"),
    ("llama", "llama", {}, {"num_key_value_heads": 2}, "2 key and value heads, .* needs 4"),
    ("llama", "llama", {}, {"num_key_value_heads": 20}, "1 query heads .* needs 2"),
    ("llama", "llama", {}, {"head_dim": 80}, "80 values in a head; expected a multiple of"),
    (
        "llama",
        "llama",
        {},
        {"tie_word_embeddings": True},
        "another kind than the model: other tied",
    ),
    (
        "bitnet",
        "bitnet",
        {},
        {"num_attention_heads": 9, "head_dim": 128},
        "3 query heads .* expected a multiple of the model's 2",
    ),
    ("gpt-oss", "gpt-oss", {}, {"num_local_experts": 15}, "15 experts, the model needs 16"),
    ("gpt-oss", "gpt-oss", {}, {"num_experts_per_tok": 3}, "3 active experts; expected a multiple"),
    ("gpt-oss", "gpt-oss", {"layers": 3}, {}, "has 3 layers, the model needs 4"),
]


@pytest.mark.parametrize(("name", "preset", "options", "sizes", "text"), REFUSED)
def test_what_does_not_fit_is_refused(
    name: str,
    preset: str,
    options: dict[str, Any],
    sizes: dict[str, Any],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = Preset(preset, "", {**synthetic.PRESETS[preset].settings, **sizes})
    monkeypatch.setattr(synthetic, "PRESETS", {**synthetic.PRESETS, preset: changed})
    with pytest.raises(UsageError, match=text):
        plan_inflation(MODELS[name], preset, Precision(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_what_would_not_be_exact_is_refused(tmp_path: Path) -> None:
    def plan(name: str, precision: Precision, **options: Any) -> None:
        plan_inflation(MODELS[name], name, precision, tmp_path, **options)

    with pytest.raises(UsageError, match="groups of 64; expected 32"):
        plan("llama", Precision("int4", "64"))
    with pytest.raises(UsageError, match="all its linears ternary"):
        plan("bitnet", Precision("int4"))
    with pytest.raises(UsageError, match="scales are fp32, ggml's are f16"):
        plan("bitnet", Precision(), gguf="same")
    with pytest.raises(UnsupportedModel, match="--pre NAME"):
        plan("llama", Precision("int4"), gguf="same")


def test_the_script_says_what_it_cannot_do(tmp_path: Path) -> None:
    flags = ("--preset", "tiny-llama", "--out-dir", tmp_path)
    failed = run_script("make_synthetic", "--inflate", LLAMA, *flags)
    assert failed.returncode == 2
    assert failed.stderr.startswith("make_synthetic: error: tiny-llama has 2 layers")
    failed = run_script("make_synthetic", "--pre", "dbrx", *flags)
    assert failed.returncode == 2
    assert "--pre has no place without --inflate" in failed.stderr
