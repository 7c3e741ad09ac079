"""The one table of flags and environment variables.

A hint is a setting that is checked and accepted, and that this version does not act on. A hint
that asks for something else than what happens anyway is listed under `hints_ignored`. When a later
version acts on a hint, it becomes a field of `RunConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clocher_runtime.command.parsing import (
    Value,
    id_list,
    integer,
    number,
    one_of,
    path,
    socket_policy,
    switch,
    text,
)

Group = Literal["Model", "Prompt", "Generation", "Run", "Work-touch", "Hints"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting of a run is given.

    Attributes:
        group: heading that it is listed under.
        takes: what its flag and its variables accept.
        help: one phrase.
        flag: "--name", or "" without one. The flag of a setting that takes 0 or 1 takes no value.
        env: environment variables, the strongest first.
        idle: values of a hint, or of a setting that is not always acted on, that ask for nothing
            else than what happens anyway.
    """

    group: Group
    takes: Value
    help: str
    flag: str = ""
    env: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


def _set(
    group: Group, takes: Value, help: str, flag: str = "", env: tuple[str, ...] = ()
) -> Setting:
    return Setting(group, takes, help, flag, env)


def _soft(env: str, takes: Value, help: str, *idle: str) -> Setting:
    return Setting("Hints", takes, help, "", (env,), idle)


def _hint(env: str, takes: Value, help: str, *idle: str) -> Setting:
    return Setting("Hints", takes, help, "", (env,), idle)


_PATH, _TEXT, _SWITCH = path(), text(), switch()
_TOKENS = integer(1, 1 << 24)
_COUNT = integer(0, 1 << 30)
_BYTES = integer(0, 1 << 40)
_PRECISION = one_of("fp32", "bf16", "fp16", "int8w", "int4", "int4w")
_KV_DTYPE = one_of("f32", "bf16", "f16", "e4m3", "e5m2", "i8")
_ACT_PREC = one_of("int8", "fp8", "fp16", "bf16", "fp32")
_DEVICE = one_of("auto", "cpu", "cuda", "ze")
_ISA = one_of("avx512vnni", "avx2", "generic")
_PLACEMENT = one_of("auto", "compact", "scatter")
_LAYOUT = one_of("none", "woh", "wxh", "all")
_AHEAD = integer(0, 4096, "on", "off", "auto")
_DEDUP = one_of("off", "on_demand", "cache", "replicate_hot")

