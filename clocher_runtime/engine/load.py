"""From a checkpoint to a Model: check every tensor, decode the vectors, requantise if asked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.float import Float
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.opening import Checkpoint
from clocher_runtime.disk.schema import given, read_as
from clocher_runtime.engine.arguments import one_of
from clocher_runtime.engine.backends import Weights
from clocher_runtime.models.config import Ends
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import EMBED, HEAD, Need, head_name, inventory
from clocher_runtime.models.spec import ModelSpec

CASTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
WEIGHT_ONLY = {
    "int8w": "int8_row_f32",
    "int4w": "int4_sym_g64_f16",
    "int4": "int4_sym_g64_f16",
}
PRECISIONS = (*CASTS, *WEIGHT_ONLY)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready to be planned.

    Attributes:
        weights: QuantTensors (matrices, in place where possible) and fp32 arrays (vectors).
        precision: what the matrices are stored as, the largest share of bytes first.
        bytes_per_token: weight bytes that one token reads.
    """

    spec: ModelSpec
    weights: Weights
    checkpoint: Checkpoint
    precision: str
    bytes_per_token: int

    @property
    def formats(self) -> dict[str, Format]:
        """Format of each matrix by tensor name."""
        return {n: w.format for n, w in self.weights.items() if isinstance(w, QuantTensor)}


def load_model(checkpoint: Checkpoint, precision: str | None = None) -> Model:
    """Load the tensors of a checkpoint.

    Args:
        checkpoint: opened Hugging Face directory or IEBIN pair.
        precision: None keeps every tensor as stored. "fp32", "bf16", "fp16" cast the float
            matrices. "int8w" (int8 per row) and "int4w" (int4, groups of 64) quantise the float
            linears of the blocks; embedding, head, router and vectors stay. Tensors that are
            quantised already are never touched.

    Raises:
        UsageError: the precision is not known.
        UnsupportedModel, FormatError: the checkpoint is not one that Clocher can run.
    """
    refuse_in_window("load weights")
    if precision is not None:
        one_of("precision", precision, PRECISIONS)
    spec = _with_stop_ids(spec_from_config(checkpoint.config), checkpoint.generation_config)
    needs = inventory(spec)
    _account(spec, needs, checkpoint)
    weights: dict[str, np.ndarray | QuantTensor] = {}
    for name, need in needs.items():
        tensor = checkpoint.tensor(name)
        if tensor.shape != need.shape:
            raise FormatError(
                f"tensor {name} has shape {list(tensor.shape)}; its config.json asks for "
                f"{list(need.shape)}"
            )
        if need.kind == "vector":
            weights[name] = _vector(name, tensor)
        else:
            weights[name] = _matrix(need, tensor, precision, spec.ternarize)
    matrices = [w for w in weights.values() if isinstance(w, QuantTensor)]
    return Model(
        spec,
        weights,
        checkpoint,
        precision=_label(matrices),
        bytes_per_token=_bytes_per_token(spec, weights),
    )


def _with_stop_ids(spec: ModelSpec, generation_config: Mapping[str, Any]) -> ModelSpec:
    """Add the ids of generation_config.json, where chat models list all that end a turn."""
    ends = read_as(given(generation_config), Ends, "generation_config.json")
    more = ends.eos_ids(spec.vocab_size)
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))


def _account(spec: ModelSpec, needs: Mapping[str, Need], checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that lacks a tensor, or has one that the model would ignore."""
    names = set(checkpoint.names)
    missing = sorted(set(needs) - names)
    if missing:
        raise FormatError(
            f"{checkpoint.path}: {len(missing)} tensors are missing, the first is {missing[0]}"
        )
    ignored = {HEAD} if spec.tied else set()
    extra = sorted(n for n in names - set(needs) - ignored if not n.endswith("rotary_emb.inv_freq"))
    extra = [name for name in extra if not _bias_of_zeros(checkpoint, name)]
    if extra:
        raise FormatError(
            f"{checkpoint.path}: {len(extra)} tensors have no place in a {spec.family} model, "
            f"the first is {extra[0]}; its config.json does not describe it"
        )


def _bias_of_zeros(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor adds nothing: AutoGPTQ gave every linear a bias, even of zeros."""
    is_bias = name.endswith(".bias") and len(checkpoint.shape(name)) == 1
    return is_bias and not checkpoint.tensor(name).decode().any()


def _vector(name: str, tensor: QuantTensor) -> np.ndarray:
    if not isinstance(tensor.format, Float):
        raise FormatError(f"tensor {name} is {tensor.format.name}; expected a float vector")
    return np.ascontiguousarray(tensor.decode(), dtype=np.float32)


def _matrix(need: Need, tensor: QuantTensor, precision: str | None, ternarize: bool) -> QuantTensor:
    if not isinstance(tensor.format, Float):
        return tensor
    if ternarize and need.kind == "linear":
        return encode(tensor.decode(), parse_format("ternary_f32"))
    if precision in CASTS:
        target = CASTS[str(precision)]
        same = tensor.format.name == target
        return tensor if same else encode(tensor.decode(), parse_format(target))
    if precision in WEIGHT_ONLY and need.kind == "linear":
        return encode(tensor.decode(), parse_format(WEIGHT_ONLY[str(precision)]))
    return tensor


def _label(matrices: list[QuantTensor]) -> str:
    """Return the format names joined by "+", the largest share of bytes first."""
    share: dict[str, int] = {}
    for w in matrices:
        share[w.format.name] = share.get(w.format.name, 0) + w.nbytes
    return "+".join(sorted(share, key=lambda name: (-share[name], name)))


def _bytes_per_token(spec: ModelSpec, weights: Weights) -> int:
    """Return the bytes of all weights that one token reads: of the experts the active ones."""
    total = 0
    for name in inventory(spec):
        nbytes = weights[name].nbytes
        if name == EMBED:
            total += nbytes // spec.vocab_size
        elif spec.moe is not None and ".mlp.experts." in name:
            total += nbytes * spec.moe.active // spec.moe.experts
        else:
            total += nbytes
    return total + (weights[head_name(spec)].nbytes if spec.tied else 0)
