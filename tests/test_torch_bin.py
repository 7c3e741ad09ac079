"""Pickled weights made to break their reader: refused in bounded time and memory, or read whole."""

import json
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import oracle
from fuzz.hf_seeds import archive_bytes, torch_archive
from fuzz.oracle import bounded_memory, judge

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound
from clocher_runtime.checkpoints.hf import torch_bin
from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin

ONE = {"w": "float32"}


def folder_of(path: Path, data: bytes) -> Path:
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "pytorch_model.bin").write_bytes(data)
    return path


def with_pickle(pickle: bytes) -> bytes:
    """Return a sound archive with another pickle."""
    with zipfile.ZipFile(BytesIO(torch_archive(ONE))) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    return archive_bytes(records | {"archive/data.pkl": pickle})


def opened(folder: Path) -> None:
    for name in (checkpoint := open_torch_bin(folder)).names:
        checkpoint.tensor(name).decode()


# What torch.save writes is read.


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    assert isinstance(state, OrderedDict) and state._metadata  # type: ignore[attr-defined]
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    state["tied"] = state["weight"]
    state["part"] = torch.arange(12.0).reshape(3, 4)[1:, 1:]
    state["turned"] = torch.arange(6.0).reshape(2, 3).T
    state["one"] = torch.full((1, 1, 4), 2.0).expand(1, 1, 4)
    (tmp_path / "config.json").write_text("{}")
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = open_torch_bin(tmp_path)
    assert set(checkpoint.names) == set(state)
    for name, tensor in state.items():
        assert np.array_equal(checkpoint.tensor(name).decode(), tensor.detach().numpy()), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
def test_every_dtype_keeps_its_bits(dtype: str, tmp_path: Path) -> None:
    values = torch.arange(6).to(getattr(torch, dtype))
    torch.save({"w": values}, tmp_path / "pytorch_model.bin")
    arrays, _ = torch_bin._read_file(tmp_path / "pytorch_model.bin")
    assert arrays["w"].array.tobytes() == values.view(torch.uint8).numpy().tobytes()
    assert not arrays["w"].array.flags.writeable


# What would take for ever, or any memory.


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


NESTED = b"(tq\0" + b"h\0h\0\x86q\0" * 60
CALL = b"\x8a\x05\x00\x00\x00\x78\x01\x85R."  # of 6.3e9
BOMBS = {
    "a key of nested tuples": b"\x80\x02}" + NESTED + b"Ns.",
    "a storage of nested tuples": b"\x80\x02}" + text("w") + NESTED + b"Qs.",
    "a deep tuple": b"\x80\x02}" + text("w") + b")" + b"\x85" * 60_000 + b"s.",
    "a bytearray": b"\x80\x02cbuiltins\nbytearray\n" + CALL,
    "a storage": b"\x80\x02ctorch\nFloatStorage\n" + CALL,
    "a size": b"\x80\x02ctorch\nSize\n" + CALL,
    "a tensor without storage": b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n" + CALL,
    "a dictionary of itself": b"\x80\x02}q\0h\0h\0s.",
    "no end": b"\x80\x02" + b"(" * 100_000,
    "many values": b"\x80\x02" + b"]" * 100_000 + b".",
    "many dictionaries": b"\x80\x02" + b"}" * 100_000 + b".",
    "many tuples": b"\x80\x02" + b")\x85" * 50_000 + b".",
    "many numbers": b"\x80\x02" + b"K\x01" * 50_000 + b".",
    "too long": b"\x80\x02" + b"N" * (2 << 20) + b".",
    "a state that is text": b"\x80\x02ccollections\nOrderedDict\n)R" + text("x") + b"b.",
    "os": b"\x80\x02cos\nsystem\n" + text("true") + b"\x85R.",
}


@pytest.mark.parametrize("pickle", BOMBS.values(), ids=BOMBS.keys())
@pytest.mark.one_in(2)
def test_a_bomb_is_refused(pickle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "CPU_SECONDS", 8.0)
    data = with_pickle(pickle)
    folder = folder_of(tmp_path, data)
    with bounded_memory(oracle.EXTRA_BYTES + 2 * len(data)):
        judgement = judge(opened, (ModelError,), folder)
    assert judgement.outcome == "refused", judgement
    with pytest.raises(FormatError, match="convert the model to safetensors"):
        open_torch_bin(folder)


def test_an_expanded_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"w": torch.zeros(1).expand(40_000, 40_000)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"share memory: \[40000, 40000\] in 4 bytes"):
        open_torch_bin(tmp_path)


# Archives that two readers may understand differently.


Make = Callable[[dict[str, bytes]], bytes]


def compressed(method: int) -> Make:
    def make(records: dict[str, bytes]) -> bytes:
        out = BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data, method if "byteorder" in name else 0)
        return out.getvalue()

    return make


def commented(records: dict[str, bytes]) -> bytes:
    return archive_bytes(records)[:-2] + b"\3\0abc"


def twice(records: dict[str, bytes]) -> bytes:
    return archive_bytes(records | {"archive/DATA.pkl": b"\x80\x02N."})


def two_archives(records: dict[str, bytes]) -> bytes:
    return archive_bytes({"archive/data.pkl": b"\x80\x02N."}) + archive_bytes(records)


def overlapping(records: dict[str, bytes]) -> bytes:
    """Two entries of the directory for one record."""
    data = bytearray(archive_bytes(records))
    entry = data.rindex(b"PK\1\2")
    data[entry + 42 : entry + 46] = bytes(4)  # its place is that of the first
    return bytes(data)


def many(records: dict[str, bytes]) -> bytes:
    data = bytearray(archive_bytes(records))
    data[-14:-10] = b"\xff\xff\xff\xff"
    return bytes(data)


@pytest.mark.parametrize(
    "make",
    [
        *(compressed(method) for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)),
        compressed(zipfile.ZIP_LZMA),
        commented,
        twice,
        two_archives,
        overlapping,
        many,
    ],
)
def test_an_odd_archive_is_refused(make: Make, tmp_path: Path) -> None:
    with zipfile.ZipFile(BytesIO(torch_archive(ONE))) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    folder = folder_of(tmp_path, make(records))
    with pytest.raises(FormatError, match=r"(?i)zip archive"):
        open_torch_bin(folder)


def test_an_index_of_pickled_shards_is_checked(tmp_path: Path) -> None:
    folder_of(tmp_path, b"").joinpath("pytorch_model.bin").unlink()
    (tmp_path / "a.bin").write_bytes(torch_archive(ONE))
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.bin"}}))
    assert open_torch_bin(tmp_path).names == ("w",)
    index.write_text(json.dumps({"weight_map": {"v": "a.bin"}}))
    with pytest.raises(FormatError, match="disagree"):
        open_torch_bin(tmp_path)
    index.unlink()
    with pytest.raises(ModelNotFound, match=r"; hf_to_iebin\.py and ptq_from_hf\.py read other"):
        open_torch_bin(tmp_path)
