"""Model files that are truncated, replaced or written to while they are in use."""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import seeds
from serving import Served, serving
from weight_files import GPTOSS, LLAMA, convert, copy_model, write_iebin

import clocher_runtime as clocher
from clocher_kernels.errors import FormatError, ModelChanged
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.dedup.reader import open_deduplicated
from clocher_runtime.convert.gguf import GgufExport
from clocher_runtime.convert.to_iebin import Conversion
from clocher_runtime.disk.files import MappedFile

ROOT = Path(__file__).parents[1]
LINUX = sys.platform.startswith("linux")
on_linux = pytest.mark.skipif(not LINUX, reason="SIGBUS is handled on Linux")

# Runs the command, and does something to the file before the n-th step (1: warm, 2: prefill).
COMMAND = """
import os, sys, time
from cpu_fallback.executor import CpuExecutor
from clocher_runtime.cli import main
path, what, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
step, calls = CpuExecutor.step, []
def stepping(self, tokens, rows):
    calls.append(tokens)
    if len(calls) == at:
        if what == "truncate":
            os.truncate(path, 0)
        elif what == "write":
            with open(path, "r+b") as file:
                file.seek(-64, 2)
                file.write(bytes(64))
        elif what == "replace":
            os.rename(path, path + ".old")
            open(path, "wb").write(open(path + ".old", "rb").read())
        else:
            os.unlink(path)
    step(self, tokens, rows)
CpuExecutor.step = stepping
sys.exit(main(sys.argv[4:]))
"""


