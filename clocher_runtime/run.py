"""The job of `clocher-run`: prompts in, text out, one measured window, one line of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

from clocher_kernels.errors import UsageError
from clocher_runtime import metrics
from clocher_runtime.config import RunConfig
from clocher_runtime.console import Console
from clocher_runtime.engine import Engine, load_engine, load_stub
from clocher_runtime.jsonline import OutputFields, RunLine, WorkTouchFields, clocher_version
from clocher_runtime.probes import Touch, WorkTouch, rss_peak_mib
from clocher_runtime.prompts import read_prompts
from clocher_runtime.session import Sampling
from clocher_runtime.timing import TimedWindow
from clocher_runtime.topology import usable_cpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the strict window and its surroundings gave.

    Attributes:
        window: the spans of all rounds.
        first_token_ns: for each sequence of each round, the time in the window from the start of
            its group of prompts to its first token.
        tokens: tokens generated, all rounds.
        outputs: token ids of each prompt, first round.
        touch: the work-touch after the last token.
        rss_peak_mib: sampled after the window.
    """

    window: TimedWindow
    first_token_ns: list[int]
    tokens: int
    outputs: list[list[int]]
    touch: Touch
    kv_hits: int
    kv_misses: int
    rss_peak_mib: float


def run(config: RunConfig, console: Console) -> RunLine:
    """Do a run and return its line.

    Raises:
        ClocherError: see `exit_codes` for what each kind means.
    """
    texts = None if config.prompt_ids is not None else read_prompts(config)
    count = 1 if texts is None else len(texts)
    batch = min(config.batch, count)
    _warn(config, count, console)
    engine = (
        load_stub(config, batch)
        if config.stub
        else load_engine(config, batch, console.compiling, console.packing)
    )
    try:
        prompts = _encode(engine, config, texts)
        engine.session.warm()
        if config.warmup:
            for _ in engine.session.generate(prompts[:1], config.warmup, stop_ids=frozenset()):
                pass
        measured = measure(engine, prompts, config, batch, console)
    finally:
        engine.session.close()
    if batch > 1 and not config.aggregate:
        for number, ids in enumerate(measured.outputs, start=1):
            console.note(f"prompt {number}:")
            console.completion(_text(engine, ids))
            console.end_line()
    return run_line(config, engine, measured, len(prompts), batch)


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    config: RunConfig,
    batch: int,
    console: Console,
) -> Measured:
    """Generate for all prompts in all rounds, inside the strict window.

    The window holds prefill, decode, sampling and the work-touch. Detokenising and writing text
    happen between its spans.
    """
    session = engine.session
    window = TimedWindow("generate", synchronize=session.synchronize)
    per_token = config.bytes_per_token if engine.files else 0  # the stub has none
    touch = session.work_touch(per_token, config.stride_bytes)
    if touch is None:
        touch = WorkTouch(engine.files, per_token, config.stride_bytes)
    sampling = Sampling(config.temperature, config.top_k, config.top_p, config.seed)
    hits, misses = session.kv_hits, session.kv_misses
    outputs: list[list[int]] = []
    first_token_ns: list[int] = []
    tokens = 0
    for round_number in range(config.rounds):
        shown = round_number == 0 and batch == 1 and not config.aggregate
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            made: list[list[int]] = [[] for _ in group]
            began = window.total_ns
            stream = engine.tokenizer.stream() if shown and engine.tokenizer else None
            for token in session.generate(
                group,
                config.max_new,
                sampling,
                engine.stop_ids,
                window,
                touch if touch.bytes_per_token else None,
            ):
                ids = made[token.sequence]
                if not ids:
                    first_token_ns.append(window.total_ns - began)
                ids.append(token.id)
                if stream is not None and token.id not in engine.stop_ids:
                    console.completion(stream.push(token.id))
            if stream is not None:
                console.completion(stream.flush())
                console.end_line()
            tokens += sum(map(len, made))
            if round_number == 0:
                outputs += made
    return Measured(
        window=window,
        first_token_ns=first_token_ns,
        tokens=tokens,
        outputs=outputs,
        touch=touch,
        kv_hits=session.kv_hits - hits,
        kv_misses=session.kv_misses - misses,
        rss_peak_mib=rss_peak_mib(),
    )


