"""The plan of a quantisation, made before a weight is read, and the manifest of the result."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels.errors import FormatError, ShapeError, UsageError, counted
from clocher_kernels.formats import Float, Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4_entries import Planes, entry_document, plane_hashes
from clocher_runtime.convert.q4_map import ALREADY, VERSION, Q4Map, assign, parse_q4_map
from clocher_runtime.convert.rounding import Clip
from clocher_runtime.convert.to_iebin import natural
from clocher_runtime.quality.tensor_error import TensorError

_DIGITS = 8


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor [N, K] or [E, N, K] to quantise."""

    name: str
    shape: tuple[int, ...]
    source: Format  # in the checkpoint
    format: Format  # of the result
    method: str  # "rtn", "imx" or "gptq"
    clip: Clip  # how rounding chooses the range of a cell
    rule: int  # index of the rule that asks for it

    @property
    def params(self) -> int:
        """Number of weights."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.format.nbytes(self.shape)


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """The decision about every tensor of a checkpoint."""

    tensors: Mapping[str, PlannedTensor]  # to be quantised, layer by layer
    kept: Mapping[str, str]  # the others -> why they stay
    notes: tuple[str, ...]  # for people, about rules that matched tensors which are kept
    size: Mapping[str, Any]  # as in the manifest: params, nbytes, bpw and others
    plane_nbytes: int  # of the plane file, at most

    @property
    def calibrated(self) -> tuple[str, ...]:
        """Tensors whose method needs calibration."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.method != "rtn")

    def with_formats(self, checkpoint: Checkpoint, formats: Mapping[str, Format]) -> "QuantPlan":
        """Return the plan with other formats for some tensors."""
        tensors = {
            name: replace(tensor, format=formats.get(name, tensor.format))
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors, size=_size_of(checkpoint, tensors, self.kept))


def build_plan(checkpoint: Checkpoint, rules: Q4Map) -> QuantPlan:
    """Apply rules to a checkpoint. Raises UsageError."""
    assigned = assign(rules.rules, checkpoint.tensors, rules.requantize, str(rules.path))
    tensors = {}
    for name in sorted(assigned.chosen, key=natural):
        stored = checkpoint.tensors[name]
        index = assigned.chosen[name]
        rule = rules.rules[index]
        assert rule.format is not None, "assign chooses no tensor for a rule that keeps"
        try:
            rule.format.planes(stored.shape)
        except ShapeError as error:
            where = f"{rules.path}: rules[{index}]: tensor {name!r}"
            raise UsageError(f"{where}: {error}; a rule of --rules can keep it") from None
        tensors[name] = PlannedTensor(
            name, stored.shape, stored.format, rule.format, rule.method, rule.clip, index
        )
    if not tensors:
        raise nothing_to_quantise(assigned.kept, rules.requantize)
    notes = assigned.notes
    grown = [
        t
        for t in tensors.values()
        if not isinstance(t.source, Float) and t.nbytes > t.source.nbytes(t.shape)
    ]
    if grown:
        notes += (
            f"--requantize gives {len(grown)} quantised tensors more bits, such as {grown[0].name} "
            f"({grown[0].source.name} to {grown[0].format.name}): they grow, and nothing that was "
            "lost comes back",
        )
    kept = {name: assigned.kept[name] for name in sorted(assigned.kept, key=natural)}
    planes = sum(tensor.nbytes for tensor in tensors.values() if tensor.method != "rtn")
    return QuantPlan(tensors, kept, notes, _size_of(checkpoint, tensors, kept), planes)


def nothing_to_quantise(kept: Mapping[str, str], requantize: bool) -> UsageError:
    """Return the error of a plan that keeps all that matters; `kept`: tensors -> reasons."""
    reasons = sorted(set(kept.values()))
    already = ", ".join(r.removeprefix(ALREADY) for r in reasons if r.startswith(ALREADY))
    if already and requantize:
        return UsageError(
            f"nothing to quantise: got matrices in {already}, which stay so with --requantize, "
            "too; choose another --format or --bits, or take the model it was made from"
        )
    if already:
        return UsageError(
            f"the model is quantised: got matrices in {already}, expected floats; take the "
            "model that it was made from, or give --requantize, which loses more"
        )
    return UsageError(
        f"nothing to quantise: {counted(len(kept), 'tensor')} kept ({', '.join(reasons)}), and no "
        "matrix of the blocks is left; choose another --format or --bits, or give --rules"
    )


def _size_of(
    checkpoint: Checkpoint, tensors: Mapping[str, PlannedTensor], kept: Iterable[str]
) -> dict[str, Any]:
    stay = [checkpoint.tensors[name] for name in kept]
    own = sum(tensor.params for tensor in tensors.values())
    params = own + sum(prod(tensor.shape) for tensor in stay)
    by_format: Counter[str] = Counter()
    for tensor in tensors.values():
        by_format[tensor.format.name] += tensor.nbytes
    nbytes = by_format.total() + sum(tensor.nbytes for tensor in stay)
    return {
        "params": params,
        "nbytes": nbytes,
        "source_nbytes": checkpoint.nbytes,
        "bpw": 8 * nbytes / params,
        "quantised_bpw": 8 * by_format.total() / own,
        "by_format": dict(by_format),
    }


class Done(NamedTuple):
    """The result for one tensor."""

    error: TensorError  # distance from the float tensor
    entry: Mapping[str, Any]  # of the manifest's `tensors`


def result_of(
    planned: PlannedTensor,
    tensor: QuantTensor,
    error: TensorError,
    record: Mapping[str, Any],
    offsets: Mapping[str, int],
) -> Done:
    """Return the result for a tensor; `record` is that of calibration, or `ROUNDED`."""
    kinds = ("rms_rel", "max_abs", "cosine", "clipped_frac")
    errors = {key: getattr(error, key) for key in kinds} | record["err"]
    known = {key: _short(value) for key, value in errors.items() if value is not None}
    more = {**record, "err": known} | ({"offsets": dict(offsets)} if offsets else {})
    hashes = plane_hashes(tensor)
    entry = entry_document(planned.name, tensor.shape, tensor.format, planned.rule, hashes, more)
    return Done(error, entry)


def tool() -> dict[str, str]:
    """Return the program's name and version for a manifest."""
    return {"name": "clocher", "version": version("clocher")}


def describe_source(
    checkpoint: Checkpoint, progress: Callable[[int], object] = lambda done: None
) -> dict[str, Any]:
    """Return a manifest's `source`: the weight files and their hashes; `progress` gets bytes."""
    files, before = list[dict[str, Any]](), 0
    for file in checkpoint.files:
        digest = file.sha256(progress, before)
        files.append({"name": file.path.name, "nbytes": file.nbytes, "sha256": digest})
        before += file.nbytes
    return {"kind": checkpoint.kind, "files": files}


def document_of(
    rules: Sequence[Mapping[str, Any]],
    plan: QuantPlan,
    done: Sequence[Done],
    planes: Planes | None,
    sections: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a manifest, checked by its reader; `done` in plan order, `sections` extra."""
    if [each.entry["name"] for each in done] != list(plan.tensors):
        raise FormatError("the manifest would not list every tensor of the plan")
    document: dict[str, Any] = {"version": VERSION, **sections}
    document["rules"] = [dict(rule) for rule in rules]
    document["size"] = plan.size
    if planes:
        document["planes"] = planes._asdict()
    document["tensors"] = [each.entry for each in done]
    document["kept"] = [{"name": name, "reason": reason} for name, reason in plan.kept.items()]
    parse_q4_map(document, Path("the new manifest"))
    return document


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
