"""The pipeline from a checkpoint and rules to a judged manifest, and what judges such models."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Int4, Int8, Tcq
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint, lazy_tensor
from clocher_runtime.config.engine import WEIGHTS_ALONE
from clocher_runtime.convert.q4_entries import ROUNDED, PlaneFile
from clocher_runtime.convert.q4_map import Q4Map, load_q4_map, parse_q4_map, write_manifest
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.kept import Kept
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, parse_object, prefixed
from clocher_runtime.engine.load import load_model
from clocher_runtime.quality.compare import Documents
from clocher_runtime.quality.evaluate import Evaluation, Progress, Record, evaluate
from clocher_runtime.quality.gate import Check, Verdict, tensor_checks, worst
from clocher_runtime.quality.tensor_error import measure
from clocher_runtime.quantize.alloc import allocate, at_most
from clocher_runtime.quantize.calibrate import calibrate
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.gradients import token_weights
from clocher_runtime.quantize.plan import (
    Done,
    QuantPlan,
    build_plan,
    describe_source,
    document_of,
    result_of,
    tool,
)
from clocher_runtime.quantize.tuning import tune

MANIFEST = "q4_manifest.json"
"""Records, beside an IEBIN, what `clocher quantize` did to each tensor, and how good it is."""

ALIKE = (
    "gradients, which say how much a token of the calibration text counts and what a format costs, "
    "need a model without experts, sinks and caps of attention: tokens count alike, costs are "
    "measured"
)

_TUNED_BITS = 4.0
"""Bits of a quantised weight from which tuning gained nothing."""


class CalibrationText(NamedTuple):
    """Text to measure importance on."""

    sequences: tuple[tuple[int, ...], ...]  # token ids of each sequence
    record: Mapping[str, Any]  # what the manifest says of it


class GateText(NamedTuple):
    """Held-out text to judge the result on."""

    documents: Documents
    limits_class: str | None  # a key of `gate.LIMITS`; None: by the formats
    given: Mapping[str, float | int | None]  # fields of `gate.Limits` that replace those of it
    record: Mapping[str, Any]  # what the manifest says of it


@dataclass(frozen=True, slots=True)
class Job:
    """One quantisation."""

    checkpoint: Checkpoint  # with one matrix for embeddings and head, if they are that
    out: Path  # of the manifest
    rules: Q4Map  # what to do, without the expanded form
    options: Mapping[str, Any] = field(default_factory=dict)  # of the script, to be recorded
    seed: int = 0
    threads: int = 1
    calibration: CalibrationText | None = None
    target_bpw: float | None = None  # bits per weight of the quantised tensors together
    gate: GateText | None = None
    min_cosine: float | None = None  # least cosine of every quantised tensor with the float one
    given: Checkpoint | None = None  # as it is stored, if `checkpoint` is not
    keeps: bool = False  # what `out` was before stays until the new manifest replaces it

    def plan(self) -> QuantPlan:
        """Return the plan, from names and shapes alone. Raises UsageError."""
        plan = build_plan(self.checkpoint, self.rules)
        if self.calibration is None and (plan.calibrated or self.target_bpw is not None):
            what = plan.tensors[plan.calibrated[0]].method if plan.calibrated else "--target-bpw"
            raise UsageError(f"{what} needs a calibration text: give --calib-text FILE")
        return plan if self.target_bpw is None else at_most(plan, self.target_bpw)


class Outcome(NamedTuple):
    """The result of a job."""

    verdict: Verdict  # of the gate; "pass" without one
    size: Mapping[str, Any]  # as in the manifest
    path: Path  # of the manifest: the one that was asked for only if the verdict is "pass"
    done: tuple[Done, ...]  # tensor by tensor
    evaluation: Evaluation | None  # what the gate found on text
    allocation: Mapping[str, Any]  # the record of a target size; empty without one
    checks: Sequence[Check]  # of the gate; without it of tensors, if a least cosine was asked for


def rejected_path(out: Path) -> Path:
    """Return the path of a manifest that failed the gate."""
    return out.with_name(f"{out.stem}.rejected.json")


def run_job(
    job: Job,
    plan: QuantPlan,
    tell: Progress = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Quantise, judge, and write the manifest, resuming a killed run of the same job.

    `note` gets a line for people if it resumes.
    """
    checkpoint = job.checkpoint
    settings: dict[str, Any] = {"threads": job.threads, "seed": job.seed, "progress": tell}
    job.out.parent.mkdir(parents=True, exist_ok=True)
    rejected_path(job.out).unlink(missing_ok=True)
    if not job.keeps:  # its planes are about to be overwritten
        job.out.unlink(missing_ok=True)
    nbytes = sum(f.nbytes for f in checkpoint.files)
    source = describe_source(checkpoint, lambda done: tell("hashing", done, nbytes))
    sections: dict[str, Any] = {"tool": tool(), "source": source}
    if job.rules.requantize:
        sections["requantize"] = True
    if job.given:
        sections["tied"] = True
    sections["options"] = dict(job.options)
    if job.calibration:
        sections["calibration"] = dict(job.calibration.record)
    text = job.calibration.sequences if job.calibration else ()
    allocation: Mapping[str, Any] = {}
    corrects = any(tensor.method == "gptq" for tensor in plan.tensors.values())
    useful = corrects and job.target_bpw is not None  # they take longer than GPTQ

    @cache
    def counts() -> Mapping[str, np.ndarray]:
        found = token_weights(checkpoint, make_text(text), **settings) if useful else {}
        if useful and not found:
            note(ALIKE)
        return found

    measured = job.out.with_name(f"{job.out.stem}.allocation.jsonl")
    if job.target_bpw is not None:
        kept = Kept(measured, _fingerprint(job, plan, source))
        plan, allocation = allocate(
            checkpoint, plan, text, target_bpw=job.target_bpw, kept=kept, counts=counts, **settings
        )
        sections["allocation"] = allocation
    with PlaneFile(job.out, _fingerprint(job, plan, source)) as planes:
        if plan.calibrated:
            calibrate(checkpoint, plan, text, planes=planes, counts=counts, note=note, **settings)
        file = planes.finish()
        found = tune(checkpoint, planes.tensors, text, **settings) if is_tuned(plan) else None
        if is_tuned(plan) and found is None:
            note("rows are not tuned: the model has calls without a derivative here")
        if found:
            better = found.after < found.before
            taken = {"kld_before": found.before, "kld_after": found.after, "taken": better}
            sections["tuning"] = taken
            said = "" if better else ", which is not taken"
            note(f"divergence of held-out text: {found.before:.4f}, tuned {found.after:.4f}{said}")
            if better:
                for name, rows in found.rows.items():
                    planes.put_anew(name, "rows", rows)
                file = planes.finish()
        done = tuple(_quantise(job, plan, planes, tell))
    rules = job.rules.document["rules"]
    evaluation: Evaluation | None = None
    checks: Sequence[Check] = ()
    if job.gate:
        unjudged = document_of(rules, plan, done, file, sections)
        evaluation = _judge(job, job.gate, unjudged, tell)
        checks, judged = evaluation.gate.checks, evaluation.gate.to_json()
        sections |= {"gates": judged.pop("gates"), "gate": {**job.gate.record, **judged}}
    elif job.min_cosine is not None:
        checks = tensor_checks([each.error for each in done], job.min_cosine)
        sections["gates"] = [check.to_json() for check in checks]
    verdict = worst(check.verdict for check in checks)
    path = job.out if verdict == "pass" else rejected_path(job.out)
    checkpoint.check_unchanged()
    write_manifest(path, document_of(rules, plan, done, file, sections))
    if verdict == "pass":
        measured.unlink(missing_ok=True)
    return Outcome(verdict, plan.size, path, done, evaluation, allocation, checks)


