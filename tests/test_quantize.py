"""`clocher quantize` and `clocher convert`: one command from a checkpoint to a model that runs."""

import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import rich.progress
from commands import here, only_line, python
from gguf_files import add_tokenizer, as_f32, write_gguf
from test_converters import SMALL, write_pickled
from weight_files import BITNET, LLAMA, ROOT, copy_model, write_first_layers, write_hf
from weight_files import convert as convert_model

from clocher_kernels.formats.bsr import INNERS
from clocher_kernels.ops.attention import KV_DTYPES
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command import console
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import Command
from clocher_runtime.convert import LINEARS
from clocher_runtime.engine.load import PRECISIONS
from clocher_runtime.quality.gate import LIMITS
from clocher_runtime.subcommands.compress import dedup, sparsify
from clocher_runtime.subcommands.convert import convert
from clocher_runtime.subcommands.quality import gate, perplexity
from clocher_runtime.subcommands.quantize import quantize

COMMANDS = (convert, quantize, dedup, sparsify, perplexity, gate)
VALID = ROOT / "tests" / "data" / "valid.txt"
LOOSE = ("--max-ppl-ratio", 9, "--max-kld", 9, "--min-same-top", 0, "--max-rms-dp", 9)


def run(command: Command, *args: object) -> int:
    return command.run(list(map(str, args)))


def error_of(capsys: pytest.CaptureFixture[str], name: str) -> str:
    """Return the one line of an error."""
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith(f"clocher {name}: error: ")]
    assert out == "" and "Traceback" not in err
    return line


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_layers(LLAMA, tmp_path_factory.mktemp("model") / "m", 2)


# From a checkpoint to a model.


def test_it_gives_the_bytes_of_the_two_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two words"
    assert run(quantize, LLAMA, out, "--mse", "--verify") == 0
    said = capsys.readouterr()
    table = [line.split() for line in said.out.splitlines()]
    assert table == [
        ["before", "after"],
        ["size", "13.6", "MB", "7.0", "MB"],
        ["bits", "per", "weight", "16.00", "8.22"],
        ["of", "the", "quantised", "4.75"],
    ]
    assert "needs 7.5 MB of disk" in said.err
    assert said.err.splitlines()[-1] == f"next: clocher chat '{out}'"
    steps = python(
        *(ROOT / "scripts" / "ptq_from_hf.py", "--hf-dir", LLAMA, "--out", tmp_path / "q4.json"),
        "--mse",
    )
    assert steps.returncode == 0, steps.stderr
    convert_model(LLAMA, tmp_path / "steps", tmp_path / "q4.json")
    assert (out / "q4_manifest.json").read_bytes() == (tmp_path / "q4.json").read_bytes()
    for name in ("model.ie.bin", "model.ie.json", "vocab.json"):
        assert (out / name).read_bytes() == (tmp_path / "steps" / name).read_bytes(), name
    _, line, err = here("run", "--model-dir", out, "--prompt", "def f", "--max-new", 2)
    assert only_line(line)["tokens_generated"] == 2, err


def test_the_gate_measures_before_and_after_and_decides(
    two_layers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clocher_runtime.quality.compare.DOCUMENT_TOKENS", 64)
    text = tmp_path / "text.txt"
    text.write_text(VALID.read_text()[:6000])
    few = ("--gate", text, "--gate-window", 32, "--min-documents", 1, "--min-tokens", 100)
    assert run(quantize, two_layers, tmp_path / "good", "--bits", 8, *few, *LOOSE) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "perplexity" in line]
    before, after = map(float, line.split()[1:])
    assert before == pytest.approx(after, rel=0.05) and before > 1

    bad = tmp_path / "bad"
    assert run(quantize, two_layers, bad, *few, *LOOSE, "--max-kld", 1e-9) == 8
    said = capsys.readouterr()
    assert said.out == "" and "no model was written: try" in said.err
    assert [path.name for path in bad.iterdir()] == ["q4_manifest.rejected.json"]
    assert run(quantize, two_layers, bad, *few, *LOOSE, "--min-tokens", 10**6) == 9
    assert "judge it with more text" in capsys.readouterr().err
    calibrated = (*few, "--calib-text", VALID, "--samples", 4, "--seq-len", 64, *LOOSE)
    assert run(quantize, two_layers, bad, *calibrated, "--max-kld", 1e-9) == 8
    assert "looser limit, which does not calibrate again" in capsys.readouterr().err
    assert run(quantize, two_layers, bad, *calibrated) == 0
    assert "goes on where" in capsys.readouterr().err


