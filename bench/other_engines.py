"""llama.cpp and OpenVINO GenAI, as commands that print llama-bench's JSON, a run per round.

    python -m bench.other_engines llama_cpp -m FILE.gguf -t 2 -p 128
    python -m bench.other_engines openvino_genai -m FILE.gguf -t 2 -n 32

OpenVINO's pipeline reads GGUF files of Llama and Qwen with Q4_0, Q8_0 and F16 weights.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from bench.experiment import NotMeasured

TEST = r"(?:(pp)([1-9]\d{0,5})|(tg)([1-9]\d{0,5})(?:@d([1-9]\d{0,5}))?)"
_TIMEOUT_S = 3600

OWN = (sys.executable, "-m", "bench.other_engines")


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
class LlamaBench:
    """A GGUF file run by a command with llama-bench's arguments."""

    command: Sequence[str]
    gguf: Path
    threads: int
    about: dict[str, Any] = field(default_factory=dict)

    def speed(self, test: str) -> float:
        """Return tokens per second of a test; NotMeasured if it cannot be run."""
        kind, tokens, depth = parsed(test)
        sizes = ["-p", "0", "-n", str(tokens)] if kind == "tg" else ["-p", str(tokens), "-n", "0"]
        sizes += ["-d", str(depth)] if depth else []
        line = [*self.command, "-m", str(self.gguf), "-t", str(self.threads), *sizes]
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


WINDOW = 512
"""Tokens of a window of llama-perplexity."""
_SAID = {
    "ppl": r"Mean PPL\(Q\) +: +(\S+)",
    "kld": r"Mean +KLD: +(\S+)",
    "kld_error": r"Mean +KLD: +\S+ ± +(\S+)",
    "same": r"Same top p: +(\S+)",
}


def divergence(
    programs: Path, gguf: Path, base: Path, tokens: int, threads: int
) -> dict[str, float]:
    """Return the sums over `tokens` that llama-perplexity prints of a file beside a base."""
    more = ["--kl-divergence-base", str(base), "--kl-divergence", "-c", f"{WINDOW}"]
    text = _perplexity(programs, gguf, [*more, "-b", f"{WINDOW}"], threads)
    found = {name: re.search(shown, text) for name, shown in _SAID.items()}
    said = {name: float(match[1]) for name, match in found.items() if match}
    if said.keys() != _SAID.keys():
        raise NotMeasured("llama-perplexity printed no divergence")
    return {
        "tokens": tokens,
        "kld": tokens * said["kld"],
        "kld2": tokens * (said["kld_error"] ** 2 * (tokens - 1) + said["kld"] ** 2),
        "same": tokens * said["same"] / 100,
        "nll": tokens * math.log(said["ppl"]),
    }


def answered(
    programs: Path, gguf: Path, questions: Sequence[tuple[str, Sequence[str], int]], threads: int
) -> dict[str, float]:
    """Return how many questions (context, choices, index) llama-perplexity answers.

    It takes the mean over a choice's tokens, so choices should have one each; a space is before it.
    """
    parts = []
    for context, choices, answer in questions:
        labels = [number == answer for number in range(len(choices))]
        texts = b"".join(map(_spelled, (context, *choices)))
        at = len(_spelled(context))
        spelled = texts[:at] + _ints(len(choices)) + texts[at:]
        parts.append(spelled + _ints(*labels, 0))
    ends = np.cumsum([4 + 4 * len(parts), *map(len, parts)]).tolist()
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(_ints(len(parts), *ends[:-1]) + b"".join(parts))
        file.flush()
        more = ["--multiple-choice", "-bf", file.name, "-c", f"{WINDOW}", "-b", f"{WINDOW}"]
        said = re.findall(r"^(\d+)\t([\d.]+)$", _perplexity(programs, gguf, more, threads), re.M)
    if len(said) != len(parts):
        raise NotMeasured(f"llama-perplexity answered {len(said)} of {len(parts)} questions")
    return {"questions": len(parts), "right": round(float(said[-1][1]) * len(parts) / 100)}


def _perplexity(programs: Path, gguf: Path, more: Sequence[str], threads: int) -> str:
    command = [str(programs / "llama-perplexity"), "-m", str(gguf), "-t", f"{threads}", *more]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None
    if run.returncode:
        words = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
        raise NotMeasured(words[-1])
    return run.stdout


def _spelled(text: str) -> bytes:
    data = text.encode()
    return _ints(len(data)) + data


def _ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def _llama_cpp(
    model: Path, threads: int, prompt: int, generated: int, depth: int
) -> tuple[float, str]:
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


def _openvino_genai(
    model: Path, threads: int, prompt: int, generated: int, depth: int
) -> tuple[float, str]:
    try:
        import openvino_genai as genai
        from openvino import Tensor
    except (ImportError, OSError) as error:
        raise NotMeasured(f"openvino_genai cannot be imported: {error}") from None
    schedule = genai.SchedulerConfig()
    schedule.enable_prefix_caching = False
    schedule.max_num_batched_tokens = max(prompt, depth, 256)
    try:
        pipeline = genai.LLMPipeline(
            str(model), "CPU", scheduler_config=schedule, INFERENCE_NUM_THREADS=threads
        )
    except (RuntimeError, IndexError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise NotMeasured(f"OpenVINO GenAI cannot load {model.name}: {reason}") from None
    settings = genai.GenerationConfig()
    settings.do_sample, settings.ignore_eos = False, True
    settings.max_new_tokens = settings.min_new_tokens = 1 if prompt else generated + 1
    length = prompt or max(depth, 1)
    # Small ids exist in every vocabulary.
    ids = (np.arange(length, dtype=np.int64) * 31 + 1) % 200
    tokens = genai.TokenizedInputs(Tensor(ids[None]), Tensor(np.ones((1, length), np.int64)))

    def run() -> float:
        metrics = pipeline.generate(tokens, settings).perf_metrics
        if prompt:
            return float(prompt / (metrics.get_ttft().mean / 1e3))
        return float(1e3 / metrics.get_tpot().mean)

    run()
    return run(), f"OpenVINO GenAI {genai.__version__}"


ENGINES: Mapping[str, Callable[[Path, int, int, int, int], tuple[float, str]]] = {
    "llama_cpp": _llama_cpp,
    "openvino_genai": _openvino_genai,
}
"""Take model, threads, prompt, generated, depth; return tokens a second and a version."""


@click.command(help=__doc__)
@click.argument("engine", type=click.Choice(list(ENGINES)))
@click.option("-m", "model", type=click.Path(path_type=Path), required=True)
@click.option("-t", "threads", type=click.IntRange(1), required=True)
@click.option("-p", "prompt", type=click.IntRange(0), default=0)
@click.option("-n", "generated", type=click.IntRange(0), default=0)
@click.option("-d", "depth", type=click.IntRange(0), default=0)
@click.option("-r", type=click.Choice(["1"]), default="1", expose_value=False)
@click.option("-o", type=click.Choice(["json"]), default="json", expose_value=False)
def main(engine: str, model: Path, threads: int, prompt: int, generated: int, depth: int) -> None:
    """Measure one test and print it as llama-bench does."""
    try:
        found, version = ENGINES[engine](model, threads, prompt, generated, depth)
    except NotMeasured as reason:
        raise click.ClickException(str(reason)) from None
    about = {"build_commit": version, "model_type": model.stem}
    click.echo(json.dumps([{"avg_ts": found, **about}]))


if __name__ == "__main__":
    main()
