"""The one table of settings: a field of `RunConfig` is a flag, variables and a key of the file.

Everything else is made from its metadata: the parser, the help text, and what docs/cli.md must say.

A hint is a setting that is checked and accepted, and that this version does not act on. A hint
that asks for something else than what happens anyway is listed under `hints_ignored`. When a later
version acts on a hint, it becomes a field.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from clocher_runtime.command.parsing import (
    Value,
    attention,
    diffusion,
    id_list,
    integer,
    number,
    one_of,
    path,
    socket_policy,
    switch,
    text,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting of a run is given.

    Attributes:
        group: heading of the help text that its flag is listed under.
        takes: what its flag and its variables accept.
        help: one phrase.
        flag: "--name", or "" without one. The flag of a setting that takes 0 or 1 takes no value.
        env: environment variables, the strongest first. A flag has one with its own name: that of
            `--max-new` is CLOCHER_MAX_NEW. Names without a prefix are those that the CLI was
            promised to read; the others of that kind belong to the make targets (bench.variables).
        idle: values of a hint, or of a setting that is not always acted on, that ask for nothing
            else than what happens anyway.
    """

    group: str
    takes: Value
    help: str
    flag: str = ""
    env: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


class Given(NamedTuple):
    """How a field was set: the flag or variable, and the text it was given."""

    source: str
    raw: str

    def __str__(self) -> str:
        return f"{self.source}={self.raw}"

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return not isinstance(self, GivenInFile) and not self.source.startswith("-")


class GivenInFile(Given):
    """The same of a file: its source is the file and the key."""

    __slots__ = ()


