"""What people type wrong: each mistake gets one line that says what to type, and its exit code."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from commands import here as run_here
from huggingface_hub import constants

from clocher_runtime.checkpoints.locate import embedded_model

USAGE, MODEL, DEVICE = 2, 3, 5


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with what people have lying about, where the command is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # it was imported before
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = Path("models/tiny")
    shutil.copytree(embedded_model(), model)
    adapter = Path("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.2-1B"})
    )
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 16)
    shutil.copy(model / "model.safetensors", "bare.safetensors")
    Path("weights.bin").write_bytes(b"PK\3\4")
    unfinished = Path("unfinished")
    unfinished.mkdir()
    shutil.copy(model / "config.json", unfinished)
    pointer = Path("pointer")
    shutil.copytree(model, pointer)
    (pointer / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    Path("half").mkdir()
    Path("half/model.ie.bin.partial").touch()
    other = Path("other")
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (other / "model.safetensors").write_bytes(data)
    return tmp_path


_QUANTIZE = "quantize models/tiny out --gate models/tiny/config.json"
_PERPLEXITY = "perplexity models/tiny --text models/tiny/config.json"
_GATE = "gate models/tiny --reference models/tiny --text models/tiny/config.json"
_CALIBRATED = "quantize models/tiny out --calib-text models/tiny/tokenizer.json"
_SPARSE = "run models/tiny --act-sparsity 0.5 --act-calibration"

MISTAKES = [
    # The command
    ("chta", USAGE, "did you mean chat?"),
    ("models/tiny", USAGE, "clocher chat models/tiny"),
    ("--model-dir models/tiny", USAGE, "flags go after a command"),
    # Flags
    ("run --max-new ten", USAGE, "--max-new: got 'ten', expected an integer from 1"),
    ("run --max-new", USAGE, "requires an argument. See clocher run --help"),
    ("run --max-tokens 8", USAGE, "No such option '--max-tokens'. Did you mean '--max-new'?"),
    ("run --temperature -1", USAGE, "--temperature: got '-1', expected a number from 0 to 100"),
    ("run --top-p 0", USAGE, "--top-p: got '0', expected a number from"),
    ("run --precision int5", USAGE, "expected one of fp32, bf16, fp16, int8w, int4, int4w, fp8w"),
    ("run --device gpu", USAGE, "expected one of auto, cpu, cuda, ze"),
    ("run --device cuda", DEVICE, "cuda"),
    ("run --prompt a --prompt-ids 1", USAGE, "exclude each other; give one"),
    ("run models/tiny --model-dir models/tiny", USAGE, "expected one of them"),
    ("run --prompts-file prompts.txt", USAGE, "prompts file prompts.txt: No such file"),
    ("run --config settings.toml", USAGE, "give a TOML file with settings"),
    ("run --context 4 --prompt some_words_that_are_too_many_for_it", USAGE, "--context"),
    ("run --trace-topk 3", USAGE, "--trace-topk needs --trace-ids; name the file"),
    ("chat --temperature warm", USAGE, "--temperature: got 'warm', expected a number"),
    ("chat", USAGE, "standard input"),
    ("serve --port 99999", USAGE, "--port: got '99999', expected an integer from 0 to 65535"),
    ("serve --port TAKEN", DEVICE, "--port"),
    ("serve --host 0.0.0.0", USAGE, "set CLOCHER_API_KEY, or listen on 127.0.0.1"),
    # Models
    ("serve --api-key k --host 203.0.113.1", DEVICE, "--host has to be an address of this machine"),
    ("run print(1)", MODEL, "--prompt"),
    ("chat -", MODEL, "--prompt"),
    ("run nowhere", MODEL, "give the directory of a model"),
    ("run qwen3:0.6b", MODEL, "`clocher pull OWNER/qwen3` fetches one"),
    ("ps", USAGE, "`clocher serve`"),
    ("show", USAGE, "`clocher models MODEL`"),
    ("run models/tny", MODEL, "models/tiny"),
    ("chat models", MODEL, "tiny"),
    ("chat adapter", MODEL, "meta-llama/Llama-3.2-1B"),
    ("chat bare.safetensors", MODEL, "give its directory"),
    ("serve weights.bin", MODEL, "give the directory"),
    ("chat unfinished", MODEL, "unfinished"),
    ("chat half", MODEL, "an unfinished conversion (model.ie.bin.partial"),
    ("chat pointer", MODEL, "git lfs pull"),
    ("chat other", MODEL, "mamba2"),
    ("chat Qwen/Qwen3-0.6B", MODEL, "`clocher pull Qwen/Qwen3-0.6B` fetches it"),
    ("chat https://huggingface.co/Qwen/Qwen3-0.6B", MODEL, "`clocher pull Qwen/Qwen3-0.6B`"),
    ("models nowhere", MODEL, "nowhere"),
    ("pull", USAGE, "OWNER/NAME"),
    ("pull llama", USAGE, "owner/name"),
    ("pull Qwen/Qwen3-0.6B", USAGE, "HF_HUB_OFFLINE"),
    # Work on models
    ("quantize models/tiny", USAGE, "OUT_DIR"),
    ("quantize models/tiny models/tiny", USAGE, "models/tiny"),
    ("quantize models/tiny out --bits 7", USAGE, "expected 4 or 8"),
    ("quantize adapter out", MODEL, "meta-llama/Llama-3.2-1B"),
    ("convert nowhere out", MODEL, "nowhere"),
    ("dedup models/tiny", MODEL, "models/tiny: no IEBIN model there"),
    ("convert models/tiny bare.safetensors", DEVICE, "File exists; name a directory"),
    (
        f"{_QUANTIZE} --gate-window 99999",
        USAGE,
        "--gate-window: got 99999, this model takes at most",
    ),
    (f"{_PERPLEXITY} --window 99999", USAGE, "--window: got 99999, this model takes 1 to"),
    (f"{_SPARSE} nope", USAGE, "--act-calibration nope: No such file or directory; give a text"),
    ("run models/tiny --lora nope", MODEL, "--lora: no adapter 'nope' here; give the directory of"),
    (f"{_CALIBRATED} --target-bpw nan", USAGE, "--target-bpw: got nan, expected 0 to 32"),
    (f"{_CALIBRATED} --seq-len 99999", USAGE, "--seq-len: got 99999, this model takes at most"),
    ("quantize models/tiny out --max-kld 1", USAGE, "--max-kld judges a text: give --gate"),
    (f"{_GATE} --json nowhere/x.json", USAGE, "nowhere is not a directory"),
    ("bench models/tiny -p many", USAGE, "-p"),
    ("bench models/tiny -b 4000", USAGE, "16 numbers from 1 to 1023, such as 1,8"),
    ("bench models/tiny -t 0", USAGE, "16 numbers from 1 to 1024, such as 1,2"),
    ("bench nowhere", MODEL, "give the directory of a model"),
    ("bench quality models/tiny --task a.jsonl", USAGE, "a.jsonl: expected one of mmlu"),
]


@pytest.mark.parametrize(("line", "code", "fix"), MISTAKES, ids=[line for line, *_ in MISTAKES])
@pytest.mark.one_in(2)
def test_a_mistake_gets_one_line_that_says_what_to_do(here, line, code, fix):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = line.replace("TAKEN", str(taken.getsockname()[1])).split()
        # A chat without a terminal answers what it is given on standard input.
        got, out, err = run_here(*words, text="Hello" if len(words) > 1 else "")
    assert got == code, err
    told = [each for each in err.splitlines() if "error: " in each]
    assert len(told) == 1, err
    names = ("clocher", f"clocher {words[0]}", f"clocher {' '.join(words[:2])}")
    assert told[0].startswith(tuple(f"{name}: error: " for name in names))
    assert fix in told[0]
    assert "Traceback" not in err
    assert len(told[0]) < 400
    assert out == "" or json.loads(out)["message"] in told[0]


def test_a_variable_with_a_wrong_value_is_named(here):
    code, _, err = run_here("run", env={"CLOCHER_THREADS": "all"})
    assert code == USAGE
    assert err.startswith("clocher run: error: CLOCHER_THREADS: got 'all', expected an integer")
