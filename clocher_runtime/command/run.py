"""The job of `clocher run`: prompts in, text out, one measured window, one JSON line."""

import gc
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import NonFinite, UsageError, counted
from clocher_runtime.checkpoints.locate import DEFAULT
from clocher_runtime.command.completions import Completions, Measured, run_line
from clocher_runtime.command.console import Console, Line, quiet_keys
from clocher_runtime.command.loading import load_engine
from clocher_runtime.config.commands import RunConfig
from clocher_runtime.engine.arguments import REPEATED, sampling_note
from clocher_runtime.engine.probes import WorkTouch, rss_peak_mib
from clocher_runtime.engine.requests import Token
from clocher_runtime.engine.timing import Reservoir, StepTotals, TimedWindow
from clocher_runtime.engine.topology import threads_of, usable_cpus
from clocher_runtime.text.prompts import (
    Preparation,
    Prompt,
    PromptPipeline,
    PromptSource,
    piped_text,
    prefetch_depth,
    worker_count,
)
from clocher_runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from clocher_runtime.quality.verify import TopLogits

_PIPE_WAIT_S, _ECHOED_CHARS = 5, 2000
_STORY = "Once upon a time"
_MODEL_SUFFIXES = (".safetensors", ".bin", ".json", ".gguf", ".jinja")


def run(config: RunConfig, console: Console) -> Line:
    """Run, and return the JSON line; raises ClocherError."""
    if config.trace_topk and config.trace_ids is None:
        raise UsageError("--trace-topk needs --trace-ids; name the file that the trace goes to")
    _keep_inputs(config)
    source = PromptSource(config.prompts_file, _single_prompt(config, console), config.rounds)
    try:
        batch = len(source.peek(config.batch))
        if config.threads is not None and config.threads > (usable := len(usable_cpus())):
            console.say(f"{config.threads} threads: running {usable}, one for each usable CPU")
        if config.batch > batch:
            console.say(f"batch {config.batch}: running {counted(batch, 'prompt')} at a time")
        with Completions(console, config) as completions:
            return _run(source, batch, completions)
    finally:
        source.close()


def _single_prompt(config: RunConfig, console: Console) -> str | tuple[int, ...] | None:
    """Return the prompt of a run without a prompt file; None for the default one."""
    given = config.prompt_ids or config.prompt
    if given is not None or config.prompts_file is not None:
        return given
    usual = _STORY if str(config.model_dir) == DEFAULT else None
    try:
        return piped_text(_PIPE_WAIT_S) or usual
    except TimeoutError:
        console.say(
            f"standard input is a pipe, and nothing came in {_PIPE_WAIT_S} s: the usual prompt is "
            "used; --prompt TEXT gives another, --prompt - waits"
        )
        return usual


def _run(source: PromptSource, batch: int, completions: Completions) -> Line:
    config, console = completions.config, completions.console
    file = config.prompts_file
    may_be_ids = config.prompt_ids is not None or (file is not None and file.suffix == ".jsonl")
    engine = load_engine(
        replace(config, batch=batch, itl_ms=inf),  # single tokens need not be fast
        console.compiling,
        console.packing,
        needs_text=not may_be_ids,
    )
    session, loaded = engine.session, engine.loaded
    try:
        for note in loaded.model.checkpoint.notes:
            console.say(note)
        is_own, tokenizer = loaded.source not in ("default", "embedded"), loaded.tokenizer
        if is_own and isinstance(tokenizer, Tokenizer) and tokenizer.chat_template:
            console.say(
                f"{loaded.name} has a chat template, which a completion does not apply: "
                f'`clocher chat {shlex.quote(loaded.name)} "QUESTION"` does'
            )
        completions.begin(engine)
        if note := sampling_note(completions.defaults):
            console.say(note)
        encode = loaded.tokenizer.encode if loaded.tokenizer else None
        prepare = Preparation(source, encode, session.check, session.context)
        if not gc.isenabled():  # as `cli` starts a process
            gc.freeze()
            gc.enable()
        if config.warmup:
            prompts = map(prepare, source.peek(config.batch))
            ids = next((prompt.ids for prompt in prompts if prompt.error is None), None)
            warm = partial(session.generate, stop_ids=frozenset(), salt=REPEATED)
            for _ in warm([ids], config.warmup) if ids else ():
                pass
        ahead, overlap = prefetch_depth(config.prefetch, batch)
        workers = worker_count(overlap, len(usable_cpus()), threads_of(loaded.config))

        def groups() -> PromptPipeline:
            return PromptPipeline(
                source.lines(),
                prepare,
                batch=batch,
                ahead=ahead if file is not None else 0,
                workers=workers,
                overlap=overlap,
            )

        measured = measure(groups, batch, completions)
    finally:
        session.close()
    if completions.failed == completions.prompts:
        if file is None:
            raise UsageError(completions.first_error)
        unusable = UsageError(f"none of {counted(completions.prompts, 'prompt')} is usable")
        unusable.add_note(completions.first_error)  # for the line of JSON: people have read it
        raise unusable
    return run_line(measured, completions, batch)


