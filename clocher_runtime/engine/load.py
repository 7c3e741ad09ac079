"""From a checkpoint to a Model: check tensors, decode vectors, convert if requested."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from clocher_kernels.errors import FormatError, counted
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.floats import Float
from clocher_kernels.guards import refuse_in_window, require
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint, is_lazy, rows_of
from clocher_runtime.config.engine import PRECISIONS as PRECISIONS
from clocher_runtime.disk.strict_json import given, read_as
from clocher_runtime.models.config import Ends
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import EMBED, HEAD, Need, head_name, inventory
from clocher_runtime.models.spec import ModelSpec

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.lora import Adapters

Weights = Mapping[str, np.ndarray | QuantTensor]

CASTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
WEIGHT_ONLY = {
    "int8w": "int8_row_f32",
    "int4w": "int4_sym_g64_f16",
    "int4": "int4_sym_g64_f16",
    "fp8w": "fp8_e4m3_row_f32",
    "fp8_b128w": "fp8_e4m3_b128_f32",
    "fp8_e5m2w": "fp8_e5m2_row_f32",
    "mxfp4w": "mxfp4",
    "ternaryw": "ternary_f16",
}
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to be planned: matrices (in place where possible) and fp32 vectors.

    `precision`: matrix formats, the most bytes first; `bytes_per_token`: weight bytes a token
    reads; `obeyed`: the requested precision changed a matrix, or all linears had it; `adapters`:
    that requests may name.
    """

    spec: ModelSpec
    weights: Weights
    checkpoint: Checkpoint
    precision: str
    bytes_per_token: int
    obeyed: bool = True
    adapters: "Adapters | None" = None

    @property
    def formats(self) -> dict[str, Format]:
        """Format of each matrix by tensor name."""
        return {n: w.format for n, w in self.weights.items() if isinstance(w, QuantTensor)}


def load_model(checkpoint: Checkpoint, precision: str | None = None) -> Model:
    """Load a checkpoint. Raises UsageError, UnsupportedModel, FormatError, OutOfMemory.

    `precision` None keeps tensors as stored; "fp32", "bf16", "fp16" cast float matrices; names in
    `WEIGHT_ONLY` quantise the float linears of the blocks. Quantised tensors never change.
    """
    refuse_in_window("load weights")
    spec, needs = describe(checkpoint)
    becomes = destined(spec, needs, checkpoint, precision)
    require(
        sum(each.nbytes for each in becomes.values() if each.made),
        "weights that are decoded or converted at load need",
        "take a model that is stored as it is used, or convert it with scripts/hf_to_iebin.py",
    )
    weights: dict[str, np.ndarray | QuantTensor] = {}
    for name, need in needs.items():
        tensor, target = checkpoint.tensor(name), becomes[name].format
        if target is None:
            weights[name] = vector(name, need, tensor)
        else:
            same = target.name == tensor.format.name
            weights[name] = tensor if same else encode(tensor.decode(), target)
    for file in checkpoint.files:
        file.remember()
    matrices = {n: (w.format, w.nbytes) for n, w in weights.items() if isinstance(w, QuantTensor)}
    return Model(
        spec,
        weights,
        checkpoint,
        precision=label(matrices),
        bytes_per_token=bytes_per_token(spec, {name: w.nbytes for name, w in weights.items()}),
        obeyed=precision is None or _obeyed(precision, needs, becomes, checkpoint),
    )


def _obeyed(
    precision: str, needs: Mapping[str, Need], becomes: Mapping[str, "Destined"], stored: Checkpoint
) -> bool:
    matrices = {name: each.format for name, each in becomes.items() if each.format is not None}
    if any(fmt is not stored.tensors[name].format for name, fmt in matrices.items()):
        return True
    wanted = {**CASTS, **WEIGHT_ONLY}[precision]
    return all(fmt.name == wanted for n, fmt in matrices.items() if needs[n].kind == "linear")


@dataclass(frozen=True, slots=True)
class Destined:
    """What a tensor becomes at load; `format` None: an fp32 vector; `made`: not read in place."""

    format: Format | None
    nbytes: int
    made: bool


def describe(checkpoint: Checkpoint) -> tuple[ModelSpec, dict[str, Need]]:
    """Return a checkpoint's model and tensors to read. Raises UnsupportedModel, FormatError."""
    spec = head_as_stored(model_spec(checkpoint), checkpoint)
    needs = inventory(spec)
    _account(spec, needs, checkpoint)
    for name, need in needs.items():
        if checkpoint.shape(name) != need.shape:
            raise FormatError(
                f"tensor {name} has shape {list(checkpoint.shape(name))}; its config.json asks for "
                f"{list(need.shape)}"
            )
    return spec, needs


