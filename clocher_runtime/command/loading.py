"""Which model a configuration names; from it to a loaded model, and to one bound to a back end.

A model is a directory, a GGUF file or a cached Hub repository. Nothing is downloaded.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_kernels.formats import Ternary
from clocher_kernels.ops.rewrite import takes_int8
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.locate import DEFAULT, EMBEDDED, embedded_model, locate
from clocher_runtime.config.engine import NUMERICS, EngineConfig
from clocher_runtime.config.values import Given, every
from clocher_runtime.disk.files import read_ahead
from clocher_runtime.engine.arguments import sampling_defaults
from clocher_runtime.engine.backends import BACK_ENDS, Progress, choose, fetch_ahead, hand_on
from clocher_runtime.engine.footprint import sizes_of
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import read_cpus, usable_threads
from clocher_runtime.models.inventory import EMBED, HEAD
from clocher_runtime.models.spec import ModelSpec
from clocher_runtime.speculation.speculator import WITH_DRAFT_MODEL
from clocher_runtime.text.tokenizer import TextStream, Tokenizer

DEDUP_INDEX = "model.dedup.json"
_STUB_ACTS_ON = {"stub", "prompt", "prompt_ids", "prompts_file", "max_new", "batch", "prefetch"}
_STUB_ACTS_ON |= {"rounds", "warmup", "aggregate", "require_model", "outputs"}
_STUB_ACTS_ON |= {"trace_ids", "trace_topk", "json", "config"}
_OR_TEXT = "; a text goes behind --prompt (`--prompt TEXT`), or through a pipe"
_CALIBRATION_CHARS = 1 << 16
_SMALL_CACHE = 4 << 20  # bytes of the keys of a layer
_SETTINGS_OF: Mapping[str, Set[str]] = {
    "placement": {"affinity", "use_affinity", "numa_policy"},
    "hot_replicate": {"hot_replicate", "hot_repl_limit_mb"},
    **{name: {name} for name in ("pretranspose", "prefetch_distance", "stream_block_bytes")},
}
"""What a session may act on -> its settings."""
_ON_GPU = frozenset({"fast_batch"})
_NOT_ON: Mapping[str, Set[str]] = {"cuda": {"isa"}, "cpu": _ON_GPU, "reference": _ON_GPU}
"""Back end -> settings of another one."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model, not opened yet.

    `source`: the flag or variable that chose it, "current directory", "default" or "embedded".
    `path`: directory, GGUF file, or metadata file of an IEBIN pair, whose data file is `data`.
    """

    name: str
    source: str
    path: Path
    data: Path | None = None

    def open_for(self, config: EngineConfig) -> tuple[Checkpoint, Set[str]]:
        """Open it, with what is set: deduplicated weights, LoRA, a chat template.

        Returns also the settings without effect. Raises ModelError, UsageError.
        """
        directory: Path | None = self.path if self.data is None else self.path.parent
        if config.model_bin is not None or (self.data and self.path.name != JSON_NAME):
            directory = None
        asked = config.dedup or any(name.startswith("dedup") for name in config.given)
        checkpoint, ignored = None, frozenset[str]()
        if asked or (directory is not None and os.path.isfile(directory / DEDUP_INDEX)):
            from clocher_runtime.command.dedup_weights import open_weights

            checkpoint, ignored = open_weights(config, directory)
        if checkpoint is None and self.data is not None:
            from clocher_runtime.checkpoints.q4 import open_index

            checkpoint = open_index(self.path, self.data)
        checkpoint = checkpoint or open_checkpoint(self.path)
        if config.chat_template is not None:
            from clocher_runtime.text.chat_template import chosen_template

            how = config.given.get("chat_template", Given("chat_template", config.chat_template))
            template = {"chat_template": chosen_template(config.chat_template, how.source)}
            settings = {**checkpoint.tokenizer_config, **template}
            checkpoint = replace(checkpoint, tokenizer_config=settings)
        if (merged := adapters_of(config).get("")) is None:
            return checkpoint, ignored
        from clocher_runtime.checkpoints.hf.lora import with_lora

        return with_lora(checkpoint, merged), ignored


def adapters_of(config: EngineConfig) -> dict[str, Path]:
    """Return the directories of LoRA adapters by name, "" for one to merge; raises ModelError."""
    source = config.given["lora"].source if "lora" in config.given else "--lora"
    return {name: locate(path, source, "", "adapter") for name, path in (config.lora or {}).items()}


def choose_model(config: EngineConfig, cwd: Path | None = None) -> ModelChoice:
    """Return the model of a run; raises ModelNotFound.

    In order: `--model-json` and `--model-bin`; `--model-dir`; an IEBIN pair in the current
    directory; the embedded model (not with IE_REQUIRE_MODEL=1). The unnamed file of a pair has its
    usual name, in the model directory if given, else beside the other file.
    """
    source, raw = config.given.get("model_dir", ("", str(config.model_dir)))
    source = "default" if raw == DEFAULT else source
    is_flag = source == "--model-dir"  # or given by its place
    hint = _OR_TEXT if is_flag and hasattr(config, "prompt") else ""
    model_dir = config.model_dir and locate(raw, "" if is_flag else source, hint)
    named = config.model_json or config.model_bin
    if named is not None:
        directory = model_dir or named.parent
        json = config.model_json or directory / JSON_NAME
        data = config.model_bin or directory / BIN_NAME
        source = "--model-json" if config.model_json else "--model-bin"
        return ModelChoice(str(json), source, json, data)
    if model_dir is not None:
        return ModelChoice(str(config.model_dir), source, model_dir)
    if os.path.isfile((cwd or Path()) / JSON_NAME):
        cwd = cwd or Path.cwd()
        return ModelChoice(str(cwd), "current directory", cwd)
    if config.require_model:
        raise ModelNotFound(
            f"IE_REQUIRE_MODEL=1, but no model is named and the current directory "
            f"has no {JSON_NAME}; "
            "give --model-dir, or unset IE_REQUIRE_MODEL to use the default model"
        )
    return ModelChoice(EMBEDDED, "embedded", embedded_model())


def converses(path: Path, template: object) -> bool:
    """Return whether a model has a chat template; that of the embedded model is for tests."""
    return bool(template) and not path.samefile(embedded_model())


class StubTokenizer:
    """The stub's tokenizer: prompts are UTF-8 bytes, ids are written as numbers."""

    def encode(self, text: str, *, room: int | None = None) -> list[int]:
        """Return the UTF-8 bytes; raises UsageError: invalid Unicode, or longer than `room`."""
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
        """Return an incremental decoder."""
        return TextStream(self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loaded model, not bound to a back end yet.

    `reason` says why this back end; `calibration`: token ids for activation thresholds; `ignored`:
    settings without effect.
    """

    config: EngineConfig
    reason: str
    name: str
    source: str
    model: Model
    tokenizer: Tokenizer | StubTokenizer | None
    draft: Model | None = None
    calibration: list[int] | None = None
    ignored: Set[str] = frozenset()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return frozenset() if self.config.ignore_eos else frozenset(self.model.spec.eos_ids)

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """See `defaults_of`."""
        return defaults_of(self.config, self.model.checkpoint)

    def session(self, **tell: Progress | None) -> Session:
        """Return a `Session` of it; `tell`: its arguments `progress` and `packing`."""
        draft, calibration = self.draft, self.calibration
        return Session(self.model, self.config, draft=draft, calibration=calibration, **tell)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with its warm session; `hints_ignored`: settings without effect."""

    loaded: Loaded
    session: Session
    hints_ignored: tuple[str, ...]

    @property
    def files(self) -> tuple[np.ndarray, ...]:
        """Mapped weight files, u8 [size] each."""
        return tuple(file.bytes(0, file.nbytes) for file in self.loaded.model.checkpoint.files)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without its stop token."""
        tokenizer, stop_ids = self.loaded.tokenizer, self.loaded.stop_ids
        if tokenizer is None:
            return ""
        return tokenizer.decode(ids[:-1] if ids and ids[-1] in stop_ids else ids)


def load_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    packing: Progress | None = None,
    *,
    needs_text: bool = True,
) -> Engine:
    """Load and warm up a model; raises ModelError, DeviceError, OutOfMemory, UsageError."""
    loaded = load(config, needs_text=needs_text)
    session = loaded.session(progress=progress, packing=packing)
    try:
        session.warm()
    except BaseException:
        session.close()
        raise
    ignored = without_effect(session.acted_on) | loaded.ignored
    if loaded.config.act_prec not in (None, session.act_prec):
        ignored |= {"act_prec"}
    return Engine(loaded, session, config.unmet(ignored))


def numerics(session: Session) -> dict[str, str]:
    """Return the storage of weights, KV cache and activations of a session."""
    model = session.model
    cache = session.sizes.cache_dtype if model.spec.windows else "none"  # no layers, no cache
    precision, kv = NUMERICS
    return {precision: model.precision, "act_prec": session.act_prec, kv: cache}


def load(config: EngineConfig, *, needs_text: bool = True) -> Loaded:
    """Load a model; arguments and errors as `load_engine`."""
    if config.stub:
        return _stub(config)
    hand_on(config.isa)
    backend, reason = "reference", "asked for"
    if config.backend != "reference":
        backend, reason = choose(config.device)
    config = replace(config, backend=backend)
    choice = choose_model(config)
    checkpoint, not_deduplicated = choice.open_for(config)
    read_ahead([file.path for file in checkpoint.files])
    if config.verify_weights:
        checkpoint.verify()
    model = load_model(checkpoint, config.precision)
    if named := {name: path for name, path in adapters_of(config).items() if name}:
        from clocher_runtime.checkpoints.hf.lora import Adapters

        adapters = Adapters(checkpoint, model.spec, named)
        nbytes = model.bytes_per_token + adapters.nbytes
        model = replace(model, adapters=adapters, bytes_per_token=nbytes)
    fetch_ahead(_packed_later(config, checkpoint, model.spec))
    draft = None
    if config.draft_model is not None and config.speculate in WITH_DRAFT_MODEL:
        from clocher_runtime.text.pairing import load_draft

        how = config.given.get("draft_model", Given("--draft-model", str(config.draft_model)))
        draft = load_draft(locate(how.raw, how.source), model)
    known = config.act_prec in BACK_ENDS[backend].activations
    return Loaded(
        config=replace(
            config, threads=usable_threads(config), act_prec=config.act_prec if known else None
        ),
        reason=reason,
        name=choice.name,
        source=choice.source,
        model=model,
        tokenizer=_tokenizer(checkpoint, needs_text),
        draft=draft,
        calibration=_calibration(config, checkpoint),
        ignored=not_deduplicated
        | ({"precision"} if not model.obeyed else set())
        | _NOT_ON.get(backend, set())
        | ({"draft_model"} if draft is None else set()),
    )


def defaults_of(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, float]:
    """Return a model's sampling defaults, {} with `--generation-config none`."""
    return sampling_defaults(checkpoint) if config.generation_config == "auto" else {}


def _calibration(config: EngineConfig, checkpoint: Checkpoint) -> list[int] | None:
    path = config.act_calibration
    if path is None:
        return None
    if config.act_sparsity is None:
        raise UsageError("--act-calibration without --act-sparsity: give both, or neither")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_CALIBRATION_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "not UTF-8")
        raise UsageError(f"--act-calibration {path}: {why}; give a text in UTF-8") from None
    return list(Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config).encode(text))