def flag(group: str, takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field whose flag has its name."""
    return _field(Setting(group, takes, help, "--", env), **more)


def variable(takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field that has no flag."""
    return _field(Setting("", takes, help, "", env), **more)


def _field(setting: Setting, idle: tuple[str, ...] = (), **more: Any) -> Any:
    default = more.get("default", setting.takes.unset)
    return field(default=default, metadata={"setting": replace(setting, idle=idle)})


_PATH, _TEXT, _SWITCH = path(), text(), switch()
_TOKENS = integer(1, 1 << 24)
_COUNT = integer(0, 1 << 30)
_BYTES = integer(0, 1 << 40)
PRECISIONS = (
    "fp32",
    "bf16",
    "fp16",
    "int8w",
    "int4",
    "int4w",
    "fp8w",
    "fp8_b128w",
    "fp8_e5m2w",
    "mxfp4w",
    "ternaryw",
)
"""What float weights can be cast to or quantised as when a model is loaded."""
KV_DTYPES = ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")
"""How keys and values can be stored."""
_PRECISION, _KV_DTYPE = one_of(*PRECISIONS), one_of(*KV_DTYPES)
_ACT_PREC = one_of("int8", "fp8", "fp16", "bf16", "fp32")
_DEVICE = one_of("auto", "cpu", "cuda", "ze")
_ISA = one_of("avx512vnni", "avx512", "avxvnni", "avx2", "neon_i8mm", "neon_dotprod", "generic")
_PLACEMENT = one_of("auto", "compact", "scatter")
_SPECULATE = one_of("auto", "off", "suffix", "recycle", "draft")
_ATTN = attention()
_DIFFUSION = diffusion()
_LAYOUT = one_of("none", "woh", "wxh", "all")
_AHEAD = integer(0, 4096, "on", "off", "auto")
MIN_P, MIN_P_HELP = number(0, 1), "drop tokens less likely than this share of the likeliest"
PENALTY, PENALTY_HELP = number(0.01, 100), "above 1: tokens in the text become less likely"
_DEDUP = one_of("off", "on_demand", "cache", "replicate_hot")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A run, fully decided: every setting that it acts on. A None stands for what help says.

    Attributes:
        isa: None takes the best. It holds for the process (engine.backends.hand_on).
        tile_table: None leaves tiles to the shipped tables.
        config: the file whose settings are in here already.
        given: field -> how it was set; fields with their default are absent.
        hints_ignored: "source=value" of what was given and this version does not act on.
    """

    model_dir: Path | None = flag(
        "Model", _PATH, "directory of a model, GGUF file, or owner/name in the Hub's cache"
    )
    model_json: Path | None = flag("Model", _PATH, "model.ie.json of an IEBIN pair")
    model_bin: Path | None = flag("Model", _PATH, "model.ie.bin of an IEBIN pair")
    lora: Path | None = flag(
        "Model", _PATH, "LoRA adapter, a directory of peft, to add to the float weights"
    )
    draft_model: Path | None = flag(
        "Model",
        _PATH,
        "small model of the same vocabulary that guesses tokens, named like --model-dir; used with "
        "--speculate auto or draft",
    )
    require_model: bool = variable(
        _SWITCH,
        "1: exit 3 unless a model is named or lies in the current directory",
        "IE_REQUIRE_MODEL",
    )
    verify_weights: bool = flag(
        "Model",
        _SWITCH,
        "read all weights first; check their hashes, where they have any, and their codes",
    )
    stub: bool = flag("Model", _SWITCH, "no model: token ids are a hash of the prompt")
    precision: str | None = flag(
        "Model",
        _PRECISION,
        "cast or quantise float weights at load (unset: as stored)",
        "IE_PRECISION",
        "PRECISION",
    )
    kv_dtype: str | None = flag(
        "Model", _KV_DTYPE, "storage of the KV cache (unset: f16, on a GPU bf16)"
    )
    act_sparsity: str | None = flag(
        "Model",
        _TEXT,
        "lossy variant for int4 on a CPU: the share of small inputs of products to drop (0.25), "
        "topk:F with the share of each token's to keep, or adaptive",
    )
    act_calibration: Path | None = flag(
        "Model", _PATH, "text that the thresholds of --act-sparsity 0.25 are taken from"
    )
    context: int | None = flag(
        "Model",
        _TOKENS,
        "prompt and output tokens of a sequence (unset: the model's, at most 4096)",
    )

    attn: str = flag(
        "Model",
        _ATTN,
        "what attention reads of the KV cache; all but dense and auto are lossy, auto says whether "
        "they would pay",
        default="dense",
    )

    prompt: str | None = flag(
        "Prompt", _TEXT, "text to complete; - reads standard input, as a pipe without this flag is"
    )
    prompt_ids: tuple[int, ...] | None = flag("Prompt", id_list(), "token ids to complete")
    prompts_file: Path | None = flag(
        "Prompt",
        _PATH,
        'one prompt per line; *.jsonl: {"prompt": "..."} or {"ids": [...]} per line',
    )

    max_new: int = flag("Generation", _TOKENS, "tokens to generate per prompt", default=64)
    temperature: float = flag(
        "Generation", number(0, 100), "0 takes the most likely token", default=0.0
    )
    top_k: int = flag("Generation", _COUNT, "sample from the k most likely; 0: all", default=0)
    top_p: float = flag(
        "Generation",
        number(1e-6, 1),
        "sample from the most likely that sum to this probability",
        default=1.0,
    )
    min_p: float = flag("Generation", MIN_P, MIN_P_HELP, default=0.0)
    repetition_penalty: float = flag("Generation", PENALTY, PENALTY_HELP, default=1.0)
    seed: int = flag("Generation", integer(0, (1 << 64) - 1), "same seed, same tokens", default=0)
    generation_config: str = flag(
        "Generation",
        one_of("auto", "none"),
        "auto: what the model's generation_config.json says of drawing is the default",
        default="auto",
    )
    ignore_eos: bool = flag("Generation", _SWITCH, "go on after the end-of-sequence token")

    device: str = flag("Run", _DEVICE, "where to run", default="auto")
    isa: str | None = variable(
        _ISA, "CPU instruction set (unset: the best of the host)", "CLOCHER_ISA"
    )
    threads: int | None = flag(
        "Run", integer(1, 1024), "CPU threads (unset: physical cores, within the CPU quota)"
    )
    tensor_parallel: int = flag(
        "Run",
        integer(1, 64),
        "processes that share each step: of the CPU threads, or a GPU each",
        default=1,
    )
    tile_table: Path | None = variable(
        _PATH, "JSON table of tiles that GPU kernels follow; --tune writes it", "CLOCHER_TILE_TABLE"
    )
    tune: bool = flag(
        "Run",
        _SWITCH,
        "generate nothing: time the tiles of GPU kernels on the model's weights, write a table",
    )
    config: Path | None = flag(
        "Run", _PATH, "TOML file of settings by name; flags and variables are stronger"
    )
    batch: int = flag("Run", integer(1, 1024), "prompts to generate side by side", default=1)
    speculate: str = flag(
        "Run",
        _SPECULATE,
        "who guesses tokens, which one pass then verifies; the text stays the same",
        default="auto",
        idle=("auto", "off"),
    )
    diffusion: str = flag(
        "Run",
        _DIFFUSION,
        "how a model that denoises blocks does so: lossless, or a rule such as threshold:0.9",
        default="auto",
        idle=("auto",),
    )
    share_drafts: bool = flag(
        "Run",
        _SWITCH,
        "guess from finished answers to others too: how fast a text comes then tells users what "
        "stands in others' texts",
        idle=("0",),
    )
    rounds: int = flag("Run", integer(1, 1_000_000), "times to run every prompt", default=1)
    warmup: int = flag(
        "Run", integer(0, 1 << 24), "tokens to generate before the timed window", default=0
    )
    prefetch: int | str = flag(
        "Run",
        _AHEAD,
        "tokenise ahead: auto only between batches, off never, on or N (batches) beside the model",
        default="auto",
    )
    json: bool = flag(
        "Run", _SWITCH, "the line of JSON on standard output, also where that is a terminal"
    )
    aggregate: bool = flag(
        "Run", _SWITCH, "report totals only: outputs stays empty in the JSON line"
    )
    outputs: Path | None = flag(
        "Run", _PATH, "write ids and text of every prompt to this file, JSONL"
    )
    trace_ids: Path | None = flag(
        "Run",
        _PATH,
        "write prompt and generated ids of each prompt to this file, JSONL, to be verified",
    )
    trace_topk: int = flag(
        "Run",
        integer(1, 1000),
        "with --trace-ids: also the N largest logits of each step",
        default=0,
    )

    bytes_per_token: int = variable(
        _BYTES,
        "bytes of the weight files to walk over per token; 0: none",
        "IE_BYTES_PER_TOKEN",
        default=0,
    )
    stride_bytes: int = variable(
        integer(1, 1 << 40),
        "distance of the bytes that the walk reads",
        "IE_STRIDE_BYTES",
        default=256,
    )
    verify_touch: bool = variable(_SWITCH, "1: report the checksum of the walk", "IE_VERIFY_TOUCH")

    act_prec: str | None = flag(
        "Hints",
        _ACT_PREC,
        "precision of what products read (unset: int8 for integer weights, else fp32; GPU: fp16)",
        "IE_ACT_PREC",
    )
    pretranspose: str | None = flag(
        "Hints",
        _LAYOUT,
        "prepack weights: of the output head (woh), of the blocks (wxh), all or none (unset: all "
        "integer weights)",
    )
    affinity: str = variable(
        _PLACEMENT,
        "pinned threads: compact takes neighbouring cores and fills sockets, scatter one of each "
        "cache and socket in turn",
        "AFFINITY",
        default="auto",
        idle=("auto",),
    )
    use_affinity: bool = variable(
        _SWITCH, "1: pin each thread to a CPU", "IE_TP_USE_AFFINITY", idle=("0",)
    )
    numa_policy: str = variable(
        socket_policy(),
        "pin threads: fill sockets, one of each in turn, or one socket only",
        "NUMA_POLICY",
        default="auto",
        idle=("auto",),
    )
    hot_replicate: bool = variable(
        _SWITCH,
        "1: copies per socket of weights that every token reads",
        "IE_HOT_REPLICATE",
        idle=("0",),
    )
    hot_repl_limit_mb: int = variable(
        _COUNT,
        "cap of the copies of a socket in MiB; 0: none",
        "IE_HOT_REPL_LIMIT_MB",
        default=0,
        idle=("0",),
    )
    prefetch_distance: int | str = variable(
        integer(0, 1 << 40, "auto"),
        "bytes of weights to load ahead (auto: the kernel's)",
        "IE_PREFETCH_DISTANCE",
        default="auto",
        idle=("auto",),
    )
    stream_block_bytes: int | None = variable(
        _BYTES,
        "stored bytes of float weights to decode at a time for many tokens",
        "IE_STREAM_BLOCK_BYTES",
    )
    dedup: bool | None = variable(
        _SWITCH,
        "1: use deduplicated weights, 0: never (unset: if model.ie.bin is not there)",
        "IE_DEDUP",
        default=None,
        idle=("0",),
    )
    dedup_strict: bool = variable(
        _SWITCH,
        "with IE_DEDUP=1: refuse a model without sound ones",
        "IE_DEDUP_STRICT",
        idle=("0",),
    )
    dedup_policy: str = variable(
        _DEDUP,
        "decode a tensor when it is loaded; also keep it in files; also keep others in memory",
        "IE_DEDUP_POLICY",
        default="on_demand",
        idle=("off",),
    )
    dedup_cache_mb: int | None = variable(
        _COUNT, "with cache: MiB of files (unset: 1024)", "IE_DEDUP_CACHE_MB"
    )
    dedup_hot_bytes: int = variable(
        _BYTES,
        "with replicate_hot: bytes to copy into memory; 0: no limit",
        "IE_DEDUP_HOT_BYTES",
        default=0,
    )
    dedup_hot_list: str | None = variable(
        _TEXT,
        "with replicate_hot: names of tensors, commas between them, * and ? wild (unset: all)",
        "IE_DEDUP_HOT_LIST",
    )

    given: Mapping[str, Given] = field(default_factory=dict)
    hints_ignored: tuple[str, ...] = ()


def declared(config: type[Any]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of a dataclass whose fields were made by `flag` and `variable`."""
    for each in fields(config):
        if setting := each.metadata.get("setting"):
            yield each.name, _named(each.name, setting) if setting.flag else setting


def _named(name: str, setting: Setting) -> Setting:
    """Return a setting with the flag and the variable of its name."""
    env = dict.fromkeys((f"CLOCHER_{name.upper()}", *setting.env))
    return replace(setting, flag=f"--{name.replace('_', '-')}", env=tuple(env))


def _hint(env: str, takes: Value, help: str, *idle: str) -> Setting:
    return Setting("Hints", takes, help, "", (env,), idle)


SETTINGS: Mapping[str, Setting] = dict(declared(RunConfig))
"""Field of `RunConfig` -> how it is given."""

_HINTS = (
    _hint("IE_NT_LOADS", one_of("0", "1", "auto"), "non-temporal loads", "0", "auto"),
    _hint("IE_NT_RATIO", integer(0, 100), "per cent of loads that are non-temporal", "0"),
    _hint("IE_NT_THRESHOLD_RATIO", number(0, 1e6), "working set / cache where they begin"),
    _hint("IE_L3_BYTES", _BYTES, "cache budget of hot slices"),
    _hint("IE_REUSE_GUARD_WINDOWS", _COUNT, "blocks to guard against eviction"),
)

HINTS: Mapping[str, Setting] = {hint.env[0].lower().removeprefix("ie_"): hint for hint in _HINTS}
"""Name -> hint."""

ALL: Mapping[str, Setting] = {**SETTINGS, **HINTS}
"""Every flag and every environment variable of a run."""


def unmet(given: Mapping[str, Given], names: Collection[str]) -> tuple[str, ...]:
    """Return what was given of some settings as "source=value", but for what asks for nothing."""
    found = [(setting, given[n]) for n, setting in SETTINGS.items() if n in names and n in given]
    return tuple(str(how) for setting, how in found if how.raw not in setting.idle)
