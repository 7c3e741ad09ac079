r"""Clocher beside llama.cpp, ONNX Runtime and torch: same weights, same threads, in turns.

\b
    python -m bench.peers                             products of matrices: torch, ONNX Runtime
    python -m bench.peers --model-dir DIR             a model: llama.cpp runs DIR/model.gguf
        [--llama-bench PATH] [--gguf FILE] [--test pp128 --test tg64]

DIR comes from `scripts/make_synthetic.py --gguf`. Without --llama-bench, llama.cpp is run through
llama-cpp-python. --gguf adds files that llama-quantize made of the same weights. Tests are named as
llama-bench names them; Clocher's tg includes sampling, llama-bench's does not. A ratio is Clocher's
speed over the peer's. A peer that is missing is shown with the reason, never with a number.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from bench.bandwidth import DEFAULT_BYTES, PAGES, Reader
from bench.decode import Runner
from bench.llama_cpp import LlamaCpp
from bench.matmuls import ENGINES, Engine, Problem, exact_product
from bench.measure import (
    NotMeasured,
    Ratio,
    Rows,
    help_text,
    interleave,
    limit_note,
    machine,
    print_table,
    ratio,
    write_json,
)
from clocher_kernels.errors import ClocherError
from clocher_kernels.formats import parse_format
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.synthetic import GGUF_NAME
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.topology import default_threads
from cpu_fallback.lanes.isa import CURRENT

OURS = next(iter(ENGINES))
FORMATS = ("int4_sym_g32_f16", "int4_sym_g128_f16", "int8_row_f32", "bf16", "ternary", "mxfp4")
SHAPES = ("14336x4096", "2880x4096", "6912x2560")
TESTS = ("pp128", "tg32")

_AT_LEAST_S = 0.02


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants share: threads, rounds, and the buffer that the limit is read from."""

    threads: int
    rounds: int
    reader: Reader


