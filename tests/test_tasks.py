"""Known tasks: the prompts and numbers of lm-evaluation-harness, from local lines."""

import gzip
import json
from math import sqrt
from pathlib import Path

import pytest

from clocher_kernels.errors import FormatError, ModelNotFound, UsageError
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quality import tasks
from clocher_runtime.quality.likelihood import Likelihood, Question, Target, metrics
from clocher_runtime.quality.run_program import passes
from clocher_runtime.quality.tasks import TASKS, Asked
from clocher_runtime.subcommands.quality import quality

LLAMA = str(Path(__file__).parent / "data" / "clocher-tiny-llama")

MMLU = [
    {"question": " 1 + 1? ", "choices": ["0", "1", "2", "3"], "answer": 2, "subject": "a_b"},
    {"question": "2 + 1?", "choices": ["0", "1", "2", "3"], "answer": "D", "subject": "a_b"},
]
WORDED = "1 + 1?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer:"
ABOUT = "The following are multiple choice questions (with answers) about a b.\n\n"
HELLASWAG = {
    "activity_label": "Roof",
    "ctx_a": "A man sits [substeps] on it.",
    "ctx_b": "he",
    "endings": [" [title] goes  up.", "falls."],
    "label": "1",
}
ARC = {"question": "Why?", "choices": ["a b", "c"], "labels": ["A", "B"], "answer": "B"}
PUBLISHED = {"question": "Why?", "choices": {"text": ["a b", "c"], "label": ["1", "2"]}}
GSM8K = {"question": "How many?", "answer": "1,000 + 234 = 1,234\n#### 1,234"}
HUMANEVAL = {
    "prompt": "def one():\n",
    "test": "def check(f):\n    assert f() == 1\n",
    "entry_point": "one",
}
LAMBADA = {"text": "She looked at the stone and saw a sign"}


def lines(path: Path, *each: dict) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in each), encoding="utf-8")
    return path


def read(name: str, data: Path, shots: int | None = None, limit: int | None = None) -> list:
    return list(tasks.read_task(name, data, shots, limit, run_code=True).items)


def test_prompts_are_those_of_the_harness(tmp_path: Path) -> None:
    lines(tmp_path / "mmlu_test.jsonl", *MMLU)
    lines(tmp_path / "mmlu_dev.jsonl", *MMLU[::-1])
    letters = tuple("ABCD")
    first = Question(ABOUT + WORDED, letters, 2, " ")
    assert read("mmlu", tmp_path, limit=1) == [first]
    shown = WORDED.replace("1 + 1", "2 + 1") + " D\n\n"
    assert read("mmlu", tmp_path, shots=1)[0] == Question(ABOUT + shown + WORDED, letters, 2, " ")
    path = lines(tmp_path / "h.jsonl", HELLASWAG)
    endings = (" goes up.", "falls.")
    assert read("hellaswag", path) == [Question("Roof: A man sits on it. He", endings, 1, " ")]
    path = lines(tmp_path / "a.jsonl", ARC, {**PUBLISHED, "answerKey": "2"})
    assert (
        read("arc_challenge", path)
        == [Question("Question: Why?\nAnswer:", ("a b", "c"), 1, " ")] * 2
    )
    data = gzip.compress(json.dumps(LAMBADA).encode())
    (tmp_path / "lambada").mkdir()
    (tmp_path / "lambada" / "lines.jsonl.gz").write_bytes(data)
    said = Target("She looked at the stone and saw a", " sign")
    assert read("lambada", tmp_path) == [said]
    request = {"context": said.context, "continuation": said.continuation}
    assert read("lambada", lines(tmp_path / "r.jsonl", {"request": request})) == [said]


def test_numbers_are_found_as_the_harness_finds_them(tmp_path: Path) -> None:
    (item,) = read("gsm8k", lines(tmp_path / "g.jsonl", GSM8K), shots=0)
    assert item.context == "Question: How many?\nAnswer:" and item.max_new == 256
    expected = {
        "so\n#### 1,234": (1, 1),
        "so #### $1234.": (0, 1),  # the marked number may not begin with a sign of a currency
        "it is $1,234.": (0, 1),
        "#### 1234\nQ 5": (1, 0),
        "none": (0, 0),
    }
    for said, (strict, flexible) in expected.items():
        names = "exact_match_strict", "exact_match_flexible"
        assert item.judge(said, item.answer) == dict(zip(names, (strict, flexible), strict=True)), (
            said
        )
    lines(tmp_path / "gsm8k_train.jsonl", *[GSM8K] * 5)
    lines(tmp_path / "gsm8k_test.jsonl", GSM8K)
    one = f"Question: How many?\nAnswer: {GSM8K['answer']}\n\n"
    assert read("gsm8k", tmp_path)[0].context == one * 5 + item.context


def test_metrics_are_those_of_the_harness() -> None:
    question = Question("q", ("a", "bbbb"), 1, " ")
    scores = [Likelihood(-2.0, False), Likelihood(-3.0, False)]
    found = metrics([question, question], [scores, scores[::-1]])["questions"]
    # by sums the first is 0 and the second 1; by characters, without the space, both are 1
    assert (found["acc"], found["acc_norm"]) == (0.5, 1.0)
    assert found["acc_stderr"] == pytest.approx(sqrt(0.25 * 2 / 1) / sqrt(2))
    words = [[Likelihood(-1.0, True)], [Likelihood(-3.0, False)]]
    found = metrics([Target("a", " b")] * 2, words)["targets"]
    assert found["acc"] == 0.5 and found["perplexity"] == pytest.approx(2.718281828**2)