def measure(
    pipelines: Callable[[], PromptPipeline], batch: int, completions: Completions
) -> Measured:
    """Generate for all prompts in all rounds, inside the strict window.

    The window holds prefill, decode, sampling and the work-touch. Tokenising, detokenising, writing
    text and reading traced logits happen between its spans, unless a GPU is at the next step.
    """
    engine, config, console = completions.engine, completions.config, completions.console
    session = engine.session
    window = TimedWindow("generate", synchronize=session.synchronize)
    touch = session.work_touch(config.bytes_per_token, config.stride_bytes)
    if touch is None:
        touch = WorkTouch(engine.files, config.bytes_per_token, config.stride_bytes)
    hits, misses = session.scheduler.kv_hits, session.scheduler.kv_misses
    drafted, pages_read = session.speculation().counts, session.pages_read
    steps, first_token_ns = StepTotals(), Reservoir[int]()
    tokenizer, stop_ids = engine.loaded.tokenizer, engine.loaded.stop_ids
    tokens, cut, traced = 0, 0, bool(config.trace_topk)
    for round_number in range(config.rounds):
        first = round_number == 0
        shown = first and not config.aggregate
        with quiet_keys(), pipelines() as groups:
            for prompts in groups:
                usable = [prompt for prompt in prompts if prompt.error is None]
                made: list[list[int]] = [[] for _ in usable]
                completions.unfinished = made if first else []
                largest: list[list[TopLogits]] = [[] for _ in usable]
                began = window.total_ns
                live = shown and batch == 1 and usable
                stream = tokenizer.stream() if live and tokenizer else None
                if live and config.prompts_file is not None:
                    console.say(f"prompt {completions.prompts + 1}:")
                if stream is not None and console.texts.is_terminal:
                    text = usable[0].text or ""
                    echo = text if len(text) <= _ECHOED_CHARS else f"...{text[-_ECHOED_CHARS:]}"
                    console.texts.write(echo, dim=True)
                generated = session.generate(
                    [prompt.ids for prompt in usable],
                    config.max_new,
                    completions.sampling,
                    stop_ids,
                    window,
                    touch if touch.bytes_per_token else None,
                    logits=traced and first,
                    salt=REPEATED if config.rounds > 1 else "",
                )
                for token in _named(generated, usable) if usable else ():
                    ids = made[token.sequence]
                    if not ids:
                        first_token_ns.add(window.total_ns - began)
                    ids.append(token.id)
                    if token.logits is not None:
                        from clocher_runtime.quality.verify import top_logits

                        largest[token.sequence].append(top_logits(token.logits, config.trace_topk))
                    if stream is not None and token.id not in stop_ids:
                        console.texts.write(stream.push(token.id))
                if stream is not None:
                    console.texts.write(stream.flush())
                    console.texts.end_line()
                tokens += sum(map(len, made))
                short = [ids for ids in made if len(ids) < config.max_new]
                cut += sum(not (ids and ids[-1] in stop_ids) for ids in short)
                steps.add(window.spans)
                window.spans.clear()  # a prompt file may produce more than fits in memory
                if first:
                    results = iter(zip(made, largest, strict=True))
                    for prompt in prompts:
                        ids, topk = next(results) if prompt.error is None else ([], [])
                        completions.add(prompt, ids, topk, shown and batch > 1)
                    completions.unfinished = []
    if cut:
        advice = "; give a larger --context" * (session.longest < session.model.spec.max_positions)
        console.say(
            f"the context of {session.longest} tokens is full: {counted(cut, 'completion')} ended "
            f"before --max-new{advice}"
        )
    return Measured(
        wall_ns=window.total_ns,
        steps=steps,
        first_token_ns=first_token_ns,
        tokens=tokens,
        touch=touch,
        speculation=session.speculation(drafted),
        pages_read=session.pages_read.share(pages_read),
        kv_hits=session.scheduler.kv_hits - hits,
        kv_misses=session.scheduler.kv_misses - misses,
        rss_peak_mib=rss_peak_mib(),
    )


def _named(tokens: Iterator[Token], prompts: Sequence[Prompt]) -> Iterator[Token]:
    try:
        yield from tokens
    except NonFinite as error:
        where = prompts[error.sequence].where
        raise NonFinite(f"{where}: {error}", error.sequence) from None


def _keep_inputs(config: RunConfig) -> None:
    model = config.model_dir
    inputs = (config.prompts_file, config.config, config.model_json, config.model_bin, model)
    for flag, path in (("--outputs", config.outputs), ("--trace-ids", config.trace_ids)):
        if path is None:
            continue
        beside = _is_same(path.parent, model) and path.name.endswith(_MODEL_SUFFIXES)
        if (beside and os.path.exists(path)) or any(_is_same(path, each) for each in inputs):
            raise UsageError(f"{flag}: {path} is a file that this run reads; name another")


def _is_same(path: Path, other: Path | None) -> bool:
    try:
        return other is not None and os.path.samefile(path, other)
    except OSError:
        return False