def _packed_later(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> int:
    """Return the bytes of what is packed, and about those of a small KV cache."""
    usual = config.act_prec in (None, "int8") and config.pretranspose in (None, "all")
    if config.backend != "cpu" or not usual or len({cpu.socket for cpu in read_cpus()}) > 1:
        return 0
    looked_up = {EMBED} if HEAD in checkpoint.names else set()
    cache = 2 * sizes_of(spec, config).context * spec.num_kv_heads * spec.head_dim
    caches = 2 * len(spec.windows) if cache <= _SMALL_CACHE else 0
    return caches * cache + sum(
        tensor.nbytes
        for name, tensor in checkpoint.tensors.items()
        if (takes_int8(tensor.format) or isinstance(tensor.format, Ternary))
        and name not in looked_up
    )


def _stub(config: EngineConfig) -> Loaded:
    from clocher_runtime.engine.stub import CONTEXT, stub_model

    return Loaded(
        config=EngineConfig(
            backend="stub",
            threads=1,
            context=CONTEXT,
            batch=config.batch,
            speculate="off",
            itl_ms=config.itl_ms,
            stub=True,
            given=config.given,
        ),
        reason="asked for by --stub",
        name="stub",
        source="--stub",
        model=stub_model(),
        tokenizer=StubTokenizer(),
        ignored={name for name, _ in every(type(config))} - _STUB_ACTS_ON,
    )


def _tokenizer(checkpoint: Checkpoint, needs_text: bool) -> Tokenizer | None:
    source = checkpoint.tokenizer_source
    if not needs_text and isinstance(source, Path) and not os.path.exists(source):
        return None
    try:
        made = Tokenizer(source, checkpoint.tokenizer_config)
    except ModelNotFound:
        raise ModelNotFound(
            f"{source!s}: no such file; a model without it takes --prompt-ids"
        ) from None
    del source
    # Making it took up to 0.3 GB, which the C library would keep; only glibc can give it back.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return made


def without_effect(acted_on: Set[str]) -> Set[str]:
    """Return the settings of memory and placement that a session does not act on."""
    return set().union(*(names for what, names in _SETTINGS_OF.items() if what not in acted_on))