def compare_products(problem: Problem, setting: Setting) -> Rows:
    """Return a row for each engine that could multiply, or the reason why not."""
    weights = problem.weights()
    exact = exact_product(problem, weights)
    engines: dict[str, Engine] = {}
    correct, missing = {}, {}
    for name, build in ENGINES.items():
        try:
            engines[name] = build(problem, weights, setting.threads)
            correct[name] = engines[name].correct(exact)
        except NotMeasured as reason:
            missing[name] = str(reason)
    runs: dict[str, Callable[[], float]] = {
        name: (lambda engine=engine: engine.gbps(problem.nbytes, _AT_LEAST_S))
        for name, engine in engines.items()
    }
    runs["read"] = lambda: setting.reader.gbps(setting.threads)
    try:
        found = interleave(runs, setting.rounds)
    finally:
        for engine in engines.values():
            engine.close()
    rows = []
    for name in ENGINES:
        row: dict[str, Any] = {
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
            rows.append({**row, "note": f"not measured: {missing[name]}"})
            continue
        speeds = found[name]
        row |= {
            "gbps": median(speeds),
            "pct_of_limit": 100 * ratio(speeds, found["read"]).value,
            "correct": correct[name],
            "samples": speeds,
        }
        notes = engines[name].note, limit_note(row["pct_of_limit"])
        row["note"] = "; ".join(filter(None, notes))
        rows.append({**row, **_ratio_fields(found[OURS], speeds)})
    return rows


def compare_models(
    model: Model, peers: dict[str, LlamaCpp], tests: Sequence[str], setting: Setting
) -> Rows:
    """Return a row for each contestant and test."""
    longest = max(int(test[2:]) for test in tests) + 2
    runner = Runner(model, setting.threads, longest)
    missing = {}
    for name, peer in peers.items():
        try:
            peer.speed("tg1")
        except NotMeasured as reason:
            missing[name] = str(reason)
    runs: dict[str, Callable[[], float]] = {}
    for test in tests:
        run = runner.prefill if test.startswith("pp") else runner.decode
        runs[f"{OURS} {test}"] = lambda run=run, size=int(test[2:]): run(size)
        for name, peer in peers.items():
            if name not in missing:
                runs[f"{name} {test}"] = lambda peer=peer, test=test: peer.speed(test)
    runs["read"] = lambda: setting.reader.gbps(setting.threads)
    try:
        found = interleave(runs, setting.rounds)
    finally:
        runner.close()
    rows: Rows = []
    for test in tests:
        ours = found[f"{OURS} {test}"]
        for name in (OURS, *peers):
            row: dict[str, Any] = {
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
                rows.append({**row, "note": f"not measured: {missing[name]}"})
                continue
            speeds = found[f"{name} {test}"]
            row |= {"tok_s": median(speeds), "samples": speeds, "note": ""}
            if name == OURS and test.startswith("tg"):
                gbps = [speed * model.bytes_per_token / 1e9 for speed in speeds]
                row["gbps"] = median(gbps)
                row["pct_of_limit"] = 100 * ratio(gbps, found["read"]).value
                row["note"] = limit_note(row["pct_of_limit"])
            if name != OURS:
                about = peers[name].about
                row["note"] = " ".join(str(value) for value in about.values() if value)
            rows.append({**row, **_ratio_fields(ours, speeds)})
    return rows


def _ratio_fields(ours: list[float], theirs: list[float]) -> dict[str, float]:
    if ours is theirs:
        return {}
    found = ratio(ours, theirs)
    return {"ratio": found.value, "ratio_low": found.low, "ratio_high": found.high}


def show(rows: Rows, threads: int) -> None:
    """Print the rows as tables."""
    models = [row for row in rows if row["op"] == "model"]
    products = [row for row in rows if row["op"] == "linear"]
    title = f"{threads} threads on {machine()}"
    if models:
        table = Table("model", "test", "engine", "tok/s", "% of limit", "Clocher / peer", "note")
        table.title = title
        for row in models:
            table.add_row(
                Path(row["model"]).name,
                row["test"],
                f"{row['engine']} {row['format']}" if row["engine"] == OURS else row["engine"],
                _number(row, "tok_s", ".2f"),
                _number(row, "pct_of_limit", ".0f"),
                _ratio_text(row),
                row["note"],
            )
        print_table(table)
    if products:
        table = Table("format", "N x K, M", "engine", "GB/s", "read", "% of limit")
        for column in ("correct", "Clocher / peer", "note"):
            table.add_column(column)
        table.title = title
        for row in products:
            table.add_row(
                row["format"],
                f"{row['N']} x {row['K']}, {row['M']}",
                row["engine"],
                _number(row, "gbps", ".1f"),
                f"{row['read_gbps']:.1f}",
                _number(row, "pct_of_limit", ".0f"),
                {True: "yes", False: "NO"}.get(row.get("correct"), ""),  # type: ignore[arg-type]
                _ratio_text(row),
                row["note"],
            )
        print_table(table)


def _number(row: dict[str, Any], key: str, spec: str) -> str:
    return format(row[key], spec) if key in row else ""


def _ratio_text(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return ""
    return str(Ratio(row["ratio"], row["ratio_low"], row["ratio_high"]))


def _peers(
    directory: Path, more: Sequence[Path], command: Sequence[str] | None, threads: int
) -> dict[str, LlamaCpp]:
    files = [path for path in (directory / GGUF_NAME, *more) if path.is_file()]
    if not files:
        raise click.UsageError(
            f"no {GGUF_NAME} in {directory}; make it with scripts/make_synthetic.py --gguf, "
            "or name one with --gguf"
        )
    names = [path.name for path in files]
    return {
        f"llama.cpp {path.name if names.count(path.name) == 1 else path}": LlamaCpp(
            command, path, threads
        )
        for path in files
    }


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch("([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text)
    if match is None:
        raise click.UsageError(f"--shape {text!r}; expected NxK, such as {SHAPES[0]}")
    return int(match[1]), int(match[2])


@click.command(help=help_text(__doc__))
@click.option("--model-dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--gguf", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option("--llama-bench", help="Program, and arguments for it: 'llama-bench -fa 1'.")
@click.option("--test", "tests", multiple=True, default=TESTS, show_default=True)
@click.option("--format", "formats", multiple=True, default=FORMATS, show_default=True)
@click.option("--shape", "shapes", multiple=True, default=SHAPES, show_default=True, help="NxK")
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True, help="M")
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--pages", type=click.Choice(PAGES), default="2m", show_default=True)
@click.option("--mib", type=click.IntRange(2), default=DEFAULT_BYTES >> 20, help="Bytes to move.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write rows there.")
def main(
    model_dir: Path | None,
    gguf: tuple[Path, ...],
    llama_bench: str | None,
    tests: tuple[str, ...],
    formats: tuple[str, ...],
    shapes: tuple[str, ...],
    tokens: int,
    threads: int | None,
    rounds: int,
    pages: str,
    mib: int,
    out: Path | None,
) -> None:
    """Measure and print; the exit code is 1 if a result was wrong."""
    setting = Setting(threads or default_threads(), rounds, Reader(pages, mib << 20))
    if bad := [test for test in tests if not re.fullmatch("(pp|tg)[1-9][0-9]{0,5}", test)]:
        raise click.UsageError(f"--test {bad[0]!r}; expected pp or tg and a number, such as pp512")
    rows: Rows = []
    try:
        if model_dir:
            command = shlex.split(llama_bench) if llama_bench else None
            model = load_model(open_checkpoint(model_dir))
            peers = _peers(model_dir, gguf, command, setting.threads)
            rows = compare_models(model, peers, tests, setting)
        else:
            for fmt in formats:
                parse_format(fmt)
                for n, k in map(_shape, shapes):
                    problem = Problem.filling(fmt, n, k, tokens, mib << 20)
                    rows += compare_products(problem, setting)
    except (ClocherError, NotMeasured) as error:
        raise click.ClickException(str(error)) from None
    show(rows, setting.threads)
    if out:
        write_json(out, rows)
    raise SystemExit(int(not all(row.get("correct", True) for row in rows)))


if __name__ == "__main__":
    main()
