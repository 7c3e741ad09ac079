"""HF -> IEBIN: lossless, quantised by manifest, bounded, and safe to kill."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import PYTHON_PATH, SCRIPTS, python, run_script
from weight_files import (
    BITNET,
    GPTOSS,
    LLAMA,
    TINY,
    Array,
    array,
    convert,
    copy_model,
    write_hf,
    write_sharded,
)

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert import rounding
from clocher_runtime.convert.to_iebin import Conversion

to_iebin = partial(run_script, "hf_to_iebin")
TEMPLATE: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "pattern": ".*attn.*(q_proj|k_proj|v_proj|o_proj).*",
            "dtype": "int4w",
            "group": 64,
            "zero": "per-tensor",
            "scale": "per-channel",
        },
        {
            "pattern": ".*mlp.*(gate_proj|up_proj|down_proj).*",
            "dtype": "int4w",
            "group": 64,
            "zero": "per-tensor",
            "scale": "per-channel",
        },
    ],
}
SMALL: dict[str, Array] = {
    "embed.weight": array("BF16", 6, 64),
    "proj.weight": array("F16", 5, 64),
    "proj.bias": array("F16", 5),
    "norm.weight": array("F32", 64),
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def manifest(path: Path, *rules: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"version": 1, "rules": rules}))
    return path


@pytest.mark.parametrize("model", TINY, ids=lambda path: path.name)
def test_tiny_models_survive_bit_for_bit(model: Path, tmp_path: Path) -> None:
    before = digests(model)
    seen: list[tuple[int, str]] = []
    out = tmp_path / "new" / "out"
    convert(model, out, progress=lambda nbytes, name: seen.append((nbytes, name)))
    assert digests(model) == before
    source, result = open_checkpoint(model), open_checkpoint(out, verify=True)
    assert sorted(result.names) == sorted(source.names)
    for name in source.names:
        old, new = source.tensor(name), result.tensor(name)
        assert (old.shape, old.format, set(old.planes)) == (new.shape, new.format, set(new.planes))
        for key, plane in old.planes.items():
            assert new.planes[key].tobytes() == plane.tobytes()
    assert result.config == source.config == json.loads((model / "config.json").read_text())
    assert result.generation_config == source.generation_config
    assert result.tokenizer_config == source.tokenizer_config
    assert result.tokenizer_json.read_bytes() == source.tokenizer_json.read_bytes()
    assert [name for _, name in seen] == list(result.names)
    assert seen[-1][0] == (out / "model.ie.bin").stat().st_size
    assert sorted(digests(out)) == ["model.ie.bin", "model.ie.json", "vocab.json"]


def test_layers_are_in_natural_order(tmp_path: Path) -> None:
    names = ["m.10.w", "m.9.w", "a", "m.9.b", "m.x"]
    convert(write_hf(tmp_path / "hf", {name: array("F32", 2) for name in names}), tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").names == ("a", "m.9.b", "m.9.w", "m.10.w", "m.x")


def test_output_depends_on_nothing_but_the_input(tmp_path: Path) -> None:
    first = copy_model(BITNET, tmp_path / "first")
    convert(first, tmp_path / "a")
    time.sleep(0.01)
    convert(BITNET, tmp_path / "b")
    convert(BITNET, tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_shards_change_nothing_but_the_provenance(tmp_path: Path) -> None:
    convert(write_hf(tmp_path / "hf1", SMALL), tmp_path / "one")
    halves = {"b.safetensors": dict(list(SMALL.items())[:2])}
    halves["a.safetensors"] = dict(list(SMALL.items())[2:])
    convert(write_sharded(tmp_path / "hf2", halves), tmp_path / "two")
    one, two = ((tmp_path / name / "model.ie.bin").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_model_may_lie_in_hf_below_the_output(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", SMALL)
    convert(tmp_path / "hf", tmp_path)
    assert open_checkpoint(tmp_path).kind == "iebin"
    convert(tmp_path, tmp_path / "out")
    assert digests(tmp_path / "out")["model.ie.bin"] == digests_of(tmp_path / "model.ie.bin")


def digests_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_directory_with_an_hf_model_is_never_written_to(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "hf", SMALL)
    (tmp_path / "link").symlink_to(model)
    before = digests(model)
    for out in (model, tmp_path / "link", write_hf(tmp_path / "other", SMALL)):
        with pytest.raises(UsageError, match="holds a Hugging Face model"):
            convert(model, out)
    assert digests(model) == before


def test_a_damaged_source_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    arrays: dict[str, Array] = {
        "p.weight": array("U8", 2, 5, fill=0xFF),
        "p.weight_scale": array("BF16", 1),
    }
    model = write_hf(tmp_path / "hf", arrays, {"quantization_config": {"quant_method": "bitnet"}})
    with pytest.raises(FormatError, match=r"'p\.weight'.*code 3"):
        convert(model, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ModelNotFound, match=r"no model there"):
        convert(tmp_path / "absent", tmp_path / "out")


# The manifest.


def test_the_template_quantises_the_matrices_of_llama(tmp_path: Path) -> None:
    path = tmp_path / "q4.json"
    path.write_text(json.dumps(TEMPLATE))
    conversion = convert(LLAMA, tmp_path / "out", path)
    source, result = open_checkpoint(LLAMA), open_checkpoint(tmp_path / "out", verify=True)
    fmt = parse_format("int4_sym_g64_f16")
    for name in source.names:
        old, new = source.tensor(name), result.tensor(name)
        if "_proj" in name:
            expected = encode(old.decode(), fmt)
            assert new.format == fmt and name in conversion.quantised
            assert all(np.array_equal(new.planes[key], expected.planes[key]) for key in new.planes)
        else:
            assert new.planes["data"].tobytes() == old.planes["data"].tobytes()
    assert len(conversion.quantised) == 42 and conversion.notes == ()
    recorded = json.loads((tmp_path / "out" / "model.ie.json").read_text())["source"]
    assert recorded["q4_map"] == TEMPLATE and len(recorded["quantised"]) == 42


def test_the_template_keeps_biases_and_experts_of_gpt_oss_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "q4.json"
    path.write_text(json.dumps(TEMPLATE))
    conversion = convert(GPTOSS, tmp_path / "out", path)
    assert sorted({name.rsplit(".", 1)[-1] for name in conversion.quantised}) == ["weight"]
    assert len(conversion.quantised) == 16
    assert "matrices to int4_sym_g64_f16: 16; tensors kept: 16 (bf16)" in conversion.notes[0]
    assert ": 0; tensors kept" in conversion.notes[1] and "mxfp4" in conversion.notes[1]
    open_checkpoint(tmp_path / "out", verify=True)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"dtype": "int4w"}, "int4_sym_row_f16"),
        ({"dtype": "int4", "group": 32}, "int4_sym_g32_f16"),
        ({"dtype": "int4w", "group": 64, "zero": "per-group"}, "int4_asym_g64_f16"),
        ({"dtype": "int4w", "group": 128, "zero": "per-tensor"}, "int4_sym_g128_f16"),
        ({"dtype": "int8w"}, "int8_row_f32"),
        ({"dtype": "int8w", "scale": "per-channel", "group": 64}, "int8_g64_f16"),
        ({"dtype": "int8w", "scale": "per-tensor"}, "int8_tensor_f32"),
        ({"dtype": "fp8"}, "fp8_e4m3_row_f32"),
        ({"dtype": "fp8", "scale": "per-block"}, "fp8_e4m3_b128_f32"),
        ({"dtype": "fp8_e5m2"}, "fp8_e5m2_row_f32"),
        ({"dtype": "mxfp4"}, "mxfp4"),
    ],
    ids=lambda value: str(value),
)
def test_a_rule_means(
    rule: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifest(tmp_path / "q4.json", {"pattern": r"proj\.weight", **rule})
    model = write_hf(tmp_path / "hf", SMALL)
    convert(model, tmp_path / "whole", path)
    tensor = open_checkpoint(tmp_path / "whole", verify=True).tensor("proj.weight")
    assert tensor.format.name == expected
    original = open_checkpoint(model).tensor("proj.weight").decode()
    assert np.array_equal(tensor.decode(), encode(original, tensor.format).decode())
    monkeypatch.setattr(rounding, "_BLOCK_ELEMENTS", 128)
    convert(model, tmp_path / "by rows", path)
    assert digests(tmp_path / "by rows") == digests(tmp_path / "whole")


def test_the_first_rule_that_matches_decides(tmp_path: Path) -> None:
    rules = [{"pattern": "embed.*", "dtype": "int8w"}, {"pattern": ".*", "dtype": "int4w"}]
    conversion = Conversion(
        write_hf(tmp_path / "hf", SMALL), tmp_path, manifest(tmp_path / "q4.json", *rules)
    )
    names = {name: fmt.name for name, fmt in conversion.formats.items()}
    assert names["embed.weight"] == "int8_row_f32" and names["proj.weight"] == "int4_sym_row_f16"
    assert names["norm.weight"] == "f32" and names["proj.bias"] == "f16"


RULE = {"pattern": ".*", "dtype": "int4w"}
BAD_MANIFESTS: dict[str, tuple[object, str]] = {
    "not json": (b"{", "not valid JSON"),
    "a list": ([], "expected a JSON object"),
    "no rules": ({"version": 1}, "'rules' is missing"),
    "empty rules": ({"version": 1, "rules": []}, "0 rules; expected 1 to 1000"),
    "1001 rules": ({"version": 1, "rules": [RULE] * 1001}, "1001 rules"),
    "version 2": ({"version": 2, "rules": [RULE]}, "reads version 1"),
    "unknown field": ({"version": 1, "rules": [RULE], "x": 1}, "unknown field 'x'"),
    "unknown rule field": ({"version": 1, "rules": [RULE | {"bits": 4}]}, "unknown field 'bits'"),
    "no pattern": ({"version": 1, "rules": [{"dtype": "int4w"}]}, "'pattern' is missing"),
    "dtype": ({"version": 1, "rules": [RULE | {"dtype": "int3"}]}, "int4w, int4, int8w"),
    "group 48": ({"version": 1, "rules": [RULE | {"group": 48}]}, "known: 32, 64, 128"),
    "group text": ({"version": 1, "rules": [RULE | {"group": "64"}]}, "'group' is str"),
    "group bool": ({"version": 1, "rules": [RULE | {"group": True}]}, "'group' is bool"),
    "zero": ({"version": 1, "rules": [RULE | {"zero": "none"}]}, "known: per-tensor, per-group"),
    "scale": ({"version": 1, "rules": [RULE | {"scale": "x"}]}, "known: per-channel, per-tensor"),
    "int4 per tensor": ({"version": 1, "rules": [RULE | {"scale": "per-tensor"}]}, "for int8"),
    "int8 affine": (
        {"version": 1, "rules": [RULE | {"dtype": "int8w", "zero": "per-group"}]},
        "symmetric",
    ),
    "bad pattern": ({"version": 1, "rules": [RULE | {"pattern": "("}]}, "pattern '\\('"),
    "long pattern": ({"version": 1, "rules": [RULE | {"pattern": "a" * 501}]}, "500"),
    "no match": ({"version": 1, "rules": [RULE | {"pattern": "xyz"}]}, "'xyz' matches no tensor"),
    "shadowed": ({"version": 1, "rules": [RULE, RULE]}, "matches no tensor that an earlier rule"),
    "part of a name": ({"version": 1, "rules": [RULE | {"pattern": "proj"}]}, "matches no tensor"),
}


@pytest.mark.parametrize(("document", "message"), BAD_MANIFESTS.values(), ids=BAD_MANIFESTS.keys())
def test_a_bad_manifest_is_a_usage_error(document: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "q4.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    with pytest.raises(UsageError, match=message):
        convert(write_hf(tmp_path / "hf", SMALL), tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


def test_values_that_cannot_be_quantised_are_refused_by_name(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "hf", {"proj.weight": array("F32", 2, 32, fill=0xFF)})
    with pytest.raises(FormatError, match=r"tensor 'proj\.weight'.*nan"):
        convert(model, tmp_path / "out", manifest(tmp_path / "q4.json", RULE))


# Disk and memory.


def test_a_disk_too_small_is_noticed_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    out = tmp_path / "deep" / "out"
    with pytest.raises(
        OSError, match=r"needs [\d.]+ \w+, the disk has 1\.0 kB free: [\d.]+ \w+ "
    ) as e:
        convert(LLAMA, out)
    assert str(out) in str(e.value) and not out.exists()


def test_the_announced_size_is_an_upper_bound_and_close(tmp_path: Path) -> None:
    for model in TINY:
        conversion = convert(model, tmp_path / model.name)
        written = sum(path.stat().st_size for path in (tmp_path / model.name).iterdir())
        assert written <= conversion.nbytes <= 1.05 * written


def test_a_disk_that_fills_up_is_exit_5_with_the_path_and_no_leftovers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(BITNET, out)
    before = digests(out)

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    words = (SCRIPTS / "hf_to_iebin.py", "--hf-dir", LLAMA, "--out-dir", out)
    done = python(*words, preexec_fn=limit_files)
    assert done.returncode == 5, done.stderr
    assert str(out / "model.ie.bin.partial") in done.stderr and "Traceback" not in done.stderr
    assert digests(out) == before


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """32 matrices of 4 MB; half of them become int4."""
    matrix: Array = ("BF16", (1024, 2048), bytes(1 << 22))
    model = write_hf(tmp_path / "hf", {f"{i}.weight": matrix for i in range(32)})
    path = manifest(tmp_path / "q4.json", {"pattern": r"[0-9]*[02468]\.weight", "dtype": "int4w"})
    code = (
        "import resource, sys; from pathlib import Path;"
        "from clocher_runtime.convert.to_iebin import Conversion;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "before = peak(); Conversion(*map(Path, sys.argv[1:])).run();"
        "print(peak() - before)"
    )
    done = python("-c", code, model, tmp_path / "out", path, check=True)
    assert int(done.stdout) < 48 * 1024, "KiB above the start"


# The script.


def test_script_converts_and_reports_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "q4.json"
    path.write_text(json.dumps(TEMPLATE))
    done = to_iebin("--hf-dir", GPTOSS, "--out-dir", tmp_path / "out", "--q4-map", path, "--verify")
    assert done.returncode == 0 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("note: pattern '.*attn.*(q_proj")
    assert "of disk" in lines[2]
    out = tmp_path / "out"
    assert lines[3:] == [
        f"clocher convert: wrote 71 tensors (16 quantised) to {out}, verified: 55 of 71 bit for "
        "bit those of the source",
        f"next: clocher chat {out}",
    ]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--hf-dir", LLAMA], 2, "OUT is missing; give it, or --out-dir"),
        (["--hf-dir", LLAMA, "--out-dir", "{out}", "--bits", "4"], 2, "--bits"),
        (["--hf-dir", LLAMA, "--out-dir", "{out}", "--q4-map", "x"], 2, "--q4-map not found: x"),
        (["--hf-dir", LLAMA, "--out-dir", LLAMA], 2, "holds a Hugging Face model"),
        (["--hf-dir", "absent", "--out-dir", "{out}"], 3, "MODEL: no model 'absent' here"),
        (["--hf-dir", LLAMA, "--out-dir", "/proc/none/out"], 5, "/proc/none"),
    ],
    ids=["missing flag", "unknown flag", "no manifest", "same folder", "no model", "no place"],
)
def test_script_exit_codes(args: list[object], code: int, message: str, tmp_path: Path) -> None:
    done = to_iebin(*(str(arg).format(out=tmp_path / "out") for arg in args))
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


# kill -9.


def assert_sound_or_absent(out: Path, valid: set[str]) -> None:
    """Whatever is accepted must be one of the valid models, whole."""
    try:
        open_checkpoint(out)
    except ModelError:
        return
    open_checkpoint(out, verify=True)
    assert digests_of(out / "model.ie.json") in valid


def die_at(step: int, action: Callable[[], object]) -> int:
    """Run an action in a child that is killed at its step-th system call; return its status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    left = step
    for name in ("open", "write", "fsync", "ftruncate", "replace", "unlink", "mkdir"):
        real = getattr(os, name)

        def dying(*args: Any, real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, dying)
    action()
    os._exit(0)


