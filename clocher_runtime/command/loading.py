"""The engine of a run: a loaded model bound to a back end, or to the stub, and how it is made."""

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.command.model_choice import choose_model
from clocher_runtime.command.settings import SETTINGS, Given, RunConfig, unmet
from clocher_runtime.disk.read_ahead import read_ahead
from clocher_runtime.engine.backends import (
    BACK_ENDS,
    Progress,
    Tuning,
    choose,
    fetch_ahead,
    gpu,
    hand_on,
)
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.sampling_defaults import sampling_defaults
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.stub import CONTEXT, stub_model
from clocher_runtime.engine.topology import default_threads, in_order, read_cpus, usable_cpus
from clocher_runtime.models.inventory import EMBED, HEAD
from clocher_runtime.speculation.speculator import SHARING, WITH_DRAFT_MODEL
from clocher_runtime.text.pairing import load_draft
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

_STUB_ACTS_ON = {"stub", "prompt", "prompt_ids", "prompts_file", "max_new", "batch", "prefetch"}
_STUB_ACTS_ON |= {"rounds", "warmup", "aggregate", "require_model", "outputs"}
_STUB_ACTS_ON |= {"trace_ids", "trace_topk"}

_CALIBRATION_CHARS = 1 << 16
_PINNED = frozenset({"affinity", "use_affinity", "numa_policy"})
_REPLICATED = frozenset({"hot_replicate", "hot_repl_limit_mb"})
_MEMORY = frozenset({"pretranspose", "prefetch_distance", "stream_block_bytes"})
_NOT_ON: Mapping[str, Set[str]] = {"cpu": {"tile_table"}, "cuda": {"isa"}}
"""Device -> settings that are of the other one."""


