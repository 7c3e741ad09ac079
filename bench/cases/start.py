"""From the command to the first token: a process of its own each time.

    python -m bench start --model-dir DIR [--llama-bench PATH] [--cache warm] [--cache cold]
        [--threads N] [--rounds N] [--json FILE]

Seconds from the start of a process to its end; `clocher run --max-new 1` reads the model, packs it
and prints a token, llama-bench reads DIR/model.gguf and a prompt of one token without warming up.
"read" only reads the files of the model, into memory that is in use. They take turns. Before each
run of a cold cache the system is asked to forget the pages of the model's files. Kernels, and
Python's modules as installing does it, are compiled before the first round.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

from bench.ops.experiment import FILE, TEAM, NotMeasured, Row, experiment, ratio, seconds, turns
from clocher_kernels.errors import UsageError

_TIMEOUT_S = 600
_BLOCK = 8 << 20
_WEIGHTS = (".bin", ".safetensors")
_CACHES = ("warm", "cold")


def files_of(model_dir: Path) -> list[Path]:
    """Return the weight files of a model directory; UsageError if there are none."""
    found = sorted(path for path in model_dir.glob("*") if path.suffix in _WEIGHTS)
    if not found:
        raise UsageError(f"{model_dir}: no {' or '.join(_WEIGHTS)} file; give a model's directory")
    return found


def timed(work: Callable[[], object], files: Sequence[Path], cache: str) -> float:
    """Return the seconds of a run; drops the pages of cold files first."""
    for path in files if cache == "cold" else ():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return seconds(work)


def read(files: Sequence[Path]) -> None:
    """Read whole files into the same memory."""
    block = bytearray(_BLOCK)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def run(command: Sequence[str], modules: str | None = None) -> None:
    """Run a process with a Python cache of `modules`; NotMeasured if it cannot run or fails."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": modules} if modules else {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotMeasured(str(error)) from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotMeasured(f"{command[0]}: {words[-1]}")


@experiment("start", __doc__, title="start, {threads} threads", rounds=5)
@click.option("--model-dir", type=FILE, required=True)
@click.option("--llama-bench", help="Program, and arguments for it.")
@click.option("--cache", "caches", type=click.Choice(_CACHES), multiple=True, default=_CACHES)
@TEAM
def main(
    model_dir: Path, llama_bench: str | None, caches: Sequence[str], threads: int, rounds: int
) -> Iterator[Row]:
    """Yield a row for each state of the cache and each engine."""
    files, gguf = files_of(model_dir), model_dir / "model.gguf"
    ours = [sys.executable, "-m", "clocher_runtime.cli", "--model-dir", str(model_dir)]
    ours += ["--prompt-ids", "1", "--max-new", "1", "--speculate", "off", "--threads", str(threads)]
    with TemporaryDirectory() as modules:
        found: dict[str, tuple[Callable[[], object], list[Path]]] = {
            "clocher": (partial(run, ours, modules), files),
            "read": (partial(read, files), files),
        }
        if llama_bench:
            peer = [*shlex.split(llama_bench), "-m", str(gguf), "-t", str(threads)]
            peer += ["-p", "1", "-n", "0", "-r", "1", "--no-warmup"]
            found["llama.cpp"] = (partial(run, peer), [gguf])
        for cache in caches:
            runs = {name: partial(timed, *what, cache) for name, what in found.items()}
            samples = turns(runs, rounds)
            for name, taken in samples.items():
                over = ratio(taken, samples["read"])
                yield {
                    "op": "start",
                    "model": model_dir.name,
                    "engine": name,
                    "cache": cache,
                    "threads": threads,
                    "s": median(taken),
                    "samples": taken,
                    "bytes": sum(path.stat().st_size for path in found[name][1]),
                    "over_read": over.value,
                    "over_read_95": [over.low, over.high],
                }


if __name__ == "__main__":
    main()
