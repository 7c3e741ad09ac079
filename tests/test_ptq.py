"""The PTQ scripts, from a checkpoint to a manifest, and from there to the same bytes again."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from commands import PYTHON_PATH, SCRIPTS
from commands import run_script as script
from safetensors.torch import load_file
from weight_files import BITNET, GPTOSS, LLAMA, ROOT, convert, copy_model

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.checkpoint import open_arrays
from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.command.ptq import rules_of
from clocher_runtime.convert.q4_entries import PlaneFile, part_of
from clocher_runtime.convert.q4_map import load_q4_map, parse_q4_map
from clocher_runtime.convert.rounding import parse_clip, round_tensor
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.quantize import job as job_module
from clocher_runtime.quantize.job import CalibrationText, Job, run_job
from clocher_runtime.quantize.plan import QuantPlan, build_plan, describe_source
from clocher_runtime.subcommands import quantize

SCHEMA = json.loads((ROOT / "docs" / "q4-manifest.schema.json").read_text())


def from_hf(model: Path, out: Path, *args: object) -> tuple[int, str]:
    """Run what scripts/ptq_from_hf.py runs, in this process."""
    return quantised(open_checkpoint, model, out, *args)


def quantised(
    opener: Callable[[Path], Checkpoint], source: Path, out: Path, *args: object
) -> tuple[int, str]:
    given = ["--hf-dir", str(source), "--out", str(out), *map(str, args)]
    with mock.patch.object(quantize, "_open", lambda hf_dir, **_: opener(hf_dir)):
        result = CliRunner().invoke(quantize.ptq, given)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def manifest(model: Path, out: Path, *args: object) -> dict[str, Any]:
    code, output = from_hf(model, out, *args)
    assert code == 0, output
    document = json.loads(out.read_text())
    jsonschema.validate(document, SCHEMA)
    return document


# What the manifest says, and that it is true.


def test_the_manifest_accounts_for_every_tensor_and_converts_to_its_hashes(tmp_path: Path) -> None:
    document = manifest(LLAMA, tmp_path / "q4.json", "--bits", 4, "--weights-only", 1)
    source = open_checkpoint(LLAMA)
    quantised = {entry["name"]: entry for entry in document["tensors"]}
    kept = {entry["name"]: entry["reason"] for entry in document["kept"]}
    assert quantised.keys() | kept.keys() == set(source.names) and len(quantised) == 42
    assert document["size"]["params"] == sum(np.prod(source.shape(n)) for n in source.names)
    (file,) = document["source"]["files"]
    assert file["name"] == "model.safetensors"
    text = (tmp_path / "q4.json").read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text

    convert(LLAMA, tmp_path / "out", tmp_path / "q4.json")
    written = json.loads((tmp_path / "out" / "model.ie.json").read_text())
    for tensor in written["tensors"]:
        if tensor["name"] in quantised:
            hashes = {key: plane["sha256"] for key, plane in tensor["planes"].items()}
            assert hashes == quantised[tensor["name"]]["sha256"]
    assert "tensors" not in written["source"]["q4_map"]
    stored = sum(t.nbytes for t in open_checkpoint(tmp_path / "out").tensors.values())
    assert document["size"]["nbytes"] == stored

    name = "model.layers.0.mlp.down_proj.weight"
    w = source.tensor(name).decode().astype(np.float64)
    v = open_checkpoint(tmp_path / "out").tensor(name).decode().astype(np.float64)
    err = quantised[name]["err"]
    assert err["rms_rel"] == pytest.approx(np.sqrt(np.sum((v - w) ** 2) / np.sum(w**2)), rel=1e-6)
    assert err["max_abs"] == pytest.approx(np.abs(v - w).max(), rel=1e-6)
    cosine = np.vdot(v, w) / np.sqrt(np.vdot(v, v) * np.vdot(w, w))
    assert err["cosine"] == pytest.approx(cosine, rel=1e-7)


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for folder, threads in (("a", 1), ("b", 2)):
        manifest(LLAMA, tmp_path / folder / "q4.json", "--mse", "--threads", threads)
    first, second = (tmp_path / folder / "q4.json" for folder in "ab")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("flags", "fmt", "clip"),
    [
        ((), "int4_asym_g32_f16", "none"),
        (("--group", 128, "--symmetric"), "int4_sym_g128_f16", "none"),
        (("--granularity", "per-row"), "int4_asym_row_f16", "none"),
        (("--scale-dtype", "bf16", "--mse"), "int4_asym_g32_bf16", "mse"),
        (("--bits", 8), "int8_row_f32", "none"),
        (("--bits", 8, "--granularity", "per-tensor", "--clamp", 0.05), "int8_tensor_f32",
         "clamp:0.05"),
        (("--bits", 8, "--group", 64, "--percentile", 95), "int8_g64_f16", "percentile:95"),
        (("--format", "int8"), "int8_row_f32", "none"),
        (("--format", "fp8"), "fp8_e4m3_row_f32", "none"),
        (("--format", "fp8", "--granularity", "per-block", "--scale-dtype", "bf16"),
         "fp8_e4m3_b128_bf16", "none"),
        (("--format", "fp8_e5m2", "--symmetric"), "fp8_e5m2_row_f32", "none"),
        (("--format", "mxfp4"), "mxfp4", "none"),
        (("--format", "ternary"), "ternary_f16", "none"),
    ],
    ids=str,
)  # fmt: skip
def test_every_flag_reaches_the_weights(
    flags: Sequence[object], fmt: str, clip: str, tmp_path: Path
) -> None:
    arrays = {"layers.0.w": np.random.default_rng(5).standard_t(4, (16, 256)).astype(np.float32)}
    code, output = quantised(
        lambda path: open_arrays(arrays, "w"), Path("w"), tmp_path / "q4.json", *flags
    )
    assert code == 0, output
    (entry,) = json.loads((tmp_path / "q4.json").read_text())["tensors"]
    expected = round_tensor(
        encode(arrays["layers.0.w"], parse_format("f32")), parse_format(fmt), parse_clip(clip)
    )
    from clocher_runtime.convert.q4_entries import plane_hashes

    assert entry["format"] == fmt and entry["sha256"] == plane_hashes(expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--weights-only", 0), "quantises weights alone"),
        (("--clamp", 1, "--mse"), "exclude each other"),
        (("--granularity", "per-row", "--group", 32), "--group has no place"),
        (("--bits", 8, "--affine"), "symmetric"),
        (("--granularity", "per-tensor"), "per-tensor is for int8"),
        (("--percentile", 20), "percentile:P"),
        (("--format", "mxfp4", "--bits", 4), "--format mxfp4 and --bits 4 contradict"),
        (("--format", "fp8", "--group", 32), "--group is for int4 and int8"),
        (("--format", "mxfp4", "--granularity", "per-block"), "per-block for fp8"),
        (("--format", "mxfp4", "--scale-dtype", "f32"), "leave scale_dtype out"),
        (("--format", "fp8", "--mse"), "clip is for int4 and int8"),
        (("--format", "fp8", "--method", "gptq"), "give it the method imx or rtn"),
        (("--format", "ternary", "--method", "imx"), "give it the method rtn"),
        (("--format", "mxfp4", "--affine"), "mxfp4 is symmetric"),
        (("--method", "imx"), "needs a calibration text: give --calib-text"),
        (("--method", "imx", "--mse"), "is for --method rtn"),
        (("--rules", ROOT / "quant" / "q4_manifest.json", "--bits", 8), "no place beside --rules"),
        (("--calib-text", ROOT / "README.md", "--seq-len", 4096), "less than one sequence"),
    ],
    ids=str,
)
def test_a_wrong_flag_is_a_usage_error(
    flags: Sequence[object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = from_hf(LLAMA, tmp_path / "q4.json", *flags)
    assert code == 2 and message in " ".join(output.split()), output
    assert not (tmp_path / "q4.json").exists()


def test_an_embedding_alone_is_not_quantised(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (8, 256), "model.layers.0.w": (16, 200)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    flags = (lambda path: open_arrays(arrays, "w"), Path("w"), tmp_path / "q4.json", "--bits", 3)
    code, output = quantised(*flags)
    assert code == 2, output
    message = " ".join(output.split())
    assert "1 tensor kept (columns are no multiple of 64), and no matrix of the" in message
    assert message.endswith("choose another --format or --bits, or give --rules")
    code, output = quantised(*flags[:3], "--format", "mxfp4")
    assert code == 2 and "; a rule of --rules can keep it" in " ".join(output.split()), output


def test_the_seed_manifest_is_a_set_of_rules(tmp_path: Path) -> None:
    seed = ROOT / "quant" / "q4_manifest.json"
    document = manifest(LLAMA, tmp_path / "q4.json", "--rules", seed)
    assert document["rules"] == json.loads(seed.read_text())["rules"]
    assert {entry["format"] for entry in document["tensors"]} == {"int4_sym_g64_f16"}
    assert {entry["rule"] for entry in document["tensors"]} == {0, 1}


def test_quantised_sources_stay_bit_exact_unless_asked(tmp_path: Path) -> None:
    document = manifest(GPTOSS, tmp_path / "q4.json")
    reasons = {entry["name"]: entry["reason"] for entry in document["kept"]}
    experts = [name for name in reasons if name.endswith("experts.down_proj")]
    assert {reasons[name] for name in experts} == {"already mxfp4"}
    convert(GPTOSS, tmp_path / "out", tmp_path / "q4.json")
    old, new = open_checkpoint(GPTOSS), open_checkpoint(tmp_path / "out")
    for name in experts:
        a, b = old.tensor(name), new.tensor(name)
        assert all(a.planes[key].tobytes() == b.planes[key].tobytes() for key in a.planes)

    document = manifest(GPTOSS, tmp_path / "re.json", "--requantize", "--bits", 8, "--group", 32)
    assert document["requantize"] is True
    exact = {e["name"]: e["err"]["max_abs"] for e in document["tensors"]}
    # Twice an FP4 code is an integer, so int8 in groups of 32 holds MXFP4 but for its scales.
    assert max(exact[name] for name in experts) < 1e-2
    assert {e["format"] for e in document["tensors"]} == {"int8_g32_f16"}

    code, output = from_hf(BITNET, tmp_path / "b.json")
    assert code == 2 and "give --requantize" in " ".join(output.split())


def test_a_dry_run_reads_no_weight_and_writes_nothing(tmp_path: Path) -> None:
    code, output = from_hf(LLAMA, tmp_path / "deep" / "q4.json", "--dry-run")
    assert code == 0 and "42 become int4_asym_g32_f16 by rtn; 15 stay" in " ".join(output.split())
    assert not (tmp_path / "deep").exists()


def test_the_cosine_gate_rejects_and_leaves_no_manifest(tmp_path: Path) -> None:
    out = tmp_path / "q4.json"
    manifest(LLAMA, out, "--cosine-threshold", 0.9)
    code, output = from_hf(LLAMA, out, "--cosine-threshold", 0.999)
    assert code == 8 and "rejected" in output
    assert re.search(r"gate: fail +cosine 0\.99\d+ >= 0\.999, model\.", output)
    assert [path.name for path in tmp_path.iterdir()] == ["q4.rejected.json"]
    document = json.loads((tmp_path / "q4.rejected.json").read_text())
    jsonschema.validate(document, SCHEMA)
    failed = [check for check in document["gates"] if check["verdict"] == "fail"]
    assert [check["name"] for check in failed] == ["cosine"]


def test_the_text_gate_accepts_rejects_and_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clocher_runtime.quality.compare.DOCUMENT_TOKENS", 64)
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "tests" / "data" / "valid.txt").read_text()[:3000])
    out = tmp_path / "q4.json"
    few = ("--gate", text, "--gate-window", 32, "--min-documents", 1)
    loose = ("--max-ppl-ratio", 9, "--max-kld", 9, "--min-same-top", 0, "--max-rms-dp", 9)
    for flags, code in (
        ((*few, "--min-tokens", 100, *loose), 0),
        ((*few, "--min-tokens", 10**6, *loose), 9),
        ((*few, "--min-tokens", 100, *loose[2:], "--max-kld", 1e-9), 8),
    ):
        got, output = from_hf(LLAMA, out, "--bits", 8, *flags)
        assert got == code, output
        path = out if code == 0 else tmp_path / "q4.rejected.json"
        document = json.loads(path.read_text())
        jsonschema.validate(document, SCHEMA)
        assert out.exists() == (code == 0) and document["gate"]["text"]["name"] == "text.txt"
        assert {check["name"] for check in document["gates"]} >= {"kld", "ppl_ratio", "same_top"}


# Sources other than safetensors.


def bin_model(folder: Path) -> Path:
    model = copy_model(LLAMA, folder)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = list(tensors)
    tensors[names[0]] = tensors[names[0]].T.contiguous().T
    weight_map = {}
    for index, part in enumerate((names[:20], names[20:])):
        file = f"pytorch_model-{index + 1:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, model / file)
        weight_map |= dict.fromkeys(part, file)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def test_pickled_weights_are_the_same_weights(tmp_path: Path) -> None:
    model = bin_model(tmp_path / "model")
    found, expected = open_torch_bin(model), open_checkpoint(LLAMA)
    assert found.kind == "bin" and set(found.names) == set(expected.names)
    for name in expected.names:
        a, b = found.tensor(name), expected.tensor(name)
        assert a.format.name == b.format.name and np.array_equal(a.planes["data"], b.planes["data"])
    done = script("ptq_from_bin", "--hf-dir", model, "--out", tmp_path / "bin.json")
    assert done.returncode == 0, done.stderr
    reference = manifest(LLAMA, tmp_path / "hf.json")
    document = json.loads((tmp_path / "bin.json").read_text())
    assert document["tensors"] == reference["tensors"] and document["source"]["kind"] == "bin"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch.save", "plain pickle", "legacy torch.save"])
def test_an_evil_pickle_is_refused_and_not_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    file, trap = tmp_path / "pytorch_model.bin", tmp_path / "trap"
    content = {"w": torch.zeros(2), "evil": Evil(trap)}
    if how == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how == "torch.save")
    with pytest.raises(FormatError, match="convert the model to safetensors") as error:
        open_torch_bin(tmp_path)
    assert not trap.exists() and "weights_only" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [[torch.zeros(2)], {"state": {"w": torch.zeros(2)}}, {1: torch.zeros(2)}, {}],
    ids=["list", "nested", "number", "empty"],
)
def test_what_is_not_a_dict_of_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match="expected a dict"):
        open_torch_bin(tmp_path)


def test_pickled_weights_without_torch_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bin_model(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedModel, match=r"needs torch.*pip install '\.\[torch\]'"):
        open_torch_bin(model)


def test_a_truncated_or_flipped_bin_is_refused_or_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save({"w": torch.zeros(64, 64), "v": torch.ones(7)}, file)
    data = file.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        if rng.random() < 0.5:
            del damaged[int(rng.integers(1, len(data))) :]
        else:
            damaged[int(rng.choice([*range(800), *range(len(data) - 900, len(data))]))] ^= 1 << int(
                rng.integers(8)
            )
        file.write_bytes(damaged)
        try:
            open_torch_bin(tmp_path)
        except (FormatError, UnsupportedModel):
            refused += 1
    assert refused > 15


def test_arrays_of_any_float_type_are_taken() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.standard_normal((4, 32)).astype(np.float32),
        "f16": rng.standard_normal((4, 32)).astype(np.float16),
        "f64": rng.standard_normal((2, 4, 32)),
        "big-endian": rng.standard_normal((4, 32)).astype(">f4"),
        "fortran": np.asfortranarray(rng.standard_normal((4, 32)).astype(np.float32)),
    }
    found = open_arrays(arrays, "w")
    assert found.tensors["f16"].format.name == "f16"
    for name, array in arrays.items():
        assert np.array_equal(found.tensor(name).decode(), array.astype(np.float32)), name


def test_a_function_gives_weights(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    rng = np.random.default_rng(1)\n"
        "    yield 'a.weight', rng.standard_normal((8, 64)).astype(np.float32)\n"
        "    yield 'a.bias', np.zeros(8, np.float32)\n"
        "value = 3\n"
    )
    done = script(
        "ptq_from_source", "--source", "mine:load", "--out", "q4.json", cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "q4.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["source"] == {"kind": "callable", "files": []}
    assert [e["name"] for e in document["tensors"]] == ["a.weight"]
    assert document["kept"] == [{"name": "a.bias", "reason": "bias"}]
    for source, message in (
        ("mine:value", "int is not a function"),
        ("nomodule:f", "nomodule"),
        ("mine", "expected module:function"),
    ):
        done = script("ptq_from_source", "--source", source, "--out", "no.json", cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "value", [3, [1], [("a", "text")], {"a": np.arange(3)}, {}, [("a", np.ones(2))] * 2], ids=str
)
def test_what_a_function_may_not_give(value: object) -> None:
    with pytest.raises(UsageError, match="mine:load"):
        open_arrays(value, "mine:load")


# Calibrated tensors: the plane file, resumed.


def stand_in(
    checkpoint: Any, plan: QuantPlan, text_ids: Sequence[Sequence[int]], *, planes: PlaneFile,
    counts: Any, threads: int, seed: int, progress: Any, note: Any,
) -> None:  # fmt: skip
    """Do what `calibrate` does with the files, by rounding to the best scale."""
    names = sorted(plan.calibrated, key=part_of)
    planes.resume({n: (plan.tensors[n].format, plan.tensors[n].shape) for n in names})
    assert callable(note)
    assert counts() == {}, "no format is chosen"
    record = {"method": "imx", "tokens_seen": [len(text_ids)], "err":
              {"out_nmse": 0.5, "out_nmse_rtn": 0.6}}  # fmt: skip
    for number, name in enumerate(names):
        if name not in planes.records:
            stand_in.written.append(name)  # type: ignore[attr-defined]
            if len(stand_in.written) == stand_in.die_after:  # type: ignore[attr-defined]
                raise KeyboardInterrupt
            fmt = plan.tensors[name].format
            planes.add(name, round_tensor(checkpoint.tensor(name), fmt, parse_clip("mse")), record)
        progress(name, number + 1, len(names))


def calibrated_job(out: Path, seed: int = 0) -> Job:
    rule = {"pattern": ".*mlp.*", "dtype": "int4w", "group": 64, "method": "imx"}
    rest = {"pattern": ".*attn.*", "dtype": "int8w"}
    rules = parse_q4_map({"version": 1, "rules": [rule, rest]}, Path("rules"))
    record = {"name": "t", "nbytes": 1, "sha256": "0" * 64, "sequences": 1, "seq_len": 3} | {
        "tokens": 3, "tokens_sha256": "0" * 64, "bos": False, "seed": seed}  # fmt: skip
    text = CalibrationText(((1, 2, 3),), record)
    return Job(open_checkpoint(LLAMA), out, rules, calibration=text, seed=seed)


def run_stand_in(monkeypatch: pytest.MonkeyPatch, job: Job, die_after: int = 0) -> list[str]:

    monkeypatch.setattr(job_module, "calibrate", stand_in)
    stand_in.written, stand_in.die_after = [], die_after  # type: ignore[attr-defined]
    if die_after:
        with pytest.raises(KeyboardInterrupt):
            run_job(job, job.plan())
    else:
        run_job(job, job.plan())
    return stand_in.written  # type: ignore[attr-defined, no-any-return]


def test_a_killed_job_goes_on_after_its_last_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "a" / "q4.json", tmp_path / "b" / "q4.json"
    names = run_stand_in(monkeypatch, calibrated_job(whole))
    assert len(names) == 18
    run_stand_in(monkeypatch, calibrated_job(out), die_after=11)
    assert not out.exists() and (tmp_path / "b" / "q4.planes.bin").stat().st_size
    assert run_stand_in(monkeypatch, calibrated_job(out)) == names[10:]
    assert run_stand_in(monkeypatch, calibrated_job(out)) == []
    for name in ("q4.json", "q4.planes.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    jsonschema.validate(document := json.loads(out.read_text()), SCHEMA)
    entry = next(e for e in document["tensors"] if "mlp" in e["name"])
    assert entry["method"] == "imx" and entry["tokens_seen"] == [1]
    assert entry["err"]["out_nmse"] == 0.5 and set(entry["offsets"]) == {"codes", "scales"}

    convert(LLAMA, tmp_path / "out", out)
    found = open_checkpoint(tmp_path / "out", verify=True).tensor(entry["name"])
    source = open_checkpoint(LLAMA).tensor(entry["name"])
    expected = round_tensor(source, found.format, parse_clip("mse"))
    assert all(np.array_equal(found.planes[key], expected.planes[key]) for key in found.planes)

    assert len(run_stand_in(monkeypatch, calibrated_job(out, seed=1))) == 18, "another job"


def test_a_manifest_without_its_planes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "q4.json"
    run_stand_in(monkeypatch, calibrated_job(out))
    (tmp_path / "q4.planes.bin").unlink()
    with pytest.raises((ModelNotFound, FormatError), match=r"q4\.planes\.bin: missing"):
        convert(LLAMA, tmp_path / "out", out)


def test_a_rule_that_matches_nothing_stops_before_any_weight_is_read() -> None:
    rules = parse_q4_map({"version": 1, "rules": [{"pattern": "x", "dtype": "int8"}]}, Path("r"))
    with pytest.raises(UsageError, match="pattern 'x' matches no tensor"):
        build_plan(open_checkpoint(LLAMA), rules)


def test_a_tensor_left_out_of_the_manifest_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = job_module._quantise
    monkeypatch.setattr(job_module, "_quantise", lambda *args: tuple(real(*args))[:-1])
    rules = rules_of(dict.fromkeys(DEFAULTS) | {"weights_only": 1}, ())
    job = Job(open_checkpoint(LLAMA), tmp_path / "q4.json", rules)
    with pytest.raises(FormatError, match="list every tensor of the plan"):
        run_job(job, job.plan())
    assert not (tmp_path / "q4.json").exists()


DEFAULTS = ("format", "bits", "granularity", "group", "symmetric", "scale_dtype", "clamp",
            "percentile", "mse", "rules", "method", "calib_text", "requantize")  # fmt: skip


def test_interrupted_is_exit_130_and_leaves_no_manifest(tmp_path: Path) -> None:
    out = tmp_path / "q4.json"
    command = [sys.executable, str(SCRIPTS / "ptq_from_hf.py"), "--hf-dir", str(LLAMA)]
    command += ["--out", str(out), "--mse", "--threads", "1"]
    text = ROOT / "tests" / "data" / "valid.txt"
    process = subprocess.Popen(
        [*command, "--gate", str(text)], env=os.environ | PYTHON_PATH,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    line = ""
    while "bits per weight" not in line:
        line = process.stderr.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted" in rest and "Traceback" not in rest
    assert not out.exists()


def test_help_teaches() -> None:
    done = script("ptq_from_hf", "--help")
    assert done.returncode == 0
    for word in ("Examples:", "Exit codes:", "--calib-text", "--cosine-threshold", "interrupted"):
        assert word in done.stdout


def test_the_loaded_manifest_is_the_one_that_was_written(tmp_path: Path) -> None:
    document = manifest(LLAMA, tmp_path / "q4.json")
    q4_map = load_q4_map(tmp_path / "q4.json")
    assert q4_map.entries is not None and len(q4_map.entries) == len(document["tensors"])
    assert set(q4_map.kept) == {entry["name"] for entry in document["kept"]}


def test_hashing_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(bytes(64 << 20))
    checkpoint = Checkpoint(tmp_path, "bin", {}, {}, (MappedFile(tmp_path / "w"),))
    resident = []

    def look(*_: object) -> None:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        resident.append(int(fields[2]) * os.sysconf("SC_PAGE_SIZE"))

    describe_source(checkpoint, progress=look)
    assert len(resident) > 10
    assert max(resident) - resident[0] < 16 << 20


def test_finished_planes_do_not_stay_in_memory(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1 << 11, 1 << 12), np.float32)
    tensor = encode(values, parse_format("int8_row_f32"))
    file = PlaneFile(tmp_path / "m.json", "job")
    file.add("w", tensor, {})
    file.finish()

    def resident() -> int:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[2]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    assert file.tensors["w"].planes["codes"].any()
    assert resident() - before > 6 << 20  # of 8 MiB: the kernel counts in steps
    file.release()
    assert resident() - before < 2 << 20


@pytest.mark.parametrize("given", [[], ["--hf-dir", "x", "--source", "mine:load"]])
def test_one_input_is_named(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize.ptq.run([*given, "--out", "q4.json"]) == 2
    assert "expected one of --hf-dir and --source" in capsys.readouterr().err
