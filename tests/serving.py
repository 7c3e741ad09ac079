"""A server in a process of its own, and what tests ask it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from commands import clean_environment
from weight_files import ROOT

T = TypeVar("T")


class Served:
    """A running `clocher-serve`.

    Attributes:
        url: where it listens.
        facts: the line that it wrote when it was ready.
        log: what it has written to standard error so far.
    """

    def __init__(
        self,
        *flags: object,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "clocher_runtime.serve.command"),
    ) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                *program,
                "--port",
                "0",
                *map(str, flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**(env or {})),
        )
        self.log: list[str] = []
        threading.Thread(target=self._read_log, daemon=True).start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}: {''.join(self.log)}"
        self.facts: dict[str, Any] = json.loads(line)
        self.url: str = self.facts["url"]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def ask(self, path: str, /, **body: Any) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(path, json=body)

    def events(self, path: str, /, **body: Any) -> list[Any]:
        """Return the events of a streamed answer; the last one is "[DONE]"."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return [
                line.removeprefix("data: ") if "[DONE]" in line else json.loads(line[6:])
                for line in response.iter_lines()
                if line.startswith("data: ")
            ]

    def health(self) -> dict[str, Any]:
        """Return what /health says."""
        found: dict[str, Any] = self.client.get("/health").json()
        return found

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = self.client.get("/metrics").text.splitlines()
        samples = [line for line in lines if line.startswith(f"clocher:{name}{{")]
        assert samples, name
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(60)


@contextmanager
def serving(*flags: object, **options: Any) -> Iterator[Served]:
    """Run a server while the context is open."""
    server = Served(*flags, **options)
    try:
        yield server
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def settled(server: Served) -> None:
    """Wait until nothing runs; no page may be in use then."""
    deadline = time.monotonic() + 10
    while server.metric("kv_cache_pages_used") or server.health()["sequences"]:
        assert time.monotonic() < deadline, "pages leak"
        time.sleep(0.02)


def that_ends(ask: Callable[[int], T | None]) -> T:
    """Return the first answer that came to its end.

    Before it follows a structure, a harmony model may think, and a tiny one seldom stops. Which
    seeds do differs with the instruction set.

    Args:
        ask: asks with a seed; returns None, or raises openai's error, for an answer that was cut.
    """
    for seed in range(40):
        with suppress(openai.LengthFinishReasonError):
            if (answer := ask(seed)) is not None:
                return answer
    raise AssertionError("no answer came to its end")


def example_of(page: str, first: str, server: Served) -> str:
    """Return a block of Python of a page by its first line, for a server and its model."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python\n({re.escape(first)}\n.*?)^```$", text, re.M | re.S)
    block = block.replace("http://127.0.0.1:8000", server.url)
    return str(block.replace("clocher-tiny-gptoss", server.facts["model"]))


def model_with_template(directory: Path, source: Path, template: str) -> Path:
    """Return a copy of a model that has another chat template."""
    directory.mkdir()
    for file in source.iterdir():
        if file.name != "tokenizer_config.json":
            shutil.copyfile(file, directory / file.name)
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "chat_template": template})
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return directory


def without_harmony(directory: Path) -> None:
    """Rename a mark of harmony in the tokenizer of a model, or its answers would be harmony's."""
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    for added in tokenizer["added_tokens"]:
        added["content"] = added["content"].replace("channel", "canal")
    vocabulary = tokenizer["model"]["vocab"]
    if "<|channel|>" in vocabulary:
        vocabulary["<|canal|>"] = vocabulary.pop("<|channel|>")
    file.unlink()
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
