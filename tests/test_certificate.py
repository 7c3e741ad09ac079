"""What `--verify` writes beside a model, and what `--check` makes of it."""

import hashlib
import itertools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_subcommand
from weight_files import BITNET, GPTOSS, LLAMA, copy_model
from weight_files import convert as convert_plainly

from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert import certificate
from clocher_runtime.disk.plane_index import seal

RULES = {"pattern": r".*mlp.*", "dtype": "int4w", "group": 32}


def convert(*args: object) -> subprocess.CompletedProcess[str]:
    return run_subcommand("convert", *args)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint, and the model that was made of it with a certificate."""
    folder = tmp_path_factory.mktemp("certified")
    source = copy_model(GPTOSS, folder / "hf")
    done = convert(source, folder / "out", "--verify")
    assert done.returncode == 0, done.stderr
    return source, folder / "out"


@pytest.fixture
def pair(certified: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of both; the certificate names the first checkpoint."""
    source, model = (shutil.copytree(path, tmp_path / path.name) for path in certified)
    return source, model


def document(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "model.ie.certificate.json").read_bytes())
    return found


def test_it_lists_what_both_sides_hold(certified: tuple[Path, Path]) -> None:
    source, model = (open_checkpoint(path) for path in certified)
    found = document(certified[1])
    assert [each["name"] for each in found["tensors"]] == list(model.names)
    assert found["identical"] == len(model.names) == len(source.names)
    for each in found["tensors"]:
        for side, checkpoint in (("source", source), ("stored", model)):
            tensor = checkpoint.tensor(each["name"])
            hashes = {k: hashlib.sha256(p.tobytes()).hexdigest() for k, p in tensor.planes.items()}
            assert each[side] == {"format": tensor.format.name, "planes": hashes}
            assert each["shape"] == list(tensor.shape)
        assert (each["compared"], each["identical"]) == ("bytes", True)
    weights = certified[0] / "model.safetensors"
    facts = {"file": weights.name, "nbytes": weights.stat().st_size}
    assert found["source"]["files"] == [facts | {"mtime_ns": weights.stat().st_mtime_ns}]


def test_a_sound_model_passes_wherever_it_lies(pair: tuple[Path, Path]) -> None:
    done = convert("--check", pair[1])
    assert done.returncode == 0 and "as certified" in done.stderr, done.stderr
    done = convert(pair[0], "--check", pair[1])
    assert done.returncode == 0 and f"source {pair[0]}" in done.stderr, done.stderr


def test_a_source_that_is_gone_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "again"
    assert convert(pair[0], model, "--verify").returncode == 0
    shutil.rmtree(pair[0])
    done = convert("--check", model)
    assert done.returncode == 0 and "the source is not there any more" in done.stderr


def test_one_flipped_byte_of_the_model_is_one_line(pair: tuple[Path, Path]) -> None:
    flip(pair[1] / "model.ie.bin", 1000)
    done = convert("--check", pair[1])
    lines = done.stderr.splitlines()
    assert done.returncode == 7 and len(lines) == 2, done.stderr
    assert lines[0].startswith("lm_head.weight: stored: plane 'data' has SHA-256 ")
    assert lines[1].endswith("1 difference from its certificate")


def test_a_flipped_byte_of_the_source_is_told_as_that(pair: tuple[Path, Path]) -> None:
    flip(pair[0] / "model.safetensors", -1)
    done = convert(pair[0], "--check", pair[1])
    assert done.returncode == 7 and ": source: plane" in done.stderr, done.stderr
    assert convert("--check", pair[1]).returncode == 0


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    """Those between the planes, too."""
    convert_plainly(BITNET, tmp_path)
    certificate.write_certificate(open_checkpoint(BITNET), tmp_path)
    path = tmp_path / "model.ie.bin"
    planes = [
        plane
        for tensor in json.loads((tmp_path / "model.ie.json").read_bytes())["tensors"]
        for plane in tensor["planes"].values()
    ]
    gap = next(
        one["offset"] + one["nbytes"]
        for one, two in itertools.pairwise(planes)
        if one["offset"] + one["nbytes"] < two["offset"]
    )
    assert not certificate.check_certificate(tmp_path).problems
    for at in (0, gap, path.stat().st_size - 1):
        flip(path, at)
        assert len(certificate.check_certificate(tmp_path).problems) == 1, at
        flip(path, at)
    assert not certificate.check_certificate(tmp_path).problems


