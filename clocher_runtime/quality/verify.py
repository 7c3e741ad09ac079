"""Traces of runs as JSONL, and their comparison with another implementation; docs/verification.md.

The other implementation is fed the traced prompt and the generated ids, so each step is judged on
its own.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict

import msgspec
import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, ModelError, UsageError, counted
from clocher_runtime.checkpoints.checkpoint import Checkpoint, planes_of
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import finite, parse_lines, read_as

SCHEMA = "clocher.trace/1"
MAX_BYTES = 1 << 30
MAX_ID = (1 << 31) - 1
MAX_FINDINGS = 200
MAX_SHOWN = 20

_Ids = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_ID)], ...], Meta(min_length=1)]
_Amount = Annotated[float, Meta(ge=0)]
_Whole = Annotated[int, Meta(ge=0)]

_SAMPLED = 4096

Verdict = Literal["match", "near-tie", "mismatch"]
Kind = Literal["prompt", "vocabulary", "token", "logits", "near-tie"]
Encode = Callable[[str], Sequence[int]]


class TopLogits(Struct, frozen=True, forbid_unknown_fields=True):
    """Top logits of one step, largest first."""

    ids: _Ids  # token ids
    # their logits as the engine had them; where they are not finite, a file has None
    logits: tuple[float | None, ...]


class Sampling(TypedDict):
    """Sampling parameters of a run."""

    temperature: _Amount
    top_k: _Whole
    top_p: _Amount
    seed: _Whole


class Trace(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=SCHEMA, tag_field="schema"
):
    """The generation of one prompt."""

    version: str  # of Clocher
    model: str  # what the run called it
    fingerprint: str | None  # of the weights, see `fingerprint`; None where there are none
    precision: str  # formats of the matrices, as in the JSON line of the run
    act_prec: str  # precision of activations
    kv_dtype: str  # storage of the KV cache
    device: str  # back end that ran
    sampling: Sampling  # temperature, top_k, top_p and seed
    prompt: str | None  # its text; None where the run was given ids
    prompt_ids: _Ids  # what the engine was fed
    generated_ids: _Ids  # what it generated, the token that ended the text included
    # the largest logits of each step, None where they were not traced
    topk: tuple[TopLogits, ...] | None = None


def top_logits(logits: np.ndarray, count: int) -> TopLogits:
    """Return the largest of logits fp32 [V], ties by lower id."""
    scores = np.where(np.isnan(logits), -np.inf, logits)
    count = min(count, scores.size)
    floor = np.partition(scores, scores.size - count)[scores.size - count]
    candidates = np.flatnonzero(scores >= floor)
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    return TopLogits(tuple(order.tolist()), tuple(logits[order].astype(float).tolist()))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a SHA-256 that tells models apart without reading all weights; no proof of integrity.

    Covers names, formats, shapes and both ends (4096 elements) of each plane. A checkpoint and its
    unquantised IEBIN conversion agree.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.format.name} {list(tensor.shape)}\n".encode())
        planes = planes_of(tensor)
        for key in sorted(planes):
            digest.update(planes[key].flat[:_SAMPLED].tobytes())
            digest.update(planes[key].flat[-_SAMPLED:].tobytes())
    return digest.hexdigest()


def read_trace(path: Path) -> list[Trace]:
    """Read a trace of at most 1 GiB; UsageError names the bad line and field."""
    try:
        traces = [_trace(*line) for line in parse_lines(read_bytes(path, MAX_BYTES), path)]
    except ModelError as error:
        raise UsageError(f"trace: {error}") from None
    if not traces:
        raise UsageError(f"trace: {path}: no line; clocher-run --trace-ids FILE writes one")
    return traces


def document(trace: Trace) -> dict[str, Any]:
    """Return a line's object."""
    found: dict[str, Any] = finite(msgspec.to_builtins(trace))
    return found


def _trace(document: dict[str, Any], where: str) -> Trace:
    if document.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema is {document.get('schema')!r:.60}, expected {SCHEMA!r}")
    trace = read_as(document, Trace, where)
    if trace.topk is None:
        return trace
    if len(trace.topk) != len(trace.generated_ids):
        raise FormatError(
            f"{where}: topk: {len(trace.topk)} steps, but {len(trace.generated_ids)} ids were "
            "generated"
        )
    for index, step in enumerate(trace.topk):
        if not len(step.logits) == len(step.ids) == len(set(step.ids)):
            raise FormatError(
                f"{where}: topk[{index}]: {len(step.logits)} logits for {len(step.ids)} ids, all "
                "different"
            )
    return trace