def crash_at_every_step(model: Path, old: Path | None, folder: Path, reference: Path) -> None:
    valid = {digests_of(path / "model.ie.json") for path in (reference, old) if path}
    for step in range(1000):
        out = folder / str(step)
        if old:
            copy_model(old, out)
        if die_at(step, partial(convert, model, out)) == 0:
            break
        assert_sound_or_absent(out, valid)
        convert(model, out)
        assert digests(out) == digests(reference)
    print(step)


@pytest.mark.parametrize("over", [pytest.param("nothing", marks=pytest.mark.slow), "an old model"])
def test_killed_at_every_system_call(over: str, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "hf", SMALL)
    (model / "tokenizer.json").write_text("{}")
    convert(model, tmp_path / "reference")
    old = None
    if over == "an old model":
        # Of the same layout, so that only the order of the steps tells the two apart.
        other = {name: array(dtype, *shape, fill=1) for name, (dtype, shape, _) in SMALL.items()}
        convert(write_hf(tmp_path / "hf2", other), tmp_path / "old")
        old = tmp_path / "old"
    before = digests(model)
    # In a process of its own, because a process with threads had better not fork.
    code = "import sys, test_convert as t; from pathlib import Path;" + (
        "t.crash_at_every_step(*(Path(a) if a else None for a in sys.argv[1:]))"
    )
    args = [model, old or "", tmp_path / "crashes", tmp_path / "reference"]
    done = python("-c", code, *args)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "steps"
    assert digests(model) == before


