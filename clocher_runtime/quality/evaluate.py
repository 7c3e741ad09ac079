"""One model through the gate: weights, text scores, size and speed; the table of several."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import log10, prod
from statistics import median
from typing import NamedTuple

from clocher_kernels.errors import ModelError
from clocher_kernels.formats import parse_format
from clocher_kernels.guards import require
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.config.engine import WEIGHTS_ALONE, EngineConfig
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.spec import EMBED, HEAD
from clocher_runtime.quality.compare import Documents, Summary, compare, summarise
from clocher_runtime.quality.gate import (
    GateResult,
    choose_limits,
    override,
    tensor_checks,
    text_checks,
)
from clocher_runtime.quality.speed import Case, Runner, session_for
from clocher_runtime.quality.statistics import Estimate
from clocher_runtime.quality.tensor_error import TensorError, measure, same

Progress = Callable[[str, int, int], None]
"""Gets what is done, how much of it, and of how much."""

_CHUNK = 256
_DECODED = 64
_ROUNDS = 3


def scoring(model: Model, window: int, config: EngineConfig) -> Session:
    """Return a session with logits of every token. Raises UsageError, OutOfMemory."""
    nbytes = 2 * 4 * window * model.spec.vocab_size
    require(nbytes, "two windows of logits need", "lower --window")
    chunk = min(window, _CHUNK)
    return Session(model, replace(config, context=window, chunk=chunk, all_logits=True))


class Record(NamedTuple):
    """A manifest's record of a tensor: see `TensorError`."""

    method: str = "rtn"
    out_nmse: float | None = None
    out_nmse_rtn: float | None = None


class Size:
    """Size of a model as stored: elements and bytes of all tensors."""

    def __init__(self, model: Model) -> None:
        stored = model.checkpoint.tensors
        self.parameters = sum(prod(weight.shape) for weight in model.weights.values())
        # Vectors are fp32 in memory, whatever the file has.
        self.nbytes = sum(
            weight.nbytes if isinstance(weight, QuantTensor) else stored[name].nbytes
            for name, weight in model.weights.items()
        )

    @property
    def bpw(self) -> float:
        """Return bits per parameter, scales included."""
        return 8 * self.nbytes / self.parameters


class Evaluation(NamedTuple):
    """The results of one model."""

    gate: GateResult
    summary: Summary
    errors: tuple[TensorError, ...]
    size: Size


def evaluate(
    reference: Model,
    model: Model,
    documents: Documents,
    *,
    config: EngineConfig = WEIGHTS_ALONE,
    limits_class: str | None = None,
    given: Mapping[str, float | int | None] = {},
    records: Mapping[str, Record] = {},
    progress: Progress = lambda *_: None,
) -> Evaluation:
    """Judge a model against the float model that it was made from.

    The reference has an f32 cache and fp32 activations. `limits_class`: a key of `gate.LIMITS`;
    None: by the formats that differ. `given` replaces fields of its `Limits`; `records` are a
    manifest's. Raises ModelError, UsageError, OutOfMemory.
    """
    check_alike(reference, model)
    errors = weight_errors(reference, model, records, progress)
    exact = config.exact()
    settings = ["kv"] * (replace(config, act_prec=exact.act_prec) != exact)
    settings += ["int8"] * (config.act_prec in (None, "int8"))
    formats = [parse_format(error.format) for error in errors]
    name, limits = choose_limits(formats, settings, limits_class)
    limits = override(limits, **given)
    with (
        closing(scoring(model, documents.window, config)) as judged,
        closing(scoring(reference, documents.window, exact)) as own,
    ):
        compared = compare(
            own.logits, judged.logits, documents, lambda *done: progress("windows", *done)
        )
    summary = summarise(compared)
    checks = tensor_checks(errors, limits.min_cosine) + text_checks(summary, limits)
    return Evaluation(GateResult(name, limits, tuple(checks)), summary, errors, Size(model))


