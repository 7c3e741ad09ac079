"""The engine of a run: a loaded model bound to a back end, or the stub, and how both are made."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.command.config import RunConfig
from clocher_runtime.command.model_choice import choose_model
from clocher_runtime.command.settings import SETTINGS
from clocher_runtime.command.stub import StubSession, StubTokenizer
from clocher_runtime.command.threads import choose_threads, not_acted_on, tune
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import ACTIVATIONS, Progress, choose, gpu
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.probes import Touch
from clocher_runtime.engine.sequences import Token
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.text.tokenizer import Tokenizer


class Generates(Protocol):
    """What a run needs of a session; see `Session`."""

    context: int
    kv_hits: int
    kv_misses: int

    def synchronize(self) -> None:
        """Wait until the device has done all steps."""

    def work_touch(self, bytes_per_token: int, stride: int) -> Touch | None:
        """Return a work-touch of weights on a device; None: they are the mapped files."""

    def warm(self) -> None:
        """Compile and load every kernel."""

    def close(self) -> None:
        """Release threads and buffers."""

    def check(self, prompt: Sequence[int]) -> None:
        """Raise UsageError unless a prompt can be generated from."""

    def step_logits(self, token: Token) -> np.ndarray:
        """Return the logits that a token of the last step was drawn from, [V] fp32."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Sampling | None = None,
        stop_ids: frozenset[int] | None = None,
        window: TimedWindow | None = None,
        after_token: Callable[[int], None] | None = None,
    ) -> Iterator[Token]:
        """Generate tokens for some prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Something that generates, and what the JSON line says about it.

    Attributes:
        tokenizer: None where the model has none.
        checkpoint: None for the stub.
        files: contents of the mapped weight files, u8 [size] each.
        stop_ids: ids that end a sequence.
        bytes_per_token: weight bytes that one token reads.
        gpu: name, driver, clocks and memory of the GPU; None on the CPU.
        hints_ignored: what the run asked for and this engine does not act on.
    """

    session: Generates
    tokenizer: Tokenizer | StubTokenizer | None
    checkpoint: Checkpoint | None
    device: str
    backend_reason: str
    isa: str
    model: str
    model_source: str
    precision: str
    act_prec: str
    kv_dtype: str
    threads: int
    files: tuple[np.ndarray, ...]
    stop_ids: frozenset[int]
    bytes_per_token: int
    gpu: Mapping[str, str | int] | None
    hints_ignored: tuple[str, ...]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion, without the token that ended it."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)


def load_engine(
    config: RunConfig, batch: int, progress: Progress, packing: Progress | None = None
) -> Engine:
    """Load the model of a run and compile what it needs.

    Args:
        config: the run.
        batch: sequences side by side.
        progress: called while kernels compile.
        packing: called while weights are packed, if they are many.

    Raises:
        ModelError: the model is missing, invalid or not supported.
        DeviceError: the device is not available.
        OutOfMemory: the model or its cache does not fit.
    """
    device, reason = choose(config.device)
    choice = choose_model(config)
    checkpoint, not_deduplicated = choice.open_for(config)
    if config.verify_weights:
        checkpoint.verify()
    model = load_model(checkpoint, config.precision)
    tokenizer = _tokenizer(config, checkpoint)
    threads = choose_threads(config)
    tuning = tune(config, threads)
    wanted = config.act_prec if config.act_prec in ACTIVATIONS[device] else None
    session = Session(
        model,
        backend=device,
        threads=threads,
        batch=batch,
        context=config.context,
        kv_dtype=config.kv_dtype,
        act_prec=wanted,
        tuning=tuning,
        pretranspose=config.pretranspose,
        progress=progress,
        packing=packing,
    )
    ignored = not_acted_on(config, session.acted_on)
    if config.act_prec not in (None, session.act_prec):
        ignored = (str(config.given["act_prec"]), *ignored)
    ignored += not_deduplicated
    return Engine(
        session=session,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        device=device,
        backend_reason=reason,
        isa=session.isa,
        model=choice.name,
        model_source=choice.source,
        precision=model.precision,
        act_prec=session.act_prec,
        kv_dtype=session.kv_dtype,
        threads=threads,
        files=tuple(file.bytes(0, file.nbytes) for file in checkpoint.files),
        stop_ids=frozenset() if config.ignore_eos else frozenset(model.spec.eos_ids),
        bytes_per_token=model.bytes_per_token,
        gpu=gpu() if device == "cuda" else None,
        hints_ignored=ignored,
    )


def load_stub(config: RunConfig, batch: int) -> Engine:
    """Return the stub. It acts on the prompt and on counts only; the rest is listed as ignored."""
    acted_on = {"stub", "prompt", "prompt_ids", "prompts_file", "max_new", "batch", "prefetch"}
    acted_on |= {"rounds", "warmup", "aggregate", "require_model", "outputs"}
    acted_on |= {"trace_ids", "trace_topk"}
    return Engine(
        session=StubSession(batch),
        tokenizer=StubTokenizer(),
        checkpoint=None,
        device="stub",
        backend_reason="asked for by --stub",
        isa="none",
        model="stub",
        model_source="--stub",
        precision="none",
        act_prec="none",
        kv_dtype="none",
        threads=1,
        files=(),
        stop_ids=frozenset(),
        bytes_per_token=0,
        gpu=None,
        hints_ignored=tuple(
            str(given)
            for name, given in config.given.items()
            if name not in acted_on and given.raw not in SETTINGS[name].idle
        ),
    )


def _tokenizer(config: RunConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Load the tokenizer. Prompts that are or may be token ids do without one."""
    source = checkpoint.tokenizer_source
    file = config.prompts_file
    may_be_ids = config.prompt_ids is not None or (file is not None and file.suffix == ".jsonl")
    if may_be_ids and isinstance(source, Path) and not os.path.exists(source):
        return None
    try:
        return Tokenizer(source, checkpoint.tokenizer_config)
    except ModelNotFound:
        raise ModelNotFound(
            f"{source!s}: no such file; a model without it takes --prompt-ids"
        ) from None
