"""One safetensors file: what is read is what was written, and nothing doubtful is read."""

import json
import os
from pathlib import Path

import pytest
from weight_files import (
    TINY,
    Array,
    array,
    header_of,
    read_with_the_library,
    safetensors_bytes,
    write_safetensors,
)

from clocher_kernels import guards
from clocher_kernels.errors import FormatError, ModelError, ModelNotFound, WindowError
from clocher_runtime.checkpoints.hf.shards import DTYPES, open_safetensors

ARRAYS: dict[str, Array] = {"a": array("F32", 2, 3), "b": array("BF16", 4), "c": array("U8", 5)}
DATA = b"".join(stored[2] for stored in ARRAYS.values())


def write(path: Path, header: object, data: bytes = DATA) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(safetensors_bytes(text, data))
    return path


@pytest.mark.parametrize("model", TINY, ids=lambda path: path.name)
def test_reads_the_bytes_that_the_safetensors_library_reads(model: Path) -> None:
    path = model / "model.safetensors"
    ours, _ = open_safetensors(path)
    theirs = read_with_the_library(path)
    assert set(ours) == set(theirs)
    for name, other in theirs.items():
        assert (ours[name].dtype, list(ours[name].array.shape)) == (other["dtype"], other["shape"])
        assert ours[name].array.tobytes() == bytes(other["data"])


def test_reads_every_known_dtype_as_the_library_wrote_it(tmp_path: Path) -> None:
    for dtype, storage in DTYPES.items():
        path = tmp_path / "x.safetensors"
        _, shape, data = array(dtype, 3, 8, fill=1)
        write_safetensors(path, {"x": (dtype, shape, data)})
        assert read_with_the_library(path)["x"]["dtype"] == dtype
        view = open_safetensors(path)[0]["x"].array
        assert view.shape == shape and view.tobytes() == data, storage


def test_views_are_read_only_and_outlive_the_file_object(tmp_path: Path) -> None:
    found, file = open_safetensors(write(tmp_path / "x", header_of(ARRAYS)))
    view = found["a"].array
    assert not view.flags.writeable
    file.release()
    del file, found
    assert view.tobytes() == ARRAYS["a"][2]


def test_scalars_empty_tensors_metadata_and_padding_are_sound(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {"s": array("F32"), "e": array("F32", 0, 4)}
    header = header_of(arrays) | {"__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode() + b"   "
    found, _ = open_safetensors(write(tmp_path / "x", text, arrays["s"][2]))
    assert found["s"].array.shape == () and found["e"].array.shape == (0, 4)


def entry(**changes: object) -> dict[str, object]:
    return header_of(ARRAYS) | {"b": header_of(ARRAYS)["b"] | changes}


_SOUND = json.dumps(header_of(ARRAYS))
BAD_HEADERS: dict[str, object] = {
    "not json": b"{x",
    "an array": b"[]",
    "a leading space": b" {}",
    "invalid utf-8": b'{"\xff": 1}',
    "a nul in a name": {"\0": header_of(ARRAYS)["a"]},
    "an empty name": {"": header_of(ARRAYS)["a"]},
    "a lone surrogate": b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    "a duplicate tensor": f'{{"b": {json.dumps(header_of(ARRAYS)["b"])}, {_SOUND[1:]}'.encode(),
    "a duplicate field": _SOUND.replace('"dtype"', '"dtype": "U8", "dtype"', 1).encode(),
    "a tensor that is a list": header_of(ARRAYS) | {"b": []},
    "a missing field": header_of(ARRAYS) | {"b": {"dtype": "BF16", "shape": [4]}},
    "an unknown field": entry(strides=[1]),
    "F64": entry(dtype="F64", shape=[1]),
    "an unknown dtype": entry(dtype="Q4_0"),
    "a dtype that is an object": entry(dtype={}),
    "another dtype": entry(dtype="F32"),
    "another shape": entry(shape=[5]),
    "a negative dimension": entry(shape=[-4]),
    "two negative dimensions": entry(shape=[-2, -2]),
    "a bool as dimension": entry(shape=[4, True]),
    "a float as dimension": entry(shape=[4.0]),
    "nine dimensions": entry(shape=[4] + [1] * 8),
    "a product that wraps to the right size": entry(shape=[2**63, 2, 4]),
    "a huge shape behind a zero": entry(shape=[0, 2**40, 2**40], data_offsets=[24, 24]),
    "a shape that is a number": entry(shape=4),
    "a float as offset": entry(data_offsets=[24.0, 32]),
    "a bool as offset": entry(data_offsets=[True, 9]),
    "one offset": entry(data_offsets=[24]),
    "offsets backwards": entry(data_offsets=[32, 24]),
    "a negative offset": entry(data_offsets=[-8, 0]),
    "an overlap": entry(data_offsets=[20, 28]),
    "a hole": entry(data_offsets=[25, 33]),
    "an offset beyond the file": entry(data_offsets=[2**60, 2**60 + 8]),
    "an offset beyond 64 bits": entry(data_offsets=[2**64 + 24, 2**64 + 32]),
    "metadata that is a list": header_of(ARRAYS) | {"__metadata__": []},
    "metadata with a number": header_of(ARRAYS) | {"__metadata__": {"a": 1}},
    "NaN": b'{"a": NaN}',
    "an overflowing float": b'{"a": 1e999}',
    "a number of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "200 levels": b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
    "a million levels": b'{"a": ' + b"[" * 1_000_000,
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_refuses_a_header_with(header: object, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(FormatError) as caught:
        open_safetensors(path)
    assert "bad.safetensors" in str(caught.value)


def test_a_bad_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"x\.safetensors: tensor 'b': .*\[24, 32\].*20 bytes"):
        open_safetensors(write(tmp_path / "x.safetensors", entry(shape=[10])))


def test_refuses_a_cut_or_extended_file_at_every_byte(tmp_path: Path) -> None:
    sound = safetensors_bytes(json.dumps(header_of(ARRAYS)).encode(), DATA)
    path = tmp_path / "x"
    for size in range(len(sound)):
        path.write_bytes(sound[:size])
        with pytest.raises(FormatError):
            open_safetensors(path)
    path.write_bytes(sound + b"\0")
    with pytest.raises(FormatError, match="trailing"):
        open_safetensors(path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**32, 100_000_001, 300])
def test_refuses_a_header_length_beyond_the_file(length: int, tmp_path: Path) -> None:
    sound = safetensors_bytes(json.dumps(header_of(ARRAYS)).encode(), DATA)
    path = tmp_path / "x"
    path.write_bytes(length.to_bytes(8, "little") + sound[8:])
    with pytest.raises(FormatError, match=str(length)):
        open_safetensors(path)


def test_refuses_what_is_not_a_readable_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    for name in ("pipe", "loop", "empty", "."):
        with pytest.raises(ModelError):
            open_safetensors(tmp_path / name)
    for name in ("absent", "pipe/x", "n" * 300):
        with pytest.raises(ModelError):
            open_safetensors(tmp_path / name)
    with pytest.raises(ModelNotFound, match="absent"):
        open_safetensors(tmp_path / "absent")


def test_refuses_to_read_inside_a_timed_window(tmp_path: Path) -> None:
    path = write(tmp_path / "x", header_of(ARRAYS))
    guards.open_window("decode")
    try:
        with pytest.raises(WindowError, match="read a model file"):
            open_safetensors(path)
    finally:
        guards.close_window()