def check_alike(reference: Model, model: Model) -> None:
    """Raise ModelError if two models differ in tensors, shapes or vocabularies."""
    shapes, others = _shapes(reference), _shapes(model)
    for name in sorted({*shapes, *others}):
        if shapes.get(name) != others.get(name):
            raise ModelError(
                f"tensor {name} is {others.get(name, 'absent')} in the model, "
                f"{shapes.get(name, 'absent')} in the reference; the two are not the same model"
            )


def _shapes(model: Model) -> dict[str, list[int]]:
    found = {name: list(tensor.shape) for name, tensor in model.weights.items()}
    return found | ({HEAD: found[EMBED]} if model.spec.tied else {})


def weight_errors(
    reference: Model,
    model: Model,
    records: Mapping[str, Record] = {},
    progress: Progress = lambda *_: None,
) -> tuple[TensorError, ...]:
    """Return the errors of all tensors that are stored differently.

    One matrix for the embeddings and head of the reference is like one of them.
    """
    errors = []
    for number, (name, tensor) in enumerate(model.weights.items(), start=1):
        originals = [reference.weights[name if name in reference.weights else EMBED]]
        if name == EMBED and model.spec.tied and not reference.spec.tied:
            originals.append(reference.weights[HEAD])
        if not any(same(original, tensor) for original in originals):
            method, nmse, nmse_rtn = records.get(name, Record())
            found = [measure(name, original, tensor, method) for original in originals]
            error = min(found, key=lambda each: each.rms_rel)
            errors.append(replace(error, out_nmse=nmse, out_nmse_rtn=nmse_rtn))
        progress("weights", number, len(model.weights))
    return tuple(errors)


def decode_speed(model: Model, prompt: list[int], config: EngineConfig) -> float:
    """Return the median decode tokens/s of three runs of 64 tokens, batch 1, without prefill."""
    case = Case(0, _DECODED, len(prompt))
    usual = EngineConfig(backend=config.backend, threads=config.threads, speculate="off")
    with closing(session_for(model, [case], usual)) as session:
        runner = Runner(session, prompt)
        return median(_DECODED * 1e9 / runner.run(case) for _ in range(_ROUNDS))


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the table; the reference's comparisons are None."""

    label: str
    bpw: float  # bits per parameter
    nbytes: int
    perplexity: float
    ppl_ratio: Estimate | None = None
    kld: Estimate | None = None  # mean KL divergence, nats
    same_top: Estimate | None = None  # share of tokens with the same top-1 token
    rms_dp: Estimate | None = None  # root mean square change of the true token's probability
    tokens_per_s: float | None = None  # of decoding; None if it was not measured
    verdict: str = ""  # of the gate


def table(rows: Sequence[Row]) -> str:
    """Return the rows as an aligned Markdown table; `±` is half the 95 % interval."""
    head = (
        *("model", "bpw", "GiB", "perplexity", "PPL ratio", "KLD, nats", "same top, %"),
        *("RMS Δp, %", "tok/s", "gate"),
    )
    cells = [
        (
            row.label.replace("|", "/"),
            f"{row.bpw:.3f}",
            f"{row.nbytes / 2**30:.4g}",
            f"{row.perplexity:.4g}",
            _spell(row.ppl_ratio),
            _spell(row.kld),
            _spell(row.same_top, 100),
            _spell(row.rms_dp, 100),
            "" if row.tokens_per_s is None else f"{row.tokens_per_s:.4g}",
            row.verdict,
        )
        for row in rows
    ]
    return markdown_table([head, *cells])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the head first, as an aligned Markdown table; the first column is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join([row[0].ljust(widths[0]), *rest])} |"

    return "\n".join(map(line, [rows[0], rule, *rows[1:]]))


def _spell(estimate: Estimate | None, scale: float = 1) -> str:
    if estimate is None:
        return ""
    value, half = scale * estimate.value, scale * (estimate.high - estimate.low) / 2
    if half == float("inf"):
        return f"{value:.4g} ±?"
    digits = 4 if half <= 0 else min(8, max(1, 1 - int(log10(half) // 1)))
    return f"{value:.{digits}f} ±{half:.{digits}f}"
