"""The server on Ray Serve: which replica gets a request, and two real replicas."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clocher_runtime.ray.prefix import PREFIX_CHARS, prefix_key

PORT = 18437


def key(**body: object) -> str | None:
    return prefix_key(json.dumps(body).encode())


def said(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_a_conversation_keeps_its_key() -> None:
    first = key(messages=said("Be kind.", "Hello"))
    assert first is not None
    assert first == key(messages=said("Be kind.", "Hello", "Hi!", "And now?"), temperature=1)
    assert first != key(messages=said("Be kind.", "Goodbye"))
    assert first != key(messages=said("Be kind.", "Hello"), cache_salt="mine")


def test_what_follows_the_first_pages_does_not_matter() -> None:
    begins = "x" * PREFIX_CHARS
    assert key(prompt=begins) == key(prompt=begins + "y") != key(prompt="y" + begins)
    ids = list(range(PREFIX_CHARS // 4))
    assert key(prompt=ids) == key(prompt=[*ids, 1]) != key(prompt=[1, *ids])
    assert key(prompt=["a", "b"]) == key(prompt=["a", "c"]) == key(prompt="a")
    assert key(input="a", instructions="b") != key(input="a")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"{}", b'{"prompt": ""}', b"\xff", b"[" * 100_000, b'{"messages": []}'],
)
def test_a_body_that_asks_nothing_has_no_key(body: bytes) -> None:
    assert prefix_key(body) is None


@pytest.mark.parametrize("body", [b'{"messages": {"a": [1]}}', b'{"prompt": {}, "messages": 4}'])
def test_a_body_that_is_wrong_is_no_error_here(body: bytes) -> None:
    prefix_key(body)


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
def test_what_begins_alike_goes_to_one_replica(handle: Any) -> None:
    text = "import os\nimport sys\n" * 25
    cached = []
    for n in range(6):
        usage = post(f"{text}x{n} =", 2).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
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
