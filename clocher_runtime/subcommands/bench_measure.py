"""The work of `clocher bench`: interleave the cases of a model, make rows of the times.

llama-bench's keys have its meaning.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from math import prod
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from clocher_kernels import __version__
from clocher_kernels.errors import OutOfMemory, UsageError, counted
from clocher_runtime.command.console import COMPILING, PACKING, Tell
from clocher_runtime.command.loading import Loaded, load, without_effect
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.disk.files import read_text
from clocher_runtime.engine.backends import gpu, memory_reader
from clocher_runtime.engine.probes import working_set
from clocher_runtime.engine.topology import (
    cache_bytes,
    cpu_name,
    read_cpus,
    threads_of,
    usable_cpus,
)
from clocher_runtime.quality.evaluate import markdown_table
from clocher_runtime.quality.speed import Case, Runner, session_for
from clocher_runtime.quality.statistics import in_turns, median_of_runs, ratio, spread
from clocher_runtime.text.tokenizer import Tokenizer

Row = dict[str, Any]

WIDE = 0.1
"""Spread of the repetitions, relative to the median, above which a figure is uncertain."""

READ_LOOP_ERROR = 1.05
"""Tolerated ratio of decoding to the read loop, which is not exact."""

_GB = 1e9
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))

_BUSY = 0.5
"""Load average per CPU above which a machine counts as busy."""

_NOT_ASKED = {"verify_weights", "context", "generation_config", "config", "diffusion"}
"""Settings of a model that a bench has no use for, or its own."""

_READ_S = 0.1
_TOKEN_CHARS = 64  # a token has fewer


def measure(
    config: EngineConfig, cases: Sequence[Case], asked: Mapping[str, Any], tell: Tell
) -> list[Row]:
    """Measure every case with every number of threads; raises ClocherError.

    `asked`: numbers of `threads` (interleaved teams), of `repetitions`, `no_check`, and the `text`
    of prompts (None: random ids).
    """
    load1 = os.getloadavg()[0]
    if config.speculate != "off" and any(case.batch > 1 for case in cases):
        raise UsageError(
            "-b above 1 with --speculate: sequences would end at different steps; give -b 1"
        )
    loaded = load(config)
    counts = _thread_counts(asked["threads"], loaded.config)
    with ExitStack() as stack:
        text = _text_ids(asked["text"], cases, loaded)
        runners = {}
        for count in counts:
            try:
                session = session_for(
                    loaded.model,
                    cases,
                    replace(loaded.config, threads=count),
                    draft=loaded.draft,
                    calibration=loaded.calibration,
                    progress=partial(tell, COMPILING),
                    packing=partial(tell, PACKING),
                )
            except OutOfMemory as error:
                more = "; or give -t one number: each packs weights of its own"
                raise OutOfMemory(f"{error}{more * (len(counts) > 1)}") from None
            runners[count] = Runner(stack.enter_context(closing(session)), text)
        busy = load1 > _BUSY * len(usable_cpus())
        return _rows(loaded, runners, cases, asked, tell, {"load1": load1, "busy": busy})


def _text_ids(path: Path | None, cases: Sequence[Case], loaded: Loaded) -> list[int]:
    if path is None:
        return []
    longest = max(case.before for case in cases)
    text = read_text(path)[: _TOKEN_CHARS * longest]
    assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
    ids = loaded.tokenizer.encode(text)[:longest]
    if not ids:
        raise UsageError(f"--text {path}: there is no text in it; name another file")
    if len(ids) < longest:
        raise UsageError(
            f"--text {path} has {counted(len(ids), 'token')}; the longest prompt, with what stands "
            f"before it, has {longest}; name a longer file, or give less with -p and -d"
        )
    return ids


def _thread_counts(asked: Sequence[int], config: EngineConfig) -> tuple[int, ...]:
    usable = len(usable_cpus())
    for count in asked:
        if count > usable:
            raise UsageError(
                f"-t {count}: this process may use {counted(usable, 'CPU')}, and more threads "
                "than that wait for each other; give less"
            )
    if config.backend != "cpu" and len(asked) > 1:
        given = ",".join(map(str, asked))
        raise UsageError(f"-t {given}: threads do nothing on {config.backend}; drop -t")
    return tuple(asked) or (threads_of(config),)


def _rows(
    bound: Loaded,
    runners: Mapping[int, Runner],
    cases: Sequence[Case],
    asked: Mapping[str, Any],
    tell: Tell,
    about: Row,
) -> list[Row]:
    nbytes, rounds = working_set(bound.model), asked["repetitions"]
    decodes = any(case.tokens and not case.prompt for case in cases)
    reader = memory_reader(nbytes, bound.config.backend) if decodes else None
    runs: dict[tuple[int, Case | None], Callable[[], float]] = {}
    for threads, runner in runners.items():
        for case in cases:
            runs[threads, case] = partial(runner.run, case)
        if reader is not None:
            runs[threads, None] = partial(reader.gbps, threads, _READ_S)
    total = len(runs) * (rounds + 1)

    def before(done: int, key: tuple[int, Case | None]) -> None:
        threads, case = key
        what = case.name if case else "reading memory"
        tell(f"{what} -t {threads}, round {done // len(runs)} of {rounds}", done, total)

    found = in_turns(runs, rounds, before)
    facts = {**_facts(bound), **about}
    in_cache = bound.config.backend == "cpu" and nbytes <= cache_bytes(read_cpus())
    rows = []
    for done, ((threads, runner), case) in enumerate(product(runners.items(), cases)):
        tell(f"checking the tokens of {case.name}", done, len(runners) * len(cases))
        row = speed(case, [int(ns) for ns in found[threads, case]])
        row |= beside_reads(row, runner, case, found.get((threads, None), []))
        everyone = {made for each in runners.values() for made in each.made[case]}
        same = {
            "repetitions": len(set(runner.made[case])) == 1,
            "thread_counts": len(everyone) == 1 if len(runners) > 1 else None,
            "another_way": runner.agrees(case) if not asked["no_check"] else None,
        }
        said = {
            "tokens_sha256": runner.made[case][-1],
            "same_tokens": same,
            # None if only repetitions were compared.
            "correct": False not in same.values() and (True if same["another_way"] else None),
            "n_threads": threads,
            "in_cache": in_cache,
            "speculate": bound.config.speculate,
            "attn": runner.session.config.attn,
            "act_sparsity": runner.session.config.act_sparsity,
            "tokens_per_pass": runner.tokens_per_pass(case) if case.tokens else None,
        }
        row = {**facts, **_about(runner, bound), **row, **said}
        rows.append({**row, "valid": not above_limit(row)})
    return rows


def _about(runner: Runner, bound: Loaded) -> Row:
    session, config = runner.session, bound.config
    given = {name: how for name, how in config.given.items() if name not in _NOT_ASKED}
    names = without_effect(session.acted_on) | ({"draft_model"} if bound.draft is None else set())
    ignored = (*config.hints_ignored, *config.unmet(names))
    variables = [str(how) for how in given.values() if how.source[:1] != "-"]
    return {
        "settings": [how for how in variables if how not in ignored],
        "hints_ignored": list(ignored),
        "isa": session.isa,
        "act_prec": session.act_prec,
        "type_k": session.sizes.cache_dtype,
        "type_v": session.sizes.cache_dtype,
        "n_ubatch": session.executor.plan.tokens,
    }


def _facts(bound: Loaded) -> Row:
    model, name = bound.model, bound.name
    return {
        "kind": "bench",
        "build_commit": __version__,
        "versions": {
            "clocher": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "numba", "llvmlite")},
        },
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu_info": cpu_name(),
        "cpus": len(usable_cpus()),
        "gpu_info": str(gpu().get("name", "")) if bound.config.backend == "cuda" else "",
        "backends": bound.config.backend.upper(),
        # A model of the Hub's cache is a link, whose own name says more.
        "model_filename": os.path.basename(os.path.abspath(name)) if os.path.exists(name) else name,
        "lora": (bound.config.lora or {}).get("", ""),
        "model_type": model.spec.family,
        "model_size": sum(weight.nbytes for weight in model.weights.values()),
        "model_n_params": sum(prod(weight.shape) for weight in model.weights.values()),
        "precision": model.precision,
    }


def speed(case: Case, samples_ns: Sequence[int]) -> Row:
    """Return the timing fields of a case."""
    tokens = (case.prompt + case.tokens) * case.batch
    rates = [tokens * 1e9 / ns for ns in samples_ns]
    several = len(rates) > 1
    return {
        "test": case.name,
        "n_prompt": case.prompt,
        "n_gen": case.tokens,
        "n_depth": case.depth,
        "n_seqs": case.batch,
        "avg_ns": mean(samples_ns),
        "stddev_ns": stdev(samples_ns) if several else 0.0,
        "avg_ts": mean(rates),
        "stddev_ts": stdev(rates) if several else 0.0,
        "median_ts": median(rates),
        "iqr_ts": spread(rates),
        "mad_ts": median(abs(rate - median(rates)) for rate in rates),
        "ci95_ts": median_of_runs(rates).ends,
        "samples_ns": list(samples_ns),
        "samples_ts": rates,
    }


def beside_reads(row: Row, runner: Runner, case: Case, reads: Sequence[float]) -> Row:
    """Return the bandwidth fields of a row; `reads` are GB/s by round, [] if not measured."""
    nbytes = runner.bytes_per_token(case)
    said: Row = {"bytes_per_token": nbytes, "gbps": None, "read_gbps": None}
    said |= {"samples_read_gbps": list(reads), "pct_of_read": None, "pct_of_read_95": None}
    if nbytes is None:
        return said
    drawn = [rate * nbytes / _GB for rate in row["samples_ts"]]
    said["gbps"] = median(drawn)
    if reads:
        share = ratio(drawn, reads)
        said["read_gbps"] = median(reads)
        said["pct_of_read"] = 100 * share.value
        said["pct_of_read_95"] = [100 * share.low, 100 * share.high]
    return said


def above_limit(row: Row) -> bool:
    """Return whether a row exceeds the memory limit: its tokens cannot have read all weights."""
    ends = row["pct_of_read_95"]
    return ends is not None and not row["in_cache"] and ends[0] > 100 * READ_LOOP_ERROR


def doubts(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why figures are uncertain, one line each."""
    found = []
    busy, cpus = rows[0]["load1"], counted(rows[0]["cpus"], "CPU")
    if rows[0]["busy"]:
        found.append(f"the machine was busy: load average {busy:.1f} on {cpus} at the start")
    wide = [row for row in rows if row["iqr_ts"] > WIDE * row["median_ts"]]
    if wide:
        shares = ", ".join(f"{_named(row)} {row['iqr_ts'] / row['median_ts']:.0%}" for row in wide)
        found.append(f"repetitions differ by more than {WIDE:.0%} (IQR over median): {shares}")
    over = [row for row in rows if (row["pct_of_read"] or 0) > 100]
    for row in over:
        why = "within the error of the read loop"
        if row["in_cache"]:
            why = "the weights lie in a cache"
        elif above_limit(row):
            why = "no valid result: the read loop was disturbed, or less is read than is counted"
        found.append(f"{_named(row)}: {row['pct_of_read']:.0f} % of the read bandwidth: {why}")
    wrong = [_named(row) for row in rows if row["correct"] is False]
    if wrong:
        found.append(f"tokens differ, which is a defect: do not trust {', '.join(wrong)}")
    return found


