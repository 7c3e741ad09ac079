"""Synthetic models: reproducible bytes, sane numbers, and GGUF files with equal weights."""

import hashlib
import json
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from commands import SCRIPTS, python
from gguf.quants import dequantize
from sessions import make_session
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import clocher_runtime as clocher
from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import open_arrays
from clocher_runtime.checkpoints.gguf.blocks import F16, F32, row_blocks, same_type
from clocher_runtime.convert import PRESETS, synthetic
from clocher_runtime.convert.gguf import GgufEntry, GgufExport
from clocher_runtime.convert.synthetic import (
    GGUF_NAME,
    Synthesis,
    byte_tokenizer,
    formats_of,
    normal_matrix,
    preset_config,
)
from clocher_runtime.engine.load import load_model
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
TINY = ("tiny-gpt-oss", "tiny-bitnet", "tiny-llama")
# What each kind of model is made with here; ternary experts do not exist.
MADE = [
    *[("tiny-gpt-oss", p) for p in ("native", "bf16", "int8w", "int4")],
    *[("tiny-bitnet", p) for p in ("native", "bf16", "int4")],
    *[("tiny-llama", p) for p in ("native", "int8w", "int4", "ternary", "mxfp4")],
]
STORED = ("bf16", "int8_g32_f16", "int4_sym_g32_f16", "ternary")


def make(out_dir: Path, preset: str, precision: str = "native", **options: object) -> Path:
    Synthesis(preset, precision, out_dir, **options).run()  # type: ignore[arg-type]
    return out_dir


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [
        ("gpt-oss-20b", 20_915, 24),
        ("bitnet-2b", 2_413, 30),
        ("llama-1b", 1_104, 16),
        ("llama-8b", 8_030, 32),
    ],
)
def test_presets_have_the_published_sizes(name: str, millions: int, layers: int) -> None:
    spec = spec_from_config(preset_config(name))
    weights = sum(int(np.prod(need.shape)) for need in inventory(spec).values())
    assert (round(weights / 1e6), spec.num_layers) == (millions, layers)


def test_fewer_layers_are_the_first_ones() -> None:
    spec = spec_from_config(preset_config("gpt-oss-20b", 3))
    assert spec.windows == (128, 0, 128)
    with pytest.raises(UsageError, match="expected 1 to 24"):
        preset_config("gpt-oss-20b", 25)
    assert len(PRESETS["gpt-oss-20b"]["config"]["layer_types"]) == 24


@pytest.mark.parametrize("shape", [(64, 256), (3, 8, 96)], ids=["64x256", "3x8x96"])
@pytest.mark.parametrize("name", [*STORED, "mxfp4"])
def test_values_have_the_distribution_that_was_asked_for(name: str, shape: tuple[int, ...]) -> None:
    fmt = parse_format(name)
    shape = shape[-2:] if name == "ternary" else shape
    tensor = normal_matrix("w", shape, 0, 0.02, fmt)
    tensor.check()
    values = tensor.decode()
    # Ternary digits are 0 or +-mean(|x|): sqrt(0.69) * 0.8 of the deviation.
    expected = 0.0132 if name == "ternary" else 0.02
    assert abs(values.mean()) < 0.002
    assert values.std() == pytest.approx(expected, rel=0.08)


def test_a_row_may_end_inside_a_cell() -> None:
    fmt = parse_format("int4_sym_g64_f16")
    tensor = normal_matrix("w", (16, 90), 0, 1.0, fmt)
    assert tensor.decode().std() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("preset", TINY)
def test_the_same_arguments_give_the_same_bytes(preset: str, tmp_path: Path) -> None:
    first = digests(make(tmp_path / "a", preset, gguf=True))
    assert set(first) == {"model.ie.json", "model.ie.bin", "vocab.json", GGUF_NAME}
    assert digests(make(tmp_path / "b", preset, gguf=True)) == first
    other = digests(make(tmp_path / "c", preset, gguf=True, seed=1))
    assert other["vocab.json"] == first["vocab.json"]
    assert other["model.ie.bin"] != first["model.ie.bin"]


@pytest.mark.parametrize(("preset", "precision"), MADE, ids=lambda value: str(value))
def test_a_model_loads_and_its_logits_are_sane(preset: str, precision: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path, preset, precision), verify=True)
    session = make_session(load_model(checkpoint), context=16, chunk=8, all_logits=True)
    try:
        logits = session.logits([3, 141, 59, 26, 5])
    finally:
        session.close()
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 4
    assert len(set(logits.argmax(axis=1))) > 1