def run_command(file: Path, what: str, at: int, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Return exit code, the one line of standard output, and standard error."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(file), what, str(at)]
        + ["--model-dir", str(file.parent), "--prompt-ids", "1,2,3", "--max-new", "6"]
        + ["--ignore-eos", "--device", "cpu", *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env=os.environ | {"IE_REQUIRE_MODEL": "0"},
    )
    (line,) = done.stdout.splitlines()
    return done.returncode, json.loads(line), done.stderr


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An IEBIN pair; its kernels are compiled."""
    folder = tmp_path_factory.mktemp("pair")
    convert(GPTOSS, folder)
    with clocher.load(folder, device="cpu", threads=2) as model:
        model.generate([1, 2], max_new=2)
    return folder


@on_linux
@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.slow), "2"])
@pytest.mark.parametrize("at", [1, 2, 4], ids=["warm", "prefill", "decode"])
def test_a_truncated_file_ends_a_run_with_one_line(
    at: int, threads: str, pair: Path, tmp_path: Path
) -> None:
    model = copy_model(pair, tmp_path / "m")
    file = model / "model.ie.bin"
    code, line, text = run_command(file, "truncate", at, "--threads", threads)
    assert (code, line["status"], line["code"]) == (3, "error", 3)
    assert line["type"] == "ModelChanged"
    assert str(file) in line["message"] and "0 bytes" in line["message"]
    assert f"error: {line['message']}" in text and "Traceback" not in text


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["write", "replace", "unlink"])
@pytest.mark.parametrize("source", ["iebin", "safetensors"])
@pytest.mark.one_in(2)
def test_a_changed_file_fails_a_run(what: str, source: str, pair: Path, tmp_path: Path) -> None:
    model = copy_model(pair if source == "iebin" else LLAMA, tmp_path / "m")
    file = model / ("model.ie.bin" if source == "iebin" else "model.safetensors")
    code, line, _ = run_command(file, what, 4)
    assert (code, line["status"], line["type"]) == (3, "error", "ModelChanged")
    assert str(file) in line["message"]


@on_linux
def test_a_bus_error_elsewhere_goes_its_way() -> None:
    program = (
        "import mmap, os, tempfile\n"
        "from clocher_runtime.disk.files import ending_on_lost_pages\n"
        "with ending_on_lost_pages(print), tempfile.TemporaryFile() as file:\n"
        "    file.truncate(8192)\n"
        "    data = mmap.mmap(file.fileno(), 8192)\n"
        "    file.truncate(0)\n"
        "    data[0]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (-7, b"")


# The Python API


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-64, 2)
        opened.write(bytes(64))


@pytest.mark.parametrize("what", ["write", "replace", "unlink"])
def test_the_api_raises_before_it_generates(what: str, pair: Path, tmp_path: Path) -> None:
    model = copy_model(pair, tmp_path / "m")
    file = model / "model.ie.bin"
    with clocher.load(model, device="cpu", threads=1) as loaded:
        assert loaded.generate([1, 2], max_new=2) is not None
        os.utime(file, ns=(0, 0))  # new times alone are no change
        assert loaded.generate([1, 2], max_new=2) is not None
        if what == "write":
            overwrite(file)
        elif what == "replace":
            shutil.copy2(file, tmp_path / "new")
            os.replace(tmp_path / "new", file)
        else:
            file.unlink()
        with pytest.raises(ModelChanged, match=r"model\.ie\.bin: changed since it was loaded"):
            loaded.generate([1, 2], max_new=2)
    if what != "unlink":
        with clocher.load(model, device="cpu", threads=1) as loaded:
            assert loaded.generate([1, 2], max_new=2) is not None


def test_a_change_during_a_generation_is_noticed_at_its_end(pair: Path, tmp_path: Path) -> None:
    model = copy_model(pair, tmp_path / "m")
    with clocher.load(model, device="cpu", threads=1) as loaded:
        tokens = loaded.session.generate([[1, 2]], 3, stop_ids=frozenset())
        next(tokens)
        overwrite(model / "model.ie.bin")
        with pytest.raises(ModelChanged, match="written to"):
            list(tokens)


def test_another_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    file = MappedFile(Path("f"))
    monkeypatch.chdir("else")
    file.check_unchanged()


def test_a_file_that_comes_while_pages_are_sampled_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    file = MappedFile(path)
    file.remember()
    os.utime(path, ns=(0, 0))
    sample = MappedFile._sample

    def replaced(self: MappedFile) -> str:
        found = sample(self)
        (tmp_path / "new").write_bytes(b"abd")
        (tmp_path / "new").replace(path)
        return found

    monkeypatch.setattr(MappedFile, "_sample", replaced)
    with pytest.raises(ModelChanged, match="another file"):
        file.check_unchanged()


# Converters

CONVERTER = """
import os, runpy, sys
from clocher_runtime.checkpoints.checkpoint import Checkpoint
path, what, at, script = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
tensor, calls = Checkpoint.tensor, []
def reading(self, *args, **more):
    calls.append(args)
    if len(calls) == at:
        if what == "truncate":
            os.truncate(path, 0)
        else:
            with open(path, "r+b") as file:
                file.seek(-64, 2)
                file.write(bytes([1] * 64))
    return tensor(self, *args, **more)
Checkpoint.tensor = reading
sys.argv[:] = sys.argv[4:]
runpy.run_path(script, run_name="__main__")
"""


def run_converter(
    file: Path, what: str, script: str, *flags: str | Path
) -> subprocess.CompletedProcess[str]:
    path = ROOT / "scripts" / f"{script}.py"
    command = [sys.executable, "-c", CONVERTER, file, what, "9", path, *flags]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=600
    )


@pytest.mark.parametrize("what", [pytest.param("truncate", marks=on_linux), "write"])
@pytest.mark.parametrize(
    "script",
    [
        "hf_to_iebin",
        pytest.param("hf_to_iebin_raw", marks=pytest.mark.slow),
        "convert_to_block_sparse",
    ],
)
def test_a_converter_notices_that_its_input_changed(script: str, what: str, tmp_path: Path) -> None:
    model = copy_model(LLAMA, tmp_path / "m")
    file = model / "model.safetensors"
    flag = "--model-dir" if script == "convert_to_block_sparse" else "--hf-dir"
    more = ["--sparsity", "0.9"] if script == "convert_to_block_sparse" else []
    done = run_converter(file, what, script, flag, model, "--out-dir", tmp_path / "out", *more)
    assert done.returncode == 3, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1 and str(file) in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "model.ie.json").exists()


def test_a_write_of_lost_pages_is_the_inputs_fault(tmp_path: Path) -> None:
    from clocher_runtime.disk.output_file import OutputFile

    (tmp_path / "in").write_bytes(bytes(1 << 16))
    file = MappedFile(tmp_path / "in")
    os.truncate(tmp_path / "in", 0)
    out = OutputFile(tmp_path / "out")
    with pytest.raises(ModelChanged, match="in: changed"):
        out.write(file.bytes(0, file.nbytes))
    out.close()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def float_plane(model: Path) -> int:
    """Return the offset of a float plane of an IEBIN pair, where any bit may be set."""
    document = json.loads((model / "model.ie.json").read_bytes())
    plane = next(t["planes"]["data"] for t in document["tensors"] if t["format"] == "bf16")
    return int(plane["offset"])


def test_a_converter_checks_the_hashes_of_an_iebin_pair(pair: Path, tmp_path: Path) -> None:
    model = copy_model(pair, tmp_path / "m")
    flip(model / "model.ie.bin", float_plane(model))
    with pytest.raises(FormatError, match=r"has SHA-256 .* expected .* the file is damaged"):
        Conversion(model, tmp_path / "out").run()
    assert not (tmp_path / "out" / "model.ie.json").exists()
    source = open_checkpoint(model)
    formats = {name: tensor.format for name, tensor in source.tensors.items()}
    with pytest.raises(FormatError, match=r"has SHA-256 .* expected .* the file is damaged"):
        GgufExport(source.config, formats, "m").write(source, tmp_path / "m.gguf")


def test_verify_weights_checks_the_hashes_and_a_normal_start_does_not(
    pair: Path, tmp_path: Path
) -> None:
    model = copy_model(pair, tmp_path / "m")
    file = model / "model.ie.bin"
    assert run_command(file, "", 0, "--verify-weights")[0] == 0
    flip(file, float_plane(model))
    assert run_command(file, "", 0)[0] == 0
    code, line, _ = run_command(file, "", 0, "--verify-weights")
    assert (code, line["type"]) == (3, "FormatError")
    assert "SHA-256" in line["message"]


# Indices


def test_the_indices_of_block_sparse_rows_cannot_change_after_the_check(tmp_path: Path) -> None:
    from clocher_kernels.formats.bsr import Bsr
    from clocher_kernels.quant_tensor import encode
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import IebinWriter, open_iebin

    values = np.eye(8, dtype=np.float32)
    with IebinWriter(tmp_path) as writer:
        writer.add("w", encode(values, Bsr.for_values(values, (2, 2))))
        writer.commit({}, {}, {}, None, {})
    tensor = open_iebin(tmp_path / JSON_NAME).tensor("w")
    with (tmp_path / "model.ie.bin").open("r+b") as file:
        file.write(b"\x7f" * 256)  # all of the indices
    assert tensor.planes["row_ptr"].tolist() == [0, 1, 2, 3, 4]
    assert tensor.planes["col_idx"].tolist() == [0, 1, 2, 3]


def test_the_trits_of_a_deduplicated_plane_cannot_change_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files,) = seeds.dedup()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    checkpoint = open_deduplicated(tmp_path)
    sound = checkpoint.tensor("ternary").planes["codes"].tobytes()
    take, calls = np.take, []

    def late(*args: Any, **more: Any) -> np.ndarray:
        with (tmp_path / "model.dedup.masks.bin").open("r+b") as file:
            file.write(b"\xff" * len(files["model.dedup.masks.bin"]))
        calls.append(args)
        return take(*args, **more)

    monkeypatch.setattr(np, "take", late)
    assert checkpoint.tensor("ternary").planes["codes"].tobytes() == sound
    assert calls


def test_iebin_of_the_tests_has_hashes_for_every_plane(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_iebin(tmp_path))
    for name in checkpoint.names:
        assert set(checkpoint.hashes[name]) == set(checkpoint.tensor(name).planes)


# A server


def streams(server: Served, count: int) -> list[str]:
    """Return the texts of some streams at the same time; each has to be whole."""

    def stream(seed: int) -> str:
        body = {"prompt": "import ", "max_tokens": 200, "seed": seed, "temperature": 1}
        *chunks, done = server.events("/v1/completions", **body, ignore_eos=True)
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(stream, range(count)))


def test_a_server_goes_on_with_what_is_mapped(pair: Path, tmp_path: Path) -> None:
    model = copy_model(pair, tmp_path / "m")
    file = model / "model.ie.bin"
    stop = threading.Event()

    def touch() -> None:
        for _ in range(10):
            os.utime(file)
            stop.wait(0.05)

    with serving("--model-dir", model, "--batch", 8) as server:
        expected = streams(server, 8)
        toucher = threading.Thread(target=touch)
        toucher.start()
        assert streams(server, 8) == expected
        toucher.join()
        health = server.health()
        assert health["restarts"] == 0 and "model_changed" not in health
        shutil.copy2(file, tmp_path / "new")
        os.replace(tmp_path / "new", file)
        assert streams(server, 8) == expected
        health = server.health()
        assert (health["status"], health["restarts"]) == ("ok", 0)
        assert "another file has taken its place" in health["model_changed"]
        assert "".join(server.log).count("another file has taken its place") == 1
