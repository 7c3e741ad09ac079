"""GuideLLM, a load generator with its own versions of everything, finds nothing wrong.

It is looked for in CLOCHER_GUIDELLM, the path of its program in an environment of its own, and
among the programs that the shell finds.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import clean_environment
from serving import Served, serving, settled
from weight_files import ROOT

PROGRAM = os.environ.get("CLOCHER_GUIDELLM") or shutil.which("guidellm")
EMBEDDED = ROOT / "clocher_runtime" / "assets" / "clocher-tiny-gptoss"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None,
        reason="guidellm is not found: pip install guidellm into an environment of its own and "
        "set CLOCHER_GUIDELLM to its program",
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--batch", 4) as running:
        yield running
        settled(running)


def benchmark(server: Served, directory: Path, profile: str, requests: int, *more: str) -> Any:
    """Run it; return what it reports of its one benchmark."""
    report = directory / "report.json"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    done = subprocess.run(
        [str(PROGRAM), "run", "--disable-console"]
        + ["--backend", ",".join([f"kind=openai_http,target={server.url}", *more])]
        + ["--profile", profile, "--constraint", f"kind=max_requests,count={requests}"]
        + ["--tokenizer", f"kind=hf_auto,model={EMBEDDED}", "--data", data]
        + ["--output", f"kind=json,path={report}"],
        capture_output=True,
        text=True,
        cwd=directory,
        env=clean_environment(HF_HUB_OFFLINE="1", HF_HOME=str(directory), PYTHONPATH=""),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    return found


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("form", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_every_request_succeeds(server: Served, tmp_path: Path, form: str, stream: str) -> None:
    requests = 24
    found = benchmark(
        server,
        tmp_path,
        "kind=concurrent,streams=6",
        requests,
        f"request_format={form}",
        f"stream={stream}",
    )
    counts = found["metrics"]["request_totals"]
    assert counts == {"successful": requests, "errored": 0, "incomplete": 0, "total": requests}
    for request in found["requests"]["successful"]:
        assert request["output_tokens"] == OUTPUT_TOKENS
        assert request["prompt_tokens"] >= PROMPT_TOKENS
        assert request["output"]
        if stream == "true":
            # Some tokens have no text of their own, and a byte of a character waits for the rest.
            assert request["iter_tokens_per_iteration"] == pytest.approx(1, abs=0.5)
            assert 0 < request["time_to_first_token_ms"] <= 1e3 * request["request_latency"]
    medians = {
        name: found["metrics"][name]["successful"]["median"]
        for name in ("time_to_first_token_ms", "inter_token_latency_ms", "output_tokens_per_second")
    }
    print(f"{form} stream={stream}: {counts['successful']} of {counts['total']}, {medians}")


def test_more_than_the_queue_takes_is_refused_and_nothing_else_fails(tmp_path: Path) -> None:
    with serving("--batch", 2, "--queue", 2) as small:
        found = benchmark(small, tmp_path, "kind=concurrent,streams=16", 200)
        counts = found["metrics"]["request_totals"]
        assert counts["successful"] > 0 and counts["errored"] > 0
        assert counts["successful"] + counts["errored"] == counts["total"]
        for request in found["requests"]["errored"]:
            assert "429" in json.dumps(request["info"]), request["info"]
        settled(small)
