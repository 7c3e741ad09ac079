"""`clocher-run` from outside: one JSON line, exit codes, streams, which model, prompts."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import rich.progress
from commands import clean_environment, only_line
from weight_files import convert

from clocher_kernels import errors
from clocher_runtime import cli
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command import loading as engine
from clocher_runtime.command.clocher_run import clocher_run
from clocher_runtime.command.console import COMPILING, Console
from clocher_runtime.config.commands import ALL
from clocher_runtime.engine.stub import stub_id
from clocher_runtime.text.prompts import DEFAULT_PROMPT

ROOT = Path(__file__).parent.parent
BITNET = Path(__file__).parent / "data" / "clocher-tiny-bitnet"


def command(*flags):
    return [sys.executable, "-m", "clocher_runtime.cli", *flags]


def start(cwd, *flags, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["stdin"] = subprocess.DEVNULL
    environment = clean_environment(**options.pop("env", {}))
    return subprocess.Popen(command(*flags), cwd=cwd, env=environment, **(pipes | options))


def outside(cwd, *flags, **env):
    """Run the real command in a process of its own: (code, parsed line, standard error)."""
    process = start(cwd, *flags, env=env)
    out, err = process.communicate(timeout=250)
    return process.returncode, only_line(out), err


# The real command on the real back end


def test_embedded_model_completes_a_function(tmp_path):
    code, line, err = outside(tmp_path, "--max-new", "12")
    assert (code, line["status"]) == (0, "ok")
    assert (line["device"], line["model_source"]) == ("cpu", "embedded")
    assert line["model"] == "clocher-tiny-gptoss"
    assert "mxfp4" in line["precision"]
    assert line["tokens_generated"] == 12
    assert line["forward_passes"] + line["speculation"]["accepted"] == 12
    assert 0 < line["prefill_s"] < line["wall_time_s"]
    assert line["ttft_ms"] == pytest.approx(line["prefill_s"] * 1e3)
    assert line["rss_peak_mb"] > 20
    assert line["outputs"][0]["text"] in err
    assert "12 tokens in" in err
    assert "Traceback" not in err


def test_cpu_gives_the_tokens_of_the_reference(tmp_path, inside):
    (tmp_path / "prompts.txt").write_text("import os\nclass Stack:\n\nfor i in range(10):\n")
    flags = ("--prompts-file", "prompts.txt", "--max-new", "16")
    real = outside(tmp_path, *flags, "--batch", "2", "--threads", "2")[1]
    assert real["outputs"] == inside(*flags)[1]["outputs"]
    assert (real["prompts"], real["batch"], real["tokens_generated"]) == (3, 2, 48)


def test_work_touch_of_the_real_run_can_be_recomputed(tmp_path):
    env = {"IE_BYTES_PER_TOKEN": "1000003", "IE_STRIDE_BYTES": "129", "IE_VERIFY_TOUCH": "1"}
    line = outside(tmp_path, "--max-new", "20", "--ignore-eos", **env)[1]
    data = np.fromfile(embedded_model() / "model.safetensors", np.uint8)
    total = 0
    for token in range(20):
        walk = token * 1000003 + np.arange(0, 1000003, 129)
        total += int(data[walk % data.size].sum(dtype=np.uint64))
    assert line["work_touch"] == {
        "bytes_per_token": 1000003,
        "stride": 129,
        "bytes_touched": 20 * 1000003,
        "bytes_read": 20 * 7752 * 64,
        "checksum": total,
    }
    assert line["bytes_touched"] == 20 * (line["bytes_per_token"] + 1000003)
    assert line["coverage"] == pytest.approx(line["bytes_touched"] / data.size)


def test_cpu_path_imports_no_library_that_it_does_not_need(tmp_path):
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "clocher_runtime.cli", "--max-new", "1"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert process.returncode == 0
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    packages = ("clocher_kernels", "clocher_runtime", "cpu_fallback")
    assert sum(module.startswith(packages) for module in modules) <= 130
    loaded = {module.partition(".")[0] for module in modules}
    assert "tokenizers" in loaded
    unwanted = {"torch", "triton", "cupy", "transformers", "huggingface_hub", "jinja2"}
    assert not loaded & unwanted


# The stub: the command itself, without a model


def test_stub_is_the_documented_hash(tmp_path):
    code, line, err = outside(tmp_path, "--stub", "hé", "--max-new", "3")  # it has no MODEL
    ids = ",".join(str(b) for b in "hé".encode())
    expected = [
        int.from_bytes(sha256(f"{ids}:{i}".encode()).digest()[:4], "big") % 32768 for i in range(3)
    ]
    assert code == 0
    assert line["outputs"][0]["token_ids"] == expected
    assert (line["model"], line["mode"], line["device"]) == ("stub", "stub", "stub")
    assert line["outputs"][0]["text"] in err


def test_stub_takes_ids_and_lists_what_it_does_not_act_on(inside):
    env = {"IE_BYTES_PER_TOKEN": "64"}
    code, line, _ = inside("--stub", "--prompt-ids", "5,6", "--max-new", "2", "--top-k", "3", **env)
    assert code == 0
    assert line["outputs"][0]["token_ids"] == [stub_id([5, 6], 0), stub_id([5, 6], 1)]
    assert sorted(line["hints_ignored"]) == ["--top-k=3", "IE_BYTES_PER_TOKEN=64"]


def test_stub_takes_any_id_and_lists_hints_in_the_order_of_the_settings(inside):
    most = (1 << 31) - 1
    env = {"IE_DEDUP": "1", "AFFINITY": "compact", "IE_ACT_PREC": "fp8"}
    flags = ("--prompt-ids", f"{most},99999", "--max-new", "1", "--top-p", ".5")
    _, line, _ = inside("--stub", *flags, **env)
    assert line["outputs"][0]["token_ids"] == [stub_id([most, 99999], 0)]
    ignored = ["IE_ACT_PREC=fp8", "AFFINITY=compact", "IE_DEDUP=1", "--top-p=.5"]
    assert line["hints_ignored"] == ignored


def test_closed_stdout_is_code_1_without_a_traceback(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = start(tmp_path, "--stub", "--max-new", "2", stdout=write)
    os.close(write)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_closed_stderr_does_not_stop_the_run(tmp_path):
    read, write = os.pipe()
    os.close(read)
    process = start(tmp_path, "--stub", "--max-new", "2", stderr=write)
    os.close(write)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert only_line(out)["tokens_generated"] == 2


# Usage


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-new", "ten"], "--max-new: got 'ten', expected an integer from 1"),
        (["--max-new", "0"], "--max-new: got '0'"),
        (["--threads", "-1"], "--threads: got '-1'"),
        (["--no-such-flag"], "No such option"),
        (["--max-new"], "requires an argument"),
        (["m", "p", "surplus"], "unexpected extra argument"),
        (["m", "--model-dir", "n"], "got MODEL m and --model-dir n; expected one of them"),
        (["--device", "tpu"], "expected one of auto, cpu, cuda, ze"),
        (["--prompt", "a", "--prompt-ids", "1"], "exclude each other"),
        (["--prompt", ""], "prompt 1: no tokens"),
        (["--prompt-ids", "1,,2"], "--prompt-ids: got '1,,2'"),
        (["--prompt-ids", "4096"], "outside 0..4095"),
        (["--prompts-file", "absent.txt"], "absent.txt: No such file"),
        (["--prompts-file", "."], "Is a directory"),
        (["--outputs", "x" * 3000], "File name too long"),
        (["--context", "5", "--prompt-ids", "1,2,3,4,5,6"], "6 tokens, the context holds 5"),
        (["--context", "99999"], "this model takes 1 to 4096"),
        (["--stub", "--model-dir", "x"], "exclude each other"),
        (["--attn", "auto"], "--attn: got 'auto', expected dense, topk:N"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_code_2(inside, flags, message):
    code, line, err = inside(*flags)
    assert (code, line["status"], line["code"], line["type"]) == (2, "error", 2, "UsageError")
    assert message in line["message"]
    assert "Traceback" not in err
    assert message in err


def test_bad_variable_is_code_2_and_named(inside):
    code, line, _ = inside(IE_STRIDE_BYTES="zero")
    assert code == 2
    assert line["message"].startswith("IE_STRIDE_BYTES: got 'zero', expected an integer")


def test_bad_usage_in_a_process_of_its_own(tmp_path):
    code, line, err = outside(tmp_path, "--rounds", "x")
    assert (code, line["code"]) == (2, 2)
    assert err == f"clocher-run: error: {line['message']}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.FormatError("broken"), 3),
        (errors.UnsupportedModel("new"), 3),
        (errors.DeviceError("no such device"), 5),
        (errors.UnsupportedOp("no kernel"), 5),
        (errors.OutOfMemory("too much"), 6),
        (MemoryError("too much"), 6),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("a defect"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_of_the_engine_becomes_its_code(inside, monkeypatch, error, code):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("clocher_runtime.command.run.load_engine", fail)
    got, line, err = inside()
    assert (got, line["code"], line["type"]) == (code, code, type(error).__name__)
    assert ("Traceback" in err) == (code == 1)


def test_library_that_finds_no_memory_is_code_6(inside, monkeypatch):
    def load(*args, **kwargs):
        try:
            raise OSError("libllvmlite.so: failed to map segment from shared object")
        except OSError as error:
            raise OSError("Could not find/load shared object file") from error

    monkeypatch.setattr("clocher_runtime.command.run.load_engine", load)
    code, line, err = inside()
    assert (code, line["type"]) == (6, "OutOfMemory")
    assert "failed to map segment" in line["message"] and "ulimit -v" in line["message"]
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", [errors.FormatError, ZeroDivisionError])
def test_other_errors_keep_their_code_where_memory_was_short_before(inside, monkeypatch, kind):
    def load(*args, **kwargs):
        try:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        except OSError as error:
            raise kind("something else") from error

    monkeypatch.setattr("clocher_runtime.command.run.load_engine", load)
    assert inside()[1]["type"] == kind.__name__


def test_cache_that_does_not_fit_is_code_6(inside, monkeypatch):
    monkeypatch.setattr("clocher_kernels.guards.available", lambda *root: 1 << 20)
    code, line, _ = inside()
    assert (code, line["type"]) == (6, "OutOfMemory")
    assert "--context" in line["message"]


@pytest.mark.parametrize("device", ["cuda", "ze"])
def test_device_that_is_not_there_is_code_5(tmp_path, device):
    code, line, _ = outside(tmp_path, "--device", device)
    assert (code, line["type"]) == (5, "DeviceError")
    assert device in line["message"]


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_write_no_json(tmp_path, flag):
    process = start(tmp_path, flag)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Usage: clocher-run" if flag == "--help" else "clocher-run ")


def test_help_teaches_every_flag_variable_and_code(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, setting in ALL.items():
        assert setting.flag in text
        assert all(variable in text for variable in setting.env)
        assert " ".join(clocher_run.describe(name).split()[:3]) in text
    for code in ("0", "1", "2", "3", "5", "6", "130", "143"):
        assert f" {code} " in text
    assert "Examples:" in text


def test_help_begins_with_examples_and_leaves_tuning_out(capsys):
    assert cli.main(["-h"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Examples:") < shown.index("--model-dir")
    tuning = {s.env[0] for s in ALL.values() if not s.flag} - {"IE_BYTES_PER_TOKEN"}
    assert not any(variable in shown for variable in tuning)
    assert "--pretranspose" not in shown
    assert "--help-all" in shown
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == shown


# Which model


def corrupt(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    del data[-1]
    path.write_bytes(data)


@pytest.fixture
def bitnet(tmp_path):
    return Path(shutil.copytree(BITNET, tmp_path / "bitnet"))


@pytest.fixture
def iebin(tmp_path):
    """An IEBIN pair of the embedded model."""
    directory = tmp_path / "pair"
    convert(embedded_model(), directory)
    return directory


def test_model_dir_flag_and_variable(inside, bitnet):
    line = inside("--model-dir", "bitnet", "--max-new", "3")[1]
    assert (line["model"], line["model_source"]) == ("bitnet", "--model-dir")
    assert (line["act_prec"], "ternary" in line["precision"]) == ("int8", True)
    again = inside("--max-new", "3", CLOCHER_MODEL_DIR=str(bitnet))[1]
    assert again["model_source"] == "CLOCHER_MODEL_DIR"
    assert again["environment"] == [f"CLOCHER_MODEL_DIR={bitnet}"]
    assert inside(str(bitnet), "--max-new", "3")[1]["outputs"] == line["outputs"]
    assert inside("--max-new", "3", MODEL_DIR=str(bitnet))[1]["model_source"] == "embedded"
    assert again["outputs"] == line["outputs"]


def test_iebin_pair_by_directory_by_file_and_in_the_current_directory(
    inside, iebin, tmp_path, monkeypatch
):
    embedded = inside("--max-new", "8")[1]
    strict = {"IE_REQUIRE_MODEL": "1"}
    by_directory = inside("--max-new", "8", "--model-dir", "pair", **strict)[1]
    by_json = inside("--max-new", "8", "--model-json", "pair/model.ie.json")[1]
    shutil.move(iebin / "model.ie.bin", tmp_path / "weights.bin")
    by_both = inside("--max-new", "8", "--model-dir", "pair", "--model-bin", "weights.bin")[1]
    shutil.move(tmp_path / "weights.bin", iebin / "model.ie.bin")
    monkeypatch.chdir(iebin)
    current = inside("--max-new", "8", **strict)[1]
    sources = [line["model_source"] for line in (by_directory, by_json, by_both, current)]
    assert sources == ["--model-dir", "--model-json", "--model-bin", "current directory"]
    assert (by_directory["mode"], embedded["mode"]) == ("strict", "default")
    for line in (by_directory, by_json, by_both, current):
        assert line["outputs"] == embedded["outputs"]


def test_required_model_that_is_not_there_is_code_3(tmp_path):
    code, line, _ = outside(tmp_path, IE_REQUIRE_MODEL="1")
    assert (code, line["type"]) == (3, "ModelNotFound")
    assert "IE_REQUIRE_MODEL=1" in line["message"]


@pytest.mark.parametrize("required", ["0", "1"])
def test_named_model_that_is_unusable_is_code_3(inside, bitnet, required):
    env = {"IE_REQUIRE_MODEL": required}
    code, line, _ = inside("--model-dir", "openai/gpt-oss-20b", **env)
    assert (code, line["type"]) == (3, "ModelNotFound")
    assert "'openai/gpt-oss-20b' is not a directory" in line["message"]
    assert inside("--model-dir", ".", **env)[0] == 3
    assert inside("--model-json", "absent.json", **env)[0] == 3
    corrupt(bitnet)
    code, line, _ = inside("--model-dir", "bitnet", **env)
    assert (code, line["type"]) == (3, "FormatError")


def test_iebin_without_its_data_in_the_current_directory_is_code_3(inside, iebin, monkeypatch):
    (iebin / "model.ie.bin").unlink()
    monkeypatch.chdir(iebin)
    assert inside()[0] == 3


def test_model_without_a_tokenizer_takes_ids(inside, bitnet):
    (bitnet / "tokenizer.json").unlink()
    code, line, _ = inside("--model-dir", "bitnet", "--max-new", "2")
    assert code == 3
    assert "--prompt-ids" in line["message"]
    code, line, _ = inside("--model-dir", "bitnet", "--max-new", "2", "--prompt-ids", "7,8")
    assert code == 0
    assert (len(line["outputs"][0]["token_ids"]), line["outputs"][0]["text"]) == (2, "")


# What a run does


def test_precision_quantises_the_float_weights(inside):
    line = inside("--max-new", "2", "--precision", "int8w", PRECISION="fp32")[1]
    assert "int8_row" in line["precision"]
    assert line["hints_ignored"] == []


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_activation_precision_is_acted_on(inside, precision):
    line = inside("--max-new", "1", IE_ACT_PREC=precision)[1]
    assert (line["act_prec"], line["hints_ignored"]) == (precision, [])


def test_a_setting_of_the_gpu_has_no_effect_elsewhere(inside):
    line = inside("--max-new", "1", "--fast-batch")[1]
    assert line["hints_ignored"] == ["--fast-batch=1"]


def test_prompt_comes_from_flag_stdin_file_or_default(inside, tmp_path, monkeypatch):
    def ids(*flags, **env):
        return [o["token_ids"] for o in inside("--max-new", "4", *flags, **env)[1]["outputs"]]

    (tmp_path / "p.txt").write_text("import os\r\n\n  \nclass A:", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "import os", "id": 1}\n{"prompt": "class A:"}\n')
    flag = [ids("--prompt", text)[0] for text in ("import os", "class A:")]
    assert ids("--prompts-file", "p.txt") == flag
    assert ids("--prompts-file", "p.jsonl") == flag
    assert ids(CLOCHER_PROMPTS_FILE="p.txt") == flag
    assert ids("--prompt", "import os", CLOCHER_PROMPTS_FILE="p.txt") == flag[:1]
    assert ids() == ids("--prompt", DEFAULT_PROMPT)
    (tmp_path / "stdin").write_text("class A:")
    with (tmp_path / "stdin").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert ids("--prompt", "-") == flag[1:]
        stdin.seek(0)
        assert ids() == flag[1:]
        stdin.seek(0)
        assert ids("--prompt", "import os") == flag[:1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "no prompts"),
        ("p.txt", b"\n \n", "no prompts"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
        ("p.jsonl", b'{"prompt": 1}\n', 'line 1: "prompt" is 1; expected an object'),
        ("p.jsonl", b'\n[1]\n["prompt"]\n', "none of 2 prompts is usable: prompts file p.jsonl, "),
        ("p.jsonl", b'\n["prompt"]\n', "line 2: got ['prompt']; expected an object"),
        (
            "p.jsonl",
            b"{",
            "name enclosed in double quotes, at column 2; expected an object",
        ),
        ("p.jsonl", b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_bad_prompts_file_is_code_2(inside, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    code, line, _ = inside("--prompts-file", name)
    assert code == 2
    assert message in line["message"]


def test_the_error_of_a_single_prompt_is_told_once(inside):
    code, line, err = inside("--stub", "--prompt", "")
    assert code == 2
    assert err.count(line["message"]) == 1


def test_sampling_is_reproducible_and_depends_on_the_seed(inside):
    flags = ("--max-new", "4", "--temperature", "1.5", "--top-k", "200", "--top-p", "0.98")
    first, again, other = (inside(*flags, "--seed", seed)[1]["outputs"] for seed in "778")
    assert first == again != other


def test_end_of_sequence_ends_unless_it_is_ignored(inside, monkeypatch):
    greedy = inside("--max-new", "6")[1]["outputs"][0]["token_ids"]
    stop = greedy[2]
    real = engine.load_model

    def stopping(checkpoint, precision):
        from dataclasses import replace

        model = real(checkpoint, precision)
        return replace(model, spec=replace(model.spec, eos_ids=(stop,)))

    monkeypatch.setattr(engine, "load_model", stopping)
    line = inside("--max-new", "6")[1]
    first = greedy.index(stop) + 1
    assert line["outputs"][0]["token_ids"] == greedy[:first]
    assert line["tokens_generated"] == first
    ignoring = inside("--max-new", "6", "--ignore-eos")[1]
    assert ignoring["outputs"][0]["token_ids"] == greedy


def test_warmup_and_rounds(inside):
    once = inside("--max-new", "3")[1]
    line = inside("--max-new", "3", "--warmup", "5", "--rounds", "2")[1]
    assert line["outputs"] == once["outputs"]
    assert line["tokens_generated"] == 6
    assert (line["kv_hits"], line["kv_misses"]) == (2 * once["kv_hits"], 2 * once["kv_misses"])
    assert line["prefill_tokens"] == 2 * once["prefill_tokens"]


def test_batch_prints_each_text_under_its_number(inside, tmp_path):
    (tmp_path / "p.txt").write_text("import os\nclass A:\ndef f(\n")
    _, line, err = inside("--prompts-file", "p.txt", "--batch", "8", "--max-new", "5")
    assert line["batch"] == 3
    assert "batch 8: running 3 prompts at a time" in err
    for number, output in enumerate(line["outputs"], start=1):
        assert f"prompt {number}:\n{output['text']}" in err


def test_more_threads_than_cpus_are_lowered_with_a_message(inside):
    usable = len(os.sched_getaffinity(0))
    code, line, err = inside("--max-new", "1", "--threads", "999")
    assert (code, line["threads"]) == (0, usable)
    assert f"999 threads: running {usable}, one for each usable CPU" in err


# The console


def test_compilation_shows_a_few_lines_where_there_is_no_terminal(capsys, monkeypatch):
    now = 0.0
    clocked = functools.partial(rich.progress.Progress, get_time=lambda: now)
    monkeypatch.setattr("rich.progress.Progress", clocked)
    with Console() as console:
        for done in range(41):
            console.compiling(done, 40)
            now += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"clocher-run: {COMPILING}: 12 % after 5 s" and len(lines) == 5


def test_terminal_gets_a_bar_and_no_control_characters(tmp_path):
    class Terminal:
        def __init__(self) -> None:
            self.written = ""

        def write(self, text: str) -> int:
            self.written += text
            return len(text)

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with Console(stream=terminal) as console:
        console.texts.write("a\x1b]0;title\x07\tb\n\x9b31m")
        assert terminal.written == "a\ufffd]0;title\ufffd\tb\n\ufffd31m"
        console.compiling(0, 2)
        console.compiling(2, 2)
    assert COMPILING in terminal.written


def test_checkpoint_in_the_current_directory_must_be_iebin(inside, bitnet, monkeypatch):
    monkeypatch.chdir(bitnet)
    assert open_checkpoint(bitnet).kind == "hf"
    assert inside("--max-new", "1")[1]["model_source"] == "embedded"


@pytest.mark.slow
def test_first_token_comes_within_two_seconds_when_kernels_are_compiled(tmp_path):
    import time

    outside(tmp_path, "--max-new", "1")
    began = time.monotonic()
    outside(tmp_path, "--max-new", "1")
    assert time.monotonic() - began < 2