def destined(
    spec: ModelSpec, needs: Mapping[str, Need], checkpoint: Checkpoint, precision: str | None = None
) -> dict[str, Destined]:
    """Return what `load_model` will make of each tensor, from headers alone."""
    found = {}
    for name, need in needs.items():
        stored = checkpoint.tensors[name]
        if need.kind == "vector":
            is_same = stored.format.name == "f32" and not is_lazy(stored)
            is_same = is_same and not need.offset and need.scale == 1
            found[name] = Destined(None, 4 * prod(need.shape), not is_same)
            continue
        fmt = _target(need, stored.format, precision, spec.ternarize)
        is_late = is_lazy(stored) and (rows_of(stored) is None or need.kind == "embedding")
        made = fmt is not stored.format or is_late
        found[name] = Destined(fmt, fmt.nbytes(need.shape), made)
    return found


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Return a checkpoint's model from its configs alone. Raises UnsupportedModel, FormatError."""
    spec = spec_from_config(checkpoint.config)
    # Chat models list all end-of-turn tokens there.
    ends = read_as(given(checkpoint.generation_config), Ends, "generation_config.json")
    more = ends.eos_ids(spec.vocab_size)
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))


def head_as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Untie embedding and head if the checkpoint stores a different head, as transformers does."""
    both = {EMBED, HEAD} <= set(checkpoint.names)
    if not spec.tied or not both or _same_planes(checkpoint, EMBED, HEAD):
        return spec
    return replace(spec, tied=False)


def _same_planes(checkpoint: Checkpoint, name: str, other: str) -> bool:
    one, two = checkpoint.tensors[name], checkpoint.tensors[other]
    if (one.shape, one.format) != (two.shape, two.format):
        return False
    planes, others = checkpoint.tensor(name).planes, checkpoint.tensor(other).planes
    return all(
        np.array_equal(plane[start : start + _ROWS], others[key][start : start + _ROWS])
        for key, plane in planes.items()
        for start in range(0, len(plane), _ROWS)
    )


def _account(spec: ModelSpec, needs: Mapping[str, Need], checkpoint: Checkpoint) -> None:
    names = set(checkpoint.names)
    missing = [name for name in needs if name not in names]
    if missing == [HEAD]:
        raise FormatError(
            f"{checkpoint.path}: {HEAD} is missing, and its config.json does not say that the "
            "embedding is the head (tie_word_embeddings): a model that was saved without its head "
            "(AutoModel) makes no text; save it as AutoModelForCausalLM"
        )
    if missing:
        raise FormatError(
            f"{checkpoint.path}: {counted(len(missing), 'tensor')} missing, the first is "
            f"{missing[0]}; its config.json is another model's, or the download is not whole"
        )
    ignored = {HEAD} if spec.tied else set()
    extra = sorted(n for n in names - set(needs) - ignored if not n.endswith("rotary_emb.inv_freq"))
    extra = [name for name in extra if not _bias_of_zeros(checkpoint, name)]
    if extra:
        raise FormatError(
            f"{checkpoint.path}: {counted(len(extra), 'tensor')} with no place in a {spec.family} "
            f"model, the first is {extra[0]}; its config.json does not describe it"
        )


def _bias_of_zeros(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor is an all-zero bias; AutoGPTQ gives every linear one."""
    is_bias = name.endswith(".bias") and len(checkpoint.shape(name)) == 1
    return is_bias and not checkpoint.tensor(name).decode().any()


def vector(name: str, need: Need, tensor: QuantTensor) -> np.ndarray:
    """Return a vector as the model reads it, fp32. Raises FormatError."""
    if not isinstance(tensor.format, Float):
        raise FormatError(f"tensor {name} is {tensor.format.name}; expected a float vector")
    values = np.ascontiguousarray(tensor.decode(), dtype=np.float32)
    if need.offset or need.scale != 1:
        values = (values + np.float32(need.offset)) * np.float32(need.scale)
    return values


def _target(need: Need, stored: Format, precision: str | None, ternarize: bool) -> Format:
    name = stored.name
    if isinstance(stored, Float):
        if ternarize and need.kind == "linear":
            name = "ternary_f32"
        elif precision in CASTS:
            name = CASTS[str(precision)]
        elif precision in WEIGHT_ONLY and need.kind == "linear":
            name = WEIGHT_ONLY[str(precision)]
    return stored if name == stored.name else parse_format(name)


def label(matrices: Mapping[str, tuple[Format, int]]) -> str:
    """Return the format names of matrices joined by "+", the largest share of bytes first."""
    share: dict[str, int] = {}
    for fmt, nbytes in matrices.values():
        share[fmt.name] = share.get(fmt.name, 0) + nbytes
    return "+".join(sorted(share, key=lambda name: (-share[name], name)))


def bytes_per_token(spec: ModelSpec, sizes: Mapping[str, int]) -> int:
    """Return the weight bytes read per token, from the bytes of each tensor."""
    total = 0
    for name, nbytes in sizes.items():
        if name == EMBED:
            nbytes //= spec.vocab_size
        elif spec.moe is not None and ".mlp.experts." in name:
            nbytes = nbytes * spec.moe.active // spec.moe.experts
        total += nbytes
    return total + (sizes[head_name(spec)] if spec.tied else 0)
