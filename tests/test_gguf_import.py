"""GGUF files as checkpoints: every number, every model, and hostile files."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import (
    F32,
    Kind,
    add_tokenizer,
    as_f32,
    gguf_tensors,
    permuted,
    raw_blocks,
    write_gguf,
)
from random_models import make, make_mxfp4, prompt_of
from sessions import make_session
from weight_files import BITNET, GPTOSS, LLAMA, rng

import clocher_runtime as clocher
from clocher_kernels.errors import FormatError, ModelError, ModelNotFound, UnsupportedModel
from clocher_kernels.formats.ggml import GGML_KINDS
from clocher_kernels.formats.ggml_blocks import KINDS
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.checkpoint import open_gguf
from clocher_runtime.checkpoints.gguf.file import MAX_TENSORS, GgufFile, Strings
from clocher_runtime.convert.gguf import GgufExport
from clocher_runtime.engine.load import load_model
from clocher_runtime.text.tokenizer import Tokenizer
from cpu_fallback.tiles import tile_pack
from cpu_fallback.tiles.layout import layout_of

TEXTS = Path(__file__).parent / "data" / "valid.txt"
STORED = {
    Kind.F32: "f32",
    Kind.F16: "f16",
    Kind.BF16: "bf16",
    Kind.Q8_0: "int8_g32_f16",
    Kind.Q4_0: "int4_sym_g32_f16",
    Kind.MXFP4: "mxfp4",
    Kind.TQ2_0: "int4_sym_g256_f16",
    **{Kind[name.upper()]: name for name in GGML_KINDS},
}
GGUF_PY = f"gguf {version('gguf')}"
Saw = Callable[..., None]
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def tiny_tensors(kind: Kind = F32, name: str = "tiny") -> dict[str, tuple[np.ndarray, Kind]]:
    """Return tensors of a one-layer Llama, the matrices made of random blocks of a type."""
    made: dict[str, tuple[np.ndarray, Kind]] = {}
    for tensor, shape in {
        "token_embd": (24, 256),
        "output_norm": (256,),
        "output": (24, 256),
        "blk.0.attn_norm": (256,),
        "blk.0.ffn_norm": (256,),
        "blk.0.attn_q": (256, 256),
        "blk.0.attn_k": (128, 256),
        "blk.0.attn_v": (128, 256),
        "blk.0.attn_output": (256, 256),
        "blk.0.ffn_gate": (512, 256),
        "blk.0.ffn_up": (512, 256),
        "blk.0.ffn_down": (256, 512),
    }.items():
        draw = rng(f"{name}-{tensor}")
        if len(shape) == 1 or kind == F32:
            made[f"{tensor}.weight"] = (draw.standard_normal(shape, np.float32), F32)
        else:
            made[f"{tensor}.weight"] = (random_blocks(kind, shape, draw), kind)
    return made


def random_blocks(kind: Kind, shape: tuple[int, int], draw: np.random.Generator) -> np.ndarray:
    """Return rows of blocks with any code in them and scales that are numbers."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // block, nbytes), np.uint8)
    scales = draw.standard_normal(blocks.shape[:2]).astype(np.float16)
    if kind in (Kind.F16, Kind.BF16):
        blocks = draw.standard_normal((*shape, 1), np.float32).view(np.uint8)[..., 2:]
        if kind == Kind.F16:
            blocks = scales[..., None].view(np.uint8)
    elif kind == Kind.MXFP4:
        blocks[..., 0] = draw.integers(100, 140, blocks.shape[:2])
    elif kind == Kind.TQ2_0:
        blocks[..., 64:] = scales[..., None].view(np.uint8)
    elif kind.name.lower() in KINDS:
        rows = blocks.reshape(-1, nbytes).view(KINDS[kind.name.lower()].fields)[:, 0]
        for field in {"d", "dmin", "m"} & set(rows.dtype.names or ()):
            rows[field] = draw.standard_normal(len(rows))
    else:
        blocks[..., :2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    model = load_model(checkpoint)
    session = make_session(
        model, backend="cpu", threads=2, chunk=23, all_logits=True, act_prec="fp32"
    )
    try:
        return session.logits(ids)
    finally:
        session.close()


# --- numbers


@pytest.mark.parametrize("kind", STORED, ids=lambda kind: kind.name)
def test_every_number_equals_the_gguf_package(kind: Kind, tmp_path: Path, saw: Saw) -> None:
    tensors = tiny_tensors(kind, kind.name)
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    checkpoint.verify()
    names = {"q_proj": ("attn_q", 4), "k_proj": ("attn_k", 2), "down_proj": ("ffn_down", 0)}
    for part, (name, heads) in names.items():
        folder = "mlp" if part == "down_proj" else "self_attn"
        tensor = checkpoint.tensor(f"model.layers.0.{folder}.{part}.weight")
        blocks, _ = tensors[f"blk.0.{name}.weight"]
        values = gguf.quants.dequantize(blocks, kind) if kind != F32 else blocks
        got = permuted(tensor.decode(), heads) if heads else tensor.decode()
        assert tensor.format.name == STORED[kind]
        assert np.array_equal(got, values)
    embedding = checkpoint.tensor("model.embed_tokens.weight").decode()
    blocks, _ = tensors["token_embd.weight"]
    assert np.array_equal(
        embedding, blocks if kind == F32 else gguf.quants.dequantize(blocks, kind)
    )
    key = "LlamaForCausalLM", f"gguf {kind.name.lower()}", "random blocks", f"the test, {GGUF_PY}"
    saw(*key, f"weights, {GGUF_PY}", difference=0.0)


@pytest.mark.parametrize("kind", [Kind.TQ2_0, Kind.TQ1_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("zero_blocks", [False, True], ids=["all-blocks", "zero-blocks"])
def test_blocks_with_one_scale_are_ternary(zero_blocks: bool, kind: Kind, tmp_path: Path) -> None:
    tensors = tiny_tensors(kind, "one-scale")
    for name, (blocks, stored) in tensors.items():
        if stored != F32:
            cells = blocks.reshape(len(blocks), -1, gguf.GGML_QUANT_SIZES[kind][1])
            if kind == Kind.TQ2_0:
                cells[..., :64] &= ~(cells[..., :64] >> 1) | 0xAA  # no code 3
            cells[..., -2:] = np.array([-0.75], np.float16).view(np.uint8)
            if zero_blocks and name == "blk.0.ffn_down.weight":
                cells[:, 1, -2:] = 0
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    checkpoint.verify()
    for source, name, heads in (
        ("mlp.down_proj", "ffn_down", 0),
        ("self_attn.q_proj", "attn_q", 4),
    ):
        tensor = checkpoint.tensor(f"model.layers.0.{source}.weight")
        values = gguf.quants.dequantize(tensors[f"blk.0.{name}.weight"][0], kind)
        assert tensor.format.name == "ternary_f16"
        got = permuted(tensor.decode(), heads) if heads else tensor.decode()
        assert np.array_equal(got, values)


def test_a_forbidden_ternary_code_is_found(tmp_path: Path) -> None:
    tensors = tiny_tensors(Kind.TQ2_0, "code-3")
    for blocks, kind in tensors.values():
        if kind != F32:
            blocks.reshape(len(blocks), -1, 66)[..., 64:] = [0, 0x3C]
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    with pytest.raises(FormatError, match=r"a\.gguf.*the code 3 is stored"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight")


def quantize_i2_s(values: np.ndarray) -> np.ndarray:
    """Pack a ternary matrix as bitnet.cpp does on x86 (quantize_i2_s with ACT_PARALLEL)."""
    flat = values.ravel()
    codes = np.where(np.abs(flat) < 1e-6, 1, np.where(flat > 0, 2, 0)).astype(np.uint8)
    packed = np.zeros(flat.size // 4, np.uint8)
    for i, block in enumerate(codes.reshape(-1, 128)):
        for j, code in enumerate(block):
            packed[i * 32 + j % 32] |= code << (6 - 2 * (j // 32))
    tail = np.zeros(8, np.float32)
    tail[0] = np.abs(flat).max()
    return np.concatenate([packed, tail.view(np.uint8)])


def test_i2_s_is_read_as_x86_writes_it(tmp_path: Path, saw: Saw) -> None:
    tensors, draw = tiny_tensors(), rng("i2_s")
    names = {"mlp.down_proj": ("ffn_down", 0), "self_attn.q_proj": ("attn_q", 4)}
    ternary = {}
    for name, _ in names.values():
        values, _ = tensors.pop(f"blk.0.{name}.weight")
        ternary[name] = draw.integers(-1, 2, values.shape) * np.float32(0.37)

    def add(writer: gguf.GGUFWriter) -> None:
        # The gguf package does not know the type, so its entry is made by hand.
        for name, values in ternary.items():
            packed, full = quantize_i2_s(values), f"blk.0.{name}.weight"
            writer.add_tensor_info(full, values.shape, values.dtype, packed.nbytes, raw_dtype=36)
            writer.tensors[-1][full].tensor = packed

    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors, add))
    checkpoint.verify()
    assert "order of bitnet.cpp on x86" in checkpoint.notes[0]
    for source, (name, heads) in names.items():
        tensor = checkpoint.tensor(f"model.layers.0.{source}.weight")
        assert tensor.format.name == "ternary_f32"
        got = permuted(tensor.decode(), heads) if heads else tensor.decode()
        assert np.array_equal(got, ternary[name])
    by = "the test, in the layout of bitnet.cpp on x86"
    saw("LlamaForCausalLM", "gguf i2_s", "random codes", by, "weights, packed", difference=0.0)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL, Kind.Q5_0], ids=str)
def test_blocks_in_order_are_views_of_the_file(kind: Kind, tmp_path: Path) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors(kind)))
    mapping = checkpoint.files[0]
    whole = mapping.bytes(0, mapping.nbytes)
    for name, in_place in (("mlp.down_proj", True), ("self_attn.q_proj", False)):
        tensor = checkpoint.tensor(f"model.layers.0.{name}.weight")
        assert np.shares_memory(tensor.planes["blocks"], whole) == in_place


@pytest.mark.parametrize(
    ("kind", "at", "what"),
    [
        *((Kind.Q4_K, 144, "d"), (Kind.Q4_K, 146, "dmin"), (Kind.Q6_K, 208, "d")),
        *((Kind.Q5_1, 24, "d"), (Kind.Q5_1, 26, "m"), (Kind.IQ4_XS, 0, "d")),
    ],
)
def test_scales_that_are_no_numbers_are_found(
    kind: Kind, at: int, what: str, tmp_path: Path
) -> None:
    tensors = tiny_tensors(kind, "bad")
    tensors["blk.0.ffn_down.weight"][0][3, at : at + 2] = [0, 0x7C]
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    tensor = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    message = rf"a\.gguf.*down_proj.*{kind.name.lower()} {what} scales cannot hold inf"
    with pytest.raises(FormatError, match=message):
        tensor.decode()
    with pytest.raises(FormatError, match=r"a\.gguf.*down_proj.*: a scale is NaN or infinite"):
        tile_pack.pack(layout_of("linear", tensor.format), tensor)


# --- models

MODELS = [
    ("llama", 0),  # yarn; biases everywhere
    ("llama", 4),  # linear
    ("llama", 8),  # llama3: rope_freqs.weight
    ("llama", 10),
    ("mistral", 5),  # sliding window, llama3
    ("mistral", 9),
    ("qwen2", 0),
    ("qwen3", 4),
    ("qwen3", 8),  # biases
    ("gpt_oss", 1),
    ("gpt_oss", 2),
    ("mxfp4", 3),
]


@pytest.mark.parametrize(("family", "seed"), MODELS, ids=[f"{f}-{s}" for f, s in MODELS])
def test_logits_equal_the_hugging_face_route(
    family: str, seed: int, tmp_path: Path, saw: Saw
) -> None:
    if family == "mxfp4":
        make_mxfp4(seed, tmp_path / "model")
    else:
        make(family, seed, tmp_path / "model")
    source = open_checkpoint(tmp_path / "model")
    path = write_gguf(tmp_path / "a.gguf", source.config, as_f32(source))
    ids = prompt_of(f"{family}-{seed}", source.config["vocab_size"])
    expected = logits(source, ids)
    assert np.array_equal(logits(open_checkpoint(path, verify=True), ids), expected)
    key = source.config["architectures"][0], "gguf f32", "floats", f"the test, {GGUF_PY}"
    saw(*key, "logits, the Hugging Face directory here", difference=0.0)


@pytest.mark.parametrize("model", [LLAMA, GPTOSS, BITNET], ids=lambda path: path.name)
def test_what_the_exporter_wrote_comes_back(model: Path, tmp_path: Path) -> None:
    source = open_checkpoint(model)
    formats = {name: tensor.format for name, tensor in source.tensors.items()}
    GgufExport(source.config, formats, "x").write(source, tmp_path / "a.gguf")
    result = open_checkpoint(tmp_path, verify=True)
    assert result.kind == "gguf" and result.names == tuple(result.tensors)
    for name in result.names:
        assert np.array_equal(result.tensor(name).decode(), source.tensor(name).decode()), name
    ids = prompt_of(model.name, 4096)
    assert np.array_equal(logits(result, ids), logits(source, ids))
    with pytest.raises(ModelNotFound):
        Tokenizer(result.tokenizer_source, result.tokenizer_config)


@pytest.mark.parametrize(
    "kind",
    [Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q3_K, Kind.IQ4_XS, Kind.IQ3_S],
    ids=lambda kind: kind.name,
)
def test_quantised_logits_equal_those_of_the_decoded_weights(kind: Kind, tmp_path: Path) -> None:
    source = open_checkpoint(LLAMA)
    packed, plain = {}, {}
    for name, values in gguf_tensors(source).items():
        packed[name] = raw_blocks(kind, values) if values.ndim == 2 else (values, F32)
        blocks = packed[name][0]
        plain[name] = (gguf.quants.dequantize(blocks, kind) if values.ndim == 2 else values, F32)
    ids = prompt_of("q", 4096)
    got, expected = (
        logits(open_gguf(write_gguf(tmp_path / f"{i}.gguf", source.config, tensors)), ids)
        for i, tensors in enumerate((packed, plain))
    )
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error < 1e-5, f"relative RMS {error:.2e}"


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.IQ4_NL, Kind.Q5_1], ids=lambda kind: kind.name)
def test_experts_of_two_tensors_become_one(kind: Kind, tmp_path: Path) -> None:
    source = open_checkpoint(GPTOSS)
    tensors = {}
    for name, values in gguf_tensors(source).items():
        experts = name.endswith("_exps.weight")
        tensors[name] = raw_blocks(kind, values) if experts else (values, F32)
    result = open_gguf(write_gguf(tmp_path / "a.gguf", source.config, tensors))
    tensor = result.tensor("model.layers.1.mlp.experts.gate_up_proj")
    assert tensor.format.name == kind.name.lower()
    for part, first in (("gate", 0), ("up", 1)):
        blocks, _ = tensors[f"blk.1.ffn_{part}_exps.weight"]
        expected = gguf.quants.dequantize(blocks, kind)
        assert np.array_equal(tensor.decode()[:, first::2], expected)
    tensors["blk.1.ffn_up_exps.weight"] = raw_blocks(
        Kind.Q8_0, gguf_tensors(source)["blk.1.ffn_up_exps.weight"]
    )
    names = f"ffn_gate_exps.weight {kind.name.lower()} and blk.1.ffn_up_exps.weight int8_g32_f16"
    with pytest.raises(UnsupportedModel, match=f"{names}; .*llama-quant"):
        open_gguf(write_gguf(tmp_path / "b.gguf", source.config, tensors))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.IQ3_XXS, Kind.Q5_1], ids=lambda kind: kind.name)
