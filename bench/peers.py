r"""A model by Clocher and by other engines: same weights, same threads, in turns.

\b
    python -m bench peers --model-dir DIR             llama.cpp runs DIR/model.gguf, or a file
        [--llama-bench PATH] [--gguf FILE] [--test pp128 --test tg64 --test tg24@d4000]
    ... --llama-bench 'PATH -fa 1' --llama-bench 'ik_llama.cpp=PATH2 -rtr 1'      several of them

DIR comes from `scripts/make_synthetic.py --gguf`. Without --llama-bench, that on the PATH is run,
and OpenVINO GenAI, where its wheel is installed, on the same file. --gguf adds files that
llama-quantize made of the same weights. Tests are named as llama-bench names them,
tg24@d4000 after 4000 tokens; Clocher's tg includes sampling, llama-bench's does not. A ratio is
Clocher's speed over the peer's. A peer that is missing is shown with the reason, never with a
number. Products of matrices beside torch: python -m bench linear.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.experiment import (
    MIB,
    TEAM,
    NotMeasured,
    Row,
    experiment,
    limit_note,
    of_read,
    opened,
    output_of,
    over,
    turns,
)
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.synthetic import GGUF_NAME
from clocher_runtime.engine.load import Model
from clocher_runtime.quality.speed import Case, Runner, session_for
from cpu_fallback.team.bandwidth import Reader

OURS = "clocher"
TEST = r"(?:(pp)([1-9]\d{0,5})|(tg)([1-9]\d{0,5})(?:@d([1-9]\d{0,5}))?)"
OPENVINO = (sys.executable, "-m", "bench.openvino")
_MODEL = click.Path(path_type=Path, exists=True)


def parsed(test: str) -> tuple[str, int, int]:
    """Return "pp" or "tg", tokens, and depth of a test's name, such as "pp512", "tg24@d4000"."""
    found = re.fullmatch(TEST, test)
    assert found is not None, test
    return found[1] or found[3], int(found[2] or found[4]), int(found[5] or 0)


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
        said = output_of(line)
        try:
            found = json.loads(said)[0]
            self.about = {key: found.get(key) for key in ("build_commit", "model_type")}
            return float(found["avg_ts"])
        except (ValueError, LookupError, TypeError):
            raise NotMeasured(f"{line[0]} printed no llama-bench JSON") from None


def compare(
    model: Model,
    peers: dict[str, LlamaBench],
    cases: dict[str, Case],
    threads: int,
    reader: Reader,
    rounds: int,
) -> Iterator[Row]:
    """Yield a row for each test and engine, beside the read bandwidth of the same rounds."""
    missing = {}
    for name, peer in peers.items():
        try:
            peer.speed("tg1")
        except NotMeasured as reason:
            missing[name] = str(reason)
    config = EngineConfig(threads=threads, speculate="off")
    with closing(session_for(model, list(cases.values()), config)) as session:
        runner = Runner(session)
        runs: dict[tuple[str, str], Callable[[], float]] = {}
        for test, case in cases.items():
            runs[OURS, test] = partial(_speed, runner, case)
            present = {name: peer for name, peer in peers.items() if name not in missing}
            runs |= {(name, test): partial(p.speed, test) for name, p in present.items()}
        runs["read", ""] = partial(reader.gbps, threads)
        found = turns(runs, rounds)
        nbytes = {test: runner.bytes_per_token(case) for test, case in cases.items()}
    for test, name in product(cases, (OURS, *peers)):
        row: Row = {
            "op": "model",
            "engine": name,
            "model": model.checkpoint.path.name,
            "format": model.precision if name == OURS else peers[name].gguf.name,
            "test": test,
            "threads": threads,
            "isa": session.isa if name == OURS else None,
        }
        if name in missing:
            yield {**row, "note": f"not measured: {missing[name]}"}
            continue
        speeds = found[name, test]
        row |= {"tok_s": median(speeds), "samples": speeds, "note": ""}
        if name != OURS:
            row["note"] = " ".join(str(value) for value in peers[name].about.values() if value)
            row |= over(found[OURS, test], speeds)
        elif each := nbytes[test]:
            row |= of_read([s * each / 1e9 for s in speeds], found["read", ""])
            row["note"] = limit_note(row["pct_of_limit"])
        yield row


def _speed(runner: Runner, case: Case) -> float:
    return (case.prompt + case.tokens) * 1e9 / runner.run(case)


def _peers(
    directory: Path, more: Sequence[Path], programs: Sequence[str], threads: int
) -> dict[str, LlamaBench]:
    own = directory if directory.is_file() else directory / GGUF_NAME
    files = [path for path in (own, *more) if path.is_file()]
    if not files:
        raise click.UsageError(
            f"no {GGUF_NAME} in {directory}; make it with scripts/make_synthetic.py --gguf, "
            "or name one with --gguf"
        )
    names = [path.name for path in files]
    found = {}
    for (label, command), path in product(map(_named, programs) if programs else _own(), files):
        said = path.name if names.count(path.name) == 1 else str(path)
        found[" ".join([*label, said])] = LlamaBench(command, path, threads)
    return found


def _named(program: str) -> tuple[list[str], list[str]]:
    """Return the label of a "NAME=PROGRAM ARGUMENTS", and its command."""
    named = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", program)
    assert named is not None
    command = shlex.split(named[2])
    return [named[1] or "llama.cpp", *command[1:]], command


def _own() -> Iterator[tuple[list[str], list[str]]]:
    """Yield llama-bench, and OpenVINO GenAI where it is installed."""
    yield ["llama.cpp"], ["llama-bench"]
    with suppress(metadata.PackageNotFoundError):
        metadata.version("openvino-genai")
        yield ["openvino"], [*OPENVINO]


def _cases(
    context: click.Context, option: click.Parameter, tests: tuple[str, ...]
) -> dict[str, Case]:
    if bad := [test for test in tests if not re.fullmatch(TEST, test)]:
        raise click.BadParameter(
            f"{bad[0]!r}; expected pp or tg and a number, such as pp512, or tg24@d4000"
        )
    asked = {test: parsed(test) for test in tests}
    return {
        test: Case(tokens, 0) if kind == "pp" else Case(0, tokens, depth)
        for test, (kind, tokens, depth) in asked.items()
    }


@experiment("peers", __doc__, title="{threads} threads", rounds=7)
@click.option("--model-dir", type=_MODEL, required=True)
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option(
    "--llama-bench",
    "programs",
    multiple=True,
    help="Program, and arguments for it: 'llama-bench -fa 1', or 'NAME=...' for a fork.",
)
@click.option("--test", "cases", multiple=True, default=("pp128", "tg32"), callback=_cases)
@TEAM
@MIB
def main(
    model_dir: Path,
    gguf: tuple[Path, ...],
    programs: tuple[str, ...],
    cases: dict[str, Case],
    threads: int,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield the rows of a model."""
    peers = _peers(model_dir, gguf, programs, threads)
    yield from compare(opened(model_dir), peers, cases, threads, Reader("2m", mib << 20), rounds)


if __name__ == "__main__":
    main()
