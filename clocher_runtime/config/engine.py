"""`EngineConfig`: the only place for defaults, ranges, help lines and variables.

A hint is a setting that is accepted but not acted on.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Self

from clocher_kernels.errors import UsageError
from clocher_runtime.config.values import (
    ADAPTERS,
    ATTENTION,
    DIFFUSION,
    PATH,
    SOCKETS,
    SWITCH,
    Given,
    Setting,
    every,
    flag,
    integer,
    internal,
    number,
    one_of,
    refuse_unknown,
    text,
    variable,
)

_TEXT = text()
_model = partial(flag, "Model")
_generation = partial(flag, "Generation")
_run = partial(flag, "Run")
_cache = partial(flag, "Cache")
_hints = partial(flag, "Hints")
TOKENS = integer(1, 1 << 24)
COUNT = integer(0, 1 << 30)
BYTES = integer(0, 1 << 40)
PRECISIONS = (
    *("fp32", "bf16", "fp16", "int8w", "int4", "int4w"),
    *("fp8w", "fp8_b128w", "fp8_e5m2w", "mxfp4w", "ternaryw"),
)
KV_DTYPES = ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")
NUMERICS = ("precision", "kv_dtype")
_KV_DTYPE = one_of(*KV_DTYPES, also={"int8": "i8", "fp8": "e4m3", "fp16": "f16", "fp32": "f32"})
_PAGES = integer(1, (1 << 31) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved settings of a model. For None see each field's help. Raises UsageError.

    `given`: field -> what set it; `hints_ignored`: "source=value" of hints without effect.
    """

    command: ClassVar[str] = "load"
    hints: ClassVar[Mapping[str, Setting]] = {}
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = tuple(
        ("stub", name) for name in ("model_dir", "model_json", "model_bin")
    )

    model_dir: Path | None = _model(
        PATH, "directory of a model, GGUF file, or owner/name in the Hub's cache"
    )
    model_json: Path | None = _model(PATH, "model.ie.json of an IEBIN pair")
    model_bin: Path | None = _model(PATH, "model.ie.bin of an IEBIN pair")
    lora: Mapping[str, str] | None = _model(
        ADAPTERS,
        "LoRA adapter, a directory of peft, to add to the float weights; to serve, also NAME=PATH, "
        "once for each: requests whose model is NAME get it, beside the base",
    )
    draft_model: Path | None = _model(
        PATH,
        "draft model: a small model of the same vocabulary, named like --model-dir; used with "
        "--speculate auto or draft",
    )
    chat_template: str | None = _model(
        text("FILE|NAME"),
        "Jinja file of a chat template to use instead of the model's, or one of chatml, gemma, "
        "llama3, mistral",
        only=("chat", "serve"),
    )
    require_model: bool = variable(
        SWITCH,
        "1: exit 3 unless a model is named or lies in the current directory",
        "IE_REQUIRE_MODEL",
    )
    yes: bool = _model(
        SWITCH,
        "fetch a model of the Hub that is not on this machine without a question",
        only=("run", "chat", "serve"),
    )
    verify_weights: bool = _model(
        SWITCH, "read all weights first; check their hashes, where they have any, and their codes"
    )
    stub: bool = _model(SWITCH, "no model: token ids are a hash of the prompt", only=("run",))
    precision: str | None = _model(
        one_of(*PRECISIONS),
        "cast or quantise float weights at load (unset: as stored)",
        "IE_PRECISION",
        "PRECISION",
    )
    kv_dtype: str | None = _model(_KV_DTYPE, "storage of the KV cache (unset: f16, on a GPU bf16)")
    act_sparsity: str | None = _model(
        _TEXT,
        "lossy variant for ternary and int4 weights on a CPU: the share of small matmul inputs to "
        "drop (0.25), topk:F with the share of each token's to keep, threshold:T, or adaptive",
    )
    act_calibration: Path | None = _model(
        PATH, "text that the thresholds of --act-sparsity 0.25 are taken from"
    )
    context: int | None = _model(
        TOKENS, "longest sequence in tokens, prompt and output (unset: the model's, at most 4096)"
    )
    attn: str = _model(
        ATTENTION,
        "what attention reads of the KV cache; lossy: topk:N, threshold:T, window:S+W, dynamic:P",
        default="dense",
    )
    generation_config: str = _generation(
        one_of("auto", "none"),
        "auto: sampling defaults come from the model's generation_config.json",
        default="auto",
    )
    ignore_eos: bool = _generation(
        SWITCH, "continue after the end-of-sequence token", only=("run",)
    )
    device: str = _run(one_of("auto", "cpu", "cuda", "ze"), "where to run", default="auto")
    fast_batch: bool = _run(
        SWITCH,
        "on a GPU, multiply 5 to 32 tokens of a step on tensor cores (int4 in groups of 128 always "
        "is): a token's last bits then depend on how many others are in its step",
    )
    backend: str = internal(
        one_of("cpu", "cuda", "reference", "stub"),
        "back end chosen for `device`: see `backends.choose`",
        default="cpu",
    )
    isa: str | None = variable(
        one_of("amx", "avx512vnni", "avx512", "avxvnni", "avx2", "neon_dotprod", "generic"),
        "CPU instruction set (unset: the best of the host)",
        "CLOCHER_ISA",
    )
    threads: int | None = _run(
        integer(1, 1024), "CPU threads (unset: physical cores, within the CPU quota)"
    )
    config: Path | None = _run(
        PATH, "TOML file of settings by name; flags and variables are stronger"
    )
    batch: int = _run(
        integer(1, 1024), "sequences to generate side by side", default=1, only=("run", "serve")
    )
    kv_pages: int | None = _cache(
        _PAGES,
        "pages of 64 tokens that all sequences share (unset: --batch whole contexts)",
        only=("serve",),
    )
    itl_ms: float = _cache(
        number(1, inf),
        "chunked prefill: while sequences decode, a step takes no more of a prompt than ends in "
        "this time, in milliseconds",
        default=100.0,
        only=("serve",),
    )
    speculate: str = _run(
        one_of("auto", "off", "suffix", "draft"),
        "drafter, whose tokens one forward pass verifies; the text stays the same",
        default="auto",
        idle=("off",),
    )
    diffusion: str = _run(
        DIFFUSION,
        "how a block-diffusion model denoises: lossless, or a rule such as threshold:0.9",
        default="auto",
    )
    act_prec: str | None = _hints(
        one_of("int8", "fp8", "fp16", "bf16", "fp32"),
        "precision of activations in matmuls (unset: int8 for integer weights, else fp32; GPU: "
        "fp16)",
        "IE_ACT_PREC",
    )
    pretranspose: str | None = _hints(
        one_of("none", "woh", "wxh", "all"),
        "prepack weights: of the output head (woh), of the blocks (wxh), all or none (unset: all "
        "integer weights)",
    )
    affinity: str = variable(
        one_of("auto", "compact", "scatter"),
        "pinned threads: compact takes neighbouring cores and fills sockets, scatter one of each "
        "cache and socket in turn",
        "AFFINITY",
        default="auto",
    )
    use_affinity: bool = variable(SWITCH, "1: pin each thread to a CPU", "IE_TP_USE_AFFINITY")
    numa_policy: str = variable(
        SOCKETS,
        "pin threads: fill sockets, one of each in turn, or one socket only",
        "NUMA_POLICY",
        default="auto",
    )
    hot_replicate: bool = variable(
        SWITCH, "1: copies per socket of weights that every token reads", "IE_HOT_REPLICATE"
    )
    hot_repl_limit_mb: int = variable(
        COUNT, "cap of the copies of a socket in MiB; 0: none", "IE_HOT_REPL_LIMIT_MB", default=0
    )
    prefetch_distance: int | str = variable(
        integer(0, 1 << 40, "auto"),
        "bytes of weights to load ahead (auto: the kernel's)",
        "IE_PREFETCH_DISTANCE",
        default="auto",
    )
    stream_block_bytes: int | None = variable(
        BYTES,
        "stored bytes of float weights to decode at a time for many tokens",
        "IE_STREAM_BLOCK_BYTES",
    )
    dedup: bool | None = variable(
        SWITCH,
        "1: use deduplicated weights, 0: never (unset: if model.ie.bin is not there)",
        "IE_DEDUP",
        default=None,
        idle=("0",),
    )
    dedup_strict: bool = variable(
        SWITCH, "with IE_DEDUP=1: refuse a model without sound ones", "IE_DEDUP_STRICT"
    )
    dedup_policy: str = variable(
        one_of("off", "on_demand", "cache", "replicate_hot"),
        "decode a tensor when it is loaded; also keep it in files; also keep others in memory",
        "IE_DEDUP_POLICY",
        default="on_demand",
        idle=("off",),
    )
    dedup_cache_mb: int | None = variable(
        COUNT, "with cache: MiB of files (unset: 1024)", "IE_DEDUP_CACHE_MB"
    )
    dedup_hot_bytes: int = variable(
        BYTES,
        "with replicate_hot: bytes to copy into memory; 0: no limit",
        "IE_DEDUP_HOT_BYTES",
        default=0,
    )
    dedup_hot_list: str | None = variable(
        _TEXT,
        "with replicate_hot: names of tensors, commas between them, * and ? wild (unset: all)",
        "IE_DEDUP_HOT_LIST",
    )
    prefix_cache: bool = internal(SWITCH, "reuse the keys and values of shared prefixes")
    keep_mapped: bool = internal(
        SWITCH, "keep using the mapped weights when their files are changed or replaced"
    )
    chunk: int | None = internal(_PAGES, "tokens of a prefill step (unset: the back end's)")
    all_logits: bool = internal(SWITCH, "keep the logits of every token of a step, for scoring")
    score_rows: int = internal(
        integer(0, (1 << 31) - 1),
        "keep the logits of so many tokens of a step: scores slower, in less memory",
        default=0,
    )
    stamped: bool = internal(SWITCH, "write the time between the launches of a step")

    given: Mapping[str, Given] = field(default_factory=dict)
    hints_ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, setting in every(type(self)):
            value = getattr(self, name)
            if value is not self.__dataclass_fields__[name].default:
                object.__setattr__(self, name, setting.takes.check(name, value))
        if self.stub and self.require_model:
            raise UsageError("--stub runs without a model, but IE_REQUIRE_MODEL=1; drop one")

    def settled(self) -> Self:
        """Return the configuration of a command line. Raises UsageError."""
        if name := next(filter(None, self.lora or ()), ""):
            raise UsageError(
                f"--lora {name}=...: only clocher serve has adapters by name; give the path alone "
                f"(./{name}=... if it begins so)"
            )
        return self

    def unmet(self, names: Collection[str]) -> tuple[str, ...]:
        """Return what was given for settings without effect, as "source=value"."""
        settings = dict(every(type(self)))
        asked = ((name, how) for name, how in self.given.items() if name in names)
        return tuple(str(how) for name, how in asked if how.raw not in settings[name].idle)

    def exact(self) -> Self:
        """Return it with an f32 KV cache and fp32 activations: only the weights lose."""
        return replace(self, kv_dtype="f32", act_prec="fp32")


