"""llama.cpp's programs on a GGUF file: requantise it, its perplexity, its greedy ids."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "LLAMA_CPP_BIN"
"""Environment variable: directory of llama-quantize, llama-perplexity and llama-server."""
BIN = Path(os.environ.get(VARIABLE, ""))
MISSING = "" if os.environ.get(VARIABLE) else f"{VARIABLE} does not name llama.cpp's programs"
# Keys and values in fp32, as here, and no flash attention: only the products differ.
_EXACT = ("-t", "2", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-warmup")


def version() -> str:
    """Return the commit that the programs are of."""
    done = subprocess.run([BIN / "llama-server", "--version"], capture_output=True, text=True)
    found = re.search(r"commit (\w+)", done.stdout + done.stderr)
    assert found, (done.stdout + done.stderr)[-2000:]
    return found[1]


def quantized(source: Path, target: Path, kind: str) -> Path:
    """Write a file of a type that llama-quantize knows: "Q4_K_M", or "F32" to expand one."""
    command = [BIN / "llama-quantize", "--allow-requantize", source, target, kind, "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return target


def perplexity(model: Path, text: Path, window: int, count: int) -> float:
    """Return the perplexity of the second halves of the first windows of a text.

    The program loses what it prints last, so it gets one more window than is asked for. If it ends
    at once it may lose all, and is run again.
    """
    command = [BIN / "llama-perplexity", "-m", model, "-f", text, *_EXACT]
    command += ["-c", str(window), "-b", str(window), "--chunks", str(count + 1)]
    for _ in range(9):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        found = re.search(rf"\[{count}\]([0-9.]+),", done.stdout)
        if found or " error " in done.stderr:
            break
    assert found, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
    return float(found[1])


@contextmanager
def server(model: Path, context: int) -> Iterator[str]:
    """Run llama-server; give its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [BIN / "llama-server", "-m", model, "-c", str(context), "--port", str(port)]
    command += [*_EXACT, "--parallel", "1", "--no-webui"]
    with open(model.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _wait(address: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, "llama-server ended"
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise AssertionError("llama-server did not start in a minute")


def greedy(address: str, prompt: Sequence[int], count: int) -> list[int]:
    """Return the ids that a server continues a prompt with."""
    asked = {
        "prompt": list(prompt),
        "n_predict": count,
        "temperature": 0,
        "top_k": 1,
        "cache_prompt": False,
        "ignore_eos": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"{address}/completion",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens
