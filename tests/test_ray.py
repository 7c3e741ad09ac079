"""Jobs of rows without a cluster: what is stored, and what a row's result is."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clocher_kernels.errors import UsageError
from clocher_runtime.ray import job
from clocher_runtime.ray.actors import Generate, Lines, Score
from clocher_runtime.ray.job import Job, opened, read_rows, run_job

ASKED = {"task": "generate", "options": {"seed": 0}, "rows": 2}


def test_a_job_resumes_where_a_driver_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(4)) + "no json\n")
    given = Job("generate", None, source, tmp_path / "out", task_rows=2)
    computed: list[int] = []

    def two_tasks(ray: object, job: Job, left: Mapping[int, str]) -> Iterator[Any]:
        for at, rows in list(left.items())[:2]:
            computed.append(at)
            done = [{"row": at + n, **json.loads(row)} for n, row in enumerate(rows.split("\n"))]
            yield at, "".join(f"{json.dumps(row)}\n" for row in done)

    monkeypatch.setattr(job, "connect", lambda address: None)
    monkeypatch.setattr(job, "_computed", two_tasks)
    with pytest.raises(FileNotFoundError, match=r"4\.jsonl"):  # a driver ends before the last
        run_job(given)
    (tmp_path / "out/tasks/4.jsonl.partial").write_text('{"row": 4, "te')
    told: list[tuple[int, int]] = []
    outcome = run_job(given, progress=lambda *counts: told.append(counts))
    assert computed == [0, 2, 4] and told == [(5, 5)]
    assert outcome == (5, 4, 1, tmp_path / "out/results.jsonl")
    lines = [json.loads(line) for line in outcome.results.read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("prompt") for line in lines] == ["0", "1", "2", "3", None]
    assert run_job(given) == (5, 5, 1, outcome.results) and len(computed) == 3
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        ".lock",
        "job.json",
        "results.jsonl",
    ]


@pytest.mark.parametrize("more", [{"options": {"seed": 1}}, {"rows": 3}, {"task": "score"}])
def test_jobs_are_not_mixed(tmp_path: Path, more: dict[str, object]) -> None:
    with opened(tmp_path / "out", ASKED):
        pass
    with (
        pytest.raises(UsageError, match="holds another job"),
        opened(tmp_path / "out", {**ASKED, **more}),
    ):
        pass
    with opened(tmp_path / "out", ASKED):  # and the refusal has let go of the lock
        pass


def test_a_job_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"version": 2, **ASKED}))
    with (
        pytest.raises(UsageError, match="a job of version 2, expected 3; finish it with"),
        opened(tmp_path, ASKED),
    ):
        pass


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(UsageError, match=r"holds 'notes\.txt' and no job"),
        opened(tmp_path, ASKED),
    ):
        pass


def test_one_driver_at_a_time(tmp_path: Path) -> None:
    with (
        opened(tmp_path, ASKED),
        pytest.raises(UsageError, match="another driver is at work"),
        opened(tmp_path, ASKED),
    ):
        pass


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


@pytest.fixture(autouse=True)
def no_tile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep packed weights out of the cache of this user."""
    monkeypatch.setenv("CLOCHER_TILE_CACHE_MB", "0")


ROWS = [
    {"prompt": "def fib(n):", "max_new": 5},
    {"prompt": "import os", "temperature": 1.0},
    {"prompt": 5},
    {"prompt": "x", "temperature": -1},
    {"text": "neither"},
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.8, "seed": 9},
    {"error": "line 7: not valid JSON"},
]


def test_a_rows_text_depends_on_the_row_alone() -> None:
    def results(actor: Lines, *numbers: int) -> list[str]:
        tasks = np.array(["\n".join(json.dumps(ROWS[n]) for n in numbers)], object)
        out = actor({"first": np.array(numbers[:1]), "lines": tasks})
        assert out["first"].tolist() == [numbers[0]]
        lines: str = out["lines"][0]
        return lines.splitlines()

    sampling = {"max_new": 6, "seed": 3}
    together = Lines("generate", None, batch=4, sampling=sampling)
    whole = results(together, *range(7))
    alone = Lines("generate", None, batch=1, sampling=sampling)
    for n in (5, 1, 0, 4):
        assert results(alone, n) == [whole[n]]
    answers = [json.loads(answer) for answer in whole]
    assert [answer["row"] for answer in answers] == [*range(7)]
    assert [n for n, answer in enumerate(answers) if "error" in answer] == [2, 3, 4, 6]
    assert answers[6]["error"] == "line 7: not valid JSON"
    assert [len(answers[n]["ids"]) for n in (0, 1, 5)] == [5, 6, 6]
    other = Lines("generate", None, batch=4, sampling={**sampling, "seed": 4})
    assert results(other, 1) != [whole[1]]  # drawn with another seed
    assert results(other, 5) == [whole[5]]  # which this row names itself


def test_columns_in_and_out() -> None:
    actor = Generate(None, batch=2, sampling={"max_new": 4})
    ids = np.empty(2, object)
    ids[:] = [np.array([5, 6, 7]), None]
    out = actor({"name": np.array(["a", "b"]), "prompt": ids})
    assert list(out) == ["name", "prompt", *Generate.columns, "error"]
    assert out["prompt_tokens"][0] == 3 and len(out["ids"][0]) <= 4 and out["error"][0] == ""
    assert out["text"][1] is None and "expected either" in out["error"][1]
    with actor.model as model:
        assert out["text"][0] == model.generate([5, 6, 7], max_new=4)


def test_scores_are_those_of_the_scorer() -> None:
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
