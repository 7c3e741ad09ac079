"""One model through the gate: weights, text scores, size and speed."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import prod
from statistics import median

from clocher_kernels.errors import ModelError, UsageError
from clocher_kernels.formats import parse_format
from clocher_kernels.guards import require
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import TimedWindow
from clocher_runtime.quality.compare import Documents, Summary, compare, summarise
from clocher_runtime.quality.gate import (
    GateResult,
    choose_limits,
    override,
    tensor_checks,
    text_checks,
)
from clocher_runtime.quality.tensor_error import TensorError, measure, same

Progress = Callable[[str, int, int], None]

WEIGHTS_ALONE = EngineConfig(kv_dtype="f32", act_prec="fp32", speculate="off")
"""Run settings under which only the weights differ from the reference."""

_CHUNK = 256
_DECODED = 64
_ROUNDS = 3


def scoring(model: Model, window: int, config: EngineConfig) -> Session:
    """Return a session with logits of every token. Raises UsageError, OutOfMemory."""
    nbytes = 2 * 4 * window * model.spec.vocab_size
    require(nbytes, "two windows of logits need", "lower --window")
    chunk = min(window, _CHUNK)
    return Session(model, replace(config, context=window, chunk=chunk, all_logits=True))


@dataclass(frozen=True, slots=True)
class Record:
    """A manifest's record of a tensor: see `TensorError`."""

    method: str = "rtn"
    out_nmse: float | None = None
    out_nmse_rtn: float | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a model: elements and bytes of all tensors."""

    parameters: int
    nbytes: int

    @property
    def bpw(self) -> float:
        """Return bits per parameter, scales included."""
        return 8 * self.nbytes / self.parameters


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one model."""

    gate: GateResult
    summary: Summary
    errors: tuple[TensorError, ...]
    size: Size


def size_of(model: Model) -> Size:
    """Return a model's stored size."""
    stored = model.checkpoint.tensors
    return Size(
        sum(prod(weight.shape) for weight in model.weights.values()),
        # Vectors are fp32 in memory, whatever the file has.
        sum(
            weight.nbytes if isinstance(weight, QuantTensor) else stored[name].nbytes
            for name, weight in model.weights.items()
        ),
    )


def evaluate(
    reference: Model,
    model: Model,
    documents: Documents,
    *,
    config: EngineConfig = WEIGHTS_ALONE,
    limits_class: str | None = None,
    given: Mapping[str, float | int | None] | None = None,
    records: Mapping[str, Record] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Judge a model against the float model that it was made from.

    The reference has an f32 cache and fp32 activations. `limits_class`: a key of `gate.LIMITS`;
    None: by the formats that differ. `given` replaces fields of its `Limits`; `records` are a
    manifest's. Raises ModelError, UsageError, OutOfMemory.
    """
    check_alike(reference, model)
    tell = progress or (lambda what, done, total: None)
    errors = weight_errors(reference, model, records, tell)
    settings = [
        *(["kv"] if config.kv_dtype != "f32" else []),
        *(["int8"] if config.act_prec in (None, "int8") else []),
    ]
    formats = [parse_format(error.format) for error in errors]
    name, limits = choose_limits(formats, settings, limits_class)
    limits = override(limits, **(given or {}))
    exact = replace(config, kv_dtype="f32", act_prec="fp32")
    with (
        closing(scoring(model, documents.window, config)) as judged,
        closing(scoring(reference, documents.window, exact)) as own,
    ):
        compared = compare(
            own.logits, judged.logits, documents, lambda *done: tell("windows", *done)
        )
    summary = summarise(compared)
    checks = tensor_checks(errors, limits.min_cosine) + text_checks(summary, limits)
    return Evaluation(GateResult(name, limits, tuple(checks)), summary, errors, size_of(model))


def check_alike(reference: Model, model: Model) -> None:
    """Raise ModelError if two models differ in tensors, shapes or vocabularies."""
    shapes = {name: list(tensor.shape) for name, tensor in reference.weights.items()}
    others = {name: list(tensor.shape) for name, tensor in model.weights.items()}
    for name in sorted({*shapes, *others}):
        if shapes.get(name) != others.get(name):
            raise ModelError(
                f"tensor {name} is {others.get(name, 'absent')} in the model, "
                f"{shapes.get(name, 'absent')} in the reference; the two are not the same model"
            )


def weight_errors(
    reference: Model,
    model: Model,
    records: Mapping[str, Record] | None = None,
    progress: Progress | None = None,
) -> tuple[TensorError, ...]:
    """Return the errors of all tensors that are stored differently."""
    errors = []
    for number, (name, tensor) in enumerate(model.weights.items(), start=1):
        if not same(reference.weights[name], tensor):
            record = (records or {}).get(name, Record())
            error = measure(name, reference.weights[name], tensor, record.method)
            errors.append(
                replace(error, out_nmse=record.out_nmse, out_nmse_rtn=record.out_nmse_rtn)
            )
        if progress is not None:
            progress("weights", number, len(model.weights))
    return tuple(errors)


def decode_speed(model: Model, prompt: list[int], config: EngineConfig) -> float:
    """Return the median decode tokens/s of three runs of 64 tokens, batch 1, without prefill."""
    usual = EngineConfig(
        backend=config.backend,
        threads=config.threads,
        context=min(model.spec.max_positions, len(prompt) + _DECODED),
        speculate="off",
    )
    with closing(Session(model, usual)) as session:
        session.warm()
        rates = []
        for _ in range(_ROUNDS):
            window = TimedWindow("decode", synchronize=session.synchronize)
            for _ in session.generate([prompt], _DECODED, stop_ids=frozenset(), window=window):
                pass
            spans = [span for span in window.spans if span.kind == "decode"]
            if not spans:
                raise UsageError("the model's context leaves no room to time decoding")
            rates.append(len(spans) * 1e9 / sum(span.ns for span in spans))
    return median(rates)
