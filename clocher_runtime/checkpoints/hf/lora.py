"""LoRA adapters (PEFT directories), added to the float weights of their base at load, or beside it.

    adapter_config.json          which tensors mean what: lora_alpha, use_rslora, ...
    adapter_model.safetensors    base_model.model.M.lora_A.weight            [r, K]
                                 base_model.model.M.lora_B.weight            [N, r]
                                 base_model.model.M.lora_embedding_A, _B     [r, V], [H, r]
                                 base_model.model.M.weight                   of modules_to_save

    W' = W + s * (B @ A),  of an embedding W + s * (B @ A)^T
    s = lora_alpha / r, with use_rslora lora_alpha / sqrt(r); alpha_pattern has others by module

The sum W' is in fp32, rounded once; PEFT also rounds a bf16 product. Source: peft
src/peft/tuners/lora/{config,layer}.py, utils/save_and_load.py.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel, counted
from clocher_kernels.formats import Float, parse_format
from clocher_kernels.formats.base import require_finite
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.ops.rewrite import LORA, Adapted
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import checkpoint
from clocher_runtime.checkpoints.arranged import text_name
from clocher_runtime.checkpoints.hf import shards
from clocher_runtime.checkpoints.locate import ADAPTER_CONFIG
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.strict_json import given, one_of, read_as
from clocher_runtime.models.families import family_of, names_of, text_config
from clocher_runtime.models.inventory import EMBED, HEAD, Need, inventory
from clocher_runtime.models.spec import ModelSpec

WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
_ROWS = 1024
_BLOCK = 16
# Other arithmetic than W + s * (B @ A), by the setting that asks for it.
_OTHER = {
    "use_dora": "DoRA, which also scales the columns of the sum",
    "use_qalora": "QA-LoRA, which pools the inputs",
    "use_bdlora": "BD-LoRA, of diagonal blocks",
    "fan_in_fan_out": "weights that are stored transposed",
    "lora_bias": "biases of its own",
    "layer_replication": "layers that are used several times",
    "trainable_token_indices": "single rows of the embedding",
    "alora_invocation_tokens": "activated LoRA, which begins in the middle of a text",
    "target_parameters": "parameters that are no linears",
    "arrow_config": "a choice among adapters",
}
_MERGE = "merge it with peft (`merge_and_unload`) and give the model that this makes"


class _Config(Struct):
    """adapter_config.json; only tensors say which modules have an adapter."""

    lora_alpha: Annotated[float, Meta(ge=-1e6, le=1e6)] = 8.0
    use_rslora: bool = False
    alpha_pattern: dict[str, Annotated[float, Meta(ge=-1e6, le=1e6)]] = {}

    def scale(self, module: str, rank: int) -> float:
        own = (n for n in self.alpha_pattern if module == n or module.endswith(f".{n}"))
        alpha = self.alpha_pattern.get(next(own, ""), self.lora_alpha)
        return alpha / (sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    """scale * (B @ A), added to a tensor: A [r, K], B [N, r]; transposed for an embedding."""

    a: shards.StoredArray
    b: shards.StoredArray
    scale: float
    is_embedding: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the delta."""
        shape = self.b.array.shape[0], self.a.array.shape[1]
        return shape[::-1] if self.is_embedding else shape

    def planes_of(self, stored: QuantTensor) -> Mapping[str, np.ndarray]:
        """Return a float tensor's planes with the delta added, in its dtype."""
        data, dtype = checkpoint.planes_of(stored)["data"], stored.format.name
        left, right = (to_f32(each.array, shards.DTYPES[each.dtype]) for each in (self.b, self.a))
        for half in (left, right):
            require_finite("a LoRA adapter", half)
        if self.is_embedding:
            left, right = right.T, left.T
        out = np.empty_like(data)
        for start in range(0, len(data), _ROWS):
            rows = slice(start, start + _ROWS)
            change = left[rows] @ right
            change *= np.float32(self.scale)
            change += to_f32(data[rows], dtype)
            out[rows] = from_f32(change, dtype)
        return {"data": out}