def test_interrupted_between_manifest_and_model_it_goes_on(
    two_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--calib-text", VALID, "--samples", 4, "--seq-len", 64)
    assert run(quantize, two_layers, tmp_path / "whole", *flags) == 0
    out = tmp_path / "out"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("clocher_runtime.subcommands.quantize.run_conversion", interrupted)
        assert run(quantize, two_layers, out, *flags) == 130
    names = [f"q4_manifest.{end}" for end in ("json", "planes.bin", "planes.bin.journal")]
    assert sorted(path.name for path in out.iterdir()) == names
    written = (out / "q4_manifest.planes.bin").stat().st_mtime_ns

    assert "goes on" not in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("clocher_runtime.subcommands.quantize.run_conversion", interrupted)
        assert run(quantize, two_layers, out, *flags) == 130
    note = "goes on where a killed run ended: 14 of 14 calibrated tensors are there, 0 are left"
    assert capsys.readouterr().err.splitlines().count(note) == 1
    assert (out / "q4_manifest.planes.bin").stat().st_mtime_ns == written, "calibrated again"
    assert run(quantize, two_layers, out, *flags) == 0
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert set(whole) == {"model.ie.bin", "model.ie.json", "vocab.json", "q4_manifest.json"}
    tensors = json.loads(whole["q4_manifest.json"])["tensors"]
    assert {tensor["method"] for tensor in tensors} <= {"gptq", "imx", "rtn"}
    assert any(tensor["method"] == "gptq" for tensor in tensors), "the default with a text"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bits", 3), "2 become tcq4 by gptq, 42 become tcq3"),
        (("--bits", 4.1), "44 become tcq4"),
        (("--format", "tcq4"), "44 become tcq4"),
        (("--bits", 4.9), "2 become tcq5 by gptq, 42 become tcq4"),
    ],
)
def test_embeddings_and_head_get_four_bits_or_as_many(
    flags: tuple[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = ("--calib-text", VALID, "--samples", 4, "--seq-len", 64)
    assert run(quantize, LLAMA, tmp_path / "out", "--dry-run", *flags, *calibrated) == 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_gguf_file_reads_texts_with_its_own_vocabulary(
    two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "m.gguf", tmp_path / "out"
    assert run(convert, two_layers, file, "--pre", "gpt-2") == 0
    flags = ("--calib-text", VALID, "--samples", 4, "--seq-len", 64)
    assert run(quantize, file, out, *flags) == 0
    assert "is enough for" not in capsys.readouterr().err
    text = tmp_path / "short.txt"
    text.write_text(VALID.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    assert run(quantize, file, out, "--calib-text", text, *flags[4:], "--dry-run", "--force") == 0
    assert "sequences of 64 tokens, --samples is 128; a longer" in capsys.readouterr().err
    manifest = json.loads((out / "q4_manifest.json").read_bytes())
    assert manifest["calibration"]["tokens"] == 4 * 64


def test_a_killed_one_leaves_the_old_model_and_can_be_repeated(
    two_layers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(quantize, two_layers, out, "--bits", 8) == 0
    old, manifest = (out / "model.ie.json").read_bytes(), (out / "q4_manifest.json").read_bytes()
    code = (
        "import os, sys\n"
        "from clocher_runtime.checkpoints.checkpoint import Checkpoint\n"
        "from clocher_runtime.subcommands.quantize import quantize\n"
        "tensor, calls = Checkpoint.tensor, []\n"
        "def reading(self, *args, **more):\n"
        "    calls.append(args)\n"
        "    if len(calls) == int(sys.argv[1]): os.kill(os.getpid(), 9)\n"
        "    return tensor(self, *args, **more)\n"
        "Checkpoint.tensor = reading\n"
        "quantize.main(sys.argv[2:])"
    )
    for moment in (5, 20):  # while measuring, while writing
        done = python("-c", code, moment, two_layers, out, "--force")
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (out / "model.ie.json").read_bytes() == old
        assert moment == 20 or (out / "q4_manifest.json").read_bytes() == manifest
        open_checkpoint(out, verify=True)
    assert run(quantize, two_layers, out, "--force") == 0
    assert run(quantize, two_layers, tmp_path / "fresh") == 0
    for path in (tmp_path / "fresh").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_dry_run_says_what_it_takes_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--calib-text", VALID, "--samples", 4, "--seq-len", 64, "--method", "gptq")
    assert run(quantize, LLAMA, tmp_path / "out", "--dry-run", *flags) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "42 become int4_asym_g32_f16 by gptq" in err
    # The result, and the planes of the manifest: 4.75 bits for each of 4.5 million weights.
    source = open_checkpoint(LLAMA)
    shapes = [source.shape(name) for name in source.names if name.endswith("_proj.weight")]
    total = 7.5 + sum(map(prod, shapes)) * 4.75 / 8 / 1e6
    assert f"needs {total:.1f} MB of disk" in err
    # Hidden states of 256 tokens, 256 numbers each: three of all, and those of 6 layers and 3 more.
    assert "needs 3.1 MB for temporary files" in err
    assert not (tmp_path / "out").exists()


def test_sizes_of_a_target_are_those_of_the_result(
    two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ("--target-bpw", 5.5, "--calib-text", VALID, "--samples", 4, "--seq-len", 64)
    assert run(quantize, two_layers, out, *flags) == 0
    said = capsys.readouterr()
    of = json.loads((out / "q4_manifest.json").read_bytes())["size"]
    assert 5.3 < of["quantised_bpw"] <= 5.5
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[1][-2:] == console.size(of["nbytes"]).split()
    assert rows[2][-1] == f"{of['bpw']:.2f}" and rows[3][-1] == f"{of['quantised_bpw']:.2f}"
    foretold = re.search(r"-> at most (\S+) MB: (\S+) bits per weight, (\S+) of", said.err)
    assert foretold and float(foretold[3]) == pytest.approx(5.5, abs=1e-3)
    assert float(foretold[2]) >= round(of["bpw"], 3)
    assert of["nbytes"] == sum(t.nbytes for t in open_checkpoint(out).tensors.values())


# What it refuses.


def test_a_model_whose_blocks_would_all_stay_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(quantize, BITNET, tmp_path / "b", "--bits", 3, "--dry-run") == 2
    assert "got matrices in ternary, expected floats" in error_of(capsys, "quantize")
    three = tmp_path / "three"
    assert run(quantize, BITNET, three, "--bits", 3, "--requantize") == 0
    capsys.readouterr()
    assert run(quantize, three, tmp_path / "again", "--bits", 3, "--requantize") == 2
    line = error_of(capsys, "quantize")
    assert "tcq3, tcq4, which stay so with --requantize, too; " in line
    assert line.endswith("choose another --format or --bits, or take the model it was made from")


def test_an_output_directory_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copy_model(LLAMA, tmp_path / "m")
    (tmp_path / "link").symlink_to(model)
    used = tmp_path / "used"
    assert run(quantize, model, used) == 0
    before = {path.name: path.stat().st_mtime_ns for path in used.iterdir()}
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "m.gguf").write_bytes(b"GGUF")
    capsys.readouterr()
    for out, words in (
        (model, "own directory or inside it"),
        (tmp_path / "link", "own directory or inside it"),
        (model / "deep" / "out", "own directory or inside it"),
        (used, "holds a model already (model.ie.json); choose another directory, or"),
        (copy_model(BITNET, tmp_path / "b"), "holds a Hugging Face model"),
        (gguf, "holds a model already (m.gguf)"),
    ):
        assert run(quantize, model, out) == 2, out
        assert words in error_of(capsys, "quantize")
    assert {path.name: path.stat().st_mtime_ns for path in used.iterdir()} == before
    assert sorted(path.name for path in model.iterdir()) == sorted(
        path.name for path in LLAMA.iterdir()
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "MODEL is missing"),
        ((LLAMA,), 2, "OUT_DIR is missing"),
        ((LLAMA, "out", "more"), 2, "unexpected extra argument"),
        ((LLAMA, "out", "--model-dir", BITNET), 2, "expected one of them"),
        (("", "out"), 2, "it is empty"),
        ((LLAMA, "out", "--bits", "four"), 2, "'four' is not a valid float"),
        ((LLAMA, "out", "--bit", 4), 2, "No such option"),
        ((LLAMA, "out", "--calib-text", "none.txt"), 2, "does not exist"),
        ((LLAMA, "out", "--method", "gptq"), 2, "give --calib-text"),
        ((BITNET, "out"), 2, "give --requantize"),
        (("none", "out"), 3, "MODEL: no model 'none' here"),
        (("lora", "out"), 3, "a LoRA adapter of its base, not a model; give that"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(
    args: Sequence[object],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text("{}")
    Path("lora/adapter_model.safetensors").write_bytes(b"")
    assert run(quantize, *args) == code
    assert words in error_of(capsys, "quantize")
    assert os.listdir() == ["lora"]


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "clocher_runtime.disk.output_file.shutil.disk_usage", lambda _: SimpleNamespace(free=4096)
    )
    assert run(quantize, LLAMA, tmp_path / "out") == 5
    line = error_of(capsys, "quantize")
    needed = "needs 7.5 MB, the disk has 4.1 kB free: 7.5 MB too little"
    assert line.endswith(f"{needed}; free some space, or name another disk")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_is_told_by_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "clocher_runtime.disk.output_file.os.access", lambda _, mode: mode != os.W_OK
    )
    assert run(quantize, LLAMA, tmp_path / "out", "--dry-run") == 5
    told = f"{tmp_path}: nothing may be written there; check its permissions"
    assert error_of(capsys, "quantize").endswith(told)


# Every kind of weights, by one command.


def test_convert_knows_what_it_is_given(tmp_path: Path) -> None:
    pickled = write_pickled(tmp_path / "pt", SMALL)
    path = tmp_path / "m.gguf"
    source = open_checkpoint(LLAMA)
    write_gguf(path, source.config, as_f32(source), add_tokenizer(LLAMA, "gpt-2"))
    hf = write_hf(tmp_path / "hf", SMALL)
    for name, model in (("from-pt", pickled), ("from-gguf", path), ("from-hf", hf)):
        assert run(convert, model, tmp_path / name, "--verify") == 0
    convert_model(path, tmp_path / "gguf")
    for one, two in (("from-pt", "from-hf"), ("from-gguf", "gguf")):
        files = [tmp_path / name / "model.ie.bin" for name in (one, two)]
        assert files[0].read_bytes() == files[1].read_bytes()


# What all of them have in common.


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name.split()[1])
def test_help_shows_examples_that_can_be_typed(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for flag in ("-h", "--help"):
        assert command.run([flag]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith(f"Usage: {command.name} ")
    places = [texts[0].index(f"\n{title}:\n") for title in ("Examples", "Options", "Exit codes")]
    assert places == sorted(places)
    assert max(map(len, texts[0].splitlines())) <= 100
    monkeypatch.chdir(tmp_path)
    Path("quant").mkdir()
    for name in ("calib.txt", "held_out.txt", "quant/q4_manifest.json"):
        Path(name).touch()
    lines = [line for _, line in command.examples if line.startswith(f"{command.name} ")]
    assert lines
    for line in lines:
        command.make_context(command.name, shlex.split(line.replace("\\\n", ""))[2:])


def test_the_choices_of_the_flags_are_those_of_the_code() -> None:
    def choices(command: Command, name: str) -> set[str]:
        (param,) = [p for p in command.params if p.name == name]
        found = param.type
        return set(found.choices if isinstance(found, click.Choice) else param.metavar.split("|"))

    assert choices(quantize, "gate_limits") == set(LIMITS)
    assert choices(gate, "limits") == set(LIMITS)
    assert choices(sparsify, "inner") == set(INNERS)
    assert {p.name: p.default for p in sparsify.params}["pattern"] == LINEARS
    for command in (gate, perplexity):
        assert choices(command, "kv_dtype") == set(KV_DTYPES)
        assert choices(command, "precision") == set(PRECISIONS)


def test_help_is_made_without_what_works() -> None:
    names = [command.name.split()[1] for command in COMMANDS]
    code = (
        "import sys; from clocher_runtime.subcommands.table import dispatch\n"
        f"for name in {names!r}: assert dispatch([name, '--help']) == 0\n"
        "import os; assert os.environ['OPENBLAS_THREAD_TIMEOUT'], 'set before numpy loads'\n"
        "slow = {'numpy', 'rich', 'numba', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(slow)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_progress_of_a_long_job_is_a_few_lines_in_units_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    clocked = functools.partial(rich.progress.Progress, get_time=lambda: now)
    monkeypatch.setattr("rich.progress.Progress", clocked)

    def work(tell: Callable[[int, str], None]) -> None:
        nonlocal now
        for second in range(1200):
            now = float(second)
            tell(second * 2_000_000, f"layer {second}")

    Console("clocher convert").progress(4_000_000_000, work)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "clocher convert: layer 5: 10.0 MB of 4.0 GB after 5 s"
    assert 5 < len(lines) < 20
    with Console("x").counting() as tell_count:
        tell_count("hashing", 1, 3)
        now += console._FIRST_WORD_S
        tell_count("hashing", 2, 3)
        bar = tell_count.func.__self__._bar  # type: ignore[attr-defined]
        for layer in range(3):
            tell_count("layers of a minute", layer, 4)
            now += 60
        assert bar.tasks[0].time_remaining == 120
    assert capsys.readouterr().err.splitlines()[0] == "x: hashing: 66 % after 5 s"


def test_a_model_by_its_place_or_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(convert, LLAMA, tmp_path / "a") == 0
    assert run(convert, "--out-dir", tmp_path / "b", "--model-dir", LLAMA) == 0
    data = [(tmp_path / name / "model.ie.bin").read_bytes() for name in "ab"]
    assert data[0] == data[1]
    capsys.readouterr()
    text = ("--text", VALID, "--chars", 3000, "--window", 64)
    assert run(perplexity, tmp_path / "a", *text) == 0
    assert run(perplexity, "--model-dir", tmp_path / "b", *text) == 0
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    assert one["perplexity"] == two["perplexity"] and one["windows"] > 1


def test_a_conversion_says_what_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(quantize, LLAMA, out) == 0
    capsys.readouterr()
    assert run(convert, LLAMA, out) == 0
    err = capsys.readouterr().err
    assert f"note: replaced the model that {out} held, and removed its q4_manifest.json" in err
    assert not (out / "q4_manifest.json").exists()
    assert run(sparsify, LLAMA, out, "--sparsity", 0.9) == 0
    assert f"note: replaced the model that {out} held\n" in capsys.readouterr().err


def test_only_what_resumes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for command, resumes in ((convert, True), (quantize, True), (perplexity, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "make_context", interrupted)
            assert run(command) == 130
        assert ("to go on" in capsys.readouterr().err) == resumes


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_quantised_file_is_refused_plainly_and_may_grow(tmp_path: Path) -> None:
    small = tmp_path / "small"
    assert here("quantize", str(LLAMA), str(small), "--bits", "4")[0] == 0
    code, _, err = here("quantize", str(small), str(tmp_path / "again"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "got matrices in int4_" in err and "or give --requantize" in err
    words = ("quantize", str(small), str(tmp_path / "large"), "--requantize", "--bits", "8")
    code, _, err = here(*words)
    assert code == 0 and "more bits" in err and "they grow" in err


def test_no_message_or_page_installs_what_is_on_no_index() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("cl*/**/*.py")]:
        found = re.findall(r"pip install '?clocher.*", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found[0]}"
