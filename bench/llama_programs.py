"""llama-perplexity beside a reference, and the answers of it and llama-server to tasks."""

import math
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import OK
from pathlib import Path
from subprocess import DEVNULL
from urllib.request import urlopen

import numpy as np

from bench.experiment import NotMeasured, answer_of, output_of
from clocher_runtime.quality.tasks import Asked

_START_S = 60
_SLOTS, _CONTEXT = 4, 2048
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
    return {"items": len(parts), "right": round(float(said[-1][1]) * len(parts) / 100)}


def completed(programs: Path, gguf: Path, items: Sequence[Asked], threads: int) -> list[str]:
    """Return greedy completions by llama-server, from `_SLOTS` sequences side by side."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [programs / "llama-server", "-m", gguf, "-t", threads, "--port", port]
    command += ["-np", _SLOTS, "-c", _SLOTS * _CONTEXT, "--no-webui"]
    server = subprocess.Popen(list(map(str, command)), stdout=DEVNULL, stderr=DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _START_S
        while not _answers(address):
            if server.poll() is not None or time.monotonic() > end:
                raise NotMeasured(f"llama-server does not answer: exit code {server.poll()}")
            time.sleep(0.1)
        with ThreadPoolExecutor(_SLOTS) as pool:
            return list(pool.map(partial(_complete, address), items))
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health") as answer:
            return bool(answer.status == OK)
    except OSError:
        return False


def _complete(address: str, item: Asked) -> str:
    asked = {"prompt": item.context, "n_predict": item.max_new, "stop": item.stop, "top_k": 1}
    try:
        return str(answer_of(f"{address}/completion", asked)["content"])
    except NotMeasured as error:
        raise NotMeasured(f"llama-server: {error}") from None


def _perplexity(programs: Path, gguf: Path, more: Sequence[str], threads: int) -> str:
    command = [programs / "llama-perplexity", "-m", gguf, "-t", threads, *more]
    return output_of(command)


def _spelled(text: str) -> bytes:
    data = text.encode()
    return _ints(len(data)) + data


def _ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()
