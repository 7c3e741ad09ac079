"""The gate: a model passes if each number, or its 95 % interval, is within its limit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isfinite
from typing import Any, Literal

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format, Fp8, Int4, Int8, Mxfp4, Tcq, Ternary, parse_format
from clocher_kernels.formats.floats import Float
from clocher_runtime.disk.strict_json import finite
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.compare import DOCUMENT_TOKENS, Summary
from clocher_runtime.quality.statistics import FEWEST_DOCUMENTS, Estimate
from clocher_runtime.quality.tensor_error import TensorError, expected_rms

Verdict = Literal["pass", "fail", "undecided"]

MIN_TOKENS = 32_768
MIN_DOCUMENTS = 64
MAX_CLIPPED = 0.02
RMS_FACTOR = {"rtn": 1.3, "imx": 1.3, "gptq": 2.0}
"""Method -> largest error relative to that of rounding heavy-tailed weights."""
MAX_OUTPUT_FACTOR = 1.02
"""Largest layer output error of other methods, relative to rounding."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a class of models."""

    max_ppl_ratio: float  # perplexity over that of the reference
    max_kld: float  # mean KL divergence, nats
    min_same_top: float  # share of tokens with the same top-1 token
    max_rms_dp: float  # root mean square change of the true token's probability
    min_cosine: float | None = None  # of a tensor with the float one; None: by its format
    min_tokens: int = MIN_TOKENS  # scored tokens below which nothing passes
    min_documents: int = MIN_DOCUMENTS


LIMITS = {
    "float": Limits(1.001, 0.0005, 0.99, 0.005),
    "int8": Limits(1.002, 0.003, 0.97, 0.02),
    "kv": Limits(1.004, 0.005, 0.96, 0.02),
    "fp8": Limits(1.006, 0.01, 0.955, 0.025),
    "int4": Limits(1.03, 0.05, 0.915, 0.06),
    "int3": Limits(1.125, 0.2, 0.8, 0.12),  # a bit less: four times the squared error
}
"""Class -> limits, the strictest first."""
FEW_BITS = 3.5
"""Bits of a trellis, the mean over tensors, below which a model is of the class int3."""
MIN_COSINE = {"float": 0.9999, "int8": 0.999, "fp8": 0.999, "int4": 0.98}
"""Class -> least cosine with the float tensor."""
MIN_COSINE_E5M2 = 0.998


@dataclass(frozen=True, slots=True)
class Check:
    """One number against its limit."""

    name: str
    verdict: Verdict
    value: float
    low: float  # lower end of its 95 % interval; the number itself where it is exact
    high: float
    at_most: bool  # whether the limit is an upper one
    limit: float
    tokens: int = 0  # scored tokens behind it, 0 for weights
    documents: int = 0
    where: str = ""  # the tensor that it is about, or ""
    more_tokens: int | None = 0  # to add for a decision; 0 if decided, None if no number helps

    def to_json(self) -> dict[str, Any]:
        """Return a manifest's `gates` entry; non-finite numbers become null."""
        known = {
            "name": self.name,
            "value": self.value,
            "ci95": [self.low, self.high],
            "n_tokens": self.tokens,
            "n_docs": self.documents,
            "threshold": self.limit,
            "at_most": self.at_most,
            "verdict": self.verdict,
            "pass": self.verdict == "pass",
        }
        if self.where:
            known["where"] = self.where
        if self.verdict == "undecided":
            known["more_tokens"] = self.more_tokens
        found: dict[str, Any] = finite(known)
        return found

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        line = f"{self.verdict:9} {self.name} {self.value:.6g} {sign} {self.limit:.6g}"
        if 0 < self.documents < FEWEST_DOCUMENTS:
            line += f", no 95 % interval (documents: {self.documents} of {FEWEST_DOCUMENTS})"
        elif self.low != self.high:
            line += f", 95 % interval [{self.low:.6g}, {self.high:.6g}]"
        if self.where:
            line += f", {self.where}"
        if self.verdict == "undecided":
            more = self.more_tokens
            line += f"; add about {more} tokens" if more is not None else "; it lies at its limit"
        return line