SETTINGS: Mapping[str, Setting] = {
    "model_dir": _set(
        "Model", _PATH, "directory of a model, or GGUF file", "--model-dir", ("MODEL_DIR",)
    ),
    "model_json": _set("Model", _PATH, "model.ie.json of an IEBIN pair", "--model-json"),
    "model_bin": _set("Model", _PATH, "model.ie.bin of an IEBIN pair", "--model-bin"),
    "require_model": _set(
        "Model",
        _SWITCH,
        "1: exit 3 unless a model is named or lies in the current directory",
        env=("IE_REQUIRE_MODEL",),
    ),
    "verify_weights": _set(
        "Model",
        _SWITCH,
        "read all weights first; check their hashes, where they have any, and their codes",
        "--verify-weights",
    ),
    "stub": _set("Model", _SWITCH, "no model: token ids are a hash of the prompt", "--stub"),
    "precision": _set(
        "Model",
        _PRECISION,
        "cast or quantise float weights at load (unset: as stored)",
        "--precision",
        ("IE_PRECISION", "PRECISION"),
    ),
    "kv_dtype": _set(
        "Model",
        _KV_DTYPE,
        "storage of the KV cache (unset: f16, on a GPU bf16)",
        "--kv-dtype",
    ),
    "context": _set(
        "Model",
        _TOKENS,
        "prompt and output tokens of a sequence (unset: the model's, at most 4096)",
        "--context",
    ),
    "prompt": _set("Prompt", _TEXT, "text to complete; - reads standard input", "--prompt"),
    "prompt_ids": _set("Prompt", id_list(), "token ids to complete", "--prompt-ids"),
    "prompts_file": _set(
        "Prompt",
        _PATH,
        'one prompt per line; *.jsonl: {"prompt": "..."} or {"ids": [...]} per line',
        "--prompts-file",
        ("PROMPTS",),
    ),
    "max_new": _set(
        "Generation",
        _TOKENS,
        "tokens to generate per prompt",
        "--max-new",
        ("MAX_NEW",),
    ),
    "temperature": _set(
        "Generation", number(0, 100), "0 takes the most likely token", "--temperature"
    ),
    "top_k": _set("Generation", _COUNT, "sample from the k most likely; 0: all", "--top-k"),
    "top_p": _set(
        "Generation",
        number(1e-6, 1),
        "sample from the most likely that sum to this probability",
        "--top-p",
    ),
    "seed": _set("Generation", integer(0, (1 << 64) - 1), "same seed, same tokens", "--seed"),
    "ignore_eos": _set(
        "Generation", _SWITCH, "go on after the end-of-sequence token", "--ignore-eos"
    ),
    "device": _set("Run", _DEVICE, "where to run", "--device"),
    "isa": _set(
        "Run", _ISA, "CPU instruction set (unset: the best of the host)", env=("CLOCHER_ISA",)
    ),
    "threads": _set(
        "Run",
        integer(1, 1024),
        "CPU threads (unset: physical cores, within the CPU quota)",
        "--threads",
        ("THREADS",),
    ),
    "tile_table": _set(
        "Run",
        _PATH,
        "JSON table of tiles that GPU kernels follow; --tune writes it",
        env=("CLOCHER_TILE_TABLE",),
    ),
    "tune": _set(
        "Run",
        _SWITCH,
        "generate nothing: time the tiles of GPU kernels on the model's weights, write a table",
        "--tune",
    ),
    "config": _set(
        "Run", _PATH, "TOML file of settings by name; flags and variables are stronger", "--config"
    ),
    "batch": _set(
        "Run",
        integer(1, 1024),
        "prompts to generate side by side",
        "--batch",
        ("BATCH",),
    ),
    "rounds": _set(
        "Run",
        integer(1, 1_000_000),
        "times to run every prompt",
        "--rounds",
        ("ROUNDS",),
    ),
    "warmup": _set(
        "Run",
        integer(0, 1 << 24),
        "tokens to generate before the timed window",
        "--warmup",
        ("WARMUP_TOKENS",),
    ),
    "prefetch": _set(
        "Run",
        _AHEAD,
        "tokenise ahead: auto only between batches, off never, on or N (batches) beside the model",
        "--prefetch",
        ("PREFETCH",),
    ),
    "aggregate": _set(
        "Run", _SWITCH, "report totals only: outputs stays empty in the JSON line", "--aggregate"
    ),
    "outputs": _set(
        "Run",
        _PATH,
        "write ids and text of every prompt to this file, JSONL",
        "--outputs",
    ),
    "trace_ids": _set(
        "Run",
        _PATH,
        "write prompt and generated ids of each prompt to this file, JSONL, to be verified",
        "--trace-ids",
    ),
    "trace_topk": _set(
        "Run",
        integer(1, 1000),
        "with --trace-ids: also the N largest logits of each step",
        "--trace-topk",
    ),
    "bytes_per_token": _set(
        "Work-touch",
        _BYTES,
        "bytes of the weight files to walk over per token; 0: none",
        env=("IE_BYTES_PER_TOKEN",),
    ),
    "stride_bytes": _set(
        "Work-touch",
        integer(1, 1 << 40),
        "distance of the bytes that the walk reads",
        env=("IE_STRIDE_BYTES",),
    ),
    "verify_touch": _set(
        "Work-touch", _SWITCH, "1: report the checksum of the walk", env=("IE_VERIFY_TOUCH",)
    ),
    "act_prec": _set(
        "Hints", _ACT_PREC, "precision of activations (unset: the model's)", env=("IE_ACT_PREC",)
    ),
    "pretranspose": _set(
        "Hints",
        _LAYOUT,
        "prepack weights: of the output head (woh), of the blocks (wxh), all or none (unset: all "
        "integer weights)",
        "--pretranspose",
        ("PRETRANSPOSE",),
    ),
    "affinity": _soft(
        "AFFINITY",
        _PLACEMENT,
        "pinned threads: compact takes neighbouring cores and fills sockets, scatter one of each "
        "cache and socket in turn",
        "auto",
    ),
    "use_affinity": _soft("IE_TP_USE_AFFINITY", _SWITCH, "1: pin each thread to a CPU", "0"),
    "numa_policy": _soft(
        "NUMA_POLICY",
        socket_policy(),
        "pin threads: fill sockets, one of each in turn, or one socket only",
        "auto",
    ),
    "hot_replicate": _soft(
        "IE_HOT_REPLICATE", _SWITCH, "1: copies per socket of weights that every token reads", "0"
    ),
    "hot_repl_limit_mb": _soft(
        "IE_HOT_REPL_LIMIT_MB", _COUNT, "cap of the copies of a socket in MiB; 0: none", "0"
    ),
    "prefetch_distance": _soft(
        "IE_PREFETCH_DISTANCE",
        integer(0, 1 << 40, "auto"),
        "bytes of weights to load ahead (auto: the kernel's)",
        "auto",
    ),
    "stream_block_bytes": _soft(
        "IE_STREAM_BLOCK_BYTES",
        _BYTES,
        "stored bytes of float weights to decode at a time for many tokens",
    ),
    "dedup": _soft(
        "IE_DEDUP",
        _SWITCH,
        "1: use deduplicated weights, 0: never (unset: if model.ie.bin is not there)",
        "0",
    ),
    "dedup_strict": _soft(
        "IE_DEDUP_STRICT", _SWITCH, "with IE_DEDUP=1: refuse a model without sound ones", "0"
    ),
    "dedup_policy": _soft(
        "IE_DEDUP_POLICY",
        _DEDUP,
        "decode a tensor when it is loaded; also keep it in files; also keep others in memory",
        "off",
    ),
    "dedup_cache_mb": _soft("IE_DEDUP_CACHE_MB", _COUNT, "with cache: MiB of files (unset: 1024)"),
    "dedup_hot_bytes": _soft(
        "IE_DEDUP_HOT_BYTES", _BYTES, "with replicate_hot: bytes to copy into memory; 0: no limit"
    ),
    "dedup_hot_list": _soft(
        "IE_DEDUP_HOT_LIST",
        _TEXT,
        "with replicate_hot: names of tensors, commas between them, * and ? wild (unset: all)",
    ),
}
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
