"""The artifacts of docs/guide-vm-run.md: every command; killed, resumed, on a full disk."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import PYTHON_PATH, SCRIPTS, plain, python, run_script
from gguf_files import add_tokenizer, as_f32, write_gguf
from test_convert import die_at, digests, digests_of
from weight_files import (
    GPTOSS,
    HOSTILE,
    LLAMA,
    Array,
    array,
    convert,
    copy_model,
    mutants,
    write_hf,
)

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.checkpoints.q4 import Q4_0, open_index
from clocher_runtime.convert.q4_planes import AppendJob, Q4Job, make_index
from clocher_runtime.convert.to_iebin import Conversion
from clocher_runtime.disk.output_file import OutputFile
from clocher_runtime.disk.plane_index import seal

SHELL = ("gen_q4_bytes_stream_all.sh", "rebuild_dedup_and_quant.sh", "run_quant_and_dedup.sh")
SMALL: dict[str, Array] = {
    "model.embed_tokens.weight": array("BF16", 6, 64),
    "lm_head.weight": array("BF16", 6, 64),
    "model.layers.0.self_attn.q_proj.weight": array("F16", 5, 64),
    "model.layers.0.self_attn.k_proj.weight": array("BF16", 3, 65),
    "model.layers.0.self_attn.q_proj.bias": array("F16", 5),
    "model.layers.0.mlp.up_proj.weight": array("F32", 7, 64),
    "model.norm.weight": array("F32", 64),
}


def run(command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line as it stands in the guide, with this interpreter as python."""
    words = plain(command.replace("\\\n", " "))
    if words and words[0].endswith(".py"):
        return run_script(Path(words[0]).stem, *words[1:], cwd=cwd, env=variables)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=os.environ | {"PATH": path} | PYTHON_PATH | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def q4_job(hf: Path, folder: Path, **options: Any) -> Any:
    return Q4Job(
        hf,
        folder / "model.q4.bin",
        folder / "model.q4.scales.fp16.bin",
        folder / "q4.json",
        **options,
    )


def small_model(folder: Path) -> tuple[Path, Path]:
    """Return a checkpoint, and a directory with its pair, plane files, manifest and index."""
    hf = write_hf(folder / "hf", SMALL)
    out = folder / "out"
    convert(hf, out)
    q4_job(hf, out, include_lm_head=True).run()
    make_index(out, out / "q4.json")
    return hf, out


def same(one: QuantTensor, two: QuantTensor) -> bool:
    planes = zip(one.planes.values(), two.planes.values(), strict=True)
    return one.format == two.format and all(a.tobytes() == b.tobytes() for a, b in planes)


# The commands.

