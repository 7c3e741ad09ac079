"""Traces, and their comparison with another implementation: what agrees passes, what does not is
found and named."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from commands import clocher
from msgspec.structs import replace
from tokenizers import Tokenizer, models, pre_tokenizers
from weight_files import BITNET, GPTOSS, LLAMA, convert, rng

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.verify_hf import verify_ids
from clocher_runtime.quality.verify import (
    MAX_FINDINGS,
    Checks,
    Finding,
    TopLogits,
    Trace,
    document,
    fingerprint,
    read_trace,
    top_logits,
    verify,
)

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "verify_hf_generation_ids.py"

VOCAB = 50


def write_trace(path: Path, traces: Sequence[Trace]) -> None:
    path.write_text("".join(f"{json.dumps(document(trace))}\n" for trace in traces))


# A reference that costs nothing


class Fake:
    """Logits that depend on the last two ids, 0.1 apart."""

    vocab_size = VOCAB

    def row(self, ids: Sequence[int]) -> np.ndarray:
        order = rng(str(tuple(ids[-2:]))).permutation(VOCAB)
        return (order * 0.1).astype(np.float32)

    def logits(self, ids: Sequence[int], last: int) -> np.ndarray:
        ends = range(len(ids) - last + 1, len(ids) + 1)
        return np.stack([self.row(ids[:end]) for end in ends])


def fake_encode(text: str) -> list[int]:
    return [ord(character) % VOCAB for character in text]


def traced(text: str = "hello", steps: int = 12, topk: int = 0) -> Trace:
    """Return what an engine that equals the fake reference would trace."""
    prompt = fake_encode(text)
    ids, largest = list(prompt), []
    for _ in range(steps):
        row = Fake().row(ids)
        largest.append(top_logits(row, topk or 1))
        ids.append(int(row.argmax()))
    return Trace(
        version="0",
        model="fake",
        fingerprint=None,
        precision="f32",
        act_prec="fp32",
        kv_dtype="f32",
        device="cpu",
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0},
        prompt=text,
        prompt_ids=tuple(prompt),
        generated_ids=tuple(ids[len(prompt) :]),
        topk=tuple(largest) if topk else None,
    )


def with_id(trace: Trace, step: int, token: int) -> Trace:
    ids = list(trace.generated_ids)
    ids[step] = token
    return replace(trace, generated_ids=tuple(ids))


def behind(trace: Trace, step: int, places: int) -> int:
    """Return the id that the reference ranks some places below its best."""
    row = Fake().row(trace.prompt_ids + trace.generated_ids[:step])
    return int(np.argsort(-row)[places])


@pytest.mark.parametrize("topk", [0, 1, 5, VOCAB])
def test_an_agreeing_trace_matches(topk: int) -> None:
    traces = [traced("hello", topk=topk), traced("b", 1, topk)]
    report = verify(traces, Checks(check_prompt=True), Fake(), fake_encode)
    assert (report.verdict, report.prompts_equal) == ("match", 2)
    assert (report.steps, report.equal, report.in_topk) == (13, 13, 13)
    assert report.topk_overlap == (1.0 if topk else None)
    assert report.logits_compared == 13 * topk
    assert report.logits_max_diff == (0 if topk else None)


@pytest.mark.parametrize("step", [0, 5, 11])
def test_a_changed_id_is_found_and_named(step: int) -> None:
    trace = traced()
    token = behind(trace, step, 7)
    report = verify([traced("x"), with_id(trace, step, token)], Checks(), Fake(), None)
    assert report.verdict == "mismatch"
    first = report.findings[0]
    assert (first.kind, first.prompt, first.step) == ("token", 1, step)
    assert (first.got, first.expected) == (token, trace.generated_ids[step])
    assert first.gap == pytest.approx(0.7, abs=1e-4)
    # The ids behind it are judged by themselves: fed the changed id, the fake wants others.
    assert all(f.step - step in (1, 2) for f in report.findings[1:])
    assert report.in_topk < report.steps


def test_the_message_names_prompt_step_got_and_expected() -> None:
    text = str(Finding(kind="token", prompt=3, step=7, got=11, expected=13, gap=0.5))
    assert text == "prompt 3, step 7: token: got 11, expected 13 (logits 0.5 apart)"


@pytest.mark.parametrize("tolerance, verdict", [(0.05, "mismatch"), (0.101, "near-tie")])
def test_a_near_tie_is_counted_and_is_no_match(tolerance: float, verdict: str) -> None:
    trace = traced(steps=4)
    changed = with_id(trace, 3, behind(trace, 3, 1))
    report = verify([changed], Checks(logits_tol=tolerance), Fake(), None)
    assert report.verdict == verdict
    assert (report.equal, report.near_ties + report.mismatches) == (3, 1)
    kind = "near-tie" if verdict == "near-tie" else "token"
    assert [f.kind for f in report.findings] == [kind]


def test_a_changed_prompt_id_is_found_by_the_tokenizer() -> None:
    trace = traced("hello")
    ids = list(trace.prompt_ids)
    ids[2] += 1
    changed = replace(trace, prompt_ids=tuple(ids))
    report = verify([changed], Checks(check_prompt=True), None, fake_encode)
    assert report.verdict == "mismatch"
    assert report.findings == [
        Finding(kind="prompt", prompt=0, step=2, got=ids[2], expected=ids[2] - 1)
    ]


@pytest.mark.parametrize("longer", [True, False])
def test_a_prompt_of_another_length_is_found(longer: bool) -> None:
    trace = traced("hello")
    ids = (*trace.prompt_ids, 3) if longer else trace.prompt_ids[:-1]
    report = verify([replace(trace, prompt_ids=ids)], Checks(check_prompt=True), None, fake_encode)
    (finding,) = report.findings
    assert finding.step == (5 if longer else 4)
    assert (finding.expected is None) == longer


def test_a_prompt_of_ids_cannot_be_tokenised_again_and_is_counted() -> None:
    report = verify([replace(traced(), prompt=None)], Checks(check_prompt=True), None, fake_encode)
    assert (report.verdict, report.prompts_checked, report.prompts_without_text) == ("match", 0, 1)


def test_an_id_outside_the_vocabulary_is_found_before_the_model_sees_it() -> None:
    report = verify([with_id(traced(), 4, VOCAB), traced()], Checks(), Fake(), None)
    assert (report.verdict, report.steps) == ("mismatch", 12)
    (finding,) = report.findings
    assert (finding.kind, finding.got) == ("vocabulary", VOCAB)


def test_a_logit_beyond_the_tolerance_is_a_difference() -> None:
    trace = traced(topk=3)
    assert trace.topk is not None
    wrong = TopLogits(trace.topk[2].ids, (*trace.topk[2].logits[:2], -1.0))
    lost = TopLogits(trace.topk[4].ids, (float("nan"), *trace.topk[4].logits[1:]))
    topk = list(trace.topk)
    topk[2], topk[4] = wrong, lost
    report = verify([replace(trace, topk=tuple(topk))], Checks(), Fake(), None)
    assert (report.verdict, report.mismatches, report.logits_beyond_tol) == ("mismatch", 0, 2)
    assert [(f.kind, f.step) for f in report.findings] == [("logits", 2), ("logits", 4)]
    assert report.findings[1].got is None
    assert report.logits_max_diff == pytest.approx(5.7, abs=0.01)


def test_the_top_k_overlap_is_of_as_many_as_were_traced() -> None:
    trace = traced(steps=2, topk=4)
    assert trace.topk is not None
    first = trace.topk[0]
    away = behind(trace, 0, 30)
    changed = TopLogits((*first.ids[:3], away), first.logits)
    report = verify([replace(trace, topk=(changed, trace.topk[1]))], Checks(topk=10), Fake(), None)
    assert report.topk_overlap == pytest.approx((3 / 4 + 1) / 2)


def test_a_sampled_run_cannot_be_compared_step_by_step() -> None:
    sampled = replace(traced(), sampling={"temperature": 0.7, "top_k": 0, "top_p": 1.0, "seed": 0})
    with pytest.raises(UsageError, match=r"prompt 1 was sampled with temperature 0\.7"):
        verify([traced(), sampled], Checks(), Fake(), None)
    assert verify([sampled], Checks(check_prompt=True), None, fake_encode).verdict == "match"


def test_findings_are_bounded() -> None:
    trace = traced(steps=3)
    many = [with_id(trace, 0, behind(trace, 0, 9))] * (MAX_FINDINGS + 50)
    report = verify(many, Checks(), Fake(), None)
    assert len(report.findings) == MAX_FINDINGS
    assert report.mismatches == MAX_FINDINGS + report.findings_left_out
    json.dumps(report.document(), allow_nan=False)


def test_a_reference_that_gives_nan_never_passes() -> None:
    class Broken(Fake):
        def row(self, ids: Sequence[int]) -> np.ndarray:
            return np.full(VOCAB, np.nan, np.float32)

    report = verify([traced(topk=2)], Checks(logits_tol=1e6), Broken(), None)
    assert (report.verdict, report.mismatches, report.logits_beyond_tol) == ("mismatch", 12, 12)
    json.dumps(report.document(), allow_nan=False)


# The file


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    traces = [traced("häl\u2028lo\n", topk=3), replace(traced("x"), prompt=None, fingerprint="f0")]
    write_trace(tmp_path / "t.jsonl", traces)
    assert read_trace(tmp_path / "t.jsonl") == traces
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]
    assert (tmp_path / "t.jsonl").read_bytes().count(b"\n") == 2


def test_top_logits_are_sorted_and_ties_go_to_the_lower_id() -> None:
    found = top_logits(np.array([1, 3, 3, np.nan, 2, 3], np.float32), 4)
    assert found == TopLogits((1, 2, 5, 4), (3.0, 3.0, 3.0, 2.0))
    assert top_logits(np.array([1, 3], np.float32), 9).ids == (1, 0)


Edit = Callable[[dict[str, Any]], Any]
EDITS: dict[str, tuple[Edit, str]] = {
    "another schema": (lambda d: d.update(schema="clocher.run/1"), "schema is 'clocher.run/1'"),
    "a field is missing": (lambda d: d.pop("prompt_ids"), "'prompt_ids' is missing"),
    "an unknown field": (lambda d: d.update(more=1), "unknown field 'more'"),
    "no prompt ids": (
        lambda d: d.update(prompt_ids=[]),
        r"prompt_ids is \[\]; expected a list of",
    ),
    "a negative id": (lambda d: d["generated_ids"].append(-1), r"generated_ids\[12\] is -1"),
    "an id that is true": (lambda d: d["prompt_ids"].insert(0, True), r"prompt_ids\[0\] is True"),
    "an id as text": (lambda d: d["prompt_ids"].insert(0, "1"), r"prompt_ids\[0\] is '1'"),
    "a huge id": (lambda d: d["prompt_ids"].append(1 << 70), r"prompt_ids\[5\] is 1180"),
    "a prompt that is a number": (
        lambda d: d.update(prompt=5),
        "prompt is 5; expected text",
    ),
    "a step is missing": (lambda d: d["topk"].pop(), "topk: 11 steps, but 12 ids"),
    "one logit too few": (lambda d: d["topk"][0]["logits"].pop(), r"topk\[0\]: 1 logits for 2"),
    "one id twice": (lambda d: d["topk"][1].update(ids=[4, 4]), r"topk\[1\]: 2 logits for 2 ids"),
    "a logit as text": (
        lambda d: d["topk"][1].update(logits=["1", 2]),
        r"logits\[0\] is '1'; exp",
    ),
    "a huge logit": (lambda d: d["topk"][1].update(logits=[10**400, 2]), "logits.*out of range"),
    "no sampling": (lambda d: d["sampling"].clear(), "sampling: field 'temperature' is missing"),
    "a negative temperature": (
        lambda d: d["sampling"].update(temperature=-1),
        "temperature is -1",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_malformed_line_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [traced(), traced(topk=2)])
    first, second = path.read_text().splitlines()
    document = json.loads(second)
    edit, message = EDITS[name]
    edit(document)
    path.write_text(f"{first}\n\n{json.dumps(document)}\n")
    with pytest.raises(UsageError, match=rf"^trace: .*t\.jsonl, line 3: .*{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "no line"),
        (b"\n \n", "no line"),
        (b"{", "line 1: not valid JSON"),
        (b"[]", "line 1: expected a JSON object"),
        (b'{"schema": NaN}', "line 1: not valid JSON: NaN"),
        (b"\xff\xfe", "line 1: not valid JSON"),
    ],
    ids=["empty", "blank", "cut", "a list", "NaN", "no UTF-8"],
)
def test_a_file_that_is_no_trace_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_trace(path)
    with pytest.raises(UsageError, match="no such file"):
        read_trace(tmp_path / "absent.jsonl")


def test_the_fingerprint_does_not_depend_on_the_container(tmp_path: Path) -> None:
    prints = {path: fingerprint(open_checkpoint(path)) for path in (GPTOSS, LLAMA, BITNET)}
    assert len(set(prints.values())) == 3
    convert(GPTOSS, tmp_path / "ie")
    assert fingerprint(open_checkpoint(tmp_path / "ie")) == prints[GPTOSS]


# The run that writes it

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(inside: Callable[..., tuple[int, dict[str, Any], str]]) -> Run:
    """Run clocher-run in this process, on the reference back end: (code, line)."""
    return lambda *flags: inside(*flags)[:2]


def test_the_trace_of_a_batch_is_what_the_line_reports(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("import os\nclass Stack:\nfor i in range(10):\n")
    flags = ("--prompts-file", "p.txt", "--max-new", "5", "--batch", "2", "--rounds", "2")
    code, line = run(*flags, "--trace-ids", "t.jsonl", "--trace-topk", "3")
    assert code == 0
    traces = read_trace(tmp_path / "t.jsonl")
    assert [list(t.generated_ids) for t in traces] == [o["token_ids"] for o in line["outputs"]]
    assert [t.prompt for t in traces] == ["import os", "class Stack:", "for i in range(10):"]
    for trace in traces:
        assert trace.topk is not None
        assert [step.ids[0] for step in trace.topk] == list(trace.generated_ids)
        assert all(len(step.ids) == 3 for step in trace.topk)
    plain = run(*flags)[1]
    assert list(plain) == list(line)
    assert plain["outputs"] == line["outputs"]


def test_the_traced_logits_are_those_of_their_own_sequence(run: Run, tmp_path: Path) -> None:
    """Prompts of unlike lengths that end at unlike steps: rows must not get mixed up."""
    (tmp_path / "p.txt").write_text("import os\nclass Stack:\n    def push(self\nfor\n")
    flags = ("--prompts-file", "p.txt", "--max-new", "4", "--trace-topk", "2", "--trace-ids")
    assert run(*flags, "one.jsonl")[0] == run(*flags, "four.jsonl", "--batch", "4")[0] == 0
    assert read_trace(tmp_path / "one.jsonl") == read_trace(tmp_path / "four.jsonl")


def test_the_stub_is_traced_without_fingerprint(run: Run, tmp_path: Path) -> None:
    code, line = run("--stub", "--max-new", "3", "--prompt", "ab", "--trace-ids", "t.jsonl")
    (trace,) = read_trace(tmp_path / "t.jsonl")
    assert (code, trace.fingerprint, trace.prompt_ids) == (0, None, (97, 98))
    assert line["hints_ignored"] == []


def test_a_prompt_of_ids_is_traced_without_text(run: Run, tmp_path: Path) -> None:
    assert run("--stub", "--prompt-ids", "1,2", "--trace-ids", "t.jsonl")[0] == 0
    assert read_trace(tmp_path / "t.jsonl")[0].prompt is None


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--trace-topk", "3"), "--trace-topk needs --trace-ids"),
        (("--trace-ids", "absent/t.jsonl"), "absent/t.jsonl cannot be written"),
        (("--trace-ids", "."), "cannot be written"),
        (("--trace-ids", "t.jsonl", "--trace-topk", "1"), "the stub has no logits"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused(
    flags: tuple[str, ...], message: str, run: Run, tmp_path: Path
) -> None:
    code, line = run("--stub", *flags)
    assert (code, line["status"]) == (2, "error")
    assert message in line["message"]
    assert list(tmp_path.iterdir()) == []


# The script, with transformers


@pytest.fixture(scope="module")
def script() -> Any:
    """The program in this process: transformers is imported once for all tests."""
    return verify_ids


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Traces of the real command on the CPU: all in fp32, and with what is the default."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "p.txt").write_text("import os\nclass Stack:\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("IE_", "MODEL_"))}
    found = {}
    for kind in ("fp32", "int8"):
        found[kind] = folder / f"{kind}.jsonl"
        flags = ("--prompts-file", "p.txt", "--max-new", "32", "--trace-topk", "5", "--device")
        subprocess.run(
            [sys.executable, "-m", "clocher_runtime.cli", *flags, "cpu"]
            + ["--trace-ids", str(found[kind])]
            + (["--kv-dtype", "f32"] if kind == "fp32" else []),
            cwd=folder,
            env=kept | {"IE_ACT_PREC": kind, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            timeout=250,
        )
    return found


def invoke(script: Any, trace: Path, hf_dir: Path, *flags: str, **env: str) -> Result:
    arguments = ["--trace-jsonl", str(trace), "--hf-dir", str(hf_dir), *flags]
    return CliRunner().invoke(script, arguments, env=env, catch_exceptions=False)


def test_the_cpu_agrees_with_transformers(
    script: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "o.json"
    done = invoke(script, traces["fp32"], GPTOSS, "--check-prompt", "--out", str(out))
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert report["schema"] == "clocher.verify/1"
    assert (report["verdict"], report["prompts_equal"]) == ("match", 2)
    assert report["equal"] == report["steps"] == report["in_topk"] == 64
    assert (report["topk_overlap"], report["same_weights"]) == (1.0, True)
    assert report["logits_max_diff"] < 1e-4
    assert (report["device"], report["dtype"], report["findings"]) == ("cpu", "fp32", [])
    assert "verify: match (2 prompts)" in done.output


def test_int8_activations_agree_within_their_tolerance(
    script: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    assert read_trace(traces["int8"])[0].act_prec == "int8"
    out = tmp_path / "o.json"
    done = invoke(script, traces["int8"], GPTOSS, "--out", str(out), HF_LOGITS_TOL="2")
    report = json.loads(out.read_text())
    assert done.exit_code == 0, done.output
    assert report["logits_tol"] == 2
    assert report["equal"] + report["near_ties"] == report["steps"] == 64
    assert 1e-3 < report["logits_max_diff"] < 2
    strict = invoke(script, traces["int8"], GPTOSS)
    assert strict.exit_code == 7
    assert "steps beyond the tolerance" in strict.output


def test_what_was_tampered_with_is_found(
    script: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    first, second = read_trace(traces["fp32"])
    ids = list(first.generated_ids)
    right, ids[9] = ids[9], 5
    prompt = list(second.prompt_ids)
    right_prompt, prompt[1] = prompt[1], 7
    changed = [
        replace(first, generated_ids=tuple(ids)),
        replace(second, prompt_ids=tuple(prompt)),
    ]
    write_trace(tmp_path / "t.jsonl", changed)
    done = invoke(script, tmp_path / "t.jsonl", GPTOSS, "--check-prompt")
    assert done.exit_code == 7
    assert f"prompt 0, step 9: token: got 5, expected {right}" in done.output
    assert f"prompt 1, position 1: prompt: got 7, expected {right_prompt}" in done.output
    assert "verify: mismatch" in done.output


def test_another_model_does_not_pass(script: Any, traces: dict[str, Path]) -> None:
    done = invoke(script, traces["fp32"], LLAMA, HF_TOPK="3", HF_DTYPE="bf16", HF_DEVICE="cpu")
    assert done.exit_code == 7
    assert "note: the run used other weights" in done.output


def test_another_tokenizer_is_found_without_a_model(
    script: Any, traces: dict[str, Path], tmp_path: Path
) -> None:
    assert invoke(script, traces["fp32"], GPTOSS, "--tokenizer-only").exit_code == 0
    model = tmp_path / "model"
    model.mkdir()
    words = Tokenizer(models.WordLevel({"import": 0, "class": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}'
    )
    out = tmp_path / "o.json"
    done = invoke(script, traces["fp32"], model, "--tokenizer-only", "--out", str(out))
    assert done.exit_code == 7, done.output
    report = json.loads(out.read_text())
    assert (report["prompts_checked"], report["prompts_equal"], report["steps"]) == (2, 0, 0)
    assert report["findings"][1]["expected"] == 1
    assert report["dtype"] is None


def test_the_command_of_the_guide_runs(traces: dict[str, Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--trace-jsonl", str(traces["fp32"])]
        + ["--hf-dir", str(GPTOSS), "--tokenizer-only", "--check-prompt"]
        + ["--out", str(tmp_path / "o.json")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "prompts: 2 of 2 tokenised alike" in done.stderr
    assert json.loads((tmp_path / "o.json").read_text())["tokenizer_only"] is True


def test_what_cannot_be_checked_has_its_own_exit_code(
    script: Any, traces: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    cases = {
        "schema is None": (2, tmp_path / "bad.jsonl", GPTOSS, ()),
        "no model there": (3, traces["fp32"], tmp_path, ()),
        "BitNet in bf16 only": (2, traces["fp32"], BITNET, ("--dtype", "fp32")),
        "cannot be written": (5, traces["fp32"], GPTOSS, ("--tokenizer-only", "--out", "/dev/x/y")),
        "'fp8' is not one of": (2, traces["fp32"], GPTOSS, ("--dtype", "fp8")),
    }
    for message, (code, trace, model, flags) in cases.items():
        done = invoke(script, trace, model, *flags)
        assert done.exit_code == code, (message, done.output)
        assert message in done.output or "No such file" in done.output
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    done = invoke(script, traces["fp32"], tmp_path)
    assert (done.exit_code, "transformers cannot load it" in done.output) == (3, True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = invoke(script, traces["fp32"], GPTOSS)
    assert done.exit_code == 2
    assert "python -m pip install torch transformers" in done.output


@pytest.mark.slow
def test_the_tolerance_follows_the_dtype_of_the_reference(script: Any, tmp_path: Path) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "o.json"
    flags = ["--max-new", "12", "--trace-ids", str(trace), "--trace-topk", "5"]
    assert clocher("run", str(BITNET), "--prompt", "def f(x):", *flags)[0] == 0
    done = invoke(script, trace, BITNET, "--out", str(out))
    report = json.loads(out.read_text())
    assert (done.exit_code, report["verdict"], report["equal"]) == (0, "match", 12), done.output
    assert (report["dtype"], report["logits_tol"]) == ("bf16", 0.25)
    strict = invoke(script, trace, BITNET, HF_LOGITS_TOL="1e-3")
    assert strict.exit_code == 7
