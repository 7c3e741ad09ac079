"""llama.cpp, measured through llama-bench or through llama-cpp-python.

Both are run as a command that prints llama-bench's JSON, a run per round. Started as a program,
this module is that command for llama-cpp-python:

    python -m bench.cases.llama_cpp -m FILE -t 2 -p 128
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.ops.experiment import NotMeasured

TEST = r"(?:(pp)([1-9]\d{0,5})|(tg)([1-9]\d{0,5})(?:@d([1-9]\d{0,5}))?)"
_TIMEOUT_S = 3600

OWN = (sys.executable, "-m", "bench.cases.llama_cpp")


class Test(NamedTuple):
    """Read ("pp") or generate ("tg") this many tokens, after `depth` that do not count."""

    kind: str
    tokens: int
    depth: int


def parsed(test: str) -> Test:
    """Parse a test's name, such as "pp512" or "tg24@d4000"."""
    found = re.fullmatch(TEST, test)
    assert found is not None, test
    return Test(found[1] or found[3], int(found[2] or found[4]), int(found[5] or 0))


@dataclass(slots=True)
class LlamaCpp:
    """A GGUF file run by llama.cpp; `command` is None for llama-cpp-python."""

    command: Sequence[str] | None
    gguf: Path
    threads: int
    about: dict[str, Any] = field(default_factory=dict)

    def speed(self, test: str) -> float:
        """Return tokens per second of a test; NotMeasured if llama.cpp cannot run it."""
        kind, tokens, depth = parsed(test)
        sizes = ["-p", "0", "-n", str(tokens)] if kind == "tg" else ["-p", str(tokens), "-n", "0"]
        sizes += ["-d", str(depth)] if depth else []
        line = [*(self.command or OWN), "-m", str(self.gguf), "-t", str(self.threads), *sizes]
        line += ["-r", "1", "-o", "json"]
        try:
            run = subprocess.run(line, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotMeasured(str(error)) from None
        if run.returncode:
            words = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
            raise NotMeasured(words[-1].removeprefix("Error: "))
        try:
            found = json.loads(run.stdout)[0]
            self.about = {key: found.get(key) for key in ("build_commit", "model_type")}
            return float(found["avg_ts"])
        except (ValueError, LookupError, TypeError):
            raise NotMeasured(f"{line[0]} printed no llama-bench JSON") from None


def _speed(model: Path, threads: int, prompt: int, generated: int, depth: int) -> tuple[float, str]:
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise NotMeasured(f"llama_cpp cannot be imported: {error}") from None
    import ctypes

    llama_cpp.llama_log_set(_silent(llama_cpp, ctypes), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    weights = llama_cpp.llama_model_load_from_file(
        str(model).encode(), llama_cpp.llama_model_default_params()
    )
    if not weights:
        raise NotMeasured(f"llama.cpp cannot load {model}")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = depth + prompt + generated + 1
    settings.n_threads = settings.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(weights, settings)
    vocab = llama_cpp.llama_model_get_vocab(weights)
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    ids = [(7919 * i + 1) % size for i in range(max(depth, prompt, generated))]

    def read(piece: list[int]) -> None:
        for at in range(0, len(piece), settings.n_batch):
            part = piece[at : at + settings.n_batch]
            tokens = (llama_cpp.llama_token * len(part))(*part)
            batch = llama_cpp.llama_batch_get_one(tokens, len(part))
            if llama_cpp.llama_decode(context, batch):
                raise NotMeasured("llama_decode failed")
            llama_cpp.llama_synchronize(context)

    def run() -> float:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        read(ids[:depth])
        start = time.perf_counter()
        for piece in [ids[:prompt]] if prompt else [[token] for token in ids[:generated]]:
            read(piece)
        return (prompt or generated) / (time.perf_counter() - start)

    run()
    return run(), f"llama-cpp-python {llama_cpp.__version__}"


_callbacks: list[Any] = []


def _silent(llama_cpp: Any, ctypes: Any) -> Any:
    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    _callbacks.append(callback)  # llama.cpp keeps the pointer
    return callback


Speed = Callable[[Path, int, int, int, int], tuple[float, str]]
"""Takes model, threads, prompt, generated, depth; returns tokens a second and a version."""


def bench_command(text: str | None, speed: Speed) -> click.Command:
    """Return a command with llama-bench's arguments and JSON that measures one test by `speed`."""

    @click.command(help=text)
    @click.option("-m", "model", type=click.Path(path_type=Path), required=True)
    @click.option("-t", "threads", type=click.IntRange(1), required=True)
    @click.option("-p", "prompt", type=click.IntRange(0), default=0)
    @click.option("-n", "generated", type=click.IntRange(0), default=0)
    @click.option("-d", "depth", type=click.IntRange(0), default=0)
    @click.option("-r", type=click.Choice(["1"]), default="1", expose_value=False)
    @click.option("-o", type=click.Choice(["json"]), default="json", expose_value=False)
    def main(model: Path, **test: int) -> None:
        """Measure one test and print it as llama-bench does."""
        try:
            found, version = speed(
                model, test["threads"], test["prompt"], test["generated"], test["depth"]
            )
        except NotMeasured as reason:
            raise click.ClickException(str(reason)) from None
        about = {"build_commit": version, "model_type": model.stem}
        click.echo(json.dumps([{"avg_ts": found, **about}]))

    return main


main = bench_command(__doc__, _speed)

if __name__ == "__main__":
    main()
