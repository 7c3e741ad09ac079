"""What llama-quantize and `clocher convert` write, read here and by llama.cpp: the same text.

llama.cpp rounds activations to 8 bits for quantised weights, so the file that it expands to fp32
is what fp32 activations are compared with.
"""

import csv
import json
import os
import re
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import llama_cpp_runs as llama_cpp
import numpy as np
import pytest
from gguf_files import F32, Kind, add_tokenizer, gguf_tensors, write_gguf
from random_models import FAMILIES, make
from sessions import make_session
from test_exports import quantised
from weight_files import BITNET, GPTOSS, LLAMA, rng

from clocher_kernels.errors import UnsupportedModel
from clocher_kernels.formats import Float
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.gguf import GgufExport
from clocher_runtime.convert.gguf_model import GgufConversion
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.text.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(llama_cpp.MISSING), reason=llama_cpp.MISSING),
]

TEXT = Path(__file__).parent / "data" / "valid.txt"
WINDOW, WINDOWS = 512, 4
PROMPT, PROMPTS, NEW = 48, 4, 48
TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"),
    *("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_M"),
    *("TQ1_0", "TQ2_0"),
)


def session(checkpoint: Checkpoint, act_prec: str, logits: bool, context: int = WINDOW) -> Session:
    return make_session(
        load_model(checkpoint),
        backend="cpu",
        threads=2,
        context=context,
        kv_dtype="f32",
        chunk=context if logits else None,
        act_prec=act_prec,
        all_logits=logits,
    )