@pytest.mark.parametrize("at", [100, 2000, -100])
def test_a_damaged_certificate_is_refused(pair: tuple[Path, Path], at: int) -> None:
    flip(pair[1] / "model.ie.certificate.json", at)
    done = convert("--check", pair[1])
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr


def test_a_certificate_of_another_model_does_not_pass(pair: tuple[Path, Path]) -> None:
    found = document(pair[1])
    found["model"]["sha256"] = 64 * "0"
    found["tensors"][3]["shape"] = [1]
    del found["tensors"][0], found["sha256"]
    body = json.dumps(found).encode()[:-1] + b","
    (pair[1] / "model.ie.certificate.json").write_bytes(seal(body))
    lines = convert("--check", pair[1]).stderr.splitlines()
    assert lines[0] == "model.ie.json: not the one that was certified"
    assert lines[1] == "lm_head.weight: not in the certificate"
    assert len(lines) == 5 and ": stored: " in lines[2] and ": source: " in lines[3]


def test_quantised_tensors_are_said_to_differ(tmp_path: Path) -> None:
    rules = tmp_path / "q4.json"
    rules.write_text(json.dumps({"version": 1, "rules": [RULES]}))
    done = convert(LLAMA, tmp_path / "out", "--q4-map", rules, "--verify")
    assert done.returncode == 0, done.stderr
    found = document(tmp_path / "out")["tensors"]
    lossy = [each for each in found if not each["identical"]]
    assert lossy and {each["compared"] for each in lossy} == {"values"}
    assert all("mlp" in each["name"] and "int4" in each["stored"]["format"] for each in lossy)
    assert f"{len(found) - len(lossy)} of {len(found)} bit for bit" in done.stderr
    assert convert("--check", tmp_path / "out").returncode == 0


def test_a_new_model_takes_the_old_certificate_away(pair: tuple[Path, Path]) -> None:
    assert convert(pair[0], pair[1]).returncode == 0
    assert not (pair[1] / "model.ie.certificate.json").exists()
    done = convert("--check", pair[1])
    assert done.returncode == 3 and "certificate.json: no such file" in done.stderr
    assert f"`clocher convert MODEL {pair[1]} --verify` writes it" in done.stderr


def test_a_deduplicated_model_keeps_its_certificate(pair: tuple[Path, Path]) -> None:
    done = run_subcommand("dedup", pair[1], "--remove-bin", "--keep-anyway")
    assert done.returncode == 0, done.stderr
    assert convert("--check", pair[1]).returncode == 0


def test_check_writes_nothing_and_says_what_does_not_fit(pair: tuple[Path, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in pair[1].iterdir()}
    assert convert("--check", pair[1], "--verify").returncode == 2
    assert convert("--check", pair[1]).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in pair[1].iterdir()}


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("fmt", ["bf16", "f16", "mxfp4", "int8_g32_f16"])
def test_values_are_compared_in_parts_bit_for_bit(
    fmt: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "_DECODED_AT_ONCE", 64 * rows)
    values = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    one = encode(values, parse_format(fmt))
    other = encode(one.decode(), parse_format("f32"))
    assert certificate.same_values(one, other)
    data = other.planes["data"].copy()
    data[-1, -1] = np.nextafter(data[-1, -1], np.float32(9))
    assert not certificate.same_values(one, QuantTensor(other.shape, other.format, {"data": data}))