class Reference(Protocol):
    """The other implementation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that it knows."""

    def logits(self, ids: Sequence[int], last: int) -> np.ndarray:
        """Return its logits after the last ids, fp32 [last, V]."""


class Checks(NamedTuple):
    """What to compare; `logits_tol` bounds near ties and differences of traced logits."""

    topk: int = 5  # size of the sets of largest logits that are compared
    logits_tol: float = 1e-3
    check_prompt: bool = False  # compare the ids of the prompts with the reference's tokenizer


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, of kind "prompt", "vocabulary", "token", "logits" or "near-tie"."""

    kind: Kind
    prompt: int  # number of the prompt, from 0
    step: int  # generated token, from 0, or position in the prompt
    got: float | None  # what the trace says; None past its end
    expected: float | None  # what the reference says; None past its end
    gap: float | None = None  # of the logits of both tokens by the reference, or of both sides

    def __str__(self) -> str:
        where = "position" if self.kind in ("prompt", "vocabulary") else "step"
        gap = "" if self.gap is None else f" (logits {self.gap:.3g} apart)"
        return (
            f"prompt {self.prompt}, {where} {self.step}: {self.kind}: got {self.got}, "
            f"expected {self.expected}{gap}"
        )


@dataclass(slots=True, kw_only=True)
class Report:
    """Result of the comparison; tokens are equal, near ties or mismatches."""

    prompts: int = 0
    prompts_checked: int = 0  # prompts whose text was tokenised again
    prompts_equal: int = 0  # of these, how many have the same ids
    prompts_without_text: int = 0  # given as ids
    steps: int = 0  # generated tokens compared
    equal: int = 0
    near_ties: int = 0
    mismatches: int = 0
    in_topk: int = 0  # tokens among the largest logits of the reference
    traced_steps: int = 0  # steps whose largest logits were traced
    topk_overlap: float | None = None  # mean share of these that the reference has, too
    logits_compared: int = 0
    logits_beyond_tol: int = 0  # steps with one further from the reference's than the tolerance
    logits_max_diff: float | None = None
    unknown_ids: int = 0  # prompts with an id that the reference does not know; no step is compared
    findings: list[Finding] = field(default_factory=list)  # the first `MAX_FINDINGS` differences
    findings_left_out: int = 0

    @property
    def verdict(self) -> Verdict:
        """Return the verdict; near ties are no mismatch, but no match either."""
        wrong = self.mismatches + self.logits_beyond_tol + self.unknown_ids
        if wrong or self.prompts_equal != self.prompts_checked:
            return "mismatch"
        return "near-tie" if self.near_ties else "match"

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"schema": "clocher.verify/1", "verdict": self.verdict, **asdict(self)}

    def add(self, kind: Kind, prompt: int, step: int, *numbers: float | None) -> None:
        """Note a difference (got, expected, gap); non-finite numbers become None."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(kind, prompt, step, *finite(list(numbers))))
        else:
            self.findings_left_out += 1


