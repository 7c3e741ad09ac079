"""Traces: each prompt's generation as JSONL, for another program; see docs/verification.md."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import JsonlWriter
from clocher_runtime.disk.strict_json import finite, parse_object, read_as

SCHEMA = "clocher.trace/1"
MAX_BYTES = 1 << 30
MAX_ID = (1 << 31) - 1

_Ids = Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_ID)], ...], Meta(min_length=1)]
_Amount = Annotated[float, Meta(ge=0)]
_Whole = Annotated[int, Meta(ge=0)]

_SAMPLED_BYTES = 4096


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

    @property
    def greedy(self) -> bool:
        """Whether the run was greedy."""
        return self.sampling["temperature"] == 0


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

    Covers names, formats, shapes and both ends (4096 elements) of each plane, but no data of
    repacked tensors. A checkpoint and its unquantised IEBIN conversion agree.
    """
    digest = hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        digest.update(f"{name} {tensor.format.name} {list(tensor.shape)}\n".encode())
        if not isinstance(tensor, QuantTensor):
            continue
        for key in sorted(tensor.planes):
            elements = tensor.planes[key].flat
            digest.update(elements[:_SAMPLED_BYTES].tobytes())
            digest.update(elements[-_SAMPLED_BYTES:].tobytes())
    return digest.hexdigest()


def write_trace(path: Path, traces: Sequence[Trace]) -> None:
    """Write traces, one line each, atomically. Raises UsageError."""
    with JsonlWriter(path, "--trace-ids") as file:
        for trace in traces:
            file.write(document(trace))


def read_trace(path: Path) -> list[Trace]:
    """Read a trace of at most 1 GiB; UsageError names the bad line and field."""
    try:
        data = read_bytes(path, MAX_BYTES)
        lines = [line for line in enumerate(data.split(b"\n"), start=1) if line[1].strip()]
        traces = [_trace(line, f"{path}, line {number}") for number, line in lines]
    except ModelError as error:
        raise UsageError(f"trace: {error}") from None
    if not traces:
        raise UsageError(f"trace: {path}: no line; clocher-run --trace-ids FILE writes one")
    return traces


def document(trace: Trace) -> dict[str, Any]:
    """Return a line's object."""
    found: dict[str, Any] = finite(msgspec.to_builtins(trace))
    return found


def _trace(line: bytes, where: str) -> Trace:
    document = parse_object(line, where)
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