def test_blocks_are_exported_byte_for_byte(kind: Kind, tmp_path: Path) -> None:
    source = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors(kind, "out")))
    formats = {name: tensor.format for name, tensor in source.tensors.items()}
    GgufExport(source.config, formats, "x").write(source, tmp_path / "b.gguf")
    first, second = GgufFile(tmp_path / "a.gguf"), GgufFile(tmp_path / "b.gguf")
    for name, info in first.tensors.items():
        assert second.tensors[name].kind == info.kind
        assert np.array_equal(second.data(name), first.data(name)), name


def test_mxfp4_experts_come_back_byte_for_byte(tmp_path: Path) -> None:
    source = open_checkpoint(GPTOSS)
    tensors = {}
    for name, values in gguf_tensors(source).items():
        experts = name.endswith("_exps.weight")
        tensors[name] = raw_blocks(Kind.MXFP4, values) if experts else (values, F32)
    result = open_gguf(write_gguf(tmp_path / "a.gguf", source.config, tensors))
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        got, expected = result.tensor(name), source.tensor(name)
        assert got.format == expected.format
        assert np.array_equal(got.decode(), expected.decode())


# --- the door


def test_a_run_generates_from_a_file(tmp_path: Path) -> None:
    source = open_checkpoint(LLAMA)
    path = tmp_path / "llama.gguf"
    write_gguf(path, source.config, as_f32(source), add_tokenizer(LLAMA, "llama-bpe"))
    prompt = "def add(a, b):"
    with clocher.load(LLAMA, precision="fp32") as model, clocher.load(path) as other:
        made = model.generate(prompt, max_new=12)
        assert made.strip() and other.generate(prompt, max_new=12) == made
    command = [sys.executable, "-m", "clocher_runtime.cli", "--model-dir", str(path)]
    command += ["--prompt", prompt, "--max-new", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert made.strip() in done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["model"] == str(path)


def test_which_file_is_opened(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors())
    assert open_checkpoint(first).path == open_checkpoint(tmp_path).path == first
    (tmp_path / "b.gguf").write_bytes(first.read_bytes())
    with pytest.raises(ModelNotFound, match=r"2 GGUF files \(a.gguf, b.gguf\); name one"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFound, match="no such file"):
        open_checkpoint(tmp_path / "c.gguf")


def packs_alike(checkpoint: Checkpoint) -> int:
    """Compare the tiles of a file's blocks with those of the planes; return how many there are."""
    found = 0
    for name in checkpoint.names:
        late, made = checkpoint.tensor(name), checkpoint.tensor(name, verify=True)
        if late.held:
            continue
        layout = layout_of("test", late.format)
        packed = tile_pack.pack(layout, late)
        assert packed.data.any()
        np.testing.assert_array_equal(packed.data, tile_pack.pack(layout, made).data)
        found += 1
    return found


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0, Kind.MXFP4, Kind.Q6_K, Kind.Q5_1])
def test_blocks_are_packed_as_their_planes_are(tmp_path: Path, kind: Kind) -> None:
    """Rows of Llama's queries and keys are in another order here."""
    path = write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors(kind))
    assert packs_alike(open_gguf(path)) == 9


