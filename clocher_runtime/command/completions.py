"""A run's completions, their files, and the JSON line of its numbers."""

from collections.abc import Sequence
from contextlib import ExitStack
from math import isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from clocher_kernels import __version__
from clocher_kernels.errors import counted
from clocher_kernels.plan import Touch
from clocher_runtime.command.console import Console, Line, head
from clocher_runtime.command.loading import Engine, numerics
from clocher_runtime.config.commands import RunConfig, SamplingConfig
from clocher_runtime.disk.output_file import JsonlWriter
from clocher_runtime.engine import timing
from clocher_runtime.engine.arguments import NAMES, Sampling, taken
from clocher_runtime.engine.backends import gpu
from clocher_runtime.engine.timing import Reservoir, StepTotals
from clocher_runtime.engine.topology import numa_nodes, threads_of
from clocher_runtime.exit_codes import Interrupt, cause_of
from clocher_runtime.speculation.speculator import Account
from clocher_runtime.text.prompts import Prompt

if TYPE_CHECKING:
    from clocher_runtime.quality.verify import TopLogits

MAX_LISTED = 1000
"""Completions in `outputs` of the JSON line; `--outputs` writes all."""


class Completions(ExitStack):
    """The completions of the first round, in prompt order; a context manager that closes its files.

    `prompts` counts all, `failed` those with an error, `first_error` is the first of these.
    `listed` has up to `MAX_LISTED` completions, none with `--aggregate`. Raises UsageError if a
    file cannot be written.
    """

    def __init__(self, console: Console, config: RunConfig) -> None:
        super().__init__()
        self.prompts = self.failed = 0
        self.first_error = ""
        self.listed: list[dict[str, Any]] = []
        self.unfinished: list[list[int]] | None = None  # their ids so far
        self.console, self.config = console, config
        self._most = 0 if config.aggregate else MAX_LISTED
        self._fingerprint: str | None = None
        files = ((config.outputs, "--outputs"), (config.trace_ids, "--trace-ids"))
        self._outputs, self._traces = (
            self.enter_context(JsonlWriter(path, flag)) if path else None for path, flag in files
        )

    def begin(self, engine: Engine) -> None:
        """Take the engine that generates, once it is loaded."""
        self.engine, self.defaults = engine, from_model(self.config, engine)
        values: dict[str, Any] = {name: getattr(self.config, name) for name in NAMES}
        self.sampling = Sampling(seed=self.config.seed, **{**values, **self.defaults})
        if self._traces is not None and engine.loaded.model.checkpoint.files:
            from clocher_runtime.quality.verify import fingerprint

            self._fingerprint = fingerprint(engine.loaded.model.checkpoint)

    def add(
        self, prompt: Prompt, ids: Sequence[int], topk: Sequence["TopLogits"], show: bool
    ) -> None:
        """Add the completion of the next prompt; raises UsageError on a write error."""
        self.prompts += 1
        listed = len(self.listed) < self._most
        text = self.engine.text(ids) if listed or show or self._outputs is not None else ""
        if prompt.error is not None:
            self.failed += 1
            self.first_error = self.first_error or prompt.error
            if self.config.prompts_file is not None:  # a single prompt's error ends the run
                self.console.say(prompt.error)
        elif show:
            self.console.say(f"prompt {self.prompts}:")
            self.console.texts.write(text)
            self.console.texts.end_line()
        output = {"token_ids": list(ids), "text": text, "error": prompt.error}
        if listed:
            self.listed.append(output)
        if self._outputs is not None:
            self._outputs.write({"index": self.prompts - 1, **output})
        if self._traces is not None and prompt.error is None:
            self._traces.write(self._trace(prompt, ids, topk))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the files; hand what was generated to a signal that ends the run."""
        signal = cause_of(error) if error is not None else None
        if isinstance(signal, Interrupt) and self.unfinished is not None:
            text, room = self.engine.text, max(0, self._most - len(self.listed))
            left = [list(ids) for ids in self.unfinished[:room]]
            cut = [{"token_ids": i, "text": text(i), "error": "interrupted"} for i in left]
            signal.outputs = self.listed + cut
        for file in (self._outputs, self._traces):
            if error is not None and file is not None and file.lines:
                self.console.say(f"finished completions: {file.lines}, in {file.partial}")
        super().__exit__(kind, error, trace)

    def _trace(
        self, prompt: Prompt, ids: Sequence[int], topk: Sequence["TopLogits"]
    ) -> dict[str, Any]:
        from clocher_runtime.quality.verify import Trace, document

        engine = self.engine
        sampling: Any = {
            name: getattr(self.sampling, name) for name in ("temperature", "top_k", "top_p", "seed")
        }
        trace = Trace(
            version=__version__,
            model=engine.loaded.name,
            fingerprint=self._fingerprint,
            **numerics(engine.session),
            device=engine.loaded.config.backend,
            sampling=sampling,
            prompt=prompt.text,
            prompt_ids=tuple(prompt.ids),
            generated_ids=tuple(ids),
            topk=tuple(topk) if self.config.trace_topk else None,
        )
        return document(trace)


class Measured(NamedTuple):
    """Measurements of a run."""

    wall_ns: int  # the window, all spans of all rounds
    steps: StepTotals
    first_token_ns: Reservoir[int]  # per sequence, from the start of its group of prompts
    tokens: int  # generated in all rounds
    touch: Touch  # after the last token
    speculation: Account
    pages_read: float
    kv_hits: int
    kv_misses: int
    rss_peak_mib: float  # after the window


def from_model(config: SamplingConfig, engine: Engine) -> dict[str, float]:
    """Return the sampling settings taken from the model, because the run sets none."""
    said = {name: getattr(config, name) for name in NAMES if name in config.given}
    return taken(engine.loaded.sampling_defaults, said)


def run_line(measured: Measured, completions: Completions, batch: int) -> dict[str, Any]:
    """Return the JSON line of a run."""
    config, engine = completions.config, completions.engine
    session, loaded, speculation = engine.session, engine.loaded, measured.speculation
    device, bytes_per_token = loaded.config.backend, loaded.model.bytes_per_token
    wall_ns, steps, touch = measured.wall_ns, measured.steps, measured.touch
    latencies = timing.token_latencies_ms(steps.decode.values)
    file_bytes = sum(file.size for file in engine.files)
    bytes_touched = bytes_per_token * steps.forwards + touch.bytes_touched
    ignored = [*config.hints_ignored, *engine.hints_ignored]
    variables = [str(given) for given in config.given.values() if given.is_variable]
    return {
        **head("ok"),
        "device": device,
        "backend_reason": loaded.reason,
        "isa": session.isa,
        "gpu": gpu() if device == "cuda" else None,
        "model": loaded.name,
        "model_source": loaded.source,
        "mode": "stub" if config.stub else "strict" if config.require_model else "default",
        **numerics(session),
        "act_sparsity": session.config.act_sparsity,
        "threads": threads_of(loaded.config),
        "numa_nodes": numa_nodes(),
        "context": session.context,
        "batch": batch,
        "prompts": completions.prompts,
        "prompts_failed": completions.failed,
        "prefetch": str(config.prefetch),
        "rounds": config.rounds,
        "tokens_generated": measured.tokens,
        "wall_time_s": wall_ns / timing.NS_PER_S,
        "tps_true": timing.per_second(measured.tokens, wall_ns),
        **{f"latency_p{p}_ms": timing.percentile(latencies, p) for p in (50, 95, 99)},
        "prefill_tokens": steps.prefill_tokens,
        "prefill_s": steps.prefill_ns / timing.NS_PER_S,
        "ttft_ms": timing.percentile(measured.first_token_ns.values, 50) / timing.NS_PER_MS,
        "rss_peak_mb": measured.rss_peak_mib,
        "kv_cache_mb": session.kv_cache_bytes / (1 << 20),
        "kv_hits": measured.kv_hits,
        "kv_misses": measured.kv_misses,
        "bytes_per_token": bytes_per_token,
        "forward_passes": steps.forwards,
        "attention": {"mode": session.config.attn, "selected": measured.pages_read},
        "diffusion": {
            "mode": session.diffusion,
            "nfe": speculation.counts.forwards,
            "tokens_per_nfe": speculation.tokens_per_forward,
        },
        "speculation": _speculation(engine, speculation),
        "work_touch": {
            "bytes_per_token": touch.bytes_per_token,
            "stride": touch.stride,
            "bytes_touched": touch.bytes_touched,
            "bytes_read": touch.bytes_read,
            "checksum": touch.checksum if config.verify_touch else None,
        },
        "bytes_touched": bytes_touched,
        "coverage": bytes_touched / file_bytes if file_bytes else nan,
        "effective_gbps": timing.per_second(bytes_touched, wall_ns) / 1e9,
        "environment": [how for how in variables if how not in ignored],
        "generation_config": completions.defaults,
        "hints_ignored": ignored,
        "outputs": completions.listed,
    }


def _speculation(engine: Engine, speculation: Account) -> dict[str, Any]:
    counts, mode = speculation.counts, engine.session.speculate
    config = engine.loaded.config
    off = "the stub has no drafter" if config.stub else "switched off"
    off = off if engine.session.diffusion == "off" else "blocks are denoised instead"
    return {
        "mode": mode,
        "draft_model": None if engine.loaded.draft is None else str(config.draft_model),
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance": speculation.acceptance,
        "tokens_per_pass": speculation.tokens_per_forward,
        "passes": counts.forwards,
        "by_source": {
            source: {"drafted": drafted, "accepted": accepted}
            for source, (drafted, accepted) in counts.by_source.items()
        },
        "gate": counts.decisions,
        "cost_of_8": speculation.cost_of_8,
        "reason": off if mode == "off" else speculation.reason,
    }


def summary(line: Line) -> str:
    """Return a one-line summary for people."""
    per_pass, p50 = line["speculation"]["tokens_per_pass"], line["latency_p50_ms"]
    parts = [
        f"{counted(line['tokens_generated'], 'token')} in {line['wall_time_s']:.3f} s",
        f"{line['tps_true']:.1f} tok/s",
        *([f"{per_pass:.2f} tokens per forward"] if per_pass > 1 else []),
        f"first token {line['ttft_ms']:.1f} ms",
        "p50 -" if isnan(p50) else f"p50 {p50:.2f} ms",
        f"{line['bytes_per_token'] / 1e6:.2f} MB/token",
        f"{line['effective_gbps']:.2f} GB/s",
        f"peak {line['rss_peak_mb']:.0f} MiB",
        f"{line['model']} {line['precision']} on {line['device']}, threads: {line['threads']}",
        *([f"not acted on: {', '.join(line['hints_ignored'])}"] * bool(line["hints_ignored"])),
    ]
    return " | ".join(parts)