COMMANDS = {
    "3.1": """python scripts/hf_to_iebin.py \
  --hf-dir models/x/hf/original \
  --out-dir models/x""",
    "3.1 raw": "python scripts/hf_to_iebin_raw.py --hf-dir models/x/hf/original --out-dir raw",
    "3.1 stream": (
        "python scripts/hf_to_iebin_stream.py --hf-dir models/x/hf/original --out-dir stream"
    ),
    "3.1 stream_pt": "python scripts/hf_to_iebin_stream_pt.py --hf-dir pt --out-dir stream_pt",
    "3.2": """MODEL_DIR="$PWD/models/x"
IE_Q4_INCLUDE_LM_HEAD=1 \
CHUNK_ROWS=128 \
python scripts/gen_q4_bytes_stream.py \
  --hf-dir "$MODEL_DIR/hf/original" \
  --q4-bytes "$MODEL_DIR/model.q4.bin" \
  --scales "$MODEL_DIR/model.q4.scales.fp16.bin" \
  --manifest quant/q4_manifest.expanded.json""",
    "3.2 all": """MODEL_DIR="$PWD/models/x"
CHUNK_ROWS=128 \
bash scripts/gen_q4_bytes_stream_all.sh "$MODEL_DIR/hf/original" "$MODEL_DIR\"""",
    "3.2b": """cp -r models/x before
python scripts/hf_to_iebin.py \
  --hf-dir models/x/hf/original \
  --out-dir models/x \
  --q4-map quant/q4_manifest.expanded.json""",
    "3.2c": """bash scripts/rebuild_dedup_and_quant.sh --model-dir models/x
python scripts/append_q4_attn_from_hf.py \
  --hf-dir models/x/hf/original \
  --compat-json models/x/model.ie.compat.json \
  --q4-bin models/x/model.q4.bin""",
    "3.3": """MODEL_DIR="$PWD/models/x"
python scripts/append_q4_attn_from_hf.py \
  --hf-dir "$MODEL_DIR/hf/original" \
  --compat-json "$MODEL_DIR/model.ie.compat.json" \
  --q4-bin "$MODEL_DIR/model.q4.bin\"""",
    "3.4": """MODEL_DIR="$PWD/models/x"
bash scripts/run_quant_and_dedup.sh "$MODEL_DIR\"""",
    "3.5": "python scripts/make_tensor_map_from_iejson.py --model-dir models/x",
}


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which every command of the guide has run, in order."""
    top = tmp_path_factory.mktemp("guide")
    (top / "scripts").symlink_to(SCRIPTS)
    (top / "models" / "x" / "hf").mkdir(parents=True)
    copy_model(GPTOSS, top / "models" / "x" / "hf" / "original")
    write_pickled(top / "pt", SMALL)
    for name, command in COMMANDS.items():
        done = run(command, top)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "Traceback" not in done.stderr, name
    yield top
    shutil.rmtree(top)


def write_pickled(folder: Path, arrays: dict[str, Array]) -> Path:
    """Write a checkpoint in two pytorch_model-*.bin files."""
    import torch  # slow, and no other test here needs it

    write_hf(folder, arrays)
    source = open_checkpoint(folder)
    kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    tensors = {}
    for name in source.names:
        stored = source.tensor(name)
        raw = torch.frombuffer(bytearray(stored.planes["data"].tobytes()), dtype=torch.uint8)
        tensors[name] = raw.view(kinds[stored.format.name]).reshape(stored.shape)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    shards = {"pytorch_model-00001-of-00002.bin": names[:3]}
    shards["pytorch_model-00002-of-00002.bin"] = names[3:]
    for file, members in shards.items():
        torch.save({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def test_the_commands_give_the_files_that_the_guide_lists(guide: Path) -> None:
    found = {path.name for path in (guide / "models" / "x").iterdir() if path.is_file()}
    dedup = {name for name in found if name.startswith("model.dedup.")}
    assert found - dedup == {
        "model.ie.bin",
        "model.ie.json",
        "vocab.json",
        "model.q4.bin",
        "model.q4.scales.fp16.bin",
        "model.ie.compat.json",
        "tensor_map.json",
    }
    assert "model.dedup.json" in dedup
    assert not [*guide.rglob("*.partial"), *guide.rglob("*.journal")]


def test_raw_and_stream_are_the_same_conversion(guide: Path) -> None:
    files = [digests_of(guide / name / "model.ie.bin") for name in ("before", "raw", "stream")]
    assert len(set(files)) == 1
    open_checkpoint(guide / "raw", verify=True)


def test_pickled_weights_give_the_bytes_of_safetensors(guide: Path, tmp_path: Path) -> None:
    convert(write_hf(tmp_path / "hf", SMALL), tmp_path / "out")
    ours, expected = guide / "stream_pt" / "model.ie.bin", tmp_path / "out" / "model.ie.bin"
    assert ours.read_bytes() == expected.read_bytes()
    document = json.loads((guide / "stream_pt" / "model.ie.json").read_text())
    assert document["source"]["container"] == "pytorch"


def test_the_packed_pair_and_the_index_hold_the_same_q4_0_tensors(guide: Path) -> None:
    model = guide / "models" / "x"
    source = open_checkpoint(model / "hf" / "original")
    packed = open_checkpoint(model, verify=True)
    overlaid = open_index(model / "model.ie.compat.json")
    overlaid.verify()
    over_floats = open_index(guide / "before" / "model.ie.json")
    quantised = 0
    for name in source.names:
        assert same(packed.tensor(name), overlaid.tensor(name)), name
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            assert same(packed.tensor(name), encode(source.tensor(name).decode(), Q4_0)), name
            quantised += 1
        else:
            assert same(packed.tensor(name), source.tensor(name)), name
            assert same(over_floats.tensor(name), source.tensor(name)), name
    assert quantised == 17


def test_clocher_run_says_the_same_with_the_pair_and_with_the_index(guide: Path) -> None:
    ids = []
    for chosen in ("--model-dir models/x", "--model-json models/x/model.ie.compat.json"):
        done = run(f"clocher-run {chosen} --prompt 'def f(' --max-new 8", guide)
        assert done.returncode == 0, done.stderr
        line = json.loads(done.stdout)
        ids.append([value for key, value in sorted(line.items()) if "ids" in key or "text" in key])
    assert ids[0] == ids[1]


def test_the_tensor_map_finds_every_plane(guide: Path) -> None:
    model = guide / "models" / "x"
    found = json.loads((model / "tensor_map.json").read_text())
    index = json.loads((model / "model.ie.json").read_text())
    assert found["index"] == {"file": "model.ie.json", "sha256": index["sha256"]}
    checkpoint = open_checkpoint(model)
    assert list(found["tensors"]) == list(checkpoint.names)
    for name, entry in found["tensors"].items():
        tensor = checkpoint.tensor(name)
        assert (entry["shape"], entry["format"]) == (list(tensor.shape), tensor.format.name)
        for key, plane in entry["planes"].items():
            data = (model / plane["file"]).read_bytes()
            data = data[plane["offset"] : plane["offset"] + plane["nbytes"]]
            assert data == tensor.planes[key].tobytes()
            assert plane["shape"] == list(tensor.planes[key].shape)


def test_a_gguf_file_is_converted_with_its_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    source = open_checkpoint(LLAMA)
    write_gguf(path, source.config, as_f32(source), add_tokenizer(LLAMA, "gpt-2"))
    done = run_script("hf_to_iebin", "--hf-dir", path, "--out-dir", tmp_path / "out", "--verify")
    assert done.returncode == 0, done.stderr
    gguf, result = open_checkpoint(path), open_checkpoint(tmp_path / "out")
    assert sorted(gguf.names) == sorted(result.names)
    assert all(same(gguf.tensor(name), result.tensor(name)) for name in gguf.names)
    assert gguf.make_tokenizer and result.tokenizer_json.read_bytes() == bytes(
        gguf.make_tokenizer()
    )


# Values and usage.


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CHUNK_ROWS": "0"}, "CHUNK_ROWS: got '0', expected an integer from 1 to 1000000"),
        ({"CHUNK_ROWS": "x"}, "CHUNK_ROWS: got 'x'"),
        ({"IE_Q4_INCLUDE_LM_HEAD": "yes"}, "IE_Q4_INCLUDE_LM_HEAD: got 'yes', expected 0 or 1"),
    ],
    ids=["rows 0", "rows x", "head yes"],
)
def test_bad_variables_are_exit_2(variables: dict[str, str], message: str, tmp_path: Path) -> None:
    command = f"""python {SCRIPTS}/gen_q4_bytes_stream.py --hf-dir {LLAMA} \
        --q4-bytes q --scales s --manifest m"""
    done = run(command, tmp_path, **variables)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("bash {s}/gen_q4_bytes_stream_all.sh", 2, "Usage: bash scripts/gen_q4"),
        ("bash {s}/gen_q4_bytes_stream_all.sh a b c d", 2, "Usage"),
        ("bash {s}/rebuild_dedup_and_quant.sh", 2, "Usage: bash scripts/rebuild"),
        ("bash {s}/rebuild_dedup_and_quant.sh --model-dir", 2, "--model-dir needs a value"),
        ("bash {s}/rebuild_dedup_and_quant.sh --x", 2, "unknown argument --x"),
        ("bash {s}/run_quant_and_dedup.sh", 2, "Usage: bash scripts/run_quant"),
        ("bash {s}/run_quant_and_dedup.sh 'no such'", 3, "no config.json in no such/hf/original"),
        ("python {s}/make_tensor_map_from_iejson.py --model-dir no", 3, "no/model.ie.json"),
        (
            "python {s}/append_q4_attn_from_hf.py --hf-dir no --compat-json no/c.json --q4-bin q",
            2,
            "expected no/model.q4.bin",
        ),
        ("python {s}/hf_to_iebin_stream_pt.py --hf-dir no --out-dir out", 3, "no: no model there"),
    ],
)
def test_wrong_use_says_what_is_right(
    command: str, code: int, message: str, tmp_path: Path
) -> None:
    done = run(command.format(s=SCRIPTS), tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SHELL)
def test_shell_scripts_are_strict(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", SCRIPTS / name], check=True)


# Q4_0 files.


def test_the_rows_of_a_chunk_change_nothing(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", SMALL)
    for rows in (1, 2, 1000):
        q4_job(hf, tmp_path / str(rows), include_lm_head=True, chunk_rows=rows).run()
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "1000")


def test_what_is_left_out_is_listed_with_the_reason(tmp_path: Path) -> None:
    job = q4_job(write_hf(tmp_path / "hf", SMALL), tmp_path)
    assert job.names == tuple(name for name in job.names if name.endswith("_proj.weight"))
    assert job.kept == {
        "lm_head.weight": "no rule",
        "model.embed_tokens.weight": "no rule",
        "model.layers.0.self_attn.q_proj.bias": "bias",
        "model.norm.weight": "norm",
    }
    assert {*job.names, *job.kept} == set(SMALL)
    with pytest.raises(UsageError, match="matches no tensor"):
        q4_job(write_hf(tmp_path / "hf2", {"a": array("F32", 4)}), tmp_path)
    with pytest.raises(UsageError, match="no float matrix to encode: vector"):
        q4_job(write_hf(tmp_path / "hf3", {"a_proj.weight": array("F32", 4)}), tmp_path)
    with pytest.raises(UsageError, match="three different files"):
        Q4Job(tmp_path / "hf", tmp_path / "a", tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="or a file of it"):
        Q4Job(tmp_path / "hf", tmp_path / "hf/model.safetensors", tmp_path / "a", tmp_path / "b")


def test_a_manifest_of_other_weights_is_refused(tmp_path: Path) -> None:
    _, out = small_model(tmp_path)
    other = {name: array(dtype, *shape, fill=1) for name, (dtype, shape, _) in SMALL.items()}
    with pytest.raises(FormatError, match="made from other weights"):
        convert(write_hf(tmp_path / "hf2", other), tmp_path / "out2", out / "q4.json")
    assert list((tmp_path / "out2").iterdir()) == []
    fewer = {name: stored for name, stored in SMALL.items() if "up_proj" not in name}
    with pytest.raises(UsageError, match=r"no tensor .*up_proj"):
        convert(write_hf(tmp_path / "hf3", fewer), tmp_path / "out2", out / "q4.json")


def test_damaged_plane_files_are_refused(tmp_path: Path) -> None:
    hf, out = small_model(tmp_path)
    scales = out / "model.q4.scales.fp16.bin"
    scales.write_bytes(bytes([scales.read_bytes()[0] ^ 1]) + scales.read_bytes()[1:])
    openings = (
        lambda: make_index(out, out / "q4.json"),
        lambda: open_index(compat(out)).verify(),
    )
    for opening in openings:
        with pytest.raises(FormatError, match=r"plane 'scales'.*SHA-256"):
            opening()
    convert(hf, tmp_path / "out2", out / "q4.json")  # which rounds again
    scales.write_bytes(scales.read_bytes()[:-1])
    for opening in openings:
        with pytest.raises(FormatError, match="bytes, expected"):
            opening()


def compat(folder: Path) -> Path:
    return folder / "model.ie.compat.json"


def test_an_index_over_another_pair_is_refused(tmp_path: Path) -> None:
    _, out = small_model(tmp_path)
    other = {name: array(dtype, *shape, fill=1) for name, (dtype, shape, _) in SMALL.items()}
    convert(write_hf(tmp_path / "hf2", other), out)
    with pytest.raises(ModelError, match=r"another model\.ie\.json.*rebuild_dedup"):
        open_index(compat(out))


def test_new_plane_files_take_the_old_index_away(tmp_path: Path) -> None:
    hf, out = small_model(tmp_path)
    q4_job(hf, out).run()
    assert not compat(out).exists()


def test_mutants_of_the_two_documents_raise_typed_errors(tmp_path: Path) -> None:
    _, out = small_model(tmp_path)
    tried = 0
    for path, opening in (
        (out / "q4.json", lambda: make_index(out, out / "q4.json")),
        (compat(out), lambda: open_index(compat(out)).verify()),
    ):
        document = json.loads(path.read_bytes())
        document["tensors"] = document["tensors"][:2]
        for mutant in itertools.islice(mutants(document), 0, None, 4):
            if path == compat(out):
                body = {k: v for k, v in mutant.items() if k != "sha256"}
                path.write_bytes(seal(json.dumps(body)[:-1].encode("utf-8") + b",\n"))
            else:
                path.write_text(json.dumps(mutant))
            tried += 1
            try:
                opening()
            except (ModelError, UsageError) as error:
                assert len(str(error)) < 20_000
    assert tried > 5 * len(HOSTILE)


# Appending.


def without_attention(folder: Path) -> tuple[Path, Path]:
    """Return a checkpoint and a directory whose index lacks the attention matrices."""
    hf = write_hf(folder / "hf", SMALL)
    out = folder / "out"
    convert(hf, out)
    job = q4_job(hf, out)
    job.names = tuple(name for name in job.names if "attn" not in name)
    job.run()
    make_index(out, out / "q4.json")
    return hf, out


def test_appended_matrices_are_those_of_a_whole_run(tmp_path: Path) -> None:
    hf, out = without_attention(tmp_path)
    before = compat(out).read_bytes()
    assert len(json.loads(before)["tensors"]) == 1
    with (out / "model.q4.bin").open("ab") as file:
        file.write(b"what a killed run has left")
    job = AppendJob(hf, compat(out), out / "model.q4.bin")
    assert (len(job.names), job.present) == (2, ())
    job.run()
    assert AppendJob(hf, compat(out), out / "model.q4.bin").names == ()
    checkpoint, source = open_index(compat(out)), open_checkpoint(hf)
    checkpoint.verify()
    for name in checkpoint.names:
        stored = source.tensor(name)
        expected = encode(stored.decode(), Q4_0) if name.endswith("_proj.weight") else stored
        assert same(checkpoint.tensor(name), expected), name
    make_index(out, out / "q4.json")
    assert compat(out).read_bytes() == before
    open_index(compat(out)).verify()


def test_appending_to_files_that_changed_is_refused(tmp_path: Path) -> None:
    hf, out = without_attention(tmp_path)
    (out / "model.q4.bin").write_bytes(bytes((out / "model.q4.bin").stat().st_size))
    with pytest.raises(FormatError, match="do not match the SHA-256 in the index"):
        AppendJob(hf, compat(out), out / "model.q4.bin").run()
    compat(out).unlink()
    with pytest.raises(UsageError, match=r"rebuild_dedup_and_quant\.sh --model-dir"):
        AppendJob(hf, compat(out), out / "model.q4.bin")


# Resuming.


def interrupted(job: Any, after: int) -> None:
    """Run a job and press Ctrl-C after some tensors."""
    seen = 0

    def press(nbytes: int, name: str) -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(press)


def jobs(hf: Path, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    return {"convert": Conversion(hf, out), "q4": q4_job(hf, out, include_lm_head=True)}


@pytest.mark.parametrize("kind", ["convert", "q4"])
def test_a_rerun_takes_over_what_is_finished(kind: str, tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", SMALL)
    assert jobs(hf, tmp_path / "whole")[kind].run() == 0
    interrupted(jobs(hf, tmp_path / "out")[kind], 2)
    assert any(path.name.endswith(".journal") for path in (tmp_path / "out").iterdir())
    names: list[str] = []
    assert jobs(hf, tmp_path / "out")[kind].run(lambda nbytes, name: names.append(name)) == 3
    assert len(names) == len(set(names)) == (7 if kind == "convert" else 4)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


SPOILERS: dict[str, tuple[Callable[[Path, Path], object], int]] = {
    "a byte of the first tensor": (lambda hf, out: flip(next(out.glob("*.bin.partial")), 5), 0),
    "the end is cut off": (lambda hf, out: cut(next(out.glob("*.bin.partial")), 1), 2),
    "a torn journal": (lambda hf, out: cut(next(out.glob("*.journal")), 9), 2),
    "a journal of noise": (
        lambda hf, out: next(out.glob("*.journal")).write_bytes(b"\xff[" * 9),
        0,
    ),
    "a newer source": (lambda hf, out: os.utime(hf / "model.safetensors", (1, 1)), 0),
    "no journal": (lambda hf, out: next(out.glob("*.journal")).unlink(), 0),
}


@pytest.mark.parametrize("spoil", SPOILERS)
@pytest.mark.parametrize("kind", ["convert", "q4"])
def test_only_what_is_proved_is_taken_over(kind: str, spoil: str, tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", SMALL)
    jobs(hf, tmp_path / "whole")[kind].run()
    out = tmp_path / "out"
    interrupted(jobs(hf, out)[kind], 2)
    action, expected = SPOILERS[spoil]
    action(hf, out)
    assert jobs(hf, out)[kind].run() == expected
    assert digests(out) == digests(tmp_path / "whole")


def test_another_manifest_starts_over(tmp_path: Path) -> None:
    hf, out = small_model(tmp_path)
    interrupted(Conversion(hf, tmp_path / "new"), 3)
    assert Conversion(hf, tmp_path / "new", out / "q4.json").run() == 0
    open_checkpoint(tmp_path / "new", verify=True)


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda value: repr(value)[:20])
def test_a_hostile_journal_is_ignored(entry: object, tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", {"a": array("F32", 9), "b": array("F32", 9)})
    convert(hf, tmp_path / "whole")
    out = tmp_path / "out"
    interrupted(Conversion(hf, out), 0)
    journal = next(out.glob("*.journal"))
    head, line = journal.read_text().splitlines()
    document = json.loads(line)
    for key in ("planes", "shape", "name"):
        document[key] = entry
        journal.write_text(f"{head}\n{json.dumps(document)}\n")
        interrupted(Conversion(hf, out), 0)
    journal.write_text(f"{head}\n{json.dumps(json.loads(line) | {'planes': {'data': entry}})}\n")
    assert Conversion(hf, out).run() == 0
    assert digests(out) == digests(tmp_path / "whole")


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", SMALL)
    (tmp_path / "out").mkdir()
    with IebinWriter(tmp_path / "out"), pytest.raises(UsageError, match="another conversion"):
        convert(hf, tmp_path / "out")
    file = OutputFile(tmp_path / "out" / "model.q4.bin.partial")
    with pytest.raises(UsageError, match="another conversion"):
        q4_job(hf, tmp_path / "out").run()
    file.close()


# kill -9.


def plane_files_are_sound_or_absent(folder: Path, reference: Path) -> None:
    if (folder / "q4.json").exists():
        assert digests_of(folder / "q4.json") == digests_of(reference / "q4.json")
        assert digests_of(folder / "model.q4.bin") == digests_of(reference / "model.q4.bin")


def crash_q4_at_every_step(hf: Path, folder: Path, reference: Path) -> None:
    """Kill gen_q4 at each of its system calls; run again; compare."""
    for step in range(1000):
        out = folder / str(step)
        if die_at(step, partial(q4_job(hf, out, include_lm_head=True).run)) == 0:
            break
        plane_files_are_sound_or_absent(out, reference)
        q4_job(hf, out, include_lm_head=True).run()
        assert digests(out) == digests(reference)
    print(step)


def crash_append_at_every_step(hf: Path, model: Path, folder: Path, reference: Path) -> None:
    """Kill append at each of its system calls; what is there must open; run again; compare."""
    for step in range(1000):
        out = copy_model(model, folder / str(step))
        if die_at(step, lambda out=out: append(hf, out)) == 0:
            break
        open_index(compat(out)).verify()
        append(hf, out)
        assert digests(out) == digests(reference)
    print(step)


def append(hf: Path, out: Path) -> None:
    AppendJob(hf, compat(out), out / "model.q4.bin").run()


def kill_at_random(hf: Path, folder: Path, reference: Path, kind: str, kills: int) -> None:
    """Kill a job at random moments, go on with what is there, compare at the end."""
    rng = np.random.default_rng(kills)
    out = folder / "out"
    start = time.monotonic()
    jobs(hf, folder / "timed")[kind].run()
    whole = time.monotonic() - start
    at_work = taken = 0
    for index in range(kills):
        if index % 5 == 0:
            assert jobs(hf, out)[kind].run() >= 0
            assert digests(out) == digests(reference)
        child = os.fork()
        if not child:
            jobs(hf, out)[kind].run()
            os._exit(0)
        time.sleep(rng.uniform(0, 1) * whole)
        os.kill(child, signal.SIGKILL)
        at_work += os.waitpid(child, 0)[1] == signal.SIGKILL
        if kind == "q4":
            plane_files_are_sound_or_absent(out, reference)
        elif (out / "model.ie.json").exists():
            open_checkpoint(out, verify=True)
            assert digests_of(out / "model.ie.json") == digests_of(reference / "model.ie.json")
        taken += any(path.name.endswith(".journal") for path in out.iterdir())
    jobs(hf, out)[kind].run()
    assert digests(out) == digests(reference)
    print(at_work, taken)


def in_a_process_of_its_own(call: str, *args: object) -> list[int]:
    """Call a function of this module where fork is safe: a process with threads had better not."""
    code = (
        "import sys, test_converters as t; from pathlib import Path;"
        f"t.{call}(*(Path(a) if '/' in a else int(a) if a.isdigit() else a for a in sys.argv[1:]))"
    )
    done = python("-c", code, *args)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow  # appending is killed so by default, a conversion in test_convert
def test_gen_q4_killed_at_every_system_call(tmp_path: Path) -> None:
    hf = write_hf(tmp_path / "hf", SMALL)
    q4_job(hf, tmp_path / "whole", include_lm_head=True).run()
    call = "crash_q4_at_every_step"
    (steps,) = in_a_process_of_its_own(call, hf, tmp_path / "crashes", tmp_path / "whole")
    assert steps > 20


def test_append_killed_at_every_system_call(tmp_path: Path) -> None:
    hf, model = without_attention(tmp_path)
    whole = copy_model(model, tmp_path / "whole")
    append(hf, whole)
    (tmp_path / "crashes").mkdir()
    call = "crash_append_at_every_step"
    (steps,) = in_a_process_of_its_own(call, hf, model, tmp_path / "crashes", whole)
    assert steps > 10


def killed_at_random_moments(kind: str, kills: int, tmp_path: Path) -> None:
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)]
    hf = write_hf(tmp_path / "hf", {name: array("BF16", 256, 2048) for name in names})
    jobs(hf, tmp_path / "whole")[kind].run()
    at_work, taken = in_a_process_of_its_own(
        "kill_at_random", hf, tmp_path, tmp_path / "whole", kind, kills
    )
    assert at_work >= kills // 4, "kills came too late"
    assert taken >= kills // 8, "nothing was left to go on with"


def test_killed_at_random_moments(tmp_path: Path) -> None:
    killed_at_random_moments("convert", 12, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["convert", "q4"])
def test_killed_at_very_many_random_moments(kind: str, tmp_path: Path) -> None:
    killed_at_random_moments(kind, 300, tmp_path)


# Disk full.


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory that takes 1 MiB: a tmpfs of its own; where that may not be mounted, a limit."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["convert", "q4"])
def test_a_full_disk_leaves_what_was_there(
    kind: str, little_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_hf(tmp_path / "hf", SMALL)
    out = little_disk / "out"
    jobs(small, out)[kind].run()
    before = digests(out)
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
    large = write_hf(tmp_path / "hf2", {name: array("BF16", 900, 1024) for name in names})
    usage = type("Usage", (), {"free": 1 << 40})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"\.partial'?$") as caught:
        jobs(large, out)[kind].run()
    assert caught.value.errno in (27, 28), "EFBIG, ENOSPC"
    assert digests(out) == before
    jobs(small, out)[kind].run()
    assert digests(out) == before


# Memory.

TENSOR_BYTES = 1 << 26
BOUND = 3 * TENSOR_BYTES + 200 * 10**6


def write_sparse(folder: Path, names: list[str], shape: list[int]) -> Path:
    """Write a checkpoint of bf16 zeros that takes no disk."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    ends = [TENSOR_BYTES * index for index in range(len(names) + 1)]
    text = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": ends[index : index + 2]}
            for index, name in enumerate(names)
        }
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + ends[-1])
    return folder


