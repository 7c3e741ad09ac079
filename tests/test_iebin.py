"""IEBIN v1: golden bytes, what a reader refuses, and what a writer leaves behind."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weight_files import copy_model, resealed, rng, small_tensors, write_iebin

from clocher_kernels import guards
from clocher_kernels.errors import (
    FormatError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    UsageError,
    WindowError,
)
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import IebinWriter, open_iebin
from clocher_runtime.disk.plane_index import ALIGNMENT, place

GOLDEN_JSON = """\
{
"format": "iebin",
"version": 1,
"config": {"model_type": "llama", "eps": 1e-05},
"generation_config": {},
"tokenizer_config": {"chat_template": "é"},
"vocab": {"file": "vocab.json", "nbytes": 3, "sha256": \
"ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"},
"bin": {"file": "model.ie.bin", "nbytes": 66, "sha256": \
"339ea5b950473fbb16977d7ebb02e86b5b0392d561fb2a0fb6c1b24c34206309"},
"source": {"container": "none"},
"tensors": [
{"name": "a", "shape": [2], "format": "f32", "planes": {"data": {"dtype": "f32", "shape": [2], \
"offset": 0, "nbytes": 8, "sha256": \
"ee4ac73c2bd27756ab82780f27c73a7bc4d3f0bb6acb37e008bc27eccd7e588b"}}},
{"name": "b", "shape": [1, 1], "format": "bf16", "planes": {"data": {"dtype": "bf16", \
"shape": [1, 1], "offset": 64, "nbytes": 2, "sha256": \
"a0c1c13894ba37fc4262de301cecff957435587f82ffc8683729588ef0d86339"}}}
],
"sha256": "34664ec90ee8e2e2e7e2a1ca21fc2cfbce18526567bd6917ba6bef7e6d7916c0"
}
"""
GOLDEN_BIN = bytes.fromhex("0000803f000000c0") + bytes(56) + bytes.fromhex("c03f")


def write_golden(directory: Path) -> Path:
    with IebinWriter(directory) as writer:
        writer.add("a", encode(np.array([1, -2], np.float32), parse_format("f32")))
        writer.add("b", encode(np.array([[1.5]], np.float32), parse_format("bf16")))
        config = {"model_type": "llama", "eps": 1e-05}
        writer.commit(config, {}, {"chat_template": "é"}, b"{}\n", {"container": "none"})
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_iebin(tmp_path / "model")


def document(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "model.ie.json").read_bytes()))


def rewrite(model: Path, **changes: object) -> None:
    """Change top-level fields and correct the checksum."""
    (model / "model.ie.json").write_bytes(resealed(document(model) | changes))


def test_golden_bytes(tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert (tmp_path / "model.ie.bin").read_bytes() == GOLDEN_BIN
    assert (tmp_path / "model.ie.json").read_text("utf-8") == GOLDEN_JSON
    assert (tmp_path / "vocab.json").read_bytes() == b"{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.ie.bin",
        "model.ie.json",
        "vocab.json",
    ]


def test_golden_file_reads_back(tmp_path: Path) -> None:
    (tmp_path / "model.ie.json").write_text(GOLDEN_JSON, "utf-8")
    (tmp_path / "model.ie.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "vocab.json").write_bytes(b"{}\n")
    checkpoint = open_checkpoint(tmp_path, verify=True)
    assert checkpoint.kind == "iebin" and checkpoint.names == ("a", "b")
    assert checkpoint.config == {"model_type": "llama", "eps": 1e-05}
    assert checkpoint.tokenizer_config == {"chat_template": "é"}
    assert checkpoint.tensor("a").decode().tolist() == [1, -2]
    assert checkpoint.tensor("b").decode().tolist() == [[1.5]]
    assert checkpoint.tokenizer_json == tmp_path / "vocab.json"
    assert [file.path for file in checkpoint.files] == [tmp_path / "model.ie.bin"]
    assert checkpoint.nbytes == 10


def test_round_trip_keeps_every_plane_and_aligns_it(model: Path) -> None:
    checkpoint = open_checkpoint(model, verify=True)
    written = small_tensors()
    assert checkpoint.names == tuple(written)
    for name, tensor in written.items():
        stored = checkpoint.tensor(name)
        assert (stored.shape, stored.format) == (tensor.shape, tensor.format)
        for key, plane in tensor.planes.items():
            got = stored.planes[key]
            assert got.tobytes() == plane.tobytes() and got.dtype == plane.dtype
            assert got.ctypes.data % ALIGNMENT == 0 and not got.flags.writeable


def test_output_is_the_same_every_time(model: Path, tmp_path: Path) -> None:
    again = write_iebin(tmp_path / "again")
    for path in model.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_explicit_paths(model: Path, tmp_path: Path) -> None:
    moved = (model / "model.ie.bin").rename(tmp_path / "weights")
    with pytest.raises(ModelNotFound, match=r"model\.ie\.bin"):
        open_iebin(model / "model.ie.json")
    (file,) = open_iebin(model / "model.ie.json", moved, verify=True).files
    assert file.path == moved


def test_every_changed_byte_of_the_json_is_noticed(model: Path) -> None:
    path = model / "model.ie.json"
    sound = path.read_bytes()
    bits = rng("bits").integers(0, 8, len(sound))
    for index, bit in enumerate(bits):
        changed = bytearray(sound)
        changed[index] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(ModelError):
            open_checkpoint(model)


def test_every_changed_byte_of_the_weights_is_noticed_with_verify(model: Path) -> None:
    path = model / "model.ie.bin"
    sound = path.read_bytes()
    for index in range(len(sound)):
        path.write_bytes(sound[:index] + bytes([sound[index] ^ 1]) + sound[index + 1 :])
        with pytest.raises(FormatError, match=r"sha256|SHA-256"):
            open_checkpoint(model, verify=True)
    path.write_bytes(sound)
    open_checkpoint(model, verify=True)


def test_padding_must_be_zero_even_if_the_file_hash_agrees(model: Path) -> None:
    path = model / "model.ie.bin"
    changed = bytearray(path.read_bytes())
    changed[12] = 1
    path.write_bytes(changed)
    digest = hashlib.sha256(changed).hexdigest()
    rewrite(model, bin=document(model)["bin"] | {"sha256": digest})
    open_checkpoint(model)
    with pytest.raises(FormatError, match="damaged"):
        open_checkpoint(model, verify=True)


def test_a_file_hash_that_lies_is_noticed_with_verify(model: Path) -> None:
    rewrite(model, bin=document(model)["bin"] | {"sha256": "0" * 64})
    open_checkpoint(model)
    with pytest.raises(FormatError, match=r"bin\.sha256"):
        open_checkpoint(model, verify=True)


def edges(model: Path) -> list[int]:
    planes = [p for t in document(model)["tensors"] for p in t["planes"].values()]
    ends = [p["offset"] + p["nbytes"] for p in planes]
    near = {edge + step for edge in [*ends, *(p["offset"] for p in planes)] for step in (-1, 0, 1)}
    return sorted(near - {-1, ends[-1]})


def test_every_cut_of_the_weights_is_refused(model: Path) -> None:
    path = model / "model.ie.bin"
    sound = path.read_bytes() + b"\0"
    for size in edges(model):
        path.write_bytes(sound[:size])
        with pytest.raises(FormatError, match=r"model\.ie\.bin: .*bytes, expected"):
            open_checkpoint(model)


def test_every_cut_of_the_json_is_refused(model: Path) -> None:
    path = model / "model.ie.json"
    sound = path.read_bytes()
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(FormatError):
            open_checkpoint(model)
    path.write_bytes(sound + b"\n")
    with pytest.raises(FormatError, match="damaged or edited"):
        open_checkpoint(model)


def test_weights_of_another_model_are_refused(model: Path, tmp_path: Path) -> None:
    other = write_golden(copy_model(model, tmp_path / "other"))
    (other / "model.ie.bin").rename(model / "model.ie.bin")
    with pytest.raises(FormatError, match="another model"):
        open_checkpoint(model)


@pytest.mark.parametrize("data", [b"", b"{}", b"{} ", b"{}\n\n"], ids=["0", "2", "3", "4"])
def test_another_vocabulary_is_refused(data: bytes, model: Path) -> None:
    (model / "vocab.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"vocab\.json: not the vocabulary"):
        open_checkpoint(model)


def test_a_missing_vocabulary_is_refused_unless_none_is_described(model: Path) -> None:
    (model / "vocab.json").unlink()
    with pytest.raises(ModelNotFound, match=r"vocab\.json"):
        open_checkpoint(model)
    without = document(model)
    del without["vocab"]
    (model / "model.ie.json").write_bytes(resealed(without))
    assert not open_checkpoint(model).tokenizer_json.exists()


@pytest.mark.parametrize("version", [0, 2, -1, 1.0, True, "1", None])
def test_another_version_is_refused_by_number(version: object, model: Path) -> None:
    rewrite(model, version=version)
    with pytest.raises(UnsupportedModel, match="reads version 1"):
        open_checkpoint(model)


def test_extra_is_ignored_and_any_other_new_field_is_refused(model: Path) -> None:
    rewrite(model, extra={"anything": [1]})
    open_checkpoint(model, verify=True)
    rewrite(model, more={})
    with pytest.raises(FormatError, match=r"unknown field 'more'; known: format, version"):
        open_checkpoint(model)


def tensor_with(model: Path, index: int, **changes: object) -> None:
    tensors = document(model)["tensors"]
    tensors[index] |= changes
    rewrite(model, tensors=tensors)


def test_wrong_tensor_lists_are_refused_with_the_name(model: Path) -> None:
    tensors = document(model)["tensors"]
    cases: list[tuple[str, dict[str, object]]] = [
        ("tensor 'norm': listed twice", {"tensors": [tensors[0], tensors[0]]}),
        ("tensor 'head': plane 'data'.*expected", {"tensors": tensors[1:]}),
        ("bin.nbytes", {"tensors": tensors[:-1]}),
        ("bin.nbytes", {"tensors": []}),
        (r"tensors\[0\]: expected an object", {"tensors": [7]}),
        (
            "file is '../model.ie.bin'",
            {"bin": document(model)["bin"] | {"file": "../model.ie.bin"}},
        ),
        ("64 lower-case", {"bin": document(model)["bin"] | {"sha256": "A" * 64}}),
        ("field 'nbytes' is bool", {"bin": document(model)["bin"] | {"nbytes": True}}),
    ]
    sound = (model / "model.ie.json").read_bytes()
    for message, changes in cases:
        rewrite(model, **changes)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(model)
        (model / "model.ie.json").write_bytes(sound)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "q4_0"}, "tensor 'norm': unknown format 'q4_0'; expected one of"),
        ({"format": "bsr_1x1_f32"}, "tensor 'norm'.*'col_idx' has shape None"),
        ({"format": "mxfp4"}, "tensor 'norm'.*holds matrices"),
        ({"format": "bf16"}, "tensor 'norm': plane 'data'"),
        ({"shape": [4]}, "tensor 'norm': plane 'data'"),
        ({"shape": [0]}, "at least 1"),
        ({"shape": [True]}, "integer >= 0"),
        ({"shape": [-3]}, "integer >= 0"),
        ({"shape": [2**62, 2**62]}, "2\\^48"),
        ({"planes": {}}, r"planes \[\], expected \['data'\]"),
        ({"name": "a\nb"}, "unprintable"),
        ({"name": "n" * 513}, "1 to 512"),
        ({"extra": {}}, "unknown field 'extra'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_wrong_tensor_is_refused(changes: dict[str, object], message: str, model: Path) -> None:
    tensor_with(model, 0, **changes)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "changes",
    [{"offset": 1}, {"offset": -64}, {"offset": 64}, {"nbytes": 11}, {"nbytes": 13}]
    + [{"dtype": "i32"}, {"shape": [3, 1]}, {"shape": [3.0]}, {"sha256": ""}, {"more": 1}],
    ids=str,
)
def test_a_wrong_plane_is_refused(changes: dict[str, object], model: Path) -> None:
    plane = document(model)["tensors"][0]["planes"]["data"]
    tensor_with(model, 0, planes={"data": plane | changes})
    with pytest.raises(FormatError, match="tensor 'norm': plane 'data'"):
        open_checkpoint(model)


def test_a_forbidden_code_is_refused_when_the_tensor_is_loaded(model: Path) -> None:
    offset = document(model)["tensors"][4]["planes"]["codes"]["offset"]
    path = model / "model.ie.bin"
    data = bytearray(path.read_bytes())
    data[offset] = 3
    path.write_bytes(data)
    checkpoint = open_checkpoint(model)
    with pytest.raises(FormatError, match=r"tensor 'ternary'.*code 3"):
        checkpoint.tensor("ternary")


def test_refuses_to_open_inside_a_timed_window(model: Path) -> None:
    guards.open_window("decode")
    try:
        with pytest.raises(WindowError):
            open_checkpoint(model)
    finally:
        guards.close_window()


def test_the_writer_refuses_a_matrix_without_blocks() -> None:
    with pytest.raises(FormatError, match="no block is stored"):
        place(parse_format("bsr_1x1_f32"), (1, 1), 0)


def test_an_abandoned_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IebinWriter(tmp_path) as writer:
        writer.add("norm", small_tensors()["norm"])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_writer_keeps_the_old_model(model: Path) -> None:
    with pytest.raises(RuntimeError), IebinWriter(model):
        raise RuntimeError
    open_checkpoint(model, verify=True)


def test_what_a_killed_writer_left_is_overwritten(model: Path, tmp_path: Path) -> None:
    stale = copy_model(model, tmp_path / "stale")
    for name in ("model.ie.bin", "model.ie.json", "vocab.json"):
        (stale / f"{name}.partial").write_bytes(b"x" * 9999)
    write_iebin(stale)
    assert sorted(path.name for path in stale.iterdir()) == sorted(
        path.name for path in model.iterdir()
    )
    assert (stale / "model.ie.bin").read_bytes() == (model / "model.ie.bin").read_bytes()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with IebinWriter(tmp_path) as writer:
        with pytest.raises(UsageError, match="another conversion"):
            IebinWriter(tmp_path)
        writer.add("norm", small_tensors()["norm"])
        writer.commit({}, {}, {}, None, {})
    checkpoint = open_checkpoint(tmp_path, verify=True)
    norm: QuantTensor = checkpoint.tensor("norm")
    assert norm.decode().tolist() == small_tensors()["norm"].decode().tolist()