@dataclass(frozen=True, slots=True)
class GateResult:
    """The checks of one model."""

    limits_class: str  # a key of `LIMITS`
    limits: Limits
    checks: tuple[Check, ...]  # those of the weights first

    @property
    def verdict(self) -> Verdict:
        """Return "fail" if a check fails, else "undecided" if one is, else "pass"."""
        return worst(check.verdict for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return what a manifest records."""
        return {
            "class": self.limits_class,
            "limits": asdict(self.limits),
            "verdict": self.verdict,
            "gates": [check.to_json() for check in self.checks],
        }


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the combined verdict."""
    found = set(verdicts)
    return "fail" if "fail" in found else "undecided" if "undecided" in found else "pass"


def verdict_code(verdict: Verdict) -> ExitCode:
    """Return a verdict's exit code."""
    codes = {"pass": ExitCode.OK, "fail": ExitCode.REJECTED, "undecided": ExitCode.UNDECIDED}
    return codes[verdict]


_CLASSES: dict[type[Format], str] = {
    **{Float: "float", Int8: "int8", Fp8: "fp8"},
    **dict.fromkeys((Int4, Mxfp4, Tcq, Ternary), "int4"),
}


def least_cosine(fmt: Format) -> float | None:
    """Return a format's least cosine with the float tensor; None for ternary, trained as such.

    Trellises have none, for with two bits that of a good model is low.
    """
    if isinstance(fmt, Fp8) and fmt.code_dtype == "e5m2":
        return MIN_COSINE_E5M2
    return None if isinstance(fmt, Tcq | Ternary) else MIN_COSINE.get(_CLASSES.get(type(fmt), ""))


def choose_limits(
    changed: Iterable[Format], settings: Iterable[str] = (), name: str | None = None
) -> tuple[str, Limits]:
    """Return a model's class and limits; `settings` are other differences, "kv" or "int8"."""
    if name is not None:
        if name not in LIMITS:
            raise UsageError(f"limits {name!r} are not known; known: {', '.join(LIMITS)}")
        return name, LIMITS[name]
    found, trellises = {"float", *settings}, list[int]()
    for fmt in changed:
        if isinstance(fmt, Tcq):
            trellises.append(fmt.bits)
        if type(fmt) not in _CLASSES:
            raise UsageError(
                f"there are no default limits for {fmt.name}; name a class with --limits: "
                f"{', '.join(LIMITS)}"
            )
        found.add(_CLASSES[type(fmt)])
    if trellises and sum(trellises) < FEW_BITS * len(trellises):
        found.add("int3")
    loosest = [kind for kind in LIMITS if kind in found][-1]
    return loosest, LIMITS[loosest]


def override(limits: Limits, **given: float | int | None) -> Limits:
    """Return limits with the fields that are not None replaced. Raises UsageError."""
    named = {name: value for name, value in given.items() if value is not None}
    for name, value in named.items():
        if not (isfinite(value) and value >= 0):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is {value}; expected a number that is at least 0")
    return replace(limits, **named)  # type: ignore[arg-type]


def text_checks(summary: Summary, limits: Limits) -> list[Check]:
    """Return the checks of a model's text scores."""
    tokens = summary.tokens + summary.nonfinite
    ends = {"ppl_ratio": "max", "kld": "max", "same_top": "min", "rms_dp": "max"}
    return [
        hard("nonfinite_logits", summary.nonfinite, 0, tokens=tokens),
        *(_judge(name, end == "max", summary, limits) for name, end in ends.items()),
    ]


def _judge(name: str, at_most: bool, summary: Summary, limits: Limits) -> Check:
    estimate: Estimate = getattr(summary, name)
    limit: float = getattr(limits, f"{'max' if at_most else 'min'}_{name}")
    sign = 1 if at_most else -1
    best, worst_end = sorted((sign * estimate.low, sign * estimate.high))
    tokens, documents = summary.tokens, summary.documents
    enough = tokens >= limits.min_tokens and documents >= limits.min_documents
    verdict: Verdict = "undecided"
    if best > sign * limit:
        verdict = "fail"
    elif worst_end <= sign * limit and enough:
        verdict = "pass"
    more = _more(estimate, limit, summary, limits) if verdict == "undecided" else 0
    value, low, high = estimate.value, estimate.low, estimate.high
    return Check(
        name, verdict, value, low, high, at_most, limit, tokens, documents, more_tokens=more
    )


def _more(estimate: Estimate, limit: float, summary: Summary, limits: Limits) -> int | None:
    """Return how many tokens to add until the interval leaves the limit; None: over 1000 times."""
    tokens = summary.tokens
    documents = max(limits.min_documents, FEWEST_DOCUMENTS)
    # One document may be a piece of one.
    length = tokens / summary.documents if summary.documents > 1 else max(tokens, DOCUMENT_TOKENS)
    needed = max(limits.min_tokens, ceil(documents * length))
    end = estimate.high if estimate.value <= limit else estimate.low
    if isfinite(end):
        distance, half = abs(limit - estimate.value), abs(end - estimate.value)
        if half > distance * 1000**0.5:
            return None
        if half > distance:
            needed = max(needed, ceil(tokens * (half / distance) ** 2))
    return max(needed - tokens, 1)


def hard(
    name: str, value: float, limit: float, *, at_most: bool = True, where: str = "", tokens: int = 0
) -> Check:
    """Return an exact number's check."""
    within = value <= limit if at_most else value >= limit
    verdict: Verdict = "pass" if within else "fail"
    return Check(name, verdict, value, value, value, at_most, limit, tokens, where=where)


def tensor_checks(errors: Sequence[TensorError], min_cosine: float | None = None) -> list[Check]:
    """Return checks of the tensors nearest their limits; `min_cosine` None is by format."""
    bad = next((error.name for error in errors if not error.finite), "")
    checks = [hard("nonfinite_tensors", sum(not e.finite for e in errors), 0, where=bad)]
    found: dict[str, list[Check]] = {
        name: [] for name in ("rms_rel", "cosine", "clipped_frac", "out_nmse")
    }
    for error in errors:
        if error.finite:
            for name, value, limit in _measured(error, min_cosine):
                at_most = name != "cosine"
                found[name].append(hard(name, value, limit, at_most=at_most, where=error.name))
    return [*checks, *(max(of_all, key=_excess) for of_all in found.values() if of_all)]


def _measured(error: TensorError, min_cosine: float | None) -> Iterator[tuple[str, float, float]]:
    """Yield a tensor's measures: name, value, limit."""
    factor = RMS_FACTOR.get(error.method, max(RMS_FACTOR.values()))
    if (expected := expected_rms(error.format, error.shape)) is not None:
        yield "rms_rel", error.rms_rel, factor * expected
    least = least_cosine(parse_format(error.format)) if min_cosine is None else min_cosine
    if least is not None:
        yield "cosine", error.cosine, least
    if error.clipped_frac is not None:
        yield "clipped_frac", error.clipped_frac, MAX_CLIPPED
    if error.out_nmse is not None and error.out_nmse_rtn is not None:
        yield "out_nmse", error.out_nmse, MAX_OUTPUT_FACTOR * error.out_nmse_rtn


def _excess(check: Check) -> float:
    """Return how near its limit a check is, the largest of several."""
    if check.at_most:
        return check.value / check.limit if check.limit else float(check.value > 0)
    return (1 - check.value) / (1 - check.limit) if check.limit < 1 else 2 - check.value