@pytest.mark.parametrize("kind", ["copy", "q4 files", "packed q4", "rules", "transposed"])
@pytest.mark.one_in(5)
def test_memory_is_at_most_three_tensors(kind: str, tmp_path: Path) -> None:
    """Peak RSS of a process, the interpreter included, with tensors of 64 MiB."""
    name, shape = "model.layers.{}.mlp.up_proj.weight", [8192, 4096]
    if kind == "transposed":
        name, shape = "model.layers.{}.mlp.experts.down_proj", [2, 4096, 4096]
    hf = write_sparse(tmp_path / "hf", [name.format(i) for i in range(4)], shape)
    out = tmp_path / "out"
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"version": 1, "rules": [{"pattern": ".*", "dtype": "int8w"}]}))
    q4 = f"--q4-bytes {out}/q --scales {out}/s --manifest {out}/m"
    commands = {
        "copy": f"hf_to_iebin.py --out-dir {out}",
        "q4 files": f"gen_q4_bytes_stream.py {q4}",
        "packed q4": f"hf_to_iebin.py --out-dir {out} --q4-map {out}/m",
        "rules": f"hf_to_iebin.py --out-dir {out} --q4-map {rules}",
        "transposed": f"hf_to_iebin.py --out-dir {out}",
    }
    if kind == "packed q4":
        Q4Job(hf, out / "q", out / "s", out / "m").run()
    script, *args = commands[kind].split()
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*(line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line))"
    )
    done = python("-c", code, SCRIPTS / script, "--hf-dir", hf, *args)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < BOUND, f"{int(done.stdout) >> 10} MiB"


