"""An opened model -> GGUF for llama.cpp: the same weights, so that speeds can be compared.

The file has no vocabulary (`tokenizer.ggml.model` is "no_vocab"), so it is for benchmarks. Names
and row orders are llama.cpp's: query and key rows of a Llama are paired for its RoPE, the gate and
up rows of gpt-oss experts become two tensors. llama.cpp computes its "bitnet" with SiLU where
BitNet 2B-4T has a squared ReLU: the bytes and the shapes are the same, the text is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clocher_kernels.errors import UnsupportedModel, UsageError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.blocks import F32, FLOATS, GgmlType, row_blocks, same_type
from clocher_runtime.checkpoints.gguf.names import (
    ACTIVATION,
    ROPE_FACTORS,
    Order,
    heads_of,
    pieces,
    row_order,
)
from clocher_runtime.convert.gguf.writer import Field, GgufEntry, GgufWriter, file_bytes
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import Need, inventory
from clocher_runtime.models.rope import inverse_frequencies
from clocher_runtime.models.spec import ModelSpec, RopeSpec

SAME = "same"
TYPES = (SAME, *FLOATS)

Progress = Callable[[int, str], None]

_PIECE_ELEMENTS = 1 << 23
_ARCHITECTURES = {"llama": "llama", "bitnet": "bitnet", "gpt_oss": "gpt-oss"}


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of the file and the rows of a model's tensor that it holds."""

    entry: GgufEntry
    source: str
    order: Order


@dataclass(frozen=True, slots=True)
class GgufExport:
    """A file that can be written.

    Attributes:
        spec: the model.
        fields: metadata.
        items: its tensors.
    """

    spec: ModelSpec
    fields: Mapping[str, Field]
    items: tuple[_Item, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return file_bytes(self.fields, [item.entry for item in self.items])

    def write(self, checkpoint: Checkpoint, path: Path, progress: Progress | None = None) -> None:
        """Write the file.

        Args:
            checkpoint: the model's weights.
            path: the file; its directory exists.
            progress: called after each tensor with the bytes written so far and its name.

        Raises:
            ModelChanged: the input changed meanwhile.
            FormatError: a tensor is damaged, or ggml cannot hold it exactly.
            OSError: the file cannot be written; nothing of it is left.
        """
        done = 0
        with GgufWriter(path, self.fields, [item.entry for item in self.items]) as writer:
            if ROPE_FACTORS in (item.entry.name for item in self.items):
                writer.write(_rope_factors(self.spec).view(np.uint8))
            for item in self.items:
                if not item.source:
                    continue
                tensor = checkpoint.tensor(item.source, verify=True)
                self._write_tensor(writer, item, tensor)
                checkpoint.release()
                done += item.entry.nbytes
                if progress:
                    progress(done, item.entry.name)
            checkpoint.check_unchanged()
            writer.commit()

    def _write_tensor(self, writer: GgufWriter, item: _Item, tensor: QuantTensor) -> None:
        vector = len(item.entry.shape) == 1 or item.source.endswith(("_bias", ".bias"))
        if vector:
            values = tensor.decode().reshape(-1)
            order = row_order(item.order, len(values), heads_of(self.spec, item.source))
            writer.write(values[order].astype(np.float32).view(np.uint8))
            return
        count = 1
        for dim in tensor.shape[:-1]:
            count *= dim
        order = row_order(item.order, count, heads_of(self.spec, item.source))
        step = max(1, _PIECE_ELEMENTS // tensor.shape[-1])
        for start in range(0, len(order), step):
            writer.write(row_blocks(tensor, order[start : start + step], item.entry.kind))


def plan_gguf(
    config: Mapping[str, object], formats: Mapping[str, Format], name: str, kind: str = SAME
) -> GgufExport:
    """Check that a model can be written as GGUF, and how.

    Args:
        config: contents of its config.json.
        formats: format of each tensor.
        name: of the model, for people.
        kind: "same" keeps the numbers exactly; "f32", "f16" or "bf16" decodes all matrices, for
            llama-quantize to encode.

    Raises:
        UsageError: the kind is not known.
        UnsupportedModel: llama.cpp has no such model.
        FormatError: ggml has no type for a format.
    """
    if kind not in TYPES:
        raise UsageError(f"GGUF type {kind!r}; known: {', '.join(TYPES)}")
    spec = spec_from_config(config)
    if spec.family not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"a {spec.family} model as GGUF; this writer knows {', '.join(_ARCHITECTURES)}"
        )
    items = [
        item
        for source, need in inventory(spec).items()
        for item in _items(spec, source, need, formats[source], kind)
    ]
    if spec.rope.kind == "llama3":
        factors = GgufEntry(ROPE_FACTORS, (spec.head_dim // 2,), F32)
        items.insert(0, _Item(factors, "", "all"))
    share: dict[GgmlType, int] = {}
    for item in items:
        share[item.entry.kind] = share.get(item.entry.kind, 0) + item.entry.nbytes
    main = max(share, key=lambda k: share[k])
    return GgufExport(spec, _fields(spec, name, main), tuple(items))


def _items(spec: ModelSpec, source: str, need: Need, fmt: Format, kind: str) -> list[_Item]:
    if need.kind in ("vector", "router"):
        ggml = F32
    else:
        ggml = same_type(fmt) if kind == SAME else FLOATS[kind]
    return [
        _Item(GgufEntry(piece.name, piece.shape, ggml), source, piece.order)
        for piece in pieces(spec, source, need)
    ]


def _rope_factors(spec: ModelSpec) -> np.ndarray:
    plain = inverse_frequencies(RopeSpec(spec.rope.theta), spec.head_dim)
    return np.asarray(plain / inverse_frequencies(spec.rope, spec.head_dim), np.float32)


def _fields(spec: ModelSpec, name: str, main: GgmlType) -> dict[str, Field]:
    arch = _ARCHITECTURES[spec.family]
    values: dict[str, Field] = {
        "vocab_size": spec.vocab_size,
        "block_count": spec.num_layers,
        "context_length": spec.max_positions,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": spec.rope.theta,
    }
    if spec.moe is not None:
        values |= {
            "expert_count": spec.moe.experts,
            "expert_used_count": spec.moe.active,
            "expert_feed_forward_length": spec.intermediate_size,
            "attention.sliding_window": max(spec.windows),
        }
    if spec.rope.kind == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": spec.rope.factor,
            "rope.scaling.original_context_length": spec.rope.original_positions,
        }
    activation: dict[str, Field] = {ACTIVATION: spec.act} if spec.family == "bitnet" else {}
    return {
        "general.architecture": arch,
        "general.name": name,
        "general.file_type": main.file_type,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "no_vocab",
        **activation,
        **{f"{arch}.{key}": value for key, value in values.items()},
    }