def test_experts_of_two_tensors_are_packed_from_both(tmp_path: Path) -> None:
    make_mxfp4(7, tmp_path / "model")
    source = open_checkpoint(tmp_path / "model")
    tensors = {
        name: raw_blocks(Kind.MXFP4, values) if "_exps.weight" in name else (values, F32)
        for name, values in gguf_tensors(source).items()
    }
    path = write_gguf(tmp_path / "a.gguf", source.config, tensors)
    assert packs_alike(open_gguf(path)) == 2 * source.config["num_hidden_layers"]


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_damaged_scale_is_found_when_it_is_packed(tmp_path: Path, kind: Kind) -> None:
    tensors = tiny_tensors(kind)
    blocks = tensors["blk.0.ffn_down.weight"][0].copy()
    first = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])[5]
    first[:1] = 255
    if kind != Kind.MXFP4:
        first[1] = 0x7C
    tensors["blk.0.ffn_down.weight"] = blocks, kind
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    with pytest.raises(FormatError, match=r"ffn_down|down_proj"):
        make_session(load_model(checkpoint), backend="cpu", threads=1).close()
    with pytest.raises(FormatError, match="scale"):
        checkpoint.tensor("model.layers.0.mlp.down_proj.weight").decode()


def test_only_what_is_asked_for_is_repacked(tmp_path: Path, monkeypatch) -> None:
    from clocher_runtime.checkpoints.gguf import blocks as module

    asked, plain = [], module._unpacked
    monkeypatch.setattr(module, "_unpacked", lambda *args: asked.append(1) or plain(*args))
    path = write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors(Kind.Q8_0))
    checkpoint = open_gguf(path)
    assert not asked and checkpoint.nbytes > 0
    tensor = checkpoint.tensor("lm_head.weight")
    assert not asked and tensor.nbytes > 0
    assert tensor.planes["codes"] is tensor.planes["codes"]
    assert len(asked) == 1


