r"""Clocher beside llama.cpp, OpenVINO GenAI, ONNX Runtime and torch: same weights, same threads.

\b
    python -m bench.peers                             products of matrices: torch, ONNX Runtime
    python -m bench.peers --model-dir DIR             a model: llama.cpp runs DIR/model.gguf
        [--llama-bench PATH] [--gguf FILE] [--test pp128 --test tg64 --test tg24@d4000]
    ... --llama-bench 'PATH -fa 1' --llama-bench 'ik_llama.cpp=PATH2 -rtr 1'      several of them

DIR comes from `scripts/make_synthetic.py --gguf`. Without --llama-bench, llama.cpp is run through
llama-cpp-python, and OpenVINO GenAI, where its wheel is installed, on the same file. --gguf adds
files that llama-quantize made of the same weights. All are run in turns. Tests are named as
llama-bench names them, tg24@d4000 behind 4000 tokens; Clocher's tg includes sampling, llama-bench's
does not. A ratio is Clocher's speed over the peer's. A peer that is missing is shown with the
reason, never with a number.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from statistics import median

import click

from bench.bandwidth import MIB, PAGES_READ
from bench.decode import Runner
from bench.llama_cpp import TEST, LlamaCpp, parsed
from bench.measure import NotMeasured, limit_note, ratio
from bench.ops.experiment import SHAPES, TEAM, Row, experiment, of_read, opened, turns
from bench.ops.products import ENGINES, Engine, Problem, exact_product
from clocher_runtime.convert.synthetic import GGUF_NAME
from clocher_runtime.engine.load import Model
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

OURS = next(iter(ENGINES))
_FORMATS = ("int4_sym_g32_f16", "int4_sym_g128_f16", "int8_row_f32", "bf16", "ternary", "mxfp4")
_SHAPES = ("14336x4096", "2880x4096", "6912x2560")
_TESTS = ("pp128", "tg32")
_DIRECTORY = click.Path(path_type=Path, exists=True, file_okay=False)

_AT_LEAST_S = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants share: threads, rounds, and the buffer that the limit is read from."""

    threads: int
    rounds: int
    reader: Reader

    def turns(self, runs: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        """Run the contestants in turn, and what reads the limit among them."""
        return turns({**runs, "read": partial(self.reader.gbps, self.threads)}, self.rounds)


def compare_products(problem: Problem, setting: Setting) -> Iterator[Row]:
    """Yield a row for each engine that could multiply, or the reason why not."""
    weights = problem.weights()
    exact = exact_product(problem, weights)
    engines: dict[str, Engine] = {}
    correct, missing = {}, {}
    with ExitStack() as stack:
        for name, build in ENGINES.items():
            try:
                engine = stack.enter_context(closing(build(problem, weights, setting.threads)))
                correct[name] = engine.correct(exact)
                engines[name] = engine
            except NotMeasured as reason:
                missing[name] = str(reason)
        found = setting.turns(
            {n: partial(e.gbps, problem.nbytes, _AT_LEAST_S) for n, e in engines.items()}
        )
    for name in ENGINES:
        row: Row = {
            "op": "linear",
            "engine": name,
            "format": problem.format,
            "N": problem.n,
            "K": problem.k,
            "M": problem.m,
            "copies": problem.copies,
            "threads": setting.threads,
            "isa": CURRENT.name if name == OURS else None,
            "read_gbps": median(found["read"]),
        }
        if name in missing:
            yield {**row, "note": f"not measured: {missing[name]}"}
            continue
        row |= of_read(found[name], found["read"])
        row |= {"correct": correct[name], "samples": found[name]}
        notes = engines[name].note, limit_note(row["pct_of_limit"])
        row["note"] = "; ".join(filter(None, notes))
        yield {**row, **_over(found[OURS], found[name])}


def compare_models(
    model: Model, peers: dict[str, LlamaCpp], tests: Sequence[str], setting: Setting
) -> Iterator[Row]:
    """Yield a row for each contestant and test."""
    asked = {test: parsed(test) for test in tests}
    longest = max(tokens + depth for _, tokens, depth in asked.values()) + 2
    missing = {}
    runs: dict[str, Callable[[], float]] = {}
    with closing(Runner(model, setting.threads, longest)) as runner:
        for name, peer in peers.items():
            try:
                peer.speed("tg1")
            except NotMeasured as reason:
                missing[name] = str(reason)
        for test, (kind, tokens, depth) in asked.items():
            reads = partial(runner.prefill, tokens)
            runs[f"{OURS} {test}"] = (
                reads if kind == "pp" else partial(runner.decode, tokens, max(1, depth))
            )
            present = {name: peer for name, peer in peers.items() if name not in missing}
            runs |= {f"{name} {test}": partial(p.speed, test) for name, p in present.items()}
        found = setting.turns(runs)
    for test, name in product(tests, (OURS, *peers)):
        row: Row = {
            "op": "model",
            "engine": name,
            "model": model.checkpoint.path.name,
            "format": model.precision if name == OURS else peers[name].gguf.name,
            "test": test,
            "threads": setting.threads,
            "isa": runner.session.isa if name == OURS else None,
            "read_gbps": median(found["read"]),
        }
        if name in missing:
            yield {**row, "note": f"not measured: {missing[name]}"}
            continue
        speeds = found[f"{name} {test}"]
        row |= {"tok_s": median(speeds), "samples": speeds, "note": ""}
        if name == OURS and asked[test].kind == "tg" and not asked[test].depth:
            row |= of_read([s * model.bytes_per_token / 1e9 for s in speeds], found["read"])
            row["note"] = limit_note(row["pct_of_limit"])
        if name != OURS:
            row["note"] = " ".join(str(value) for value in peers[name].about.values() if value)
        yield {**row, **_over(found[f"{OURS} {test}"], speeds)}


def _over(ours: list[float], theirs: list[float]) -> dict[str, float]:
    if ours is theirs:
        return {}
    found = ratio(ours, theirs)
    return {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}


def _peers(
    directory: Path, more: Sequence[Path], programs: Sequence[str], threads: int
) -> dict[str, LlamaCpp]:
    files = [path for path in (directory / GGUF_NAME, *more) if path.is_file()]
    if not files:
        raise click.UsageError(
            f"no {GGUF_NAME} in {directory}; make it with scripts/make_synthetic.py --gguf, "
            "or name one with --gguf"
        )
    names = [path.name for path in files]
    found = {}
    for program, path in product(programs or _found_here(), files):
        named = re.fullmatch(r"(?:([\w.-]+)=)?(.*)", program)
        assert named is not None
        command = shlex.split(named[2])
        module = command[1:2] == ["-m"]
        label = [named[1] or "llama.cpp", *command[3 if module else 1 :]]
        label.append(path.name if names.count(path.name) == 1 else str(path))
        found[" ".join(label)] = LlamaCpp(command or None, path, threads)
    return found


def _found_here() -> tuple[str, ...]:
    """Return the peers that need no program of the caller's."""
    try:
        metadata.version("openvino-genai")
    except metadata.PackageNotFoundError:
        return ("",)
    return "", f"openvino={shlex.quote(sys.executable)} -m bench.openvino_genai"


def _checked(
    context: click.Context, option: click.Parameter, tests: tuple[str, ...]
) -> tuple[str, ...]:
    if bad := [test for test in tests if not re.fullmatch(TEST, test)]:
        raise click.BadParameter(
            f"{bad[0]!r}; expected pp or tg and a number, such as pp512, or tg24@d4000"
        )
    return tests


@experiment(
    "peers",
    __doc__,
    "model | test | format | N x K, M | engine | tok/s | GB/s | read | % of limit | "
    "correct | Clocher / peer | note",
    "{model} | {test} | {format} | {N} x {K}, {M} | {engine} | {tok_s:.2f} | {gbps:.1f} | "
    "{read_gbps:.1f} | {pct_of_limit:.0f} | {correct} | "
    "{ratio:.2f}x [{ratio_low:.2f}, {ratio_high:.2f}] | {note}",
    title="{threads} threads",
    rounds=7,
)
@click.option("--model-dir", type=_DIRECTORY)
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option(
    "--llama-bench",
    "programs",
    multiple=True,
    help="Program, and arguments for it: 'llama-bench -fa 1', or 'NAME=...' for a fork.",
)
@click.option(
    "--test", "tests", multiple=True, default=_TESTS, callback=_checked, show_default=True
)
@click.option("--format", "formats", multiple=True, default=_FORMATS, show_default=True)
@click.option(
    "--shape", "shapes", type=SHAPES, multiple=True, default=_SHAPES, show_default=True, help="NxK"
)
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True, help="M")
@TEAM
@PAGES_READ
@MIB
def main(
    model_dir: Path | None,
    gguf: tuple[Path, ...],
    programs: tuple[str, ...],
    tests: tuple[str, ...],
    formats: tuple[str, ...],
    shapes: tuple[tuple[tuple[int, int], ...], ...],
    tokens: int,
    threads: int,
    pages: str,
    mib: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield the rows of a model, or those of products."""
    setting = Setting(threads, rounds, Reader(pages, mib << 20))
    if model_dir:
        model = opened(model_dir)
        peers = _peers(model_dir, gguf, programs, threads)
        yield from compare_models(model, peers, tests, setting)
        return
    for name, (n, k) in product(formats, chain.from_iterable(shapes)):
        problem = Problem.filling(name, n, k, tokens, mib << 20)
        yield from compare_products(problem, setting)


if __name__ == "__main__":
    main()