def test_progress_reaches_what_was_announced(tmp_path: Path) -> None:
    seen: list[int] = []
    job = q4_job(GPTOSS, tmp_path / "out", include_lm_head=True)
    job.run(lambda nbytes, name: seen.append(nbytes))
    assert seen == sorted(seen) and 0.95 * job.nbytes < seen[-1] <= job.nbytes
    done = run_script("hf_to_iebin", "--hf-dir", LLAMA, "--out-dir", tmp_path / "pair")
    assert "of disk" in done.stderr and "free" in done.stderr


def test_pickled_weights_go_from_ptq_to_iebin_by_every_name(tmp_path: Path) -> None:
    pt = write_pickled(tmp_path / "pt", SMALL)
    (pt / "pytorch_model.bin.index.json").unlink()  # the names of the shards say how many they are
    scripts = {name: f"python {SCRIPTS}/{name}.py" for name in ("ptq_from_bin", "hf_to_iebin")}
    scripts["hf_to_iebin_stream_pt"] = f"python {SCRIPTS}/hf_to_iebin_stream_pt.py"
    lines = [f"{scripts['ptq_from_bin']} --hf-dir pt --out q4.json --bits 4 --weights-only 1"]
    lines += [
        f"{scripts[name]} --hf-dir pt --out-dir {name} --q4-map q4.json --verify"
        for name in ("hf_to_iebin", "hf_to_iebin_stream_pt")
    ]
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, done.stderr
    made = [
        (tmp_path / name / "model.ie.bin").read_bytes()
        for name in ("hf_to_iebin", "hf_to_iebin_stream_pt")
    ]
    assert made[0] == made[1]
    assert '"int4' in (tmp_path / "hf_to_iebin" / "model.ie.json").read_text()


@pytest.mark.slow  # PyTorch is imported by a process of each
def test_pickled_weights_are_the_same_bytes_by_every_name_of_the_converter(tmp_path: Path) -> None:
    pt = write_pickled(tmp_path / "pt", SMALL)
    made = set()
    for kind in ("", "_raw", "_stream", "_stream_pt"):
        name = f"hf_to_iebin{kind}"
        done = run_script(name, "--hf-dir", pt, "--out-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        made.add((tmp_path / name / "model.ie.bin").read_bytes())
    assert len(made) == 1