def is_tuned(plan: QuantPlan) -> bool:
    """Return whether factors of rows are tuned: of trellises of few bits that GPTQ corrected."""
    made = (isinstance(t.format, Tcq) and t.method == "gptq" for t in plan.tensors.values())
    return any(made) and bool(plan.size["quantised_bpw"] < _TUNED_BITS)


def quantised_checkpoint(checkpoint: Checkpoint, q4_map: Q4Map, threads: int = 1) -> Checkpoint:
    """Return a checkpoint with a manifest's tensors, computed on demand."""
    formats, _ = q4_map.choose(checkpoint.tensors)

    def make(name: str) -> Mapping[str, np.ndarray]:
        return q4_map.stored(name, checkpoint.tensor(name), threads).planes

    tensors: dict[str, QuantTensor] = dict(checkpoint.tensors)
    for name, fmt in formats.items():
        tensors[name] = lazy_tensor(checkpoint.shape(name), fmt, partial(make, name), name)
    hashes = {name: known for name, known in checkpoint.hashes.items() if name not in formats}
    return replace(checkpoint, tensors=tensors, hashes=hashes)


def _judge(job: Job, gate: GateText, document: Mapping[str, Any], tell: Progress) -> Evaluation:
    q4_map = parse_q4_map(document, job.out)
    quantised = quantised_checkpoint(job.checkpoint, q4_map, job.threads)
    return evaluate(
        load_model(job.given or job.checkpoint),
        load_model(quantised),
        gate.documents,
        config=replace(WEIGHTS_ALONE, threads=job.threads),
        limits_class=gate.limits_class,
        given={**gate.given, "min_cosine": job.min_cosine},
        records=records_of(q4_map),
        progress=tell,
    )


