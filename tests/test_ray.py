"""Jobs of rows without a cluster: what is stored, who has which CPU, what a row's result is."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.ray import actors
from clocher_runtime.ray.actors import Generate, Lines, Score
from clocher_runtime.ray.job import Record, read_rows

ASKED = {"task": "generate", "options": {"seed": 0}}


def test_a_record_goes_on_where_a_driver_died(tmp_path: Path) -> None:
    with Record(tmp_path / "out", ASKED, 5) as record:
        record.add({3: {"text": "d"}, 1: {"text": "b"}})
        record.add({1: {"text": "again"}, 0: {"error": "a"}})
    with (tmp_path / "out/rows.jsonl").open("a") as file:
        file.write('{"row": 2, "te')
    with Record(tmp_path / "out", ASKED, 5) as record:
        assert set(record.done) == {0, 1, 3} and not record.is_whole
        with pytest.raises(FormatError, match="3 of 5 rows are done"):
            record.finish()
        record.add({4: {"text": "e"}, 2: {"text": "c"}})
        assert record.finish() == 1
    lines = [json.loads(line) for line in record.results.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("text") for line in lines] == [None, "b", "c", "d", "e"]
    with Record(tmp_path / "out", ASKED, 5) as record:
        assert record.is_whole
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        ".lock",
        "job.json",
        "results.jsonl",
    ]


@pytest.mark.parametrize(
    ("asked", "count"), [({**ASKED, "options": {"seed": 1}}, 2), (ASKED, 3), ({"task": "score"}, 2)]
)
def test_jobs_are_not_mixed(tmp_path: Path, asked: dict[str, object], count: int) -> None:
    Record(tmp_path / "out", ASKED, 2).close()
    with pytest.raises(UsageError, match="holds another job"):
        Record(tmp_path / "out", asked, count)
    Record(tmp_path / "out", ASKED, 2).close()  # and the refusal has let go of the lock


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt' and no job"):
        Record(tmp_path, ASKED, 2)


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    with Record(tmp_path, ASKED, 2), pytest.raises(UsageError, match="another driver is at work"):
        Record(tmp_path, ASKED, 2)


def test_a_row_told_twice_is_an_error(tmp_path: Path) -> None:
    with Record(tmp_path, ASKED, 2) as record:
        record.add({0: {}})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"row": 0}\n')
    with pytest.raises(FormatError, match="row 0 is unknown or there twice"):
        Record(tmp_path, ASKED, 2)


def test_lines_that_are_no_rows_stay_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\nno json\n[1]\n{"prompt": "\xff"}\n')
    rows = [json.loads(row) for row in read_rows(path)]
    assert rows[0] == {"prompt": "a"}
    assert [list(row) for row in rows[1:]] == [["error"]] * 3
    assert rows[1]["error"].startswith("line 3: not valid JSON")
    path.write_bytes(b"\n\n")
    with pytest.raises(UsageError, match="no rows"):
        read_rows(path)


def test_a_cpu_has_one_actor_until_it_dies(tmp_path: Path) -> None:
    try:
        assert actors.claim(1, [4, 5, 6], tmp_path) == [4]
        code = (
            "import sys, time; from pathlib import Path; from clocher_runtime.ray import actors\n"
            "print(actors.claim(2, [4, 5, 6], Path(sys.argv[1])), flush=True); time.sleep(60)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as other:
            try:
                assert other.stdout is not None and other.stdout.readline() == "[5, 6]\n"
                assert actors.claim(1, [4, 5, 6], tmp_path) == []
            finally:
                other.kill()
        assert actors.claim(2, [4, 5, 6], tmp_path) == [5, 6]
    finally:
        actors.release()


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process on all of its CPUs."""
    monkeypatch.setattr(actors, "pin", lambda count: [])


ROWS = [
    {"prompt": "def fib(n):", "max_new": 5},
    {"prompt": "import os", "temperature": 1.0},
    {"prompt": 5},
    {"prompt": "x", "temperature": -1},
    {"text": "neither"},
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.8, "seed": 9},
]


def test_a_rows_text_depends_on_the_row_alone(unpinned: None) -> None:
    def batch(numbers: list[int]) -> dict[str, np.ndarray]:
        lines = np.array([json.dumps(ROWS[n]) for n in numbers], object)
        return {"row": np.array(numbers), "line": lines}

    sampling = {"max_new": 6, "seed": 3}
    together = Lines("generate", None, batch=4, sampling=sampling)
    whole = together(batch([0, 1, 2, 3, 4, 5]))
    alone = Lines("generate", None, batch=1, sampling=sampling)
    for n in (5, 1, 0, 4):
        assert alone(batch([n]))["answer"][0] == whole["answer"][n]
    answers = [json.loads(answer) for answer in whole["answer"]]
    assert [sorted(a) == ["error"] for a in answers] == [False, False, True, True, True, False]
    assert [len(answers[n]["ids"]) for n in (0, 1, 5)] == [5, 6, 6]
    other = Lines("generate", None, batch=4, sampling={**sampling, "seed": 4})(batch([1, 5]))
    assert other["answer"][0] != whole["answer"][1]  # drawn with another seed
    assert other["answer"][1] == whole["answer"][5]  # which this row names itself


def test_columns_in_and_out(unpinned: None) -> None:
    actor = Generate(None, batch=2, sampling={"max_new": 4})
    ids = np.empty(2, object)
    ids[:] = [np.array([5, 6, 7]), None]
    out = actor({"name": np.array(["a", "b"]), "prompt": ids})
    assert list(out) == ["name", "prompt", *Generate.columns, "error"]
    assert out["prompt_tokens"][0] == 3 and len(out["ids"][0]) <= 4 and out["error"][0] == ""
    assert out["text"][1] is None and "expected either" in out["error"][1]
    with actor.model as model:
        assert out["text"][0] == model.generate([5, 6, 7], max_new=4)


def test_scores_are_those_of_the_scorer(unpinned: None) -> None:
    actor = Score(None, batch=2)
    rows = [
        {"context": "def f(x):\n    return", "continuation": " x"},
        {"text": "import os\nimport sys\n"},
        {"text": ""},
        {"text": 4},
    ]
    answers = actor.answers(rows)
    want = actor._scorer.scores([actor._scorer.pair("def f(x):\n    return", " x")])[0]
    assert answers[0] == {"logprob": want.logprob, "tokens": 1, "is_greedy": want.is_greedy}
    assert answers[1]["tokens"] > 4 and answers[1]["logprob"] < 0
    assert "no tokens" in answers[2]["error"] and "expected text" in answers[3]["error"]
    assert actor.answers(rows[1:2])[0] == answers[1]
