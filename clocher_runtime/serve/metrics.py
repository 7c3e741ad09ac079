"""GET /metrics: vLLM's names with our prefix, step times. No label or value is request text."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clocher_runtime.speculation.draft import PRIORS

if TYPE_CHECKING:
    from clocher_runtime.serve.engine_process import EngineProcess

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_NEXT_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were computed.",
    "decode_tokens": "Generated tokens but the first of each text.",
    "prefix_cache_hits": "Tokens of prompts that were found.",
    "prefix_cache_queries": "Tokens of prompts that were looked up.",
    "num_preemptions": "Preempted sequences.",
    "decode_steps": "Steps that only decode.",
    "decode_step_seconds": "Strict time in them: kernels, not the server.",
    "prompt_steps": "Steps with tokens of prompts.",
    "prompt_step_seconds": "Strict time in them.",
    "diffusion_passes": "Forwards that denoise, of each text.",
    "diffusion_tokens": "Tokens that they made.",
    "spec_passes": "Forwards of sequences that only decode.",
}
"""Counters of the engine's `State` -> help text."""


class ServerMetrics(Collector):
    """Counts requests and times of an engine's server; `model` is the name for clients."""

    def __init__(self, model: str, engine: "EngineProcess") -> None:
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self._model, self._engine = model, engine
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(self)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name"]
            made = Histogram(f"clocher:{name}", about, labels, buckets=buckets, registry=registry)
            return made.labels(model)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"clocher:{name}", about, labels, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_S)
        self._next = histogram("inter_token_latency_seconds", "Between two tokens.", _NEXT_S)
        self._whole = histogram("e2e_request_latency_seconds", "Of whole sequences.", _FIRST_S)
        self._prompt = histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._made = histogram("request_generation_tokens", "Generated tokens.", _TOKENS)
        self._tokens = counter("generation_tokens", "Generated tokens.", "model_name").labels(model)
        self._ended = counter(
            "request_success", "Sequences by how they ended.", "model_name", "finished_reason"
        )
        self._responses = counter(
            "http_responses", "Responses by route and status.", "route", "status"
        )

    def token(self, seconds: float, is_first: bool) -> None:
        """Record the time to the first token of a sequence, or between two."""
        (self._first if is_first else self._next).observe(seconds)
        self._tokens.inc()

    def ended(self, how: str, seconds: float, prompt: int, made: int) -> None:
        """Record the end of a sequence."""
        self._ended.labels(self._model, how).inc()
        self._whole.observe(seconds)
        self._prompt.observe(prompt)
        self._made.observe(made)

    def response(self, route: str, status: int) -> None:
        """Count a response; `route` is the route's pattern, never the requested path."""
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        engine = self._engine
        state, ready = engine.state, engine.ready
        pages = ready.pages if ready else 0
        yield from self._all(
            GaugeMetricFamily,
            num_requests_running=("Running sequences.", state.running),
            num_requests_waiting=("Waiting sequences.", max(engine.sequences - state.running, 0)),
            kv_cache_usage_perc=(
                "Used share of the pages of the KV cache; 1 is all.",
                state.pages_used / pages if pages else 0.0,
            ),
            kv_cache_bytes=("Memory of the KV cache.", ready.kv_bytes if ready else 0),
            kv_cache_pages=("Pages of the KV cache.", pages),
            kv_cache_pages_used=("Pages that a sequence holds.", state.pages_used),
            kv_cache_pages_findable=("Pages that hold a prefix.", state.pages_cached),
            engine_up=(
                "1 while the engine answers.",
                float(engine.status == "ready" and not engine.is_stuck),
            ),
            engine_heartbeat_age_seconds=("Since it was last heard of.", engine.age_s),
        )
        found = {name: (about, state.counters.get(name, 0)) for name, about in _COUNTERS.items()}
        found["engine_restarts"] = ("Restarts of the engine.", engine.restarts)
        yield from self._all(CounterMetricFamily, **found)
        tokens = (
            ("num_draft_tokens", "Draft tokens that were verified."),
            ("num_accepted_tokens", "Draft tokens that were accepted."),
        )
        for place, (name, about) in enumerate(tokens):
            by_source = {source: state.drafted.get(source, (0, 0))[place] for source in PRIORS}
            yield self._by("source", f"spec_decode_{name}", about, by_source)
        decisions = ("sent", "no_draft", "not_worth_verifying")
        decided = {name: state.decisions.get(name, 0) for name in decisions}
        about = "Forwards that could verify a draft, by what was decided."
        yield self._by("reason", "spec_decisions", about, decided)

    def _all(self, family: type[Any], **values: tuple[str, float]) -> Iterator[Metric]:
        for name, (about, value) in values.items():
            found = family(f"clocher:{name}", about, labels=["model_name"])
            found.add_metric([self._model], value)
            yield found

    def _by(self, label: str, name: str, about: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"clocher:{name}", about, labels=["model_name", label])
        for value in values:
            family.add_metric([self._model, value], values[value])
        return family