def test_sigterm_is_told_and_how_to_go_on(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from clocher_runtime.convert import to_iebin\n"
        "to_iebin.finish = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from clocher_runtime.cli import clocher\n"
        "sys.exit(clocher(['convert', *sys.argv[1:]]))"
    )
    done = python("-c", code, LLAMA, tmp_path / "out")
    assert done.returncode == 143, done.stderr
    assert done.stderr.endswith("convert: ended by SIGTERM; run it again to go on\n")


def kill_at_random(tmp_path: Path, kills: int) -> None:
    matrix = {f"{i}.weight": array("BF16", 512 + i, 4096) for i in range(8)}
    model, out = write_hf(tmp_path / "hf", matrix), tmp_path / "out"
    before = digests(model)
    start = time.monotonic()
    convert(model, tmp_path / "reference")
    whole = time.monotonic() - start
    valid = {digests_of(tmp_path / "reference" / "model.ie.json")}
    flags = ["--hf-dir", model, "--out-dir", out]
    command = [sys.executable, SCRIPTS / "hf_to_iebin.py", *flags]
    environment = os.environ | PYTHON_PATH
    moments = np.random.default_rng(kills).uniform(0, 1.1, kills) * whole
    at_work = 0
    for index, moment in enumerate(moments):
        if index % 2:
            (out / "model.ie.json").unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (out / "model.ie.bin.partial").exists():
            time.sleep(0.001)
        time.sleep(moment)
        process.kill()
        at_work += process.wait() == -signal.SIGKILL
        assert_sound_or_absent(out, valid)
    assert at_work >= kills // 4, "kills came too late"
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert digests(out) == digests(tmp_path / "reference")
    assert digests(model) == before


def test_killed_at_two_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 2)


@pytest.mark.slow
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 40)
