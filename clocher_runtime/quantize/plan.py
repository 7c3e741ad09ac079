"""What a quantisation will do, known before a weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats import Format
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4.map import Q4Map, assign
from clocher_runtime.convert.rounding import Clip
from clocher_runtime.convert.to_iebin import natural


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor that is to be quantised.

    Attributes:
        name: of the tensor.
        shape: [N, K] or [E, N, K].
        source: format in the checkpoint.
        format: format of the result.
        method: "rtn", "imx" or "gptq".
        clip: how rounding chooses the range of a cell.
        rule: index of the rule that asks for it.
    """

    name: str
    shape: tuple[int, ...]
    source: Format
    format: Format
    method: str
    clip: Clip
    rule: int

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
    """What becomes of every tensor of a checkpoint.

    Attributes:
        tensors: to be quantised, by name, layer by layer.
        kept: the others -> why they stay.
        notes: for people, about rules that matched tensors which are kept.
        kept_params: elements of the tensors that stay.
        kept_nbytes: bytes of the tensors that stay.
        source_nbytes: bytes of all tensors in the checkpoint.
    """

    tensors: Mapping[str, PlannedTensor]
    kept: Mapping[str, str]
    notes: tuple[str, ...]
    kept_params: int
    kept_nbytes: int
    source_nbytes: int

    @property
    def params(self) -> int:
        """Elements of all tensors."""
        return self.kept_params + sum(tensor.params for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the result."""
        return self.kept_nbytes + sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bpw(self) -> float:
        """Bits per weight of all tensors in the result."""
        return 8 * self.nbytes / self.params

    @property
    def quantised_bpw(self) -> float:
        """Bits per weight of the tensors that are quantised, scales included."""
        tensors = self.tensors.values()
        return 8 * sum(t.nbytes for t in tensors) / sum(t.params for t in tensors)

    @property
    def calibrated(self) -> tuple[str, ...]:
        """Tensors whose method needs calibration."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.method != "rtn")

    def with_formats(self, formats: Mapping[str, Format]) -> "QuantPlan":
        """Return the plan with other formats for some of its tensors."""
        tensors = {
            name: replace(tensor, format=formats.get(name, tensor.format))
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)


def build_plan(checkpoint: Checkpoint, rules: Q4Map) -> QuantPlan:
    """Apply rules to a checkpoint.

    Raises:
        UsageError: a rule decides about no tensor, nothing is left to quantise, or a tensor cannot
            have the format that its rule says.
    """
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
            raise UsageError(f"{rules.path}: rules[{index}]: tensor {name!r}: {error}") from None
        tensors[name] = PlannedTensor(
            name, stored.shape, stored.format, rule.format, rule.method, rule.clip, index
        )
    if not tensors:
        reasons = ", ".join(sorted(set(assigned.kept.values())))
        raise UsageError(
            f"{rules.path}: nothing to quantise: all {len(assigned.kept)} tensors are kept "
            f"({reasons}); tensors that are quantised already need --requantize"
        )
    kept = {name: assigned.kept[name] for name in sorted(assigned.kept, key=natural)}
    stay = [checkpoint.tensors[name] for name in kept]
    return QuantPlan(
        tensors,
        kept,
        assigned.notes,
        sum(prod(tensor.shape) for tensor in stay),
        sum(tensor.nbytes for tensor in stay),
        checkpoint.nbytes,
    )
