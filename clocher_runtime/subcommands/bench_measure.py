"""The work of `clocher bench`: load a model, interleave its cases, make rows of the times."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from math import prod
from pathlib import Path

from clocher_kernels.errors import OutOfMemory, UsageError
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.command.loading import Loaded, load, not_acted_on
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import every, unmet
from clocher_runtime.config.sources import Sources, settle
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.engine.backends import gpu
from clocher_runtime.engine.probes import memory_reader, working_set
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import (
    cache_bytes,
    cpu_name,
    read_cpus,
    threads_of,
    usable_cpus,
)
from clocher_runtime.quality.speed import Case, Runner, session_for
from clocher_runtime.quality.turns import in_turns
from clocher_runtime.subcommands.bench_rows import Row, above_limit, beside_reads, speed
from clocher_runtime.text.tokenizer import Tokenizer

Tell = Callable[[str, int, int], None]
"""Progress callback: label, done, total."""

_BUSY = 0.5
"""Load average per CPU above which a machine counts as busy."""

_NEEDED = """model_dir model_json model_bin require_model lora precision kv_dtype device isa threads
act_prec pretranspose affinity use_affinity numa_policy hot_replicate hot_repl_limit_mb
prefetch_distance stream_block_bytes speculate draft_model attn act_sparsity act_calibration"""
_SETTINGS = dict(every(EngineConfig))
_ACTS_ON = frozenset(_NEEDED.split()) | {name for name in _SETTINGS if name.startswith("dedup")}

_READ_S = 0.1
_MOST_TEXT = 64 << 20
_TOKEN_CHARS = 64  # a token has fewer
_LIBRARIES = ("numpy", "numba", "llvmlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A measurement; `threads`: interleaved team sizes, `text`: prompts (None: random ids)."""

    flags: Mapping[str, str]
    threads: tuple[int, ...]
    cases: tuple[Case, ...]
    rounds: int
    check: bool
    text: Path | None = None


def measure(plan: Plan, tell: Tell) -> list[Row]:
    """Measure every case with every number of threads; raises ClocherError."""
    load1 = os.getloadavg()[0]
    config = settle(EngineConfig, Sources({"speculate": "off", **plan.flags}, os.environ))
    if config.speculate != "off" and any(case.batch > 1 for case in plan.cases):
        raise UsageError(
            "-b above 1 with --speculate: sequences would end at different steps; give -b 1"
        )
    loaded = load(config)
    counts = _thread_counts(plan.threads, loaded.config)
    with ExitStack() as stack:
        text = _text_ids(plan, loaded)
        runners = {
            count: Runner(
                stack.enter_context(closing(_session(loaded, count, plan, len(counts), tell))), text
            )
            for count in counts
        }
        return _rows(plan, loaded, runners, load1, tell)


def _text_ids(plan: Plan, loaded: Loaded) -> list[int]:
    if plan.text is None:
        return []
    longest = max(case.before for case in plan.cases)
    text = read_bytes(plan.text, _MOST_TEXT).decode(errors="replace")[: _TOKEN_CHARS * longest]
    assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
    ids = loaded.tokenizer.encode(text)[:longest]
    if not ids:
        raise UsageError(f"--text {plan.text}: there is no text in it; name another file")
    if len(ids) < longest:
        raise UsageError(
            f"--text {plan.text} has {len(ids)} tokens; the longest prompt, with what stands "
            f"before it, has {longest}; name a longer file, or give less with -p and -d"
        )
    return ids


def _thread_counts(asked: Sequence[int], config: EngineConfig) -> tuple[int, ...]:
    usable = len(usable_cpus())
    for count in asked:
        if count > usable:
            raise UsageError(
                f"-t {count}: this process may use {usable} CPUs, and more threads than that wait "
                "for each other; give less"
            )
    if config.backend != "cpu" and len(asked) > 1:
        given = ",".join(map(str, asked))
        raise UsageError(f"-t {given}: threads do nothing on {config.backend}; drop -t")
    return tuple(asked) or (threads_of(config),)