class Adapters:
    """LoRA adapters beside a model, any of which a sequence may name; see `ops.rewrite.adapt`.

    `names` number them from 1; `linears` are those that one of them changes, `weights` all that is
    multiplied with.
    """

    def __init__(
        self, base: checkpoint.Checkpoint, spec: ModelSpec, directories: Mapping[str, Path]
    ) -> None:
        """Read adapters by name, not added to the weights of their base. Raises ModelError."""
        self.names, needs = tuple(directories), inventory(spec)
        self.linears, self.weights = dict[str, Adapted](), dict[str, QuantTensor]()
        each = [_of_linears(base, spec, directory) for directory in directories.values()]
        tables: dict[tuple[tuple[int, float], ...], str] = {}
        for name in sorted({name for deltas in each for name in deltas}):
            deltas = [deltas.get(name) for deltas in each]
            # Scaled after A: both halves stay as they are stored.
            scales = tuple((len(d.a.array), d.scale) if d else (0, 0.0) for d in deltas)
            table = tables.setdefault(scales, f"{LORA}scales.{len(tables)}")
            self.linears[name] = Adapted(sum(rank for rank, _ in scales), table)
            self.weights[f"{LORA}a.{name}"] = _joined([d.a for d in deltas if d], 0)
            self.weights[f"{LORA}b.{name}"] = _joined([d.b for d in deltas if d], 1)
            if name.endswith("gate_proj.weight"):
                rows = needs[name].shape[0]
                self.weights[f"{LORA}identity.{rows}"] = _identity(rows)
        for scales, table in tables.items():
            ranks, own = zip(*scales, strict=True)
            of_adapter = np.repeat(np.eye(len(scales) + 1, len(scales), -1), ranks, axis=1)
            self.weights[table] = encode(of_adapter * np.repeat(own, ranks), parse_format("f32"))

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads."""
        return sum(weight.nbytes for weight in self.weights.values())


def _of_linears(
    base: checkpoint.Checkpoint, spec: ModelSpec, directory: Path
) -> Mapping[str, _Delta]:
    deltas, whole, _ = _recognised(directory)
    for name, delta in deltas.items():
        _fits(base, name, delta)
    # Linears of BitNet may have norms of their own, which an adapter would have to come before.
    needs = {} if spec.input_norm_eps else inventory(spec)
    dense = {n for n, need in needs.items() if need.kind == "linear" and len(need.shape) == 2}
    if others := sorted(whole.keys() | (deltas.keys() - dense)):
        raise UnsupportedModel(
            f"{directory}: changes {others[0]}; expected low-rank pairs for linears of attention "
            "and dense MLPs, which is all that requests can choose by name; merge it into the "
            f"weights instead: --lora {directory}"
        )
    return deltas


def _joined(halves: Sequence[shards.StoredArray], axis: int) -> QuantTensor:
    """Return matrices one after the other, in their own type if they share one."""
    types = {shards.DTYPES[half.dtype] for half in halves}
    values = np.concatenate(
        [to_f32(half.array, shards.DTYPES[half.dtype]) for half in halves], axis=axis
    )
    require_finite("a LoRA adapter", values)
    return encode(values, parse_format(types.pop() if len(types) == 1 else "f32"))


def _identity(size: int) -> QuantTensor:
    count = -(-size // _BLOCK)
    values = np.tile(np.eye(_BLOCK, dtype=np.float32), (count, 1, 1))
    values[-1, size - count * _BLOCK + _BLOCK :] = 0
    at = np.arange(count + 1, dtype=np.int32)
    planes = {"row_ptr": at, "col_idx": at[:-1], "values": values}
    return QuantTensor((size, size), Bsr((_BLOCK, _BLOCK), "f32", count), planes)


def with_lora(base: checkpoint.Checkpoint, directory: Path) -> checkpoint.Checkpoint:
    """Return a model with an adapter added to its float weights at load. Raises ModelError."""
    deltas, whole, file = _recognised(directory)
    tensors = dict(base.tensors)
    changed = deltas.keys() | whole.keys()
    tied = base.config.get("tie_word_embeddings") is True and HEAD not in base.tensors
    if tied and EMBED in changed and HEAD not in changed:  # no file says what the head becomes
        raise UnsupportedModel(
            f"{directory}: changes {EMBED}, which is the head of its base as well "
            f"(tie_word_embeddings); {_MERGE}"
        )
    for name, array in whole.items():  # modules_to_save
        known = _of_base(base, name, array)
        array.expect(shards.FLOATS, known.shape)
        fmt = Float(shards.DTYPES[array.dtype])
        tensors[name] = checkpoint.stored_tensor(
            known.shape, fmt, {"data": array.array}, array.where
        )
    for name, delta in deltas.items():
        found = _fits(base, name, delta)
        if not isinstance(found.format, Float):
            raise UnsupportedModel(
                f"{base.path}: {name} is {found.format.name}; a LoRA adapter is added to floats: "
                "give its float base, with --precision int8w or int4w to quantise the sum at load"
            )
        make = partial(delta.planes_of, found)
        tensors[name] = checkpoint.lazy_tensor(found.shape, found.format, make, delta.a.where)
    note = f"{directory}: LoRA, added to {counted(len(deltas), 'tensor')} at load"
    return replace(
        base,
        tensors=tensors,
        files=(*base.files, file),
        hashes={name: known for name, known in base.hashes.items() if name not in changed},
        notes=(*base.notes, note + (f"; {len(whole)} are its own" if whole else "")),
    )


def _read_config(directory: Path) -> _Config:
    folder = shards.HfFolder(directory)
    if not os.path.isdir(directory) or not folder.has(ADAPTER_CONFIG):
        raise ModelNotFound(
            f"{directory}: no {ADAPTER_CONFIG}; --lora takes the directory of a LoRA adapter as "
            "peft saves it"
        )
    if not folder.has(WEIGHTS):
        raise ModelNotFound(f"{directory}: no {WEIGHTS}; adapters of other formats are not read")
    where = str(directory / ADAPTER_CONFIG)
    settings = given(folder.json(ADAPTER_CONFIG))
    one_of(settings, "peft_type", "LORA", ("LORA",), where, _MERGE)
    one_of(settings, "bias", "none", ("none",), where, _MERGE)
    for key, what in _OTHER.items():
        if settings.get(key):
            raise UnsupportedModel(f"{where}: {key}: {what}, is not known here; {_MERGE}")
    # The other ways to begin a training change the weights of the base as well.
    known = (True, False, "gaussian", "eva", "orthogonal")
    one_of(settings, "init_lora_weights", True, known, where, _MERGE)
    config = read_as(settings, _Config, where)
    for pattern in config.alpha_pattern:
        if not re.fullmatch(r"[\w.]{1,255}", pattern, re.ASCII):
            raise UnsupportedModel(
                f"{where}: alpha_pattern has {pattern!r:.80}; expected names of modules: patterns "
                f"of a file are not run; {_MERGE}"
            )
    return config


def _recognised(
    directory: Path,
) -> tuple[dict[str, _Delta], dict[str, shards.StoredArray], MappedFile]:
    """Return the deltas and the replaced tensors, by name, and the file that has them."""
    config = _read_config(directory)
    arrays, file = shards.open_safetensors(shards.HfFolder(directory).member(WEIGHTS))
    rest, deltas = dict(arrays), dict[str, _Delta]()
    for name in arrays:
        first = next((part for part in _PARTS if name.endswith(part)), None)
        if first is None:
            continue
        module = _base_name(name, arrays[name]).removesuffix(first)
        a = rest.pop(name)
        b = rest.pop(name.removesuffix(first) + _PARTS[first], None)
        if b is None:
            raise FormatError(f"{a.where}: its other half is missing")
        for half in (a, b):
            half.expect(shards.FLOATS)
        (rank, _), (_, inner) = a.matrix(), b.matrix()
        if rank != inner:
            raise FormatError(f"{a.where}: rank {rank}, but its other half has {inner}")
        scale = config.scale(module, rank)
        deltas[f"{module}.weight"] = _Delta(a, b, scale, first == ".lora_embedding_A")
    whole = {}
    for name, array in rest.items():
        if ".lora_" in name:
            raise UnsupportedModel(f"{array.where}: not known in a LoRA adapter; {_MERGE}")
        array.expect(shards.FLOATS)
        whole[_base_name(name, array).replace(".base_layer.", ".")] = array
    if not deltas and not whole:
        raise FormatError(f"{directory}: the adapter has no tensors")
    return deltas, whole, file


def _base_name(name: str, stored: shards.StoredArray) -> str:
    if not name.startswith(_PREFIX):
        raise FormatError(f"{stored.where}: expected a name that begins with {_PREFIX}")
    return text_name(name.removeprefix(_PREFIX))


def _fits(base: checkpoint.Checkpoint, name: str, delta: _Delta) -> QuantTensor:
    """Return the tensor that an adapter changes. Raises FormatError if it has another shape."""
    found = _of_base(base, name, delta.a)
    if delta.shape != found.shape:
        raise FormatError(
            f"{delta.a.where}: for a weight {list(delta.shape)}, but {name} of {base.path} is "
            f"{list(found.shape)}; is the adapter of another model?"
        )
    return found


def _of_base(base: checkpoint.Checkpoint, name: str, stored: shards.StoredArray) -> QuantTensor:
    """Return a tensor of the base; a tied head becomes a tensor of its own."""
    found = base.tensors.get(name) or (base.tensors.get(EMBED) if name == HEAD else None)
    named = names_of(family_of(text_config(base.config)), name, Need("linear", (1, 1)))
    if found is None or any(has_other_rows for _, has_other_rows in named):
        raise FormatError(
            f"{stored.where}: {base.path} has no tensor {name} as the adapter has it: either that "
            "is of another model, or it changes what Clocher keeps in another form (fused "
            f"projections, single experts, rows in another order), and then {_MERGE}"
        )
    return found
