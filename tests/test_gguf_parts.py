"""Models in several GGUF files, as llama-gguf-split makes them."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import add_tokenizer, as_f32, write_gguf
from weight_files import LLAMA

import clocher_runtime as clocher
from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint

SPLIT = "CLOCHER_TEST_LLAMA_GGUF_SPLIT"
"""Environment variable: the program of llama.cpp that splits files."""
PARTS = 3


@pytest.fixture(scope="module")
def source() -> Checkpoint:
    return open_checkpoint(LLAMA)


@pytest.fixture(scope="module")
def whole(source: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "tiny.gguf"
    return write_gguf(path, source.config, as_f32(source), add_tokenizer(LLAMA, "llama-bpe"))


def part_name(no: int, count: int = PARTS) -> str:
    return f"tiny-{no + 1:05}-of-{count:05}.gguf"


def split(
    source: Checkpoint, folder: Path, changes: Mapping[int, Mapping[str, Any]] | None = None
) -> list[Path]:
    """Write a model in three parts, the first without tensors.

    Args:
        source: the model.
        folder: where.
        changes: metadata of parts that are to be others.
    """
    tensors = list(as_f32(source).items())
    shares = ([], tensors[:5], tensors[5:])
    paths = []
    for no, share in enumerate(shares):
        values = {"split.no": no, "split.count": PARTS, "split.tensors.count": len(tensors)}
        values |= (changes or {}).get(no, {})
        path = folder / part_name(no)
        if no:
            writer = gguf.GGUFWriter(path, "llama")
            _split_entries(values)(writer)
            for name, (array, _) in share:
                writer.add_tensor(name, array)
            _finish(writer)
        else:
            _first(path, source, values)
        paths.append(path)
    return paths


def _split_entries(values: Mapping[str, Any]) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in values.items():
            if value is None:
                writer.kv_data[0].pop(key, None)
            elif isinstance(value, str):
                writer.kv_data[0][key] = gguf.GGUFValue(value, gguf.GGUFValueType.STRING)
            else:
                writer.add_uint16(key, value)

    return add


def _first(path: Path, source: Checkpoint, values: Mapping[str, Any]) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(LLAMA, "llama-bpe")(writer)
        _split_entries(values)(writer)

    write_gguf(path, source.config, {}, add)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_any_part_opens_the_whole_model(source: Checkpoint, whole: Path, tmp_path: Path) -> None:
    paths = split(source, tmp_path)
    expected = open_checkpoint(whole)
    for path in (*paths, tmp_path):
        got = open_checkpoint(path, verify=True)
        assert got.config == expected.config and got.names == expected.names
        assert [file.path for file in got.files] == list(paths)
        for name in got.names:
            assert np.array_equal(got.tensor(name).decode(), expected.tensor(name).decode()), name
    with clocher.load(paths[1]) as model, clocher.load(whole) as other:
        prompt = "def add(a, b):"
        assert model.generate(prompt, max_new=8) == other.generate(prompt, max_new=8)


def test_parts_that_are_missing_are_named(source: Checkpoint, tmp_path: Path) -> None:
    paths = split(source, tmp_path)
    paths[1].unlink()
    for path in (paths[0], paths[2], tmp_path):
        with pytest.raises(ModelNotFound, match=f"1 of 3 parts are missing: {part_name(1)}; put"):
            open_checkpoint(path)


def test_a_directory_of_two_models_is_not_guessed(source: Checkpoint, tmp_path: Path) -> None:
    paths = split(source, tmp_path)
    (tmp_path / "other.gguf").write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelNotFound, match=r"2 GGUF files .*; name one of them"):
        open_checkpoint(tmp_path)
    assert [file.path for file in open_checkpoint(paths[2]).files] == list(paths)


@pytest.mark.parametrize(
    ("changes", "message"),
    [  # of the parts 0 to 2: what is changed; the message
        ({1: {"split.no": 2}}, f"{part_name(1)}: split.no is 2; expected 1, as its name says"),
        ({1: {"split.count": 4}}, f"{part_name(1)}: split.count is 4; expected 3"),
        ({1: {"split.count": None}}, f"{part_name(1)}: metadata 'split.count' is missing"),
        ({2: {"split.tensors.count": 9}}, "'split.tensors.count' is 9, in tiny-00001-of-"),
        ({2: {"general.architecture": "qwen2"}}, "'general.architecture' is 'qwen2', in tiny-0"),
        ({no: {"split.tensors.count": 7} for no in range(3)}, "in 3 parts; .*count says 7"),
        ({0: {"split.count": 1001}}, "split.count says that it is one of 1001 parts"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(
    changes: Mapping[int, Mapping[str, Any]], message: str, source: Checkpoint, tmp_path: Path
) -> None:
    paths = split(source, tmp_path, changes)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(paths[0])


def test_a_tensor_in_two_parts_is_refused(source: Checkpoint, tmp_path: Path) -> None:
    paths = split(source, tmp_path)
    writer = gguf.GGUFWriter(paths[2], "llama")
    _split_entries({"split.no": 2, "split.count": PARTS})(writer)
    name = next(iter(as_f32(source)))
    writer.add_tensor(name, np.zeros((4, 4), np.float32))
    _finish(writer)
    message = f"{part_name(2)}: tensor {name!r} is in {part_name(1)}, too"
    with pytest.raises(FormatError, match=re.escape(message)):
        open_checkpoint(paths[0])


def test_a_renamed_part_says_how_it_should_be_named(source: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "renamed.gguf"
    shutil.copy(split(source, tmp_path)[0], path)
    expected = "one of 3 parts; expected at most 1024 and a name like NAME-00001-of-00003.gguf"
    with pytest.raises(FormatError, match=re.escape(expected)):
        open_checkpoint(path)


def test_a_truncated_part_is_called_so(source: Checkpoint, tmp_path: Path) -> None:
    paths = split(source, tmp_path)
    size = paths[2].stat().st_size
    os.truncate(paths[2], size - 4096)
    with pytest.raises(FormatError, match=f"{part_name(2)}: truncated: the header describes"):
        open_checkpoint(paths[0])


@pytest.mark.skipif(SPLIT not in os.environ, reason=f"{SPLIT} is not set")
def test_what_llama_cpp_splits_is_read(whole: Path, tmp_path: Path) -> None:
    for options in (["--split-max-tensors", "6"], ["--no-tensor-first-split"]):
        folder = tmp_path / options[0]
        folder.mkdir()
        command = [os.environ[SPLIT], "--split", *options, str(whole), str(folder / "tiny")]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        assert len(list(folder.iterdir())) > 1
        expected, got = open_checkpoint(whole), open_checkpoint(folder, verify=True)
        assert got.names == expected.names
        for name in got.names:
            assert np.array_equal(got.tensor(name).decode(), expected.tensor(name).decode()), name