WEIGHTS_ALONE = EngineConfig(speculate="off").exact()
"""For measuring what the weights of a model lose."""


_HINTS = (
    ("IE_NT_LOADS", one_of("0", "1", "auto"), "non-temporal loads", ("0", "auto")),
    ("IE_NT_RATIO", integer(0, 100), "per cent of loads that are non-temporal", ("0",)),
    ("IE_NT_THRESHOLD_RATIO", number(0, 1e6), "working set / cache where they begin", ()),
    ("IE_L3_BYTES", BYTES, "cache budget of hot slices", ()),
    ("IE_REUSE_GUARD_WINDOWS", COUNT, "blocks to guard against eviction", ()),
)
HINTS: Mapping[str, Setting] = {
    env.lower().removeprefix("ie_"): Setting("Hints", takes, help, "", (env,), idle)
    for env, takes, help, idle in _HINTS
}
"""Name -> hint. They are variables of `clocher run`."""


def config_of(keywords: Mapping[str, Any], where: str) -> EngineConfig:
    """Return the configuration for keywords of the Python API. Raises UsageError."""
    known = {name for name, _ in every(EngineConfig)} - _NOT_KEYWORDS
    refuse_unknown(keywords, known, where)
    return EngineConfig(**keywords)


_NOT_KEYWORDS = {"backend", "stub", "require_model", "ignore_eos", "isa", "keep_mapped", "yes"}
