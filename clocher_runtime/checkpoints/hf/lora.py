"""LoRA adapters (PEFT directories), added to the float weights of their base at load.

    adapter_config.json          which tensors mean what: lora_alpha, use_rslora, ...
    adapter_model.safetensors    base_model.model.M.lora_A.weight            [r, K]
                                 base_model.model.M.lora_B.weight            [N, r]
                                 base_model.model.M.lora_embedding_A, _B     [r, V], [H, r]
                                 base_model.model.M.weight                   of modules_to_save

    W' = W + s * (B @ A),  of an embedding W + s * (B @ A)^T
    s = lora_alpha / r, with use_rslora lora_alpha / sqrt(r); alpha_pattern has others by module

The sum is in fp32, rounded once; PEFT also rounds a bf16 product. Source: peft
src/peft/tuners/lora/{config,layer}.py, utils/save_and_load.py.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_kernels.formats import Float
from clocher_kernels.formats.base import require_finite
from clocher_runtime.checkpoints import checkpoint
from clocher_runtime.checkpoints.arranged import text_name
from clocher_runtime.checkpoints.hf.shards import FLOATS, HfFolder, StoredArray, read_safetensors
from clocher_runtime.checkpoints.locate import ADAPTER_CONFIG
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.disk.strict_json import given, one_of, read_as
from clocher_runtime.models.inventory import EMBED, HEAD

WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": ".lora_B.weight", ".lora_embedding_A": ".lora_embedding_B"}
_ROWS = 1024
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
        alpha = self.lora_alpha
        for pattern, other in self.alpha_pattern.items():
            if module == pattern or module.endswith(f".{pattern}"):
                alpha = other
                break
        return alpha / (sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    """scale * (B @ A), added to a tensor: A [r, K], B [N, r]; transposed for an embedding."""

    a: StoredArray
    b: StoredArray
    scale: float
    is_embedding: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the delta."""
        shape = self.b.array.shape[0], self.a.array.shape[1]
        return shape[::-1] if self.is_embedding else shape

    def planes_of(self, stored: checkpoint.Stored) -> Mapping[str, np.ndarray]:
        """Return a float tensor's planes with the delta added, in its dtype."""
        data, dtype = checkpoint.planes_of(stored)["data"], stored.format.name
        left, right = (to_f32(each.array, DTYPES[each.dtype]) for each in (self.b, self.a))
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


def with_lora(base: checkpoint.Checkpoint, directory: Path) -> checkpoint.Checkpoint:
    """Return a model with an adapter added to its float weights at load. Raises ModelError."""
    config = _read_config(directory)
    arrays, file = read_safetensors(HfFolder(directory).member(WEIGHTS))
    deltas, whole = _recognised(arrays, config)
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
        array.expect(FLOATS, known.shape)
        fmt = Float(DTYPES[array.dtype])
        tensors[name] = checkpoint.stored_tensor(
            known.shape, fmt, {"data": array.array}, array.where
        )
    for name, delta in deltas.items():
        tensors[name] = _merged(base, name, delta)
    note = f"{directory}: LoRA, added to {len(deltas)} tensors as they are loaded"
    return replace(
        base,
        tensors=tensors,
        files=(*base.files, file),
        hashes={name: known for name, known in base.hashes.items() if name not in changed},
        notes=(*base.notes, note + (f"; {len(whole)} are its own" if whole else "")),
    )


def _read_config(directory: Path) -> _Config:
    folder = HfFolder(directory)
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
    arrays: Mapping[str, StoredArray], config: _Config
) -> tuple[dict[str, _Delta], dict[str, StoredArray]]:
    """Return the deltas and the replaced tensors, by name."""
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
            half.expect(FLOATS)
        (rank, _), (_, inner) = a.matrix(), b.matrix()
        if rank != inner:
            raise FormatError(f"{a.where}: rank {rank}, but its other half has {inner}")
        scale = config.scale(module, rank)
        deltas[f"{module}.weight"] = _Delta(a, b, scale, first == ".lora_embedding_A")
    whole = {}
    for name, array in rest.items():
        if ".lora_" in name:
            raise UnsupportedModel(f"{array.where}: not known in a LoRA adapter; {_MERGE}")
        array.expect(FLOATS)
        whole[_base_name(name, array).replace(".base_layer.", ".")] = array
    if not deltas and not whole:
        raise FormatError("the adapter has no tensors")
    return deltas, whole


def _base_name(name: str, stored: StoredArray) -> str:
    if not name.startswith(_PREFIX):
        raise FormatError(f"{stored.where}: expected a name that begins with {_PREFIX}")
    return text_name(name.removeprefix(_PREFIX))


def _merged(base: checkpoint.Checkpoint, name: str, delta: _Delta) -> checkpoint.LazyTensor:
    found = _of_base(base, name, delta.a)
    if not isinstance(found.format, Float):
        raise UnsupportedModel(
            f"{base.path}: {name} is {found.format.name}; a LoRA adapter is added to floats: give "
            "its float base, with --precision int8w or int4w to quantise the sum at load"
        )
    if delta.shape != found.shape:
        raise FormatError(
            f"{delta.a.where}: for a weight {list(delta.shape)}, but {name} of {base.path} is "
            f"{list(found.shape)}; is the adapter of another model?"
        )
    return checkpoint.lazy_tensor(
        found.shape, found.format, partial(delta.planes_of, found), delta.a.where
    )


def _of_base(base: checkpoint.Checkpoint, name: str, stored: StoredArray) -> checkpoint.Stored:
    """Return a tensor of the base; a tied head becomes a tensor of its own."""
    found = base.tensors.get(name) or (base.tensors.get(EMBED) if name == HEAD else None)
    if found is None:
        raise FormatError(
            f"{stored.where}: {base.path} has no tensor {name}: either the adapter is of another "
            "model, or it changes what Clocher keeps in another form (fused projections, single "
            f"experts), and then {_MERGE}"
        )
    return found