def test_programs_are_run_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--run-code"):
        tasks.read_task("humaneval", tmp_path, None, None, run_code=False)
    (item,) = read("humaneval", lines(tmp_path / "h.jsonl", HUMANEVAL))
    assert isinstance(item, Asked) and TASKS["humaneval"].generates
    assert item.judge("    return 1\n", item.answer) == {"pass@1": 1.0}
    assert item.judge("    return 2\n", item.answer) == {"pass@1": 0.0}
    assert item.judge("    exit(0)\n", item.answer) == {"pass@1": 0.0}


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "bytearray(4 << 30)", "open('x', 'wb').write(bytes(4 << 20))"],
    ids=["time", "memory", "file"],
)
def test_a_program_has_limits(program: str) -> None:
    assert not passes(program, seconds=1)


def test_what_is_kept_is_not_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "mmlu_test.jsonl", *MMLU)
    kept = tmp_path / "kept.jsonl"
    words = [LLAMA, "--task", "mmlu", "--data", str(tmp_path), "--keep", str(kept)]
    assert quality.run([*words, "--limit", "1"]) == 0
    kept.write_text(kept.read_text() + '{"item": "torn', encoding="utf-8")
    capsys.readouterr()
    scored: list[int] = []
    score = tasks.Scorer.grouped

    def counting(scorer, groups, progress):
        scored.append(len(groups))
        return score(scorer, groups, progress)

    monkeypatch.setattr(tasks.Scorer, "grouped", counting)
    assert quality.run(words) == 0
    got = capsys.readouterr()
    line = json.loads(got.out)
    assert scored == [1] and line["questions"]["count"] == 2 and line["shots"] == 0
    assert "mmlu" in got.err and "acc_norm" in got.err
    first, last = kept.read_text().splitlines()
    kept.write_text(f"{json.dumps({**json.loads(first), 'found': []})}\n{last}\n")
    assert quality.run(words) == 3
    assert (
        f"{kept}, line 1: no kept result, or edited; give another file" in capsys.readouterr().err
    )
    kept.write_text(f"{last}\n")
    assert quality.run(words) == 0 and json.loads(capsys.readouterr().out) == line
    assert scored == [1, 1]
    assert quality.run([*words, "--precision", "int4w"]) == 0  # other settings, other results
    assert scored == [1, 1, 2] and len(kept.read_text().splitlines()) == 4
    kept.write_text("{}\n")
    with pytest.raises(FormatError, match="another file"):
        Kept(kept, {})


def test_prompts_that_lose_their_beginning_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines(tmp_path / "lambada.jsonl", LAMBADA, {"text": "a b"})
    lines(tmp_path / "gsm8k.jsonl", GSM8K, {**GSM8K, "question": "Why? " * 999})
    words = [LLAMA, "--shots", "0", "--data", str(tmp_path), "--task"]
    for task, context, cut in (("lambada", 8, 1), ("lambada", 64, 0), ("gsm8k", 300, 1)):
        assert quality.run([*words, task, "--context", str(context), "--limit", "2"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["truncated"] == cut
        said = f"{task}: {cut} of 2 prompts are longer than a context of {context} tokens"
        assert (said in err) == bool(cut), err


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --data"):
        tasks.read_task("mmlu", None, None, None, run_code=False)
    with pytest.raises(UsageError, match="expected one of mmlu, hellaswag"):
        tasks.read_task("mmul", None, None, None, run_code=False)
    with pytest.raises(ModelNotFound, match=r"mmlu_test\.jsonl"):
        read("mmlu", tmp_path)
    lines(tmp_path / "mmlu_test.jsonl", MMLU[0], {**MMLU[0], "answer": 4})
    wrong = r"mmlu_test\.jsonl, line 2: not a line of mmlu: got {'answer': 4, .*, expected fields q"
    with pytest.raises(FormatError, match=wrong):
        read("mmlu", tmp_path)
    lines(tmp_path / "mmlu_test.jsonl", MMLU[0], {"question": "?"})
    with pytest.raises(FormatError, match=r"\{'question': '\?'\}, expected .*; give .* --data$"):
        read("mmlu", tmp_path)
    with pytest.raises(FormatError, match=r"expected fields .*, label \(a number\)"):
        read("hellaswag", lines(tmp_path / "h.jsonl", {**HELLASWAG, "label": ""}))
    with pytest.raises(FormatError, match="not a line of arc_challenge"):
        read("arc_challenge", lines(tmp_path / "a.jsonl", {**ARC, "choices": [1, 2]}))
    lines(tmp_path / "mmlu_test.jsonl", MMLU[0])
    lines(tmp_path / "mmlu_dev.jsonl", MMLU[0])
    with pytest.raises(UsageError, match="give --shots"):
        read("mmlu", tmp_path, shots=2)
    with pytest.raises(FormatError, match="no lines"):
        read("mmlu", lines(tmp_path / "empty.jsonl"))
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(FormatError, match="gzip"):
        read("mmlu", tmp_path / "x.jsonl.gz")


@pytest.mark.parametrize("theirs", ["a text without an end", '{"a": 1}\n{"item"', "one\ntwo"])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, theirs: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(theirs)
    with pytest.raises(FormatError):
        Kept(path, {})
    assert path.read_text() == theirs


def test_a_line_that_was_not_finished_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    Kept(path, {}).add("a", 1)
    whole = path.read_text()
    path.write_text(whole + whole[:-5])
    assert Kept(path, {}).get("a") == 1
    assert path.read_text() == whole


def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mmlu_test.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 5000))
    monkeypatch.setattr(tasks, "MOST_BYTES", 4000)
    with pytest.raises(FormatError, match="more than 4000 bytes when unpacked"):
        tasks.read_task("mmlu", path, 0, None, run_code=False)