def test_formats_are_those_that_were_asked_for() -> None:
    spec = spec_from_config(preset_config("tiny-gpt-oss"))
    for precision, experts, attention in (
        ("native", "mxfp4", "bf16"),
        ("int8w", *["int8_g32_f16"] * 2),
    ):
        names = {name: fmt.name for name, fmt in formats_of(spec, precision).items()}
        assert names["model.layers.0.mlp.experts.gate_up_proj"] == experts
        assert names["model.layers.0.self_attn.q_proj.weight"] == attention
        assert names["model.layers.0.self_attn.q_proj.bias"] == "bf16"
        assert names["model.layers.0.mlp.router.weight"] == names["lm_head.weight"] == "bf16"
    llama = spec_from_config(preset_config("tiny-llama"))
    assert formats_of(llama, "ternary")["lm_head.weight"].name == "int4_sym_g32_f16"
    assert formats_of(llama, "int8w")["lm_head.weight"].name == "int8_g32_f16"


def test_ternary_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"experts.*choose another precision"):
        Synthesis("tiny-gpt-oss", "ternary", tmp_path)


def test_a_full_disk_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"the disk has 1\.0 kB free"):
        Synthesis("tiny-llama", "native", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_directory_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a Hugging Face model"):
        Synthesis("tiny-llama", "native", tmp_path)


def test_no_gguf_of_other_weights_stays(tmp_path: Path) -> None:
    make(tmp_path, "tiny-llama", gguf=True)
    make(tmp_path, "tiny-llama", seed=1)
    assert not (tmp_path / GGUF_NAME).exists()


def test_a_gguf_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    entries = GgufEntry("a", (2, 3), F32, "a"), GgufEntry("b", (5,), F32, "b")
    fields = {"general.architecture": "llama", "a.flag": True, "a.size": 7, "a.part": 0.5}
    first, second = np.arange(6, dtype=np.float32), np.arange(5, dtype=np.float32)
    config = preset_config("tiny-llama")
    export = GgufExport(config, formats_of(spec_from_config(config), "native"), "a")
    export.fields, export.entries = fields, entries
    a = {"a": first.reshape(2, 3)}
    with pytest.raises(ModelError, match="no tensor 'b'"):
        export.write(open_arrays(a, "a test"), path)
    with pytest.raises(FormatError, match="24 bytes of b, expected 20"):
        export.write(open_arrays({**a, "b": first}, "a test"), path)
    assert list(tmp_path.iterdir()) == []
    export.write(open_arrays({**a, "b": second}, "a test"), path)
    assert list(tmp_path.iterdir()) == [path]
    reader = gguf.GGUFReader(path)
    np.testing.assert_array_equal(reader.tensors[0].data, first.reshape(2, 3))
    np.testing.assert_array_equal(reader.tensors[1].data, second)
    assert {key: reader.fields[key].contents() for key in fields} == fields


def test_tokenizer_has_every_id(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer(300))
    tokenizer = Tokenizer(path, {})
    text = "naïve \U0001f600\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.decode([299]) == " w299"
    assert tokenizer.vocab_size == 300
    with pytest.raises(FormatError, match="needs 256"):
        byte_tokenizer(255)


def test_the_script_makes_what_clocher_run_runs(tmp_path: Path) -> None:
    make = partial(python, SCRIPTS / "make_synthetic.py", "--out-dir", tmp_path)
    make("--preset", "tiny-llama", "--layers", "1", check=True)
    flags = ("--model-dir", tmp_path, "--prompt", "abc", "--max-new", "3")
    line = json.loads(python("-m", "clocher_runtime.cli", *flags, check=True).stdout)
    assert line["tokens_generated"] == 3
    assert line["status"] == "ok"
    failed = make("--preset", "tiny-gpt-oss", "--precision", "ternary")
    assert failed.returncode == 2
    assert failed.stderr.startswith("make_synthetic: error: model.layers.0")


def values_of(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Return a tensor of a GGUF file as fp32, decoded by the gguf package."""
    shape = [int(n) for n in tensor.shape[::-1]]
    return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)


def expected_tensors(preset: str, config: dict, values: dict) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Rename and reorder by gguf's own table of names and transformers' order of rows."""
    arch = {
        "tiny-llama": gguf.MODEL_ARCH.LLAMA,
        "tiny-bitnet": gguf.MODEL_ARCH.BITNET,
        "tiny-gpt-oss": gguf.MODEL_ARCH.GPT_OSS,
    }[preset]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    sub_norms = {"self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm"}
    out = {}
    for name, value in values.items():
        stem, tail = name, "weight"
        for suffix, kind in ((".weight", "weight"), (".bias", "bias"), ("_bias", "bias")):
            if name.endswith(suffix):
                stem, tail = name.removesuffix(suffix), kind
                break
        if stem.endswith("gate_up_proj"):
            layer = stem.split(".")[2]
            out[f"blk.{layer}.ffn_gate_exps.{tail}"] = value[:, 0::2]
            out[f"blk.{layer}.ffn_up_exps.{tail}"] = value[:, 1::2]
            continue
        if preset == "tiny-llama" and stem.endswith(("q_proj", "k_proj")):
            key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
            # llama.cpp's LlamaModel.permute.
            heads = value.reshape(config[key], 2, -1, value.shape[1])
            value = heads.swapaxes(1, 2).reshape(value.shape)
        own = next((s for long, s in sub_norms.items() if stem.endswith(long)), None)
        target = f"blk.{stem.split('.')[2]}.{own}" if own else names.get_name(stem)
        assert target, f"gguf has no name for {stem}"
        out[f"{target}.{tail}"] = value
    return out


@pytest.mark.parametrize(
    ("preset", "precision", "types"),
    [
        ("tiny-llama", "int4", {"F32", "Q4_0"}),
        ("tiny-llama", "int8w", {"F32", "Q8_0"}),
        ("tiny-llama", "native", {"F32", "BF16"}),
        ("tiny-llama", "ternary", {"F32", "TQ2_0", "Q4_0"}),
        ("tiny-bitnet", "native", {"F32", "TQ2_0", "BF16"}),
        ("tiny-gpt-oss", "native", {"F32", "MXFP4", "BF16"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else value,
)
def test_gguf_holds_the_same_numbers(
    preset: str, precision: str, types: set[str], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(make(tmp_path, preset, precision, gguf=True))
    config = dict(checkpoint.config)
    values = {name: checkpoint.tensor(name).decode() for name in checkpoint.names}
    reader = gguf.GGUFReader(tmp_path / GGUF_NAME)
    found = {tensor.name: values_of(tensor) for tensor in reader.tensors}
    expected = expected_tensors(preset, config, values)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert {tensor.tensor_type.name for tensor in reader.tensors} == types
    arch = reader.fields["general.architecture"].contents()
    assert reader.fields[f"{arch}.block_count"].contents() == 2
    assert reader.fields[f"{arch}.vocab_size"].contents() == 320


@pytest.mark.parametrize("preset", TINY)
def test_clocher_runs_the_gguf_as_the_model_itself(preset: str, tmp_path: Path) -> None:
    make(tmp_path, preset, gguf=True)
    text = "x = 12;  # na\u00efve\n"
    with clocher.load(tmp_path) as model, clocher.load(tmp_path / GGUF_NAME) as other:
        assert other.tokenizer.encode(text) == model.tokenizer.encode(text) == list(text.encode())
        assert other.generate(text, max_new=8) == model.generate(text, max_new=8)


def test_gguf_of_llama3_has_its_rope_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = PRESETS["llama-8b"]["config"]["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    small = PRESETS["tiny-llama"]["config"] | {"rope_parameters": rope}
    monkeypatch.setattr(synthetic, "PRESETS", {"small": {"summary": "", "config": small}})
    make(tmp_path, "small", "int4", gguf=True)
    reader = gguf.GGUFReader(tmp_path / GGUF_NAME)
    assert reader.tensors[0].name == "rope_freqs.weight"
    assert reader.fields["llama.rope.freq_base"].contents() == 500000.0
    factors = np.array(reader.tensors[0].data)
    assert len(factors) == small["head_dim"] // 2
    # transformers divides the frequencies by 1 .. factor; llama.cpp divides them by this tensor.
    config = AutoConfig.for_model(**small)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 500000.0 ** -(np.arange(0, small["head_dim"], 2) / small["head_dim"])
    np.testing.assert_allclose(plain / factors, scaled.numpy(), rtol=1e-6)
    assert (factors.min(), factors.max()) == (1.0, rope["factor"])


@pytest.mark.parametrize("name", ["int4_asym_g32_f16", "int8_row_f32", "int4_sym_g32_bf16"])
def test_formats_that_ggml_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="no type of ggml holds these values exactly"):
        same_type(parse_format(name))


def test_longer_groups_repeat_their_scale() -> None:
    tensor = normal_matrix("w", (4, 256), 0, 1.0, parse_format("int4_sym_g128_f16"))
    blocks = row_blocks(tensor, np.arange(4), same_type(tensor.format))
    decoded = dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(decoded, tensor.decode())


def test_floats_beyond_f16_and_scales_that_are_none_are_refused() -> None:
    large = QuantTensor((1, 1), parse_format("f32"), {"data": np.full((1, 1), 1e6, np.float32)})
    with pytest.raises(FormatError, match="beyond f16"):
        row_blocks(large, np.arange(1), F16)
    values = row_blocks(large, np.arange(1), F32)
    assert to_f32(values.view(np.float32), "f32")[0, 0] == 1e6
    for scale in (0.1, 1e6):
        ternary = encode(np.full((4, 256), scale, np.float32), parse_format("ternary_f32"))
        with pytest.raises(FormatError, match="no f16"):
            row_blocks(ternary, np.arange(4), same_type(ternary.format))