class StubTokenizer:
    """The tokenizer of the stub: prompts are their UTF-8 bytes; ids are written out as numbers."""

    def encode(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the UTF-8 bytes of a text.

        Raises:
            UsageError: the text is not valid Unicode, or has more characters than `room`.
        """
        if room is not None and len(text) > room:
            raise UsageError(f"{len(text)} characters; at most {room} are taken: shorten it")
        try:
            return list(text.encode("utf-8"))
        except UnicodeError:
            raise UsageError("not valid Unicode text; give it in UTF-8") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids in angle brackets."""
        return "".join(f"<{token}>" for token in ids)

    def stream(self) -> TextStream:
        """Return a decoder that takes one id at a time."""
        return TextStream(self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Something that generates, and what the JSON line says about it.

    Attributes:
        tokenizer: None where the model has none.
        kv_cache_bytes: memory of the KV cache.
        files: contents of the mapped weight files, u8 [size] each.
        stop_ids: ids that end a sequence.
        bytes_per_token: weight bytes that one token reads.
        sampling_defaults: what the model says of drawing, where the run wants to know.
        gpu: name, driver, clocks and memory of the GPU; None on the CPU.
        hints_ignored: what the run asked for and this engine does not act on.
        draft_model: name of the model that guesses; None without one.
    """

    session: Session
    tokenizer: Tokenizer | StubTokenizer | None
    checkpoint: Checkpoint
    device: str
    backend_reason: str
    isa: str
    model: str
    model_source: str
    precision: str
    act_prec: str
    kv_dtype: str
    threads: int
    kv_cache_bytes: int
    files: tuple[np.ndarray, ...]
    stop_ids: frozenset[int]
    bytes_per_token: int
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    gpu: Mapping[str, str | int] | None
    hints_ignored: tuple[str, ...]
    draft_model: str | None = None

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without the token that ended it."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def load_engine(
    config: RunConfig,
    batch: int,
    progress: Progress,
    packing: Progress | None = None,
    **session: Any,
) -> Engine:
    """Load the model of a run and compile what it needs.

    Args:
        config: the run.
        batch: sequences side by side.
        progress: called while kernels compile.
        packing: called while weights are packed, if they are many.
        **session: further arguments of `Session`.

    Raises:
        ModelError: the model is missing, invalid or not supported.
        DeviceError: the device is not available.
        OutOfMemory: the model or its cache does not fit.
    """
    chosen = _stub(config) if config.stub else _model(config)
    model = chosen.model
    bound = Session(
        model,
        backend=chosen.device,
        batch=batch,
        progress=progress,
        packing=packing,
        **{**chosen.settings, **session},
    )
    ignored = not_acted_on(config.given, bound.acted_on) + chosen.ignored
    if config.act_prec not in (None, bound.act_prec):
        ignored = unmet(config.given, {"act_prec"}) + ignored
    return Engine(
        session=bound,
        tokenizer=chosen.tokenizer,
        checkpoint=model.checkpoint,
        device=chosen.device,
        backend_reason=chosen.reason,
        isa=bound.isa,
        model=chosen.name,
        model_source=chosen.source,
        draft_model=chosen.draft_model,
        precision=model.precision,
        act_prec=bound.act_prec,
        kv_dtype=bound.kv_dtype if model.spec.windows else "none",  # no layers, no cache
        threads=chosen.settings["threads"],
        kv_cache_bytes=bound.kv_cache_bytes,
        files=tuple(file.bytes(0, file.nbytes) for file in model.checkpoint.files),
        stop_ids=frozenset() if config.ignore_eos else frozenset(model.spec.eos_ids),
        bytes_per_token=model.bytes_per_token,
        sampling_defaults=defaults_of(config, model.checkpoint),
        gpu=gpu() if chosen.device == "cuda" else None,
        hints_ignored=tuple(how for how in map(str, config.given.values()) if how in ignored),
    )


def defaults_of(config: RunConfig, checkpoint: Checkpoint) -> dict[str, float]:
    """Return what a model says of drawing, {} with `--generation-config none`."""
    return sampling_defaults(checkpoint) if config.generation_config == "auto" else {}


def draft_of(config: RunConfig, model: Model) -> Model | None:
    """Load the draft model of a run; None without one, and where nobody would ask it.

    Raises:
        ModelError: it is missing, damaged or not supported, or its vocabulary is another one.
        UsageError: it is to be asked, and none is named.
    """
    if config.draft_model is None and config.speculate == "draft":
        raise UsageError("--speculate draft without a draft model: give --draft-model, or auto")
    if config.draft_model is None or config.speculate not in WITH_DRAFT_MODEL:
        return None
    how = config.given.get("draft_model", Given("--draft-model", str(config.draft_model)))
    return load_draft(locate(how.raw, how.source), model)


def calibration_of(config: RunConfig, checkpoint: Checkpoint) -> list[int] | None:
    """Return the tokens of the text that thresholds of activations are taken from, if one is given.

    Raises:
        UsageError: the text cannot be read, is not UTF-8, or no activations are to be dropped.
        ModelError: the model has no tokenizer.
    """
    if config.act_calibration is None:
        return None
    if config.act_sparsity is None:
        raise UsageError("--act-calibration without --act-sparsity: give both, or neither")
    return calibration_ids(config.act_calibration, checkpoint)


def calibration_ids(path: Path, checkpoint: Checkpoint) -> list[int]:
    """Return the tokens of the first characters of a text.

    Raises:
        UsageError: the text cannot be read, or is not UTF-8.
        ModelError: the model has no tokenizer.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CALIBRATION_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--act-calibration {path}: {error}; give a text in UTF-8") from error
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    return list(tokenizer.encode(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What is to be bound, and how.

    Attributes:
        reason: why it is this device.
        source: what named the model.
        settings: arguments of `Session`.
        ignored: what the run asked for and is not obeyed, whatever the session does.
        draft_model: its name; None without one.
    """

    device: str
    reason: str
    name: str
    source: str
    model: Model
    tokenizer: Tokenizer | StubTokenizer | None
    settings: Mapping[str, Any]
    ignored: tuple[str, ...]
    draft_model: str | None = None


def _model(config: RunConfig) -> _Chosen:
    """Load the model of a run."""
    hand_on(config.isa, config.tile_table)
    device, reason = choose(config.device)
    choice = choose_model(config)
    checkpoint, not_deduplicated = choice.open_for(config)
    read_ahead(checkpoint.data_files)
    fetch_ahead(_packed_later(config, device, checkpoint))
    if config.verify_weights:
        checkpoint.verify()
    model = load_model(checkpoint, config.precision)
    draft, shares = draft_of(config, model), config.speculate in SHARING
    file = config.prompts_file
    may_be_ids = config.prompt_ids is not None or (file is not None and file.suffix == ".jsonl")
    tokenizer = _tokenizer(checkpoint, may_be_ids)
    threads = choose_threads(config.threads, config.numa_policy)
    return _Chosen(
        device=device,
        reason=reason,
        name=choice.name,
        source=choice.source,
        model=model,
        tokenizer=tokenizer,
        settings={
            "threads": threads,
            "context": config.context,
            "kv_dtype": config.kv_dtype,
            "act_sparsity": config.act_sparsity,
            "act_calibration": calibration_of(config, checkpoint),
            "act_prec": config.act_prec
            if config.act_prec in BACK_ENDS[device].activations
            else None,
            "tuning": tuning_of(config, threads),
            "pretranspose": config.pretranspose,
            "speculate": config.speculate,
            "share_drafts": config.share_drafts and shares,
            "draft": draft,
            "diffusion": config.diffusion,
            "attn": config.attn,
            "tensor_parallel": config.tensor_parallel,
            "itl_ms": inf,  # nobody waits for a single token
        },
        ignored=not_deduplicated
        + unmet(config.given, _NOT_ON.get(device, ()))
        + unmet(config.given, {"draft_model"} if draft is None else ())
        + unmet(config.given, () if shares else {"share_drafts"}),
        draft_model=None if draft is None else str(config.draft_model),
    )


def _packed_later(config: RunConfig, device: str, checkpoint: Checkpoint) -> int:
    """Return about how many bytes of weights the CPU back end will pack, if it does so by itself.

    With several sockets, whoever fills the memory decides where it lies.
    """
    usual = config.act_prec in (None, "int8") and config.pretranspose in (None, "all")
    if device != "cpu" or not usual or len({cpu.socket for cpu in read_cpus()}) > 1:
        return 0
    looked_up = {EMBED} if HEAD in checkpoint.names else set()
    return sum(
        tensor.nbytes
        for name, tensor in checkpoint.tensors.items()
        if isinstance(tensor.format, Int4 | Int8 | Mxfp4 | Ternary | Ggml) and name not in looked_up
    )


def _stub(config: RunConfig) -> _Chosen:
    """Return the stub. It acts on the prompt and on counts only; the rest is listed as ignored."""
    return _Chosen(
        device="stub",
        reason="asked for by --stub",
        name="stub",
        source="--stub",
        model=stub_model(),
        tokenizer=StubTokenizer(),
        settings={"threads": 1, "context": CONTEXT},
        ignored=unmet(config.given, SETTINGS.keys() - _STUB_ACTS_ON),
    )


def _tokenizer(checkpoint: Checkpoint, may_be_ids: bool) -> Tokenizer | None:
    """Load the tokenizer. Prompts that are or may be token ids do without one."""
    source = checkpoint.tokenizer_source
    if may_be_ids and isinstance(source, Path) and not os.path.exists(source):
        return None
    try:
        return Tokenizer(source, checkpoint.tokenizer_config)
    except ModelNotFound:
        raise ModelNotFound(
            f"{source!s}: no such file; a model without it takes --prompt-ids"
        ) from None


def choose_threads(asked: int | None, policy: str) -> int:
    """Return the threads of a run, on the socket that its NUMA policy names if it names one.

    They are at most the usable CPUs. More would wait for each other at every barrier and cannot be
    faster; results do not depend on their number.

    Raises:
        UsageError: none of the usable CPUs is on that socket.
    """
    if asked is not None:
        return min(asked, len(usable_cpus()))
    if policy.startswith("socket:"):
        cpus = in_order(read_cpus(), policy=policy)
        return default_threads(cpus=frozenset(cpu.id for cpu in cpus))
    return default_threads()


def tuning_of(config: RunConfig, threads: int) -> Tuning:
    """Return the tuning of a run.

    Threads are pinned if IE_TP_USE_AFFINITY=1, if NUMA_POLICY says where to, or if each socket has
    weights of its own.

    Raises:
        UsageError: none of the usable CPUs is on the socket that NUMA_POLICY names.
    """
    every = read_cpus()
    sockets = {cpu.socket for cpu in every}
    copies = config.hot_replicate and len(sockets) > 1
    pinned = config.use_affinity or config.numa_policy != "auto" or copies
    cpus = in_order(every, config.affinity, config.numa_policy)[:threads] if pinned else ()
    ahead = config.prefetch_distance
    return Tuning(
        cpus=tuple(cpu.id for cpu in cpus),
        sockets=tuple(cpu.socket for cpu in cpus),
        prefetch_distance=ahead if isinstance(ahead, int) else None,
        stream_block_bytes=config.stream_block_bytes,
        hot_replicate=config.hot_replicate,
        hot_limit=config.hot_repl_limit_mb << 20,
    )


def not_acted_on(given: Mapping[str, Given], acted_on: Set[str]) -> tuple[str, ...]:
    """Return what a run asked for and did not get, as "NAME=value".

    Args:
        given: how each field was set.
        acted_on: what the executor acted on, by field of its hints.
    """
    met = set(acted_on & _MEMORY)
    met |= _PINNED if "placement" in acted_on else set()
    met |= _REPLICATED if "hot_replicate" in acted_on else set()
    return unmet(given, (_PINNED | _REPLICATED | _MEMORY) - met)