def verify(
    traces: Sequence[Trace],
    checks: Checks,
    reference: Reference | None,
    encode: Encode | None,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Report:
    """Compare traces with a reference; None compares no steps. UsageError if not greedy."""
    if reference is not None:
        for number, trace in enumerate(traces):
            if temperature := trace.sampling["temperature"]:
                raise UsageError(
                    f"prompt {number} was sampled with temperature {temperature}; steps can be "
                    "compared only of a greedy run: leave out --temperature, or check the prompts "
                    "alone with --tokenizer-only"
                )
    report = Report(prompts=len(traces))
    overlaps: list[float] = []
    for number, trace in enumerate(traces):
        if checks.check_prompt and encode is not None:
            _check_prompt(report, number, trace, encode)
        if reference is not None and _ids_are_known(report, number, trace, reference.vocab_size):
            ids = trace.prompt_ids + trace.generated_ids
            logits = reference.logits(ids[:-1], len(trace.generated_ids))
            for step, row in enumerate(logits):
                overlap = _check_step(report, checks, number, trace, step, row)
                overlaps += [] if overlap is None else [overlap]
        progress(number + 1, len(traces))
    if overlaps:
        report.topk_overlap = float(np.mean(overlaps))
    return report


def _check_prompt(report: Report, number: int, trace: Trace, encode: Encode) -> None:
    if trace.prompt is None:
        report.prompts_without_text += 1
        return
    report.prompts_checked += 1
    got, expected = list(trace.prompt_ids), list(encode(trace.prompt))
    if got == expected:
        report.prompts_equal += 1
        return
    pairs = enumerate(zip_longest(got, expected))
    step, (mine, theirs) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    report.add("prompt", number, step, mine, theirs)


def _ids_are_known(report: Report, number: int, trace: Trace, vocab_size: int) -> bool:
    """Return whether the reference knows all ids; report the first unknown one."""
    for step, token in enumerate(trace.prompt_ids + trace.generated_ids):
        if token >= vocab_size:
            report.unknown_ids += 1
            report.add("vocabulary", number, step, token, vocab_size - 1)
            return False
    return True


def _check_step(
    report: Report, checks: Checks, number: int, trace: Trace, step: int, row: np.ndarray
) -> float | None:
    """Compare one step; return the share of traced top logits that the reference has too."""
    got, expected = trace.generated_ids[step], int(row.argmax())
    gap = float(row[expected] - row[got])
    report.steps += 1
    close = gap <= checks.logits_tol  # never where the reference gives NaN
    same = close and got == expected
    report.equal += same
    report.near_ties += close and not same
    report.mismatches += not close
    if not same:
        report.add("near-tie" if close else "token", number, step, got, expected, gap)
    largest = set(top_logits(row, checks.topk).ids)
    report.in_topk += got in largest
    if trace.topk is None:
        return None
    report.traced_steps += 1
    _check_logits(report, checks, number, step, trace.topk[step], row)
    traced = trace.topk[step].ids[: checks.topk]
    # As many of the reference's as there are traced ones: fewer traced ones lose nothing.
    return len(set(traced) & set(top_logits(row, len(traced)).ids)) / len(traced)


def _check_logits(
    report: Report, checks: Checks, number: int, step: int, traced: TopLogits, row: np.ndarray
) -> None:
    ids = np.array(traced.ids)
    known = ids < row.size
    logits = np.array(traced.logits, np.float64)  # None becomes NaN
    difference = np.full(ids.size, np.inf)
    difference[known] = np.abs(logits[known] - row[ids[known]])
    difference[np.isnan(difference)] = np.inf
    worst = int(difference.argmax())
    report.logits_compared += ids.size
    if np.isfinite(difference[worst]):
        report.logits_max_diff = max(report.logits_max_diff or 0.0, float(difference[worst]))
    if difference[worst] > checks.logits_tol:
        report.logits_beyond_tol += 1
        expected = float(row[ids[worst]]) if known[worst] else None
        gap = float(difference[worst])
        report.add("logits", number, step, float(logits[worst]), expected, gap)


def summary(report: Report, same: bool | None) -> Iterator[str]:
    """Yield summary lines; `same`: whether the weights are the reference's, None if unknown."""
    # The first of each kind in each prompt says most; later ones often follow from it.
    first = {(f.prompt, f.kind): f for f in reversed(report.findings)}
    shown = [f for f in report.findings if first[f.prompt, f.kind] is f][:MAX_SHOWN]
    for finding in shown:
        yield str(finding)
    if more := len(report.findings) - len(shown) + report.findings_left_out:
        yield f"and {more} more"
    if same is False:
        yield "note: the run used other weights (quantised, or another model)"
    if report.prompts_checked or report.prompts_without_text:
        yield (
            f"prompts: {report.prompts_equal} of {report.prompts_checked} tokenised alike"
            f", {report.prompts_without_text} without text"
        )
    if report.steps:
        yield (
            f"tokens: {report.equal} of {report.steps} equal, {report.near_ties} near "
            f"ties, {report.mismatches} mismatches, {report.in_topk} in the top k"
        )
    if report.topk_overlap is not None:
        largest = report.logits_max_diff
        yield (
            f"logits: top-k overlap {report.topk_overlap:.1%}, largest difference "
            f"{'-' if largest is None else format(largest, '.3g')}, "
            f"{report.logits_beyond_tol} of {report.traced_steps} steps beyond the tolerance"
        )
    yield f"{report.verdict} ({counted(report.prompts, 'prompt')})"
