"""The JSON line: its keys, their meaning and their derivation. docs/json-line.md describes it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import clocher_kernels
from clocher_runtime.disk.schema import finite
from clocher_runtime.exit_codes import exit_code

SCHEMA = "clocher.run/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTouchFields:
    """The work-touch: see `probes.WorkTouch`."""

    bytes_per_token: int
    stride: int
    bytes_touched: int
    bytes_read: int
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationFields:
    """What guessing came to: see `speculation.account`."""

    mode: str
    draft_model: str | None
    drafted: int
    accepted: int
    acceptance: float
    tokens_per_pass: float
    passes: int
    by_source: Mapping[str, Mapping[str, int]]
    gate: Mapping[str, int]
    cost_of_8: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    """What attention read of the KV cache: see `engine.attention_reads`."""

    mode: str
    selected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionFields:
    """How blocks were denoised: see `engine.diffusing`."""

    mode: str
    nfe: int
    tokens_per_nfe: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFields:
    """What was generated for one prompt."""

    token_ids: list[int]
    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """The line of a run that succeeded, in the order of its keys."""

    schema: str = SCHEMA
    status: str = "ok"
    version: str
    device: str
    backend_reason: str
    isa: str
    gpu: Mapping[str, str | int] | None
    model: str
    model_source: str
    mode: str
    precision: str
    act_prec: str
    kv_dtype: str
    act_sparsity: str | None
    threads: int
    numa_nodes: int
    context: int
    batch: int
    prompts: int
    prompts_failed: int
    prefetch: str
    rounds: int
    tokens_generated: int
    wall_time_s: float
    tps_true: float
    latency_p50_ms: float
    latency_p95_ms: float
    latency_p99_ms: float
    prefill_tokens: int
    prefill_s: float
    ttft_ms: float
    rss_peak_mb: float
    kv_cache_mb: float
    kv_hits: int
    kv_misses: int
    bytes_per_token: int
    forward_passes: int
    attention: AttentionFields
    diffusion: DiffusionFields
    speculation: SpeculationFields
    work_touch: WorkTouchFields
    bytes_touched: int
    coverage: float
    effective_gbps: float
    environment: list[str]
    generation_config: Mapping[str, float]
    hints_ignored: list[str]
    outputs: list[OutputFields]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLine:
    """The line of a run that failed, in the order of its keys."""

    schema: str = SCHEMA
    status: str = "error"
    version: str
    code: int
    type: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneLine:
    """The line of `--tune`, in the order of its keys."""

    schema: str = SCHEMA
    status: str = "tuned"
    version: str
    gpu: Mapping[str, str | int]
    model: str
    model_source: str
    precision: str
    weights: int
    faster: int
    table: str


def error_line(error: BaseException) -> ErrorLine:
    """Return the line for an exception."""
    return ErrorLine(
        version=clocher_version(),
        code=int(exit_code(error)),
        type=type(error).__name__,
        message=str(error) or type(error).__name__,
    )


def to_json(line: RunLine | TuneLine | ErrorLine) -> str:
    """Return a line as JSON text: ASCII only, without a line break, NaN and infinities as null."""
    return json.dumps(finite(asdict(line)), allow_nan=False)


def clocher_version() -> str:
    """Return the version of the installed distribution."""
    return clocher_kernels.__version__