def perplexity(checkpoint: Checkpoint, ids: list[int], act_prec: str, size: int = WINDOW) -> float:
    """Return what llama-perplexity computes: of the second half of each window."""
    made = session(checkpoint, act_prec, True, size)
    losses = []
    try:
        for start in range(0, size * WINDOWS, size):
            window = ids[start : start + size]
            logits = made.logits(window).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            losses += [-logits[i, window[i + 1]] for i in range(size // 2, size - 1)]
    finally:
        made.close()
    return float(np.exp(np.mean(losses)))


def greedy(checkpoint: Checkpoint, prompts: list[list[int]], act_prec: str) -> list[list[int]]:
    made = session(checkpoint, act_prec, False)
    stop = frozenset(checkpoint.generation_config["eos_token_id"])
    try:
        return [
            [token.id for token in made.generate([prompt], NEW, stop_ids=stop)]
            for prompt in prompts
        ]
    finally:
        made.close()


def theirs(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    with llama_cpp.server(model, WINDOW) as address:
        return [llama_cpp.greedy(address, prompt, NEW) for prompt in prompts]


def note(row: dict[str, object]) -> None:
    """Add a row to the file that the environment names, for whoever wants the figures."""
    if path := os.environ.get("LLAMA_CPP_TABLE"):
        with open(path, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if not file.tell():
                writer.writeheader()
            writer.writerow(row)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the trained model as an F16 file."""
    source = open_checkpoint(LLAMA)
    tensors = {
        name: (values.astype(np.float16), Kind.F16) if values.ndim == 2 else (values, F32)
        for name, values in gguf_tensors(source).items()
    }
    path = tmp_path_factory.mktemp("llama") / "f16.gguf"
    return write_gguf(path, source.config, tensors, add_tokenizer(LLAMA, "llama-bpe"))


def main_type(kind: str) -> str:
    """Return the type that gives a kind of file its name: "q4_k" for "Q4_K_M"."""
    return re.sub(r"(_k)_[sml]$|^(iq3)_m$", lambda m: m[1] or f"{m[2]}_s", kind.lower())


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_llama_quantize(kind: str, floats: Path, saw: Callable[..., None]) -> None:
    path = llama_cpp.quantized(floats, floats.with_name(f"{kind}.gguf"), kind)
    expanded = llama_cpp.quantized(path, path.with_name(f"{kind}-f32.gguf"), "F32")
    checkpoint = open_checkpoint(path)
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    ids = tokenizer.encode(TEXT.read_text())
    prompts = [ids[i * 1000 : i * 1000 + PROMPT] for i in range(1, PROMPTS + 1)]
    exact = llama_cpp.perplexity(expanded, TEXT, WINDOW, WINDOWS)
    rounded = llama_cpp.perplexity(path, TEXT, WINDOW, WINDOWS)
    ours = {act: perplexity(checkpoint, ids, act) for act in ("fp32", "int8")}
    exact_ids, rounded_ids = theirs(expanded, prompts), theirs(path, prompts)
    ours_ids = {act: greedy(checkpoint, prompts, act) for act in ("fp32", "int8")}
    stored = {info.tensor_type.name for info in gguf.GGUFReader(path).tensors}
    note(
        {
            "type": kind,
            "stored": " ".join(sorted(stored)),
            "fp32": f"{ours['fp32']:.4f}",
            "llama.cpp expanded": f"{exact:.4f}",
            "int8": f"{ours['int8']:.4f}",
            "llama.cpp": f"{rounded:.4f}",
            "ids fp32 = expanded": ours_ids["fp32"] == exact_ids,
            "prompts fp32 = llama.cpp": same(ours_ids["fp32"], rounded_ids),
            "prompts int8 = llama.cpp": same(ours_ids["int8"], rounded_ids),
        }
    )
    version = llama_cpp.version()
    saw(
        "LlamaForCausalLM",
        f"gguf {main_type(kind)}",
        f"{kind}: {' '.join(sorted(stored))}",
        f"llama-quantize, llama.cpp {version}",
        f"perplexity, llama.cpp {version}",
        difference=abs(ours["fp32"] / exact - 1),
        same_ids=int(ours_ids["fp32"] == exact_ids),
        variable=llama_cpp.VARIABLE,
    )
    assert ours["fp32"] == pytest.approx(exact, rel=2e-5)
    assert ours_ids["fp32"] == exact_ids
    assert ours["fp32"] == pytest.approx(rounded, rel=1e-2)
    assert ours["int8"] == pytest.approx(rounded, rel=1e-2)


def as_llama_cpp(checkpoint: Checkpoint) -> Checkpoint:
    """Return a model as llama.cpp computes it: it rounds the bounds of YaRN of gpt-oss, too."""
    config = checkpoint.config
    if config["architectures"] == ["GptOssForCausalLM"]:
        config = config | {"rope_parameters": config["rope_parameters"] | {"truncate": True}}
    return replace(checkpoint, config=config)


@pytest.mark.parametrize(
    "what",
    [
        *(LLAMA, GPTOSS, {"dtype": "int8", "group": 32}, {"dtype": "int4", "group": 32}),
        *({"dtype": "mxfp4"}, {"dtype": "ternary"}, {"dtype": "fp8"}),
    ],
    ids=str,
)
def test_what_convert_writes_has_the_same_perplexity(
    what: Path | dict[str, object], tmp_path: Path
) -> None:
    source = open_checkpoint(what) if isinstance(what, Path) else quantised(tmp_path, **what)
    path = tmp_path / "m.gguf"
    GgufConversion(source, path, "bf16", "llama-bpe").run()
    expanded = llama_cpp.quantized(path, tmp_path / "f32.gguf", "F32")
    written = as_llama_cpp(open_checkpoint(path))
    ids = Tokenizer(written.tokenizer_source, written.tokenizer_config).encode(TEXT.read_text())
    ours = perplexity(written, ids, "fp32")
    exact = 1e-3 if what == {"dtype": "ternary"} else 2e-5  # its activations are always int8
    assert ours == pytest.approx(llama_cpp.perplexity(expanded, TEXT, WINDOW, WINDOWS), rel=exact)
    assert ours == pytest.approx(llama_cpp.perplexity(path, TEXT, WINDOW, WINDOWS), rel=1e-2)
    assert ours == pytest.approx(perplexity(open_checkpoint(path), ids, "fp32"), rel=1e-2)


def letters(size: int) -> str:
    """Return a tokenizer.json whose tokens are letters."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    names = ["<s>", "<a>", "<b>", *string.ascii_letters]
    vocab = {name: i for i, name in enumerate([*names, *(f"<{i}>" for i in range(size))][:size])}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({"pre_tokenizer": level, "decoder": level, "model": model})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_have_the_same_perplexity(family: str, seed: int, tmp_path: Path) -> None:
    """Heads, biases, rotations of all kinds; what GGUF cannot say is refused or said."""
    size = 64
    make(family, seed, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text(letters(config["vocab_size"]))
    text, path = tmp_path / "text", tmp_path / "m.gguf"
    text.write_text("".join(rng("letters").choice([*string.ascii_letters], size * (WINDOWS + 1))))
    job = GgufConversion(open_checkpoint(tmp_path / "model"), path, pre="gpt-2")
    try:
        job.run()
    except UnsupportedModel as refusal:
        assert family != "llama" and "it has other settings" in str(refusal)
        return
    written = as_llama_cpp(open_checkpoint(path))
    ids = Tokenizer(written.tokenizer_source, written.tokenizer_config).encode(text.read_text())
    theirs = llama_cpp.perplexity(path, text, size, WINDOWS)
    same = perplexity(written, ids, "fp32", size) == pytest.approx(theirs, rel=2e-5)
    assert same != bool(job.export.notes)


def test_bitnet_is_refused_by_llama_cpp_and_right_in_bitnet_cpp(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    GgufConversion(open_checkpoint(BITNET), path, pre="llama-bpe").run()
    try:
        theirs = llama_cpp.perplexity(path, TEXT, WINDOW, WINDOWS)
    except AssertionError as refusal:
        assert "unknown model architecture: 'bitnet-b1.58'" in str(refusal)
        return
    written = open_checkpoint(path)
    ids = Tokenizer(written.tokenizer_source, written.tokenizer_config).encode(TEXT.read_text())
    assert perplexity(written, ids, "int8") == pytest.approx(theirs, rel=1e-2)


NARROW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ4_XS", "IQ3_S", "TQ1_0"])
def test_rows_that_are_no_whole_blocks_get_other_types(kind: str, tmp_path: Path) -> None:
    """llama-quantize falls back to types of 32 columns where a row is no multiple of 256."""
    shapes = {
        "token_embd": (64, 192),
        "output": (64, 192),
        "output_norm": (192,),
        **{f"blk.0.{name}_norm": (192,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{part}": (96, 192) for part in "kv"},
        **{f"blk.0.attn_{part}": (192, 192) for part in ("q", "output")},
        **{f"blk.0.ffn_{part}": (352, 192) for part in ("gate", "up")},
        "blk.0.ffn_down": (192, 352),
    }
    draw = np.random.default_rng(7)
    tensors = {
        f"{name}.weight": (draw.standard_normal(shape, np.float32), F32)
        for name, shape in shapes.items()
    }
    floats = write_gguf(tmp_path / "f32.gguf", NARROW, tensors)
    path = llama_cpp.quantized(floats, tmp_path / f"{kind}.gguf", kind)
    checkpoint = open_checkpoint(path, verify=True)
    stored = {info.name: info for info in gguf.GGUFReader(path).tensors}
    for name, other in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        tensor = checkpoint.tensor(f"model.layers.0.{name}.weight")
        info = stored[f"blk.0.{other}.weight"]
        assert gguf.GGML_QUANT_SIZES[info.tensor_type][0] == 32
        assert np.array_equal(tensor.decode(), gguf.quants.dequantize(info.data, info.tensor_type))


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_bitnet_files_of_llama_quantize_stay_ternary(kind: str, tmp_path: Path) -> None:
    source = open_checkpoint(BITNET)
    floats = dict.fromkeys(source.names, Float("f32"))
    GgufExport(source.config, floats, "x", timed=True).write(source, tmp_path / "f32.gguf")
    path = llama_cpp.quantized(tmp_path / "f32.gguf", tmp_path / f"{kind}.gguf", kind)
    checkpoint = open_checkpoint(path)
    found = {name: tensor.format.name for name, tensor in checkpoint.tensors.items()}
    assert found["model.embed_tokens.weight"] == "q6_k"
    assert {found[name] for name in found if "_proj" in name} == {"ternary_f16"}
    for name in found:
        if "_proj" in name:
            expected = source.tensor(name).decode()
            np.testing.assert_allclose(checkpoint.tensor(name).decode(), expected, rtol=2**-11)


def same(a: list[list[int]], b: list[list[int]]) -> int:
    """Return how many prompts have the same continuation."""
    return sum(x == y for x, y in zip(a, b, strict=True))