# --- settings that are refused


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_logit_softcapping", 30.0, "llama.attn_logit_softcapping is 30.0; Clocher knows 0"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope'; Clocher knows none, linear"),
        ("expert_count", 8, "metadata .llama.expert_used_count. is missing"),
        ("rope.dimension_count", 32, "rope.dimension_count is 32; Clocher needs that of the keys"),
        ("attention.head_count", 0, "num_attention_heads is 0"),
        ("block_count", 2, "9 tensors missing, the first is 'blk.1.attn_norm.weight'"),
        ("block_count", "1", "metadata 'llama.block_count' is str '1'; expected an integer"),
        ("embedding_length", 128, r"output_norm.weight has shape \[256\]|asks for"),
        ("attention.layer_norm_rms_epsilon", 2.0, "rms_norm_eps is 2.0"),
    ],
)
def test_settings_that_no_model_here_has(key: str, value, message: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        kinds = gguf.GGUFValueType
        kind = {int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
        writer.kv_data[0][f"llama.{key}"] = gguf.GGUFValue(value, kind)

    path = write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tiny_tensors(), add)
    with pytest.raises(ModelError, match=message) as raised:
        open_gguf(path)
    assert str(path) in str(raised.value)


def test_tensors_are_accounted_for(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    extra = tensors | {"blk.0.attn_q.scale": (np.ones(1, np.float32), F32)}
    with pytest.raises(UnsupportedModel, match=r"no place in a llama model.*attn_q\.scale"):
        open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, extra))
    tensors["blk.0.ffn_up.weight"] = (np.zeros((512, 128), np.float32), F32)
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight has shape \[512, 128\]"):
        open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))
    tensors = tiny_tensors()
    tensors["blk.0.ffn_norm.weight"] = raw_blocks(Kind.Q8_0, np.ones((1, 256)))
    tensors["blk.0.ffn_norm.weight"] = (tensors["blk.0.ffn_norm.weight"][0][0], Kind.Q8_0)
    with pytest.raises(UnsupportedModel, match="a vector of q8_0"):
        open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))


