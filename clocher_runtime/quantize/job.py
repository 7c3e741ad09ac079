"""The whole way from a checkpoint and rules to a manifest that the gate has judged."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint, LazyTensor, Stored
from clocher_runtime.convert.q4.map import Q4Map, parse_q4_map, parts_dir
from clocher_runtime.convert.q4.parts import SUFFIX, PartsWriter, part_of, plane_hashes
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.engine.load import load_model
from clocher_runtime.quality.documents import Documents
from clocher_runtime.quality.evaluate import WEIGHTS_ALONE, Evaluation, Record, evaluate
from clocher_runtime.quality.gate import Verdict, tensor_checks, worst
from clocher_runtime.quality.tensor_error import measure
from clocher_runtime.quantize.alloc import allocate
from clocher_runtime.quantize.calibrate import Calibrated, calibrate
from clocher_runtime.quantize.plan import (
    Done,
    PlannedTensor,
    QuantPlan,
    build_plan,
    describe_source,
    document_of,
    tool,
    write_manifest,
)

Progress = Callable[[str, int, int], None]
"""Called with what is done, and (done, total)."""


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Text that importance is measured on."""

    sequences: tuple[tuple[int, ...], ...]  # token ids of each sequence
    record: Mapping[str, Any]  # what the manifest says of it


@dataclass(frozen=True, slots=True)
class GateText:
    """Text that the result is judged on."""

    documents: Documents  # held-out text in the model's tokens
    limits_class: str | None  # a key of `gate.LIMITS`; None: by the formats
    # fields of `gate.Limits` that replace those of the class
    given: Mapping[str, float | int | None]
    record: Mapping[str, Any]  # what the manifest says of it


@dataclass(frozen=True, slots=True)
class Job:
    """One quantisation."""

    checkpoint: Checkpoint  # the input
    out: Path  # path of the manifest
    rules: Q4Map  # what to do, version 1 without the expanded form
    options: Mapping[str, Any] = field(default_factory=dict)  # of the script, to be recorded
    seed: int = 0  # of everything that is drawn by chance
    threads: int = 1  # how many threads work
    whole_hash: bool = True  # hash the whole weight files, not their headers alone
    calibration: CalibrationText | None = None  # text for imx, gptq and a target size
    target_bpw: float | None = None  # bits per weight of the quantised tensors together
    gate: GateText | None = None  # text to judge the result on
    min_cosine: float | None = None  # least cosine of every quantised tensor with the float one

    def plan(self) -> QuantPlan:
        """Return what will be done, from names and shapes alone.

        Raises UsageError: as `build_plan`, or calibration is needed and there is no text.
        """
        plan = build_plan(self.checkpoint, self.rules)
        if self.calibration is None and (plan.calibrated or self.target_bpw is not None):
            what = plan.tensors[plan.calibrated[0]].method if plan.calibrated else "--target-bpw"
            raise UsageError(f"{what} needs a calibration text: give --calib-text FILE")
        return plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    verdict: Verdict  # of the gate; "pass" without one
    path: Path  # of the manifest: the one that was asked for only if the verdict is "pass"
    plan: QuantPlan  # what was done
    done: tuple[Done, ...]  # tensor by tensor
    evaluation: Evaluation | None  # what the gate found on text
    allocation: Mapping[str, Any]  # the record of a target size; empty without one


def rejected_path(out: Path) -> Path:
    """Return the path of a manifest that the gate has not let through."""
    return out.with_name(f"{out.stem}.rejected.json")


def run_job(job: Job, plan: QuantPlan, progress: Progress | None = None) -> Outcome:
    """Quantise, judge, and write the manifest.

    A manifest that was there is removed first: it may share its parts with the new one. The parts
    of a killed run of the same job are used.

    Raises FormatError: a value cannot be quantised; ModelChanged: the model's files changed
    meanwhile; UsageError: the calibration does not know the model; OSError: a file cannot be
    written.
    """
    tell = progress or (lambda what, done, total: None)
    checkpoint = job.checkpoint
    job.out.parent.mkdir(parents=True, exist_ok=True)
    for path in (job.out, rejected_path(job.out)):
        path.unlink(missing_ok=True)
    source = describe_source(
        checkpoint,
        job.whole_hash,
        lambda nbytes, _: tell("hashing", nbytes, sum(f.nbytes for f in checkpoint.files)),
    )
    sections: dict[str, Any] = {
        "tool": tool(),
        "source": source,
    }
    if job.rules.requantize:
        sections["requantize"] = True
    sections["options"] = dict(job.options)
    if job.calibration:
        sections["calibration"] = dict(job.calibration.record)
    sequences = job.calibration.sequences if job.calibration else ()
    allocation: Mapping[str, Any] = {}
    if job.target_bpw is not None:
        plan, allocation = allocate(
            checkpoint,
            plan,
            sequences,
            target_bpw=job.target_bpw,
            threads=job.threads,
            seed=job.seed,
            progress=lambda done, total, what: tell(f"allocating: {what}", done, total),
        )
        sections["allocation"] = allocation
    parts = PartsWriter(parts_dir(job.out), _fingerprint(job, plan, source))
    records: Mapping[str, Calibrated] = {}
    if plan.calibrated:
        records = calibrate(
            checkpoint,
            plan,
            sequences,
            parts=parts,
            threads=job.threads,
            seed=job.seed,
            progress=lambda done, total, what: tell(f"calibrating: {what}", done, total),
        )
    done = tuple(_quantise(job, plan, parts, records, tell))
    verdicts: list[Verdict] = []
    evaluation = None
    if job.min_cosine is not None:
        checks = tensor_checks([entry.error for entry in done], job.min_cosine)
        sections["gates"] = [check.to_json() for check in checks]
        verdicts += [check.verdict for check in checks]
    rules = job.rules.document["rules"]
    files = parts.files()
    parts.remove_others()
    if job.gate:
        unjudged = document_of(rules, plan, done, files, sections)
        evaluation = _judge(job, job.gate, unjudged, done, tell)
        judged = evaluation.gate.to_json()
        sections["gates"] = judged.pop("gates")
        sections["gate"] = {**job.gate.record, **judged}
        verdicts.append(evaluation.gate.verdict)
    verdict = worst(verdicts)
    path = job.out if verdict == "pass" else rejected_path(job.out)
    checkpoint.check_unchanged()
    write_manifest(path, document_of(rules, plan, done, files, sections))
    return Outcome(verdict, path, plan, done, evaluation, allocation)