def _named(row: Row) -> str:
    batch = f" -b {row['n_seqs']}" if row["n_seqs"] > 1 else ""
    return f"{row['test']} -t {row['n_threads']}{batch}"


_COLUMNS: Sequence[tuple[str, Callable[[Row], str]]] = (
    ("model", lambda row: str(row["model_filename"])),
    ("lora", lambda row: str(row["lora"])),
    ("size", lambda row: _scaled(row["model_size"], _UNITS)),
    ("params", lambda row: _scaled(row["model_n_params"], _COUNTS)),
    ("precision", lambda row: str(row["precision"])),
    ("backend", lambda row: f"{row['backends']} {row['isa']}"),
    ("threads", lambda row: str(row["n_threads"])),
    ("batch", lambda row: str(row["n_seqs"]) if row["shows_batch"] else ""),
    ("test", lambda row: str(row["test"])),
    ("t/s", lambda row: f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}"),
    ("median [IQR]", lambda row: f"{row['median_ts']:.1f} [{row['iqr_ts']:.1f}]"),
    ("tokens/forward", lambda row: _per_forward(row["tokens_per_pass"], row["speculate"])),
    ("bytes/token", lambda row: _scaled(row["bytes_per_token"], _UNITS)),
    ("GB/s", lambda row: "" if row["gbps"] is None else f"{row['gbps']:.1f}"),
    ("% of read", lambda row: _share(row)),
    ("same tokens", lambda row: {True: "✓", False: "✗", None: "-"}[row["correct"]]),
)


def markdown(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, without empty columns."""
    several = any(row["n_seqs"] > 1 for row in rows)
    shown = [{**row, "shows_batch": several} for row in rows]
    cells = [[name, *(cell(row) for row in shown)] for name, cell in _COLUMNS]
    return markdown_table([*zip(*(column for column in cells if any(column[1:])), strict=True)])


def _scaled(value: float | None, units: Sequence[tuple[str, float]]) -> str:
    if value is None:
        return ""
    for unit, size in units:
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f}"


def _per_forward(tokens: float | None, speculate: str) -> str:
    return f"{tokens:.2f}" if tokens and speculate != "off" else ""


def _share(row: Row) -> str:
    if row["pct_of_read"] is None:
        return ""
    return f"{row['pct_of_read']:.0f}" + (" (cache)" if row["in_cache"] else "")
