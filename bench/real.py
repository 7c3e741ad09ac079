r"""Published files: what an engine's arithmetic costs on real text, beside llama.cpp.

\b
    python -m bench real --gguf FILE --text TEXT --turns JSONL --llama DIR --keep PARTS \
        --task mmlu --data DIR --json OUT

TEXT and the conversations of JSONL ({"messages": [...]} a line, by the model's template) are cut
into windows of 512 tokens, of which the last 255 are scored, as llama-perplexity does. The
reference is Clocher in fp32, the exact model of the file, whose logits are written as
llama-perplexity's --kl-divergence-base. Clocher's default and the llama-perplexity of DIR are
compared with it, on the same ids. Tasks are those of `clocher bench quality`, without examples;
llama-perplexity answers questions, llama-server completes. Speed is that of `python -m bench
peers`; start and memory are those of a process that makes one token, of llama.cpp llama-bench.
PARTS keeps what is done, so that --seconds may end a run early and the same command goes on. Errors
are standard errors.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import count, product
from math import exp, inf, sqrt
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.experiment import TEAM, NotMeasured, experiment, opened, output_of
from bench.llama_programs import WINDOW, answered, completed, divergence
from bench.peers import OURS, LlamaBench, compare
from bench.record import Row
from clocher_runtime.api import LanguageModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.flags import option, switch
from clocher_runtime.command.loading import load
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.disk.files import read_text
from clocher_runtime.disk.kept import Kept
from clocher_runtime.disk.output_file import replacing
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.quality.speed import Case
from clocher_runtime.quality.tasks import TASKS, Prompted, read_task, run_task
from clocher_runtime.subcommands.quality import scored
from clocher_runtime.text.tokenizer import Tokenizer
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

FIRST, WINDOWS = WINDOW // 2, 4
_ROUNDS = 3
SCORED = WINDOW - 1 - FIRST
EXACT, DEFAULT, LLAMA = ENGINES = "Clocher fp32", "Clocher", "llama.cpp"
_LEAST = -16.0
"""Probabilities below exp of this do not count, and `--kl-divergence-base` has none."""
_AT_ONCE = 64
_METRICS = "acc", "exact_match_flexible", "pass@1"
Windows = Sequence[list[int]]
Logits = Callable[[Sequence[int]], np.ndarray]
Sums = dict[str, float]


def windows_of(
    tokenizer: Tokenizer, text: Path | None, turns: Path | None, count: int
) -> dict[str, Windows]:
    """Return windows of a text, and of conversations if the model has a template."""
    chars = 8 * WINDOW * count
    first = [b for b in tokenizer.encode("a")[:1] if b == tokenizer.bos_id]
    ids = {"text": tokenizer.encode(read_text(text)[:chars], special=False)} if text else {}
    if turns and tokenizer.chat_template:
        chats = (
            parse_object(line.encode(), str(turns))
            for line in read_text(turns)[:chars].splitlines()[:-1]
        )
        said = (tokenizer.apply_chat_template(chat["messages"]) for chat in chats)
        ids["turns"] = [id for chat in said for id in tokenizer.encode(chat, special=False)]
    width = WINDOW - len(first)
    return {
        name: [first + of[at : at + width] for at in range(0, len(of) - width + 1, width)][:count]
        for name, of in ids.items()
    }


def write_base(path: Path, windows: Windows, logits: Logits) -> Sums:
    """Write logits as llama-perplexity's --kl-divergence-base; return their sums."""
    sums: Sums = {}
    with replacing(path) as file:
        for number, ids in enumerate(windows):
            given = logits(ids)[FIRST : WINDOW - 1]
            if not number:
                sizes = np.array([WINDOW, given.shape[1], len(windows)], np.int32)
                file.write(b"_logits_" + sizes.tobytes() + np.array(windows, np.int32).tobytes())
            rows = np.zeros((SCORED, _width(given.shape[1])), np.uint16)
            top = given.max(axis=1, keepdims=True)
            least = np.maximum(given.min(axis=1, keepdims=True), top + np.float32(_LEAST))
            step = (top - least) / np.float32(65535)
            rows[:, 4 : 4 + given.shape[1]] = np.rint(np.maximum(given - least, 0) / step)
            ends = [step, least - top - np.log(np.exp(given - top).sum(1, np.float64))[:, None]]
            rows[:, :4] = np.concatenate(ends, axis=1).astype(np.float32).view(np.uint16)
            file.write(rows.tobytes())
            _add(sums, judge(rows, given, np.array(ids[FIRST + 1 :])))
    return sums