def quantised_checkpoint(checkpoint: Checkpoint, q4_map: Q4Map, threads: int = 1) -> Checkpoint:
    """Return a checkpoint with the tensors as a manifest has them, computed when they are read."""
    formats, _ = q4_map.choose(checkpoint.tensors)

    def make(name: str) -> Mapping[str, np.ndarray]:
        return q4_map.stored(name, checkpoint.tensor(name), threads).planes

    tensors: dict[str, Stored] = dict(checkpoint.tensors)
    for name, fmt in formats.items():
        tensors[name] = LazyTensor(checkpoint.shape(name), fmt, partial(make, name))
    hashes = {name: known for name, known in checkpoint.hashes.items() if name not in formats}
    return dataclasses.replace(checkpoint, tensors=tensors, hashes=hashes)


def _judge(
    job: Job, gate: GateText, document: Mapping[str, Any], done: Sequence[Done], tell: Progress
) -> Evaluation:
    q4_map = dataclasses.replace(parse_q4_map(document, job.out), path=job.out)
    quantised = quantised_checkpoint(job.checkpoint, q4_map, job.threads)
    records = {
        entry.planned.name: Record(
            entry.method,
            entry.more_errors.get("out_nmse"),
            entry.more_errors.get("out_nmse_rtn"),
        )
        for entry in done
    }
    given = dict(gate.given)
    if job.min_cosine is not None:
        given["min_cosine"] = job.min_cosine
    return evaluate(
        load_model(job.checkpoint),
        load_model(quantised),
        gate.documents,
        config=dataclasses.replace(WEIGHTS_ALONE, threads=job.threads),
        limits_class=gate.limits_class,
        given=given,
        records=records,
        progress=tell,
    )


def _quantise(
    job: Job,
    plan: QuantPlan,
    parts: PartsWriter,
    records: Mapping[str, Calibrated],
    tell: Progress,
) -> list[Done]:
    """Round what is rounded, take the rest from the parts, and measure all of it."""
    done = []
    total = sum(tensor.params for tensor in plan.tensors.values())
    finished = 0
    for name, planned in plan.tensors.items():
        source = job.checkpoint.tensor(name, verify=True)
        done.append(_quantise_one(job, planned, source, parts, records.get(name)))
        job.checkpoint.release()
        parts.release()
        finished += planned.params
        tell("quantising and measuring", finished, total)
    return done


def _quantise_one(
    job: Job,
    planned: PlannedTensor,
    source: QuantTensor,
    parts: PartsWriter,
    record: Calibrated | None,
) -> Done:
    name = planned.name
    if record is None:
        try:
            tensor = round_tensor(source, planned.format, planned.clip, job.threads)
        except FormatError as error:
            raise FormatError(f"tensor {name!r}: {error}") from None
        return Done(planned, plane_hashes(tensor), measure(name, source, tensor), "rtn")
    tensor = parts.tensor(name)
    if tensor.format.name != planned.format.name or tensor.shape != planned.shape:
        raise FormatError(
            f"tensor {name!r}: calibration gave {tensor.format.name}{list(tensor.shape)}, the "
            f"plan says {planned.format.name}{list(planned.shape)}"
        )
    return Done(
        planned,
        plane_hashes(tensor),
        measure(name, source, tensor, record.method),
        record.method,
        record.fallback or "",
        tuple(np.atleast_1d(record.tokens_seen).tolist()),
        part_of(name) + SUFFIX,
        record.err,
    )


def _fingerprint(job: Job, plan: QuantPlan, source: Mapping[str, Any]) -> str:
    """Return what decides the bytes of the parts."""
    tensors = [
        (t.name, t.shape, t.source.name, t.format.name, t.method, str(t.clip))
        for t in plan.tensors.values()
    ]
    text = job.calibration.sequences if job.calibration else ()
    known = [tool(), source, tensors, text, job.seed]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
