"""The adapter of lm-evaluation-harness gives the numbers that transformers give."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")

from lm_eval.api.instance import Instance

from clocher_runtime.adapters.lm_eval_model import ClocherLM

LLAMA = Path(__file__).parent / "data" / "clocher-tiny-llama"
pytestmark = pytest.mark.slow


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


def test_scores_and_texts_are_those_of_transformers() -> None:
    from lm_eval.models.huggingface import HFLM

    texts = [("def f(x):", " return x"), ("import ", "os"), ("", "class A"), ("for i in", " range")]
    rolling = [("import os\nimport sys\n\n\ndef main():\n    pass\n" * 30,)]
    until = [("def read(path):\n", {"until": ["\n\n"], "max_gen_toks": 20, "do_sample": False})]
    theirs = HFLM(pretrained=str(LLAMA), dtype="float32", device="cpu", max_length=256)
    ours = ClocherLM(str(LLAMA), batch=2, context=256, kv_dtype="f32", act_prec="fp32")
    expected = theirs.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)
    found = ours.loglikelihood(requests("loglikelihood", *texts), disable_tqdm=True)
    for (score, greedy), (right, is_greedy) in zip(found, expected, strict=True):
        assert score == pytest.approx(right, abs=1e-3)
        assert greedy == is_greedy
    assert ours.generate_until(requests("generate_until", *until), True) == theirs.generate_until(
        requests("generate_until", *until), True
    )
    (whole,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", *rolling), True)
    (right,) = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *rolling), True)
    assert whole == pytest.approx(right, rel=0.01)
