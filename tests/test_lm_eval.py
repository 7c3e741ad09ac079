"""The adapter of lm-evaluation-harness gives the numbers that transformers give."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")

from lm_eval.api.instance import Instance

from clocher_kernels.errors import UsageError
from clocher_runtime.adapters.lm_eval_model import ClocherLM
from clocher_runtime.subcommands.bench import bench

DATA = Path(__file__).parent / "data"
LLAMA = DATA / "clocher-tiny-llama"
TEXT = (DATA / "valid.txt").read_text(encoding="utf-8")
pytestmark = pytest.mark.slow


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def ours(batch_size: int | str = 3, **more: Any) -> ClocherLM:
    return ClocherLM(
        str(LLAMA), batch_size=batch_size, context=256, kv_dtype="f32", act_prec="fp32", **more
    )


def test_scores_and_texts_are_those_of_transformers() -> None:
    from lm_eval.models.huggingface import HFLM

    long = "import os\nimport sys\n\n\ndef main():\n    pass\n" * 30
    texts = [("def f(x):", " return x"), ("import ", "os"), ("", "class A"), ("for i in", " range")]
    texts += [("for i in", " zip"), (long, "import os"), ("return  ", "self")]
    rolling = [(long,), ("x = 1\n",)]
    until = {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False}
    asked = [("def read(path):\n", until), ("class ", {**until, "until": ["("]}), (long, until)]
    theirs = HFLM(pretrained=str(LLAMA), dtype="float32", device="cpu", max_length=256)
    clocher = ours()
    expected = theirs.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)
    found = clocher.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)
    for (score, greedy), (right, is_greedy) in zip(found, expected, strict=True):
        assert score == pytest.approx(right, abs=1e-4)
        assert greedy == is_greedy
    assert clocher.generate_until(
        requests("generate_until", *asked), True
    ) == theirs.generate_until(requests("generate_until", *asked), True)
    whole = clocher.loglikelihood_rolling(requests("loglikelihood_rolling", *rolling), True)
    right = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *rolling), True)
    assert whole == pytest.approx(right, rel=1e-5)
    clocher.model.close()


def test_settings_of_the_harness_are_obeyed_or_refused() -> None:
    with ours("auto", max_batch_size=2).model as model:
        assert model.session.config.batch == 2
    for given, more in ((0, {}), ("some", {}), (1, {"batch": 4})):
        with pytest.raises(UsageError, match="batch_size"):
            ours(given, **more)


def test_a_task_file_has_the_results_of_the_harness(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    lines = [line.strip() for line in TEXT.splitlines() if len(line.strip()) > 30][40:72]
    questions = [
        {"context": line[:12], "choices": [line[12:], line[:11:-1], line[20:]], "answer": 0}
        for line in lines
    ]
    texts = [{"text": TEXT[:1500]}, {"text": TEXT[4000:4700]}]
    metrics = {"questions": ["acc", "acc_norm"]}
    metrics["texts"] = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    kinds = {
        "questions": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        },
    }
    for name, documents in (("questions", questions), ("texts", texts)):
        data = "".join(json.dumps(each) + "\n" for each in documents)
        (tmp_path / f"{name}.jsonl").write_text(data, encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}},
            "test_split": "test",
            "metric_list": [{"metric": each} for each in metrics[name]],
            **kinds[name],
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    clocher = ours()
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    answer = simple_evaluate(clocher, tasks=list(metrics), task_manager=tasks, bootstrap_iters=0)
    clocher.model.close()
    for name, wanted in metrics.items():
        words = ["quality", str(LLAMA), "--task", str(tmp_path / f"{name}.jsonl")]
        assert bench.run([*words, "--context", "256", "--act-prec", "fp32"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])[name]
        for metric in wanted:
            expected = answer["results"][name][f"{metric},none"]
            assert found[metric] == pytest.approx(expected, rel=1e-9), metric
    assert answer["results"]["questions"]["acc,none"] > 0.5
