"""What is written for other programs is read back as the same model."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from commands import run_subcommand
from weight_files import BITNET, LLAMA, convert, write_first_layers

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import parse_format
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.gguf import GgufExport
from clocher_runtime.convert.gguf_model import GgufConversion
from clocher_runtime.convert.to_compressed import CompressedConversion
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.text.tokenizer import Tokenizer


def quantised(folder: Path, **rule: object) -> Checkpoint:
    model = write_first_layers(LLAMA, folder / "model", 1)
    path = folder / "rules.json"
    path.write_text(
        json.dumps({"version": 1, "rules": [{"pattern": ".*_proj.weight"} | rule]}), "utf-8"
    )
    convert(model, folder / "q", path)
    return open_checkpoint(folder / "q")


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert set(one.names) == set(other.names)
    for name in one.names:
        assert np.array_equal(one.tensor(name).decode(), other.tensor(name).decode()), name


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ({"dtype": "int8", "group": 32}, "Q8_0"),
        ({"dtype": "int4", "group": 32}, "Q4_0"),
        ({"dtype": "mxfp4"}, "MXFP4"),
        ({"dtype": "ternary"}, "TQ2_0"),
    ],
    ids=str,
)
def test_a_gguf_file_has_the_numbers_and_the_tokens(
    rule: dict[str, object], kind: str, tmp_path: Path
) -> None:
    source = quantised(tmp_path, **rule)
    path = tmp_path / "m.gguf"
    GgufConversion(source, path, pre="llama-bpe").run()
    written = open_checkpoint(path, verify=True)
    assert_same(source, written)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up.weight"] == kind
    own, found = (Tokenizer(c.tokenizer_source, c.tokenizer_config) for c in (source, written))
    assert own.encode("def f(x): return x + 1") == found.encode("def f(x): return x + 1")
    messages = [{"role": "user", "content": "hi"}]
    assert own.apply_chat_template(messages) == found.apply_chat_template(messages)


def test_what_gguf_cannot_hold_is_refused_or_becomes_floats(tmp_path: Path) -> None:
    source = quantised(tmp_path, dtype="fp8")
    with pytest.raises(FormatError, match="--others bf16"):
        GgufConversion(source, tmp_path / "m.gguf", pre="llama-bpe")
    with pytest.raises(UnsupportedModel, match="--pre NAME"):
        GgufConversion(source, tmp_path / "m.gguf", "f32")
    job = GgufConversion(source, tmp_path / "m.gguf", "f32", "llama-bpe")
    assert len(job.floats) == 7
    job.run()
    assert_same(source, open_checkpoint(tmp_path / "m.gguf"))


def test_bitnet_becomes_the_architecture_with_a_squared_relu(tmp_path: Path) -> None:
    """llama.cpp computes "bitnet" with SiLU: another model, without a word."""
    path = tmp_path / "m.gguf"
    done = run_subcommand("convert", BITNET, path, "--pre", "llama-bpe")
    assert done.returncode == 0, done.stderr
    assert "note: llama.cpp has no BitNet with a squared ReLU and refuses the file" in done.stderr
    fields = gguf.GGUFReader(path).fields
    assert fields["general.architecture"].contents() == "bitnet-b1.58"
    assert_same(open_checkpoint(BITNET), open_checkpoint(path, verify=True))


@pytest.mark.parametrize("change", [{"tie_word_embeddings": False}, {"attention_bias": True}])
def test_bitnet_that_others_compute_otherwise_is_refused(change: dict[str, bool]) -> None:
    source = open_checkpoint(BITNET)
    config = source.config | change
    formats = dict.fromkeys(inventory(spec_from_config(config)), parse_format("f32"))
    with pytest.raises(UnsupportedModel, match=r"an own head or biases as GGUF.*--to iebin"):
        GgufExport(config, formats, "x")


def test_a_window_that_llama_cpp_does_not_have_is_said(tmp_path: Path) -> None:
    model = write_first_layers(LLAMA, tmp_path / "model", 1)
    config = json.loads((model / "config.json").read_text())
    for window, said in ((64, True), (None, False)):
        changed = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        (model / "config.json").write_text(json.dumps(config | changed))
        job = GgufConversion(open_checkpoint(model), tmp_path / "m.gguf", pre="llama-bpe")
        job.run()
        assert ("more than 64 tokens" in "".join(job.export.notes)) == said


@pytest.mark.parametrize(
    "rule",
    [
        {"dtype": "int4", "group": 32, "zero": "per-group"},
        {"dtype": "int4"},
        {"dtype": "int8", "group": 64},
        {"dtype": "int8", "scale": "per-tensor"},
        {"dtype": "fp8"},
        {"dtype": "fp8", "scale": "per-block", "scale_dtype": "bf16"},
        {"dtype": "mxfp4"},
    ],
    ids=str,
)
def test_a_compressed_directory_has_the_same_bytes(rule: dict[str, object], tmp_path: Path) -> None:
    source = quantised(tmp_path, **rule)
    CompressedConversion(source, tmp_path / "out").run()
    written = open_checkpoint(tmp_path / "out", verify=True)
    assert_same(source, written)
    for name in source.names:
        assert source.tensors[name].format.name == written.tensors[name].format.name
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert not (tmp_path / "out.partial").exists()