def _quantise(job: Job, plan: QuantPlan, planes: PlaneFile, tell: Progress) -> Iterator[Done]:
    """Round the rounded tensors, take the others from the plane file, and measure all."""
    total = sum(tensor.params for tensor in plan.tensors.values())
    finished = 0
    for name, planned in plan.tensors.items():
        source = job.checkpoint.tensor(name, verify=True)
        record = planes.records.get(name, ROUNDED)
        if record is ROUNDED:
            with prefixed(f"tensor {name!r}"):
                tensor = round_tensor(source, planned.format, planned.clip, job.threads)
        else:
            tensor = planes.tensors[name]
        found = measure(name, source, tensor, record["method"])
        yield result_of(planned, tensor, found, record, planes.offsets(name))
        job.checkpoint.release()
        planes.release()
        finished += planned.params
        tell("quantising and measuring", finished, total)


def _fingerprint(job: Job, plan: QuantPlan, source: Mapping[str, Any]) -> str:
    tensors = [
        (t.name, t.shape, t.source.name, t.format.name, t.method, str(t.clip))
        for t in plan.tensors.values()
    ]
    text = job.calibration.sequences if job.calibration else ()
    known = [tool(), source, tensors, text, job.seed]
    return sha256(json.dumps(known).encode()).hexdigest()


def records_beside(model: Path) -> dict[str, Record]:
    """Return the records of the manifest that an IEBIN was made with, if it lies beside it."""
    digest, beside = _manifest_digest(model), model / MANIFEST
    q4_map = load_q4_map(beside) if digest and beside.is_file() else None
    is_own = q4_map is not None and q4_map.document.get("sha256") == digest
    return records_of(q4_map) if q4_map and is_own else {}


def records_of(q4_map: Q4Map) -> dict[str, Record]:
    """Return a manifest's records; tensors without one count as rounded, the strictest."""
    return {
        name: Record(entry.method, *map(entry.err.get, ("out_nmse", "out_nmse_rtn")))
        for name, entry in (q4_map.entries or {}).items()
    }


def records_of_gptq(checkpoint: Checkpoint) -> dict[str, Record]:
    """Return the records of a GPTQ checkpoint, or its IEBIN conversion, by its config.json."""
    settings = checkpoint.config.get("quantization_config")
    if not isinstance(settings, dict) or settings.get("quant_method") != "gptq":
        return {}
    packed = (n for n, t in checkpoint.tensors.items() if isinstance(t.format, Int4 | Int8))
    return {name: Record("gptq") for name in packed}


def _manifest_digest(directory: Path) -> str:
    """Return the SHA-256 of the manifest that an IEBIN was made with, or ""."""
    path = directory / JSON_NAME
    found: Any = {}
    if path.is_file():
        found = parse_object(read_bytes(path, MAX_JSON_BYTES), str(path))
    for key in ("source", "q4_map", "sha256"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else ""
