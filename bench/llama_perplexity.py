"""llama-perplexity: how far a file's tokens are from a reference, and questions that it answers."""

import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.experiment import NotMeasured

_TIMEOUT_S = 3600
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
