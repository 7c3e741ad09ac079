"""lm-evaluation-harness gets the same numbers through HTTP as in the process of the model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import clean_environment
from serving import Served, serving, settled
from weight_files import ROOT

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'lm_eval[api]'")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from clocher_runtime.adapters.lm_eval_model import ClocherLM

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
EMBEDDED = ROOT / "clocher_runtime" / "assets" / "clocher-tiny-gptoss"
TEXT = (DATA / "valid.txt").read_text(encoding="utf-8")
CONTEXT = 1024
EXACT = 1e-5


class Both:
    """A model behind HTTP, and the same one in this process."""

    def __init__(self, directory: Path, server: Served) -> None:
        self.directory, self.server, self.name = directory, server, server.facts["model"]
        # Over HTTP a window ends one token early: the prompt has what it predicts in it, too.
        self.offline = ClocherLM(str(directory), batch_size=2, context=CONTEXT - 1)

    def http(self, own: bool = False, **options: Any) -> LocalCompletionsAPI:
        """Return what the harness calls `local-completions`.

        Its tokenizer is the server's, or its `own` one, of the model's directory.
        """
        if own:
            options |= {"tokenizer_backend": "huggingface", "tokenizer": str(self.directory)}
        return LocalCompletionsAPI(
            base_url=f"{self.server.url}/v1/completions",
            model=self.name,
            # The harness takes 2 off: for a token that is made, and for the first of a window.
            max_length=CONTEXT + 1,
            max_retries=1,
            **options,
        )


@pytest.fixture(
    scope="module",
    params=[EMBEDDED, DATA / "clocher-tiny-llama", DATA / "clocher-tiny-bitnet"],
    ids=lambda directory: directory.name,
)
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    with serving("--model-dir", request.param, "--batch", 4) as server:
        yield Both(request.param, server)
        settled(server)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def lines_of_two_words(least: int) -> list[str]:
    lines = [line.strip() for line in TEXT.splitlines()]
    return [line for line in lines if len(line) > least and " " in line[8:-4]]


def halved(line: str) -> tuple[str, str]:
    """Cut a line before a space, so that no token is on both sides."""
    at = line.index(" ", 8)
    return line[:at], line[at:]


def pairs(both: Both) -> list[tuple[str, str]]:
    """Return contexts and continuations: short and long ones, some of them greedy."""
    halves = [halved(line) for line in lines_of_two_words(20)[:40]]
    long = [(TEXT[at : at + 1500], TEXT[at + 1500 : at + 1600]) for at in (0, 5000, 9000)]
    greedy = [
        (context, both.offline.model.complete(context, max_new=3, temperature=0).text)
        for context in ("def area(", "import ", "for index in", "class Box:\n    def")
    ]
    return [*halves, *long, *greedy, ("", "class A")]


@pytest.mark.parametrize(
    "options", [{"batch_size": 8, "own": True}, {"num_concurrent": 6}], ids=str
)
def test_scores_are_those_of_the_model(both: Both, options: dict[str, Any]) -> None:
    asked = instances("loglikelihood", *pairs(both))
    expected = both.offline.loglikelihood(asked, disable_tqdm=True)
    found = both.http(**options).loglikelihood(asked, disable_tqdm=True)
    differences = [abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True)]
    print(f"{both.name}: {len(asked)} texts, largest difference {max(differences):.1e}")
    assert max(differences) <= EXACT
    flags = [greedy for _, greedy in found]
    assert flags == [greedy for _, greedy in expected]
    assert 0 < sum(flags) < len(flags)


def test_each_token_has_the_score_that_the_session_gives(both: Both) -> None:
    ids = both.offline.model.tokenizer.encode(TEXT[:3000])[: CONTEXT - 1]
    wanted: list[float] = []

    def take(position: int, logits: np.ndarray) -> None:
        if position + 1 < len(ids):
            row = logits.astype(np.float64)
            top = row.max()
            wanted.append(float(row[ids[position + 1]] - top - np.log(np.exp(row - top).sum())))

    assert not list(both.offline.model.session.scoring(ids, take))
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    answer = both.server.ask("/v1/completions", **body).json()
    first, *told = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]
    assert first is None and len(told) == len(wanted)
    # Exponentials are fp32 where log probabilities are told; here they are fp64.
    assert np.abs(np.subtract(told, wanted)).max() <= EXACT / 10


def test_whole_texts_are_scored_window_by_window(both: Both) -> None:
    asked = instances("loglikelihood_rolling", (TEXT[:400],), (TEXT[1000:14000],))
    assert len(both.offline.model.tokenizer.encode(TEXT[1000:14000])) > 2 * CONTEXT
    expected = both.offline.loglikelihood_rolling(asked, True)
    found = both.http(batch_size=2, own=True).loglikelihood_rolling(asked, True)
    assert np.abs(np.subtract(found, expected)).max() <= EXACT


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"num_concurrent": 3}], ids=str)
def test_texts_go_on_until_their_stops(both: Both, options: dict[str, int]) -> None:
    until = {"until": ["\n\n", "):"], "max_gen_toks": 24, "do_sample": False}
    free = {"until": [], "max_gen_toks": 16, "temperature": 0.0}
    texts = ["def read(path):\n", "import ", "class Box:\n", "for index in"]
    asked = instances("generate_until", *((text, until) for text in texts), (texts[0], free))
    expected = both.offline.generate_until(asked, True)
    assert both.http(**options).generate_until(asked, True) == expected
    assert all(stop not in text for text in expected[:-1] for stop in until["until"])


def test_chats_go_on_until_their_stops(both: Both) -> None:
    chat = LocalChatCompletion(
        base_url=f"{both.server.url}/v1/chat/completions", model=both.name, max_retries=1
    )
    talks = [[{"role": "user", "content": text}] for text in ("Write a loop.", "import os")]
    options = {"max_tokens": 24, "temperature": 0}
    whole = [
        both.server.ask("/v1/chat/completions", messages=talk, **options).json() for talk in talks
    ]
    texts = [answer["choices"][0]["message"]["content"] for answer in whole]
    until = {"until": [texts[0][5:8]], "max_gen_toks": 24}
    asked = [(chat.apply_chat_template(talk), until) for talk in talks]
    found = chat.generate_until(instances("generate_until", *asked), True)
    assert found == [text.split(until["until"][0])[0] for text in texts]


@pytest.mark.parametrize("both", [EMBEDDED], indirect=True, ids=["program"])
def test_a_task_run_by_the_program_has_the_same_results(both: Both, tmp_path: Path) -> None:
    documents = [
        {"text": begin, "choices": [end, f" {end[:0:-1]}"], "gold": 0}
        for begin, end in map(halved, lines_of_two_words(30)[40:72])
    ]
    (tmp_path / "documents.jsonl").write_text(
        "".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8"
    )
    task = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "lines.yaml").write_text(json.dumps(task), encoding="utf-8")
    http = f"base_url={both.server.url}/v1/completions,model={both.name},tokenizer={both.directory}"
    runs = {
        "local-completions": ("lm_eval", f"{http},tokenizer_backend=huggingface,num_concurrent=4"),
        "clocher": ("clocher_runtime.adapters.lm_eval_model", f"pretrained={both.directory}"),
    }
    answers = {}
    for model, (module, options) in runs.items():
        done = subprocess.run(
            [sys.executable, "-m", module, "--model", model, "--model_args", options]
            + ["--include_path", str(tmp_path), "--tasks", "lines", "--log_samples"]
            + ["--output_path", str(tmp_path / model)],
            capture_output=True,
            text=True,
            env=clean_environment(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "home")),
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        (samples,) = (tmp_path / model).rglob("samples_*.jsonl")
        rows = [json.loads(row) for row in samples.read_text(encoding="utf-8").splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        (results,) = (tmp_path / model).rglob("results_*.json")
        accuracy = json.loads(results.read_text(encoding="utf-8"))["results"]["lines"]["acc,none"]
        answers[model] = accuracy, [row["filtered_resps"] for row in rows]
    (accuracy, found), (right, expected) = answers.values()
    assert accuracy == right > 0.5 and len(found) == len(documents)
    for ours, theirs in zip(found, expected, strict=True):
        for (score, greedy), (wanted, is_greedy) in zip(ours, theirs, strict=True):
            assert abs(float(score) - float(wanted)) <= EXACT
            assert greedy == is_greedy