def _session(loaded: Loaded, threads: int, plan: Plan, sessions: int, tell: Tell) -> Session:
    try:
        return session_for(
            loaded.model,
            plan.cases,
            replace(loaded.config, threads=threads),
            draft=loaded.draft,
            calibration=loaded.calibration,
            progress=partial(tell, "compiling kernels (once)"),
            packing=partial(tell, "packing weights, MiB"),
        )
    except OutOfMemory as error:
        if sessions == 1:
            raise
        raise OutOfMemory(
            f"{error}; or give -t one number: each packs weights of its own"
        ) from None


def _rows(
    plan: Plan, bound: Loaded, runners: Mapping[int, Runner], load1: float, tell: Tell
) -> list[Row]:
    nbytes = working_set(bound.model)
    decodes = any(case.tokens and not case.prompt for case in plan.cases)
    reader = memory_reader(nbytes, bound.config.backend) if decodes else None
    runs: dict[tuple[int, Case | None], Callable[[], float]] = {}
    for threads, runner in runners.items():
        for case in plan.cases:
            runs[threads, case] = partial(runner.run, case)
        if reader is not None:
            runs[threads, None] = partial(reader.gbps, threads, _READ_S)
    total = len(runs) * (plan.rounds + 1)

    def before(done: int, key: tuple[int, Case | None]) -> None:
        threads, case = key
        what = case.name if case else "reading memory"
        tell(f"{what} -t {threads}, round {done // len(runs)} of {plan.rounds}", done, total)

    found = in_turns(runs, plan.rounds, before)
    facts = {**_facts(bound), "load1": load1, "busy": load1 > _BUSY * len(usable_cpus())}
    in_cache = bound.config.backend == "cpu" and nbytes <= cache_bytes(read_cpus())
    rows = []
    for done, ((threads, runner), case) in enumerate(product(runners.items(), plan.cases)):
        tell(f"checking the tokens of {case.name}", done, len(runners) * len(plan.cases))
        row = speed(case, [int(ns) for ns in found[threads, case]])
        row |= beside_reads(row, runner, case, found.get((threads, None), []))
        everyone = {made for each in runners.values() for made in each.made[case]}
        same = {
            "repetitions": len(set(runner.made[case])) == 1,
            "thread_counts": len(everyone) == 1 if len(runners) > 1 else None,
            "another_way": runner.agrees(case) if plan.check else None,
        }
        said = {
            "tokens_sha256": runner.made[case][-1],
            "same_tokens": same,
            "correct": _verdict(same),
            "n_threads": threads,
            "in_cache": in_cache,
            "speculate": bound.config.speculate,
            "attn": runner.session.reading.mode,
            "act_sparsity": runner.session.config.act_sparsity,
            "tokens_per_pass": runner.tokens_per_pass(case) if case.tokens else None,
        }
        row = {**facts, **_about(runner, bound), **row, **said}
        rows.append({**row, "valid": not above_limit(row)})
    return rows


def _verdict(same: Mapping[str, bool | None]) -> bool | None:
    """Return whether all comparisons agree; None if only repetitions were compared."""
    if False in same.values():
        return False
    return True if same["another_way"] else None


def _about(runner: Runner, bound: Loaded) -> Row:
    session, config = runner.session, bound.config
    given = {name: how for name, how in config.given.items() if name in _ACTS_ON}
    ignored = (*config.hints_ignored, *not_acted_on(given, session.acted_on))
    ignored += unmet(given, _SETTINGS, {"draft_model"} if bound.draft is None else ())
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
    model = bound.model
    return {
        "kind": "bench",
        "build_commit": clocher_version(),
        "versions": {
            "clocher": clocher_version(),
            "python": platform.python_version(),
            **{name: found for name in _LIBRARIES if (found := _version(name))},
        },
        "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu_info": cpu_name(),
        "cpus": len(usable_cpus()),
        "gpu_info": str(gpu().get("name", "")) if bound.config.backend == "cuda" else "",
        "backends": bound.config.backend.upper(),
        "model_filename": _model_name(bound.name),
        "model_type": model.spec.family,
        "model_size": sum(weight.nbytes for weight in model.weights.values()),
        "model_n_params": sum(prod(weight.shape) for weight in model.weights.values()),
        "precision": model.precision,
    }


def _model_name(name: str) -> str:
    return os.path.basename(os.path.abspath(name)) if os.path.exists(name) else name


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
