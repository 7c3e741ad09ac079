"""Traces: what a run generated for each prompt, as JSONL, so that another program can check it.

One line is one prompt; docs/verification.md lists the fields. A trace is written as the run goes,
between its steps and under a temporary name, and read as strictly as a model file.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.jsonl_writer import JsonlWriter
from clocher_runtime.disk.strict_json import fields, parse_object

SCHEMA = "clocher.trace/1"
MAX_BYTES = 1 << 30
MAX_ID = (1 << 31) - 1

_FIELDS: dict[str, type] = {
    "schema": str,
    "version": str,
    "model": str,
    "precision": str,
    "act_prec": str,
    "kv_dtype": str,
    "device": str,
    "sampling": dict,
    "prompt_ids": list,
    "generated_ids": list,
}
_NULLABLE = ("fingerprint", "prompt", "topk")
_SAMPLING: dict[str, tuple[type, ...]] = {
    "temperature": (float, int),
    "top_k": (int,),
    "top_p": (float, int),
    "seed": (int,),
}
_SAMPLED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TopLogits:
    """The largest logits of one step, the largest first.

    Attributes:
        ids: token ids.
        logits: their logits as the engine had them; NaN where they are not finite.
    """

    ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What was generated for one prompt.

    Attributes:
        version: of Clocher.
        model: what the run called it.
        fingerprint: of the weights, see `fingerprint`; None where there are none.
        precision: formats of the matrices, as in the JSON line of the run.
        act_prec: precision of activations.
        kv_dtype: storage of the KV cache.
        device: back end that ran.
        sampling: temperature, top_k, top_p and seed.
        prompt: its text; None where the run was given ids.
        prompt_ids: what the engine was fed.
        generated_ids: what it generated, the token that ended the text included.
        topk: the largest logits of each step, None where they were not traced.
    """

    version: str
    model: str
    fingerprint: str | None
    precision: str
    act_prec: str
    kv_dtype: str
    device: str
    sampling: Mapping[str, float | int]
    prompt: str | None
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    topk: tuple[TopLogits, ...] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the run took the most likely token at each step."""
        return self.sampling["temperature"] == 0


def top_logits(logits: np.ndarray, count: int) -> TopLogits:
    """Return the largest logits; of equal ones those with the lower ids come first.

    Args:
        logits: fp32 [V].
        count: how many, at most V.
    """
    scores = np.where(np.isnan(logits), -np.inf, logits)
    count = min(count, scores.size)
    floor = np.partition(scores, scores.size - count)[scores.size - count]
    candidates = np.flatnonzero(scores >= floor)
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:count]
    return TopLogits(tuple(order.tolist()), tuple(logits[order].astype(float).tolist()))


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a SHA-256 that tells models apart without reading all of their weights.

    It covers name, format and shape of each tensor and the first and last 4096 elements of each of
    its planes, in the order of names; of tensors that are repacked when they are read only name,
    format and shape. The container does not matter: a checkpoint and its unquantised IEBIN
    conversion have the same fingerprint. It is no proof against tampering.
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
    """Write traces, one line each; a file of that name is replaced in one step.

    Raises:
        UsageError: it cannot be written.
    """
    with JsonlWriter(path, "--trace-ids") as file:
        for trace in traces:
            file.write(document(trace))


def read_trace(path: Path) -> list[Trace]:
    """Read a trace.

    Raises:
        UsageError: it cannot be read, is larger than 1 GiB, or a line is not one of this schema;
            the message names the line and the field.
    """
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
    """Return the object that a line holds."""
    found = {"schema": SCHEMA, **asdict(trace)}
    if trace.topk is not None:
        found["topk"] = [
            {
                "ids": list(step.ids),
                "logits": [value if math.isfinite(value) else None for value in step.logits],
            }
            for step in trace.topk
        ]
    return found


def _trace(line: bytes, where: str) -> Trace:
    document = parse_object(line, where)
    if document.get("schema") != SCHEMA:
        raise FormatError(f"{where}: schema is {document.get('schema')!r:.60}, expected {SCHEMA!r}")
    nullable = {key: type(document.get(key)) for key in _NULLABLE}
    fields(document, where, _FIELDS | nullable)
    for key, kind in zip(_NULLABLE, (str, str, list), strict=True):
        if nullable[key] not in (kind, type(None)):
            raise FormatError(
                f"{where}: {key} is {nullable[key].__name__}, expected {kind.__name__}"
            )
    generated = _ids(document["generated_ids"], f"{where}: generated_ids")
    return Trace(
        **{key: document[key] for key in ("version", "model", "fingerprint", "precision")},
        **{key: document[key] for key in ("act_prec", "kv_dtype", "device", "prompt")},
        sampling=_sampling(document["sampling"], f"{where}: sampling"),
        prompt_ids=_ids(document["prompt_ids"], f"{where}: prompt_ids"),
        generated_ids=generated,
        topk=_topk(document["topk"], len(generated), f"{where}: topk"),
    )


def _sampling(value: dict[str, Any], where: str) -> dict[str, float | int]:
    if set(value) != set(_SAMPLING):
        raise FormatError(f"{where}: fields {sorted(value)!r:.80}, expected {sorted(_SAMPLING)}")
    for key, kinds in _SAMPLING.items():
        if type(value[key]) not in kinds or value[key] < 0:
            raise FormatError(f"{where}: {key} is {value[key]!r:.40}, expected a number >= 0")
    return value


def _ids(value: list[Any], where: str) -> tuple[int, ...]:
    if not value:
        raise FormatError(f"{where}: empty, expected token ids")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_ID:
            raise FormatError(
                f"{where}[{index}] is {token!r:.40}, expected an id from 0 to {MAX_ID}"
            )
    return tuple(value)


def _topk(value: list[Any] | None, steps: int, where: str) -> tuple[TopLogits, ...] | None:
    if value is None:
        return None
    if len(value) != steps:
        raise FormatError(f"{where}: {len(value)} steps, but {steps} ids were generated")
    found = []
    for index, step in enumerate(value):
        at = f"{where}[{index}]"
        fields(step, at, {"ids": list, "logits": list})
        ids = _ids(step["ids"], f"{at}.ids")
        logits = step["logits"]
        if len(logits) != len(ids) or len(set(ids)) != len(ids):
            raise FormatError(f"{at}: {len(logits)} logits for {len(ids)} ids, all different")
        for number in logits:
            if number is not None and type(number) not in (float, int):
                raise FormatError(f"{at}.logits: {number!r:.40} is no number")
            if type(number) is int and abs(number) > MAX_ID:
                raise FormatError(f"{at}.logits: {number!r:.40} is out of range")
        floats = tuple(math.nan if number is None else float(number) for number in logits)
        found.append(TopLogits(ids, floats))
    return tuple(found)