def run_line(
    config: RunConfig, engine: Engine, measured: Measured, prompts: int, batch: int
) -> RunLine:
    """Derive the line of a run from what was measured."""
    window, touch = measured.window, measured.touch
    latencies = metrics.token_latencies_ms(window.spans)
    passes = len(window.spans)
    file_bytes = sum(file.size for file in engine.files)
    bytes_touched = engine.bytes_per_token * passes + touch.bytes_touched
    shown = [] if config.aggregate else measured.outputs
    return RunLine(
        version=clocher_version(),
        device=engine.device,
        backend_reason=engine.backend_reason,
        isa=engine.isa,
        gpu=engine.gpu,
        model=engine.model,
        model_source=engine.model_source,
        mode="stub" if config.stub else "strict" if config.require_model else "default",
        precision=engine.precision,
        act_prec=engine.act_prec,
        kv_dtype=engine.kv_dtype,
        threads=engine.threads,
        context=engine.session.context,
        batch=batch,
        prompts=prompts,
        rounds=config.rounds,
        tokens_generated=measured.tokens,
        wall_time_s=window.total_ns / metrics.NS_PER_S,
        tps_true=metrics.per_second(measured.tokens, window.total_ns),
        latency_p50_ms=metrics.percentile(latencies, 50),
        latency_p95_ms=metrics.percentile(latencies, 95),
        prefill_tokens=metrics.span_tokens(window.spans, "prefill"),
        prefill_s=metrics.span_ns(window.spans, "prefill") / metrics.NS_PER_S,
        ttft_ms=metrics.percentile(measured.first_token_ns, 50) / metrics.NS_PER_MS,
        rss_peak_mb=measured.rss_peak_mib,
        kv_hits=measured.kv_hits,
        kv_misses=measured.kv_misses,
        bytes_per_token=engine.bytes_per_token,
        forward_passes=passes,
        work_touch=WorkTouchFields(
            bytes_per_token=touch.bytes_per_token,
            stride=touch.stride,
            bytes_touched=touch.bytes_touched,
            bytes_read=touch.bytes_read,
            checksum=touch.checksum if config.verify_touch else None,
        ),
        bytes_touched=bytes_touched,
        coverage=bytes_touched / file_bytes if file_bytes else nan,
        effective_gbps=metrics.per_second(bytes_touched, window.total_ns) / 1e9,
        hints_ignored=[*config.hints_ignored, *engine.hints_ignored],
        outputs=[OutputFields(token_ids=ids, text=_text(engine, ids)) for ids in shown],
    )


def summary(line: RunLine) -> str:
    """Return the numbers of a run in one line for a person."""
    parts = [
        f"{line.tokens_generated} tokens in {line.wall_time_s:.3f} s",
        f"{line.tps_true:.1f} tok/s",
        f"first token {line.ttft_ms:.1f} ms",
        "p50 -" if isnan(line.latency_p50_ms) else f"p50 {line.latency_p50_ms:.2f} ms",
        f"{line.bytes_per_token / 1e6:.2f} MB/token",
        f"{line.effective_gbps:.2f} GB/s",
        f"peak {line.rss_peak_mb:.0f} MiB",
        f"{line.model} {line.precision} on {line.device}, {line.threads} thread(s)",
    ]
    return " | ".join(parts)


def _warn(config: RunConfig, prompts: int, console: Console) -> None:
    """Say where a run does not do quite what its flags say."""
    usable = len(usable_cpus())
    if config.threads is not None and config.threads > usable:
        console.note(f"{config.threads} threads on {usable} usable CPUs will take turns")
    if config.batch > prompts:
        console.note(f"batch {config.batch} with {prompts} prompt(s): running {prompts} at a time")


def _encode(engine: Engine, config: RunConfig, texts: list[str] | None) -> list[list[int]]:
    if config.prompt_ids is not None:
        prompts = [list(config.prompt_ids)]
    else:
        assert engine.tokenizer is not None and texts is not None
        prompts = [engine.tokenizer.encode(text) for text in texts]
    for number, ids in enumerate(prompts, start=1):
        if not ids:
            raise UsageError(f"prompt {number} is empty; give it at least one token")
    return prompts


def _text(engine: Engine, ids: list[int]) -> str:
    """Return the text of a completion, without the token that ended it."""
    if engine.tokenizer is None:
        return ""
    return engine.tokenizer.decode(ids[:-1] if ids and ids[-1] in engine.stop_ids else ids)