def judge(base: np.ndarray, logits: np.ndarray, ids: np.ndarray) -> Sums:
    """Return the sums of llama-perplexity over tokens `ids` [T], of logits [T, V] fp32.

    `base` [T, _width(V)] uint16: rows of a --kl-divergence-base.
    """
    sums: Sums = {}
    for at in range(0, len(ids), _AT_ONCE):
        here, wanted = logits[at : at + _AT_ONCE], ids[at : at + _AT_ONCE, None]
        rows = base[at : at + _AT_ONCE]
        scale, least = np.ascontiguousarray(rows[:, :4]).view(np.float32).T[..., None]
        own = rows[:, 4 : 4 + here.shape[1]] * scale + least
        top = here.max(axis=1, keepdims=True)
        log = here - top
        log -= np.log(np.exp(log).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
        kld = (np.where(own > _LEAST, np.exp(own), 0) * (own - log)).sum(axis=1, dtype=np.float64)
        _add(
            sums,
            {
                "tokens": float(len(kld)),
                "kld": kld.sum(),
                "kld2": (kld * kld).sum(),
                "same": float((own.argmax(axis=1) == here.argmax(axis=1)).sum()),
                "nll": -np.take_along_axis(log, wanted, 1).sum(dtype=np.float64),
            },
        )
    return {name: float(value) for name, value in sums.items()}


def compared(path: Path, windows: Windows, logits: Logits) -> Sums:
    """Return the sums of an engine's logits beside a base."""
    sums: Sums = {}
    start = 20 + 4 * WINDOW * len(windows)
    for number, ids in enumerate(windows):
        given = logits(ids)[FIRST : WINDOW - 1]
        shape = len(windows), SCORED, _width(given.shape[1])
        base = np.memmap(path, np.uint16, "r", start, shape)[number]
        _add(sums, judge(base, given, np.array(ids[FIRST + 1 :])))
    return sums


def summary(sums: Sums, exact: Sums) -> Row:
    """Return the fields of a row; `exact` are the sums of the reference."""
    n = sums["tokens"]
    kld, same = sums["kld"] / n, sums["same"] / n
    return {
        "tokens": int(n),
        "kld": kld,
        "kld_error": sqrt(max(sums["kld2"] / n - kld * kld, 0) / (n - 1)),
        "same_top": same,
        "same_top_error": sqrt(same * (1 - same) / (n - 1)),
        "perplexity": exp(sums["nll"] / n),
        "ppl_ratio": exp(sums["nll"] / n - exact["nll"] / exact["tokens"]),
    }


def _width(vocab: int) -> int:
    return 2 * ((vocab + 1) // 2) + 4


def _add(sums: Sums, more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def tokenizer_of(gguf: Path) -> Tokenizer:
    """Return the tokenizer of a model."""
    checkpoint = open_checkpoint(gguf)
    return Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)


def logits_of(model: Path, threads: int, engine: str = EXACT) -> Logits:
    """Return the logits of a session; those of `EXACT` are in fp32: what the weights alone say."""
    sizes: Row = {"context": WINDOW, "chunk": 256, "threads": threads, "all_logits": True}
    config = EngineConfig(model_dir=model, speculate="off", **sizes)
    return load(config.exact() if engine == EXACT else config).session().logits


def _beside(base: Path, windows: Windows, logits: Callable[[str], Logits], engine: str) -> Sums:
    """Return the sums of an engine; those of the reference make the base."""
    return (write_base if engine == EXACT else compared)(base, windows, logits(engine))


def _accuracy(task: Prompted, gguf: Path, engine: str, asked: Any) -> Sums:
    """Return how many items of a task an engine answers as they want."""
    n, threads, programs = len(task.items), asked.threads, asked.llama
    if engine == LLAMA and not task.generates:
        questions = [(each.context, each.choices, each.answer) for each in task.items]
        return answered(programs, gguf, questions, threads)
    if engine == LLAMA:
        texts = completed(programs, gguf, task.items, threads)
        judged = zip(task.items, texts, strict=True)
        return {
            "items": n,
            "right": sum(_right(item.judge(text, item.answer)) for item, text in judged),
        }
    sizes: Row = {"threads": threads, "batch": 8, "context": 2048}
    config = EngineConfig(model_dir=gguf, all_logits=not task.generates, **sizes)
    with scored(config.exact() if engine == EXACT else config) as (session, tokenizer, facts):
        kept = Kept(asked.keep.with_suffix(".items"), {"gguf": gguf.name, **facts})
        complete = LanguageModel(session.model, session, tokenizer).complete_each
        (found,) = run_task(task, session, tokenizer, kept, lambda *_: None, complete).values()
    return {"items": n, "right": round(n * _right(found))}


def _right(metrics: Mapping[str, float]) -> float:
    """Return the metric that counts: of several the one that is kindest to the wording."""
    return next(metrics[name] for name in _METRICS if name in metrics)


_COST = """
import os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), time.perf_counter() - began, usage.ru_maxrss)
"""
"""Runs a command. In a small process: a process that is started counts the memory of its parent."""


def _cost(command: Sequence[object]) -> Sums:
    """Return the seconds and the MiB of a whole process, the second of two."""
    words = [str(word) for word in command]
    for _ in range(2):
        code, seconds, kib = output_of([sys.executable, "-S", "-c", _COST, *words]).split()
        if code != "0":
            raise NotMeasured(f"{words[0]}: exit code {code}")
    return {"start_s": float(seconds), "memory_mib": int(kib) / 1024}


def _speed(gguf: Path, programs: Path, threads: int) -> Sums:
    """Return tokens a second, start and memory of both engines; keys begin with the engine."""
    cases = {"pp512": Case(512, 0), "tg64": Case(0, 64)}
    bench = LlamaBench([str(programs / "llama-bench")], gguf, threads)
    reader = Reader("2m", 64 << 20)
    sums: Sums = {}
    for row in compare(opened(gguf), {LLAMA: bench}, cases, threads, reader, _ROUNDS):
        if "tok_s" not in row:
            raise NotMeasured(row["note"])
        sums[f"{DEFAULT if row['engine'] == OURS else LLAMA} {row['test']}"] = row["tok_s"]
    own = [sys.executable, "-m", "clocher_runtime", "run", "--model-dir", gguf]
    own += ["--threads", threads, "--prompt", "The capital of France is", "--max-new", 1]
    peer = [programs / "llama-bench", "-m", gguf, "-t", threads, "-p", 5, "-n", 0, "-r", 1]
    first = {DEFAULT: own, LLAMA: peer}
    for engine, command in first.items():
        sums |= {f"{engine} {key}": value for key, value in _cost(command).items()}
    return sums


class Parts(Kept):
    """What is measured, a line for each part in a file; nothing is begun `seconds` from now."""

    def __init__(self, path: Path | None, seconds: float | None, **settings: Any) -> None:
        super().__init__(path, settings)
        self._end = time.monotonic() + (1e9 if seconds is None else seconds)

    def do(self, key: Any, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure a part, if it is not there and there is time."""
        if self.get(key) is None and time.monotonic() < self._end:
            began = time.monotonic()
            self.add(key, {**measure(), "seconds": time.monotonic() - began})

    def sums(self, *words: str, runs: float = inf) -> Sums:
        """Return the sums over the runs from 0 on, `runs` at most, and their number."""
        sums: Sums = {}
        for run in count():
            if run >= runs or (line := self.get(" ".join((*words, str(run))))) is None:
                break
            _add(sums, {**line, "runs": 1})
        return sums


class Texts:
    """A text and chat turns in windows, and what the exact model says of them, beside --keep."""

    def __init__(self, asked: Any, parts: Parts, windows: int, exact: Callable[[], Logits]) -> None:
        """Cut `asked.text` and `asked.turns`; write the bases that are missing."""
        source, self._parts, exact = asked.source, parts, cache(exact)
        found = windows_of(tokenizer_of(source), asked.text, asked.turns, windows)
        self.kinds = {
            kind: (asked.keep.with_name(f"{source.stem}.{kind}"), own)
            for kind, own in found.items()
        }
        for base, own in self.kinds.values():
            parts.do(base.name, partial(write_base, base, own, lambda ids: exact()(ids)))

    def sums(self, logits: Logits) -> Sums:
        """Return the sums of an engine's logits, which begin with the kind of text."""
        return {
            f"{kind} {key}": value
            for kind, (base, windows) in self.kinds.items()
            for key, value in compared(base, windows, logits).items()
        }

    def fields(self, found: Sums) -> Row:
        """Return the fields of a row, which end with the kind of text."""
        row: Row = {}
        for kind, (base, _) in self.kinds.items():
            own = summary(_of(found, kind), self._parts.get(base.name))
            row |= {f"{key}_{kind}": value for key, value in own.items()}
        return row


def _of(sums: Sums, head: str) -> Sums:
    """Return the sums whose names begin with a word, without it."""
    return {k.removeprefix(f"{head} "): v for k, v in sums.items() if k.startswith(f"{head} ")}


def _rows(model: str, texts: Sequence[str], parts: Parts) -> Iterator[Row]:
    """Yield a row for each engine: fields of a text end with its name."""
    speed = parts.sums(model, "speed")
    for engine in ENGINES:
        row: Row = {}
        for text in texts:
            if sums := parts.sums(model, text, engine):
                exact = parts.sums(model, text, EXACT, runs=sums["runs"])
                row |= {f"{key}_{text}": value for key, value in summary(sums, exact).items()}
        for task in TASKS:
            if sums := parts.sums(model, task, engine):
                n, share = sums["items"], sums["right"] / sums["items"]
                error = sqrt(share * (1 - share) / max(n - 1, 1))
                row |= {f"{task}_items": int(n), task: 100 * share, f"{task}_error": 100 * error}
        row |= {key: value for key, value in _of(speed, engine).items() if " " not in key}
        if row:
            yield {"op": "real", "model": model, "engine": engine, "isa": CURRENT.name, **row}


@experiment(
    "real",
    __doc__,
    option("--gguf", PATH, name="files", multiple=True, required=True),
    option("--text", PATH),
    option("--turns", PATH),
    option("--tokens", COUNT, default=20_000),
    option("--task", click.Choice(list(TASKS)), name="tasks", multiple=True),
    option("--data", PATH, "directory with the lines of the tasks"),
    option("--limit", COUNT, "items", default=500),
    switch("--run-code", "let humaneval run what the model wrote"),
    option("--engine", click.Choice(ENGINES), name="engines", multiple=True, default=ENGINES),
    option("--speed/--no-speed", None, "tokens a second, start and memory", default=True),
    option("--llama", PATH, "where the programs of llama.cpp are"),
    option("--keep", PATH, required=True),
    option("--seconds", COUNT, "begin no part after that"),
    TEAM,
)
def main(asked: Any) -> Iterator[Row]:
    """Measure the parts that are missing, and yield the rows of all of them."""
    if LLAMA in asked.engines and asked.llama is None:
        raise click.UsageError("--llama: give the directory, or --engine without llama.cpp")
    parts, programs, keep = Parts(asked.keep, asked.seconds), asked.llama or Path(), asked.keep
    threads, more = asked.threads, (asked.data, 0, asked.limit, asked.run_code)
    tasks = {name: read_task(name, *more) for name in asked.tasks}
    for gguf in asked.files:
        name, logits = gguf.stem, cache(partial(logits_of, gguf, threads))
        if asked.speed and asked.llama:
            parts.do(f"{name} speed 0", partial(_speed, gguf, programs, threads))
        count = -(-asked.tokens // SCORED)
        windows = windows_of(tokenizer_of(gguf), asked.text, asked.turns, count)
        longest = max(map(len, windows.values()), default=0)
        for run, kind in product(range(-(-longest // WINDOWS)), windows):
            part = windows[kind][run * WINDOWS : (run + 1) * WINDOWS]
            base = keep.with_name(f"{name}.{kind}.{run}.base")
            for engine in (
                (EXACT, *(each for each in asked.engines if each != EXACT)) if part else ()
            ):
                measure = partial(_beside, base, part, logits, engine)
                if engine == LLAMA:
                    measure = partial(divergence, programs, gguf, base, len(part) * SCORED, threads)
                parts.do(f"{name} {kind} {engine} {run}", measure)
        for (task, prompted), engine in product(tasks.items(), asked.engines):
            measure = partial(_accuracy, prompted, gguf, engine, asked)
            parts.do(f"{name} {task} {engine} 0", measure)
        yield from _rows(name, [*windows], parts)
