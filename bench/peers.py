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
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import PATH
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.synthetic import GGUF_NAME
from clocher_runtime.engine.load import Model
from clocher_runtime.quality.speed import Case, Runner, session_for
from cpu_fallback.team.bandwidth import Reader

OURS = "clocher"
TEST = r"pp([1-9]\d{0,5})|tg([1-9]\d{0,5})(?:@d([1-9]\d{0,5}))?"
OPENVINO = (sys.executable, "-m", "bench.openvino")


@dataclass(slots=True)
class LlamaBench:
    """A GGUF file run by a command with llama-bench's arguments."""

    command: Sequence[str]
    gguf: Path
    threads: int
    about: dict[str, Any] = field(default_factory=dict)

    def speed(self, case: Case) -> float:
        """Return tokens per second of a case; NotMeasured if it cannot be run."""
        line = [*self.command, "-m", self.gguf, "-t", self.threads, "-p", case.prompt, "-n"]
        line += [case.tokens, *(["-d", case.depth] if case.depth else []), "-r", 1, "-o", "json"]
        said = output_of(line)
        try:
            # ik_llama.cpp warns on standard output, in the middle of the array.
            lines = (part for part in said.splitlines() if not part.startswith("WARNING:"))
            found = json.loads("\n".join(lines))[0]
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
    missing, runs = dict[str, str](), dict[tuple[str, str], Callable[[], float]]()
    for name, peer in peers.items():
        try:
            peer.speed(Case(0, 1))
            runs |= {(name, test): partial(peer.speed, case) for test, case in cases.items()}
        except NotMeasured as reason:
            missing[name] = str(reason)
    config = EngineConfig(threads=threads, speculate="off")
    with closing(session_for(model, list(cases.values()), config)) as session:
        runner = Runner(session)
        runs |= {(OURS, test): partial(_speed, runner, case) for test, case in cases.items()}
        found = turns({**runs, ("read", ""): partial(reader.gbps, threads)}, rounds)
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


def _case(text: str) -> tuple[str, Case]:
    if not (match := re.fullmatch(TEST, text)):
        raise click.BadParameter(
            f"{text!r}; expected pp or tg and a number, such as pp512, or tg24@d4000"
        )
    return text, Case(*map(int, match.groups("0")))


@experiment(
    "peers",
    __doc__,
    option("--model-dir", PATH, required=True),
    option("--gguf", click.Path(path_type=Path, exists=True), multiple=True),
    option(
        "--llama-bench",
        str,
        "program, and arguments for it: 'llama-bench -fa 1', or 'NAME=...' for a fork",
        name="programs",
        multiple=True,
    ),
    option("--test", _case, name="cases", metavar="TEST", multiple=True, default=("pp128", "tg32")),
    TEAM,
    MIB,
    title="{threads} threads",
    rounds=7,
)
def main(asked: Any) -> Iterator[Row]:
    """Yield the rows of a model."""
    threads, reader = asked.threads, Reader("2m", asked.mib << 20)
    peers = _peers(asked.model_dir, asked.gguf, asked.programs, threads)
    model, cases = opened(asked.model_dir), dict(asked.cases)
    yield from compare(model, peers, cases, threads, reader, asked.rounds)