def test_rope_factors_that_are_not_llama_3s_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 9, 32).astype(np.float32)
    tensors = {"rope_freqs.weight": (factors, F32)} | tiny_tensors()
    with pytest.raises(UnsupportedModel, match="not those of Llama 3's scaling"):
        open_gguf(write_gguf(tmp_path / "a.gguf", TINY_CONFIG, tensors))


@pytest.mark.parametrize(
    ("factor", "original"), [(8.0, 8192), (32.0, 8192)], ids=["llama-3.1", "llama-3.2"]
)
def test_published_llama_3_scalings_are_found(factor: float, original: int, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = TINY_CONFIG | {"rope_parameters": rope, "max_position_embeddings": 131072}
    path = write_gguf(tmp_path / "a.gguf", config, tiny_tensors())
    assert open_gguf(path).config["rope_parameters"] == rope


# --- hostile files


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: bytes) -> bytes:
    return u64(len(value)) + value


def entry(name: bytes, dims=(32,), kind: int = 0, offset: int = 0) -> bytes:
    numbers = b"".join(map(u64, dims))
    return text(name) + u32(len(dims)) + numbers + u32(kind) + u64(offset)


def build(
    fields: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, keys = counts or (len(entries), len(fields))
    header = b"GGUF" + u32(version) + u64(tensors) + u64(keys) + b"".join((*fields, *entries))
    return header + bytes(-len(header) % 32) + bytes(data)


def test_version_2_and_every_value_type_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    formats = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    fields = [text(f"k{t}".encode()) + u32(t) + struct.pack(f"<{f}", 3) for t, f in formats.items()]
    fields += [text(b"flag") + u32(7) + b"\1", text(b"word") + u32(8) + text("é".encode())]
    fields.append(text(b"list") + u32(9) + u32(3) + u64(2) + struct.pack("<2h", -1, 7))
    fields.append(text(b"words") + u32(9) + u32(8) + u64(2) + text(b"") + text(b"xy"))
    path.write_bytes(
        build(tuple(fields), (entry(b"a", (4, 2)), entry(b"b", (3,), offset=32)), 64, 2)
    )
    file = GgufFile(path)
    assert [file.metadata[f"k{t}"] for t in formats] == [3] * len(formats)
    assert file.get("flag", bool, False) is True and file.get("word", str) == "é"
    assert file.get("list", np.ndarray).tolist() == [-1, 7]
    assert file.get("words", Strings).texts() == ["", "xy"]
    assert file.tensors["a"].shape == (2, 4) and len(file.data("b")) == 12


STRING_ARRAY = text(b"k") + u32(9) + u32(8)
HOSTILE = {
    "empty": (b"", "0 bytes"),
    "magic": (b"GGML" + bytes(100), "begins with b'GGML', expected b'GGUF'"),
    "version-1": (build(version=1), "GGUF version 1; Clocher reads 2 and 3"),
    "big-endian": (build(version=3 << 24), "a big-endian GGUF"),
    "tensor-count": (build(counts=(2**63, 0)), "9223372036854775808 tensors in the"),
    "tensor-limit": (
        build(counts=(MAX_TENSORS + 1, 0), data=40 * MAX_TENSORS),
        "65537 tensors in the .* the limit is 65536",
    ),
    "key-count": (build(counts=(0, 2**64 - 1)), "metadata entries in the"),
    "key-twice": (build((text(b"k") + u32(7) + b"\0",) * 2), "key 'k' appears twice"),
    "key-not-utf-8": (build((text(b"\xff") + u32(7) + b"\0",)), "a metadata key: not UTF-8"),
    "key-empty": (build((text(b"") + u32(7) + b"\0",)), "needs 1 to 512 characters"),
    "value-type": (build((text(b"k") + u32(13) + bytes(8),)), "value type 13; known: 0 to 12"),
    "bool-2": (build((text(b"k") + u32(7) + b"\2",)), "a bool of 2"),
    "text-length": (build((text(b"k") + u32(8) + u64(2**64 - 1),)), "18446744073709551615 bytes"),
    "text-not-utf-8": (build((text(b"k") + u32(8) + text(b"\xc3"),)), "metadata 'k': not UTF-8"),
    "array-count": (build((text(b"k") + u32(9) + u32(12) + u64(2**61),)), "bytes, .* are left"),
    "array-of-arrays": (
        build((text(b"k") + u32(9) + u32(9) + u64(1) + u32(4) + u64(0),)),
        "'k' is an array of arrays",
    ),
    "strings-count": (build((STRING_ARRAY + u64(2**60),)), "1152921504606846976 strings in the"),
    "strings-end": (build((STRING_ARRAY + u64(1) + u64(2**40),)), "beyond the end of the file"),
    "name-twice": (build((), (entry(b"a"), entry(b"a", offset=128)), 256), "'a' appears twice"),
    "name-not-utf-8": (build((), (entry(b"\x80"),), 128), "a tensor name: not UTF-8"),
    "name-control": (build((), (entry(b"a\n"),), 128), "has unprintable characters"),
    "rank-0": (build((), (entry(b"a", ()),), 128), "0 dimensions; expected 1 to 4"),
    "rank-5": (build((), (entry(b"a", (1,) * 5),), 128), "5 dimensions; expected 1 to 4"),
    "dim-0": (build((), (entry(b"a", (0,)),), 128), "expected at least 1 each"),
    "elements": (build((), (entry(b"a", (2**40, 2**40)),), 128), "more than 2\\^48 elements"),
    "type": (build((), (entry(b"a", kind=99),), 128), "the ggml type 99, which is not known"),
    "iq1_m": (
        build((), (entry(b"a", (256,), 29),), 64),
        "is iq1_m; .* f32, f16.* llama-quantize",
    ),
    "nvfp4": (build((), (entry(b"a", (256,), 40),), 160), "is nvfp4; Clocher reads f32, f16, bf16"),
    "row-blocks": (build((), (entry(b"a", (33,), 8),), 128), "q8_0: rows of 33 elements"),
    "q4_k-blocks": (
        build((), (entry(b"a", (128,), 12),), 96),
        "q4_k: rows of 128 elements; .* 256",
    ),
    "iq4_nl-blocks": (build((), (entry(b"a", (40,), 20),), 32), "iq4_nl: rows of 40 elements"),
    "q6_k-truncated": (
        build((), (entry(b"a", (256, 4), 14),), 832),
        "truncated: the header describes",
    ),
    "q6_k-trailing": (build((), (entry(b"a", (256, 4), 14),), 896), "trailing data"),
    "i2_s-no-tail": (build((), (entry(b"a", (256,), 36),), 64), "truncated: the header describes"),
    "misaligned": (build((), (entry(b"a", offset=4),), 256), "starts at byte 4 of the data"),
    "overlap": (build((), (entry(b"a"), entry(b"b", offset=64)), 256), "'b' starts at byte 64"),
    "hole": (build((), (entry(b"a"), entry(b"b", offset=256)), 512), "'b' starts at byte 256"),
    "offset": (build((), (entry(b"a", offset=2**64 - 32),), 128), "starts at byte 18446744073709"),
    "truncated": (
        build((), (entry(b"a"),), 96),
        "truncated: the header describes 192 bytes, the file has 160",
    ),
    "trailing": (build((), (entry(b"a"),), 160), "trailing data"),
    "alignment-0": (
        build((text(b"general.alignment") + u32(4) + u32(0),), (entry(b"a"),), 128),
        "general.alignment is 0; expected a power of two from 8",
    ),
    "alignment-48": (
        build((text(b"general.alignment") + u32(4) + u32(48),), (entry(b"a"),), 128),
        "general.alignment is 48",
    ),
    "no-architecture": (build((), (entry(b"a"),), 128), "'general.architecture' is missing"),
    "architecture": (
        build((text(b"general.architecture") + u32(8) + text(b"mamba"),), (entry(b"a"),), 128),
        "architecture 'mamba' is not known; Clocher reads GGUF files of llama, llama4, qwen2",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises((FormatError, UnsupportedModel), match=message) as raised:
        open_gguf(path)
    assert str(path) in str(raised.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a small file with a tokenizer."""
    folder = tmp_path_factory.mktemp("sound")

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["<|end|>", *"abcdef", "ab", "cd"])
        writer.add_token_types([3, *[1] * 8])
        writer.add_token_merges(["a b", "c d"])
        writer.add_eos_token_id(0)

    return write_gguf(folder / "a.gguf", TINY_CONFIG, tiny_tensors(Kind.TQ2_0), add).read_bytes()


def read_all(path: Path) -> None:
    """Read everything that a run reads."""
    checkpoint = open_gguf(path)
    checkpoint.verify()
    Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)


def test_a_file_cut_anywhere_is_refused(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(sound)
    read_all(path)
    for size in [*range(0, 2600, 7), *range(2600, len(sound), 4096), len(sound) - 32]:
        path.write_bytes(sound[:size])
        with pytest.raises(ModelError):
            read_all(path)


def test_damaged_headers_give_the_typed_error_or_nothing(sound: bytes, tmp_path: Path) -> None:
    path, draw = tmp_path / "a.gguf", rng("mutants")
    hostile = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    refused = 0
    for _ in range(200):
        mutant = bytearray(sound)
        at = int(draw.integers(0, 2500))
        if draw.random() < 0.5:
            mutant[at] ^= 1 << int(draw.integers(8))
        else:
            mutant[at : at + 8] = u64(hostile[draw.integers(len(hostile))])
        path.write_bytes(mutant)
        try:
            read_all(path)
        except ModelError:
            refused += 1
    assert refused > 100
