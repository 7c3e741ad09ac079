"""The server on Ray Serve: two real replicas."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PORT = 18437


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two replicas of the embedded model, of one core each."""
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray import serve

    from clocher_runtime.ray.serving import app

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    try:
        serve.start(http_options={"port": PORT})
        args = {"replicas": "2", "cpus": "1", "context": "512", "drain": "20", "batch": "2"}
        yield serve.run(app(args), name="clocher")
    finally:
        serve.shutdown()
        ray.shutdown()


def post(prompt: str, max_tokens: int = 12, **more: object) -> Any:
    import httpx

    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
    return httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=60)


def engines() -> dict[int, int]:
    """Return the replicas that answer, with the process of the engine of each."""
    import httpx

    found = {}
    end = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < end:
        answer = httpx.get(f"http://127.0.0.1:{PORT}/health", timeout=30)
        if answer.status_code == 200:
            found[answer.json()["pid"]] = answer.json()["engine_pid"]
    return found


@pytest.mark.slow
def test_texts_are_those_of_the_model_alone(handle: Any) -> None:
    from clocher_runtime.api import load

    prompts = [f"def f{n}(" for n in range(6)]
    with load(threads=1, context=512) as model:
        want = [model.generate(prompt, max_new=12, temperature=0) for prompt in prompts]
    assert [post(prompt).json()["choices"][0]["text"] for prompt in prompts] == want


@pytest.mark.slow
def test_a_session_stays_with_its_replica(handle: Any) -> None:
    import httpx

    text = "import os\nimport sys\n" * 25
    cached = []
    for n in range(6):
        answer = httpx.post(
            f"http://127.0.0.1:{PORT}/v1/completions",
            json={"prompt": f"{text}x{n} =", "max_tokens": 2},
            headers={"x-session-id": "mine"},
            timeout=60,
        )
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and min(cached[1:]) >= 64, cached


@pytest.mark.slow
def test_an_answer_comes_in_pieces(handle: Any) -> None:
    import httpx

    body = {"prompt": "def f(", "max_tokens": 24, "stream": True}
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 4
    assert post("x", max_tokens=-1).status_code == 400


@pytest.mark.slow
def test_a_replica_that_is_killed_is_replaced(handle: Any) -> None:
    before = engines()
    assert len(before) == 2
    victim, engine = next(iter(before.items()))
    os.kill(victim, signal.SIGKILL)
    end = time.monotonic() + 120
    while time.monotonic() < end and (victim in (now := engines()) or len(now) < 2):
        time.sleep(0.5)
    assert len(now) == 2 and victim not in now
    assert not Path(f"/proc/{engine}/cmdline").exists(), "its engine lives on"
    assert post("def f(").status_code == 200


@pytest.mark.slow
def test_what_runs_comes_to_its_end_when_replicas_go(handle: Any) -> None:
    """Runs last: it ends the application."""
    from ray import serve

    pids = [pid for pair in engines().items() for pid in pair]
    answers: list[Any] = []
    asked = [
        threading.Thread(
            target=lambda n=n: answers.append(post(f"class A{n}:", max_tokens=400, ignore_eos=True))
        )
        for n in range(2)
    ]
    for thread in asked:
        thread.start()
    time.sleep(0.3)
    serve.delete("clocher")
    for thread in asked:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [400, 400]
    end = time.monotonic() + 30
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists()]
