"""An opened model -> GGUF for llama.cpp, with its tensor names and row orders.

BitNet 2B-4T is bitnet.cpp's "bitnet-b1.58" with a squared ReLU. llama.cpp's "bitnet" has SiLU, so
only random weights for timing get that name. Source: ggml's docs/gguf.md, version 3.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Format
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.architectures import ROPE_FACTORS
from clocher_runtime.checkpoints.gguf.blocks import F32, GgmlType, row_blocks, same_type
from clocher_runtime.checkpoints.gguf.checkpoint import ACTIVATION, file_family
from clocher_runtime.checkpoints.gguf.tokenizer import NORMAL
from clocher_runtime.checkpoints.iebin import Progress, quiet
from clocher_runtime.disk.output_file import PARTIAL, replacing
from clocher_runtime.disk.plane_index import aligned
from clocher_runtime.models.build import inverse_frequencies
from clocher_runtime.models.families import pieces, spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.spec import ModelSpec, RopeSpec

Field = str | bool | int | float | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]

ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS: dict[type, tuple[int, str]] = {int: (4, "I"), float: (6, "f"), bool: (7, "?")}
_ITEMS: dict[type, tuple[int, str]] = {int: (5, "i"), float: (6, "f"), str: (_STRING, "")}
_PIECE_ELEMENTS = 1 << 23
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "bitnet": "bitnet-b1.58",
    "gpt_oss": "gpt-oss",
}


class GgufEntry(NamedTuple):
    """A tensor of the file, and which rows of a model's tensor it has."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first
    kind: GgmlType
    source: str = ""  # the model's tensor; "": rope factors
    order: np.ndarray | slice = slice(None)  # rows of the model's, those of a stack counted through

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape[:-1]) * self.kind.row_bytes(self.shape[-1])


class GgufExport:
    """A GGUF file that can be written.

    `fields` are its metadata; `notes` say where llama.cpp does not compute what Clocher does.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        formats: Mapping[str, Format],
        name: str,
        vocab: Mapping[str, Field] | None = None,
        timed: bool = False,
    ) -> None:
        """Check that a model can be written as GGUF, and how.

        `formats` are those of the file: where a tensor has another one, it is decoded to these
        floats. No `vocab` makes a file for llama-bench alone. `timed` permits the name "bitnet".
        """
        spec = spec_from_config(config)
        if spec.family not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"a {spec.family} model as GGUF; this writer knows {', '.join(_ARCHITECTURES)}"
            )
        if spec.family == "bitnet" and (not spec.tied or spec.qkv_bias or spec.o_bias):
            raise UnsupportedModel(
                "a BitNet model with an own head or biases as GGUF; bitnet.cpp computes it without "
                "them; --to iebin keeps them"
            )
        entries, family = [], file_family(spec)
        for source, need in inventory(spec).items():
            ggml = F32 if need.kind in ("vector", "router") else same_type(formats[source])
            for piece in pieces(family, spec, source, need):
                if piece.name == source:
                    raise UnsupportedModel(f"{source}: llama.cpp's {spec.family} models have none")
                rows, shape = piece.rows, list(need.shape)
                if piece.places:
                    shape[-1 if need.kind == "vector" else -2] //= 2
                order = np.argsort(rows) if isinstance(rows, np.ndarray) else slice(None)
                entry = GgufEntry(piece.name, tuple(shape), ggml, source, piece.places or order)
                entries.append(entry)
        if spec.rope.kind == "llama3":
            entries.insert(0, GgufEntry(ROPE_FACTORS, (spec.head_dim // 2,), F32))
        share: Counter[GgmlType] = Counter()
        for entry in entries:
            share[entry.kind] += entry.nbytes
        ((main, _),) = share.most_common(1)
        arch = "bitnet" if timed and spec.family == "bitnet" else _ARCHITECTURES[spec.family]
        self.spec, self.entries, self.notes = spec, tuple(entries), _notes(spec)
        self.fields = _fields(spec, arch, name, main, vocab or {})

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        ends, header = _layout(self.fields, self.entries)
        return len(header) + (ends[-1] if ends else 0) + ALIGNMENT

    def write(
        self,
        checkpoint: Checkpoint,
        path: Path,
        progress: Progress = quiet,
        check: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the file, which `check` may refuse before its rename.

        Raises FormatError, ModelChanged, OSError.
        """
        done = 0
        with replacing(path) as file:
            file.write(_layout(self.fields, self.entries)[1])
            for entry in self.entries:
                start = file.tell()
                for piece in self._pieces(entry, checkpoint):
                    file.write(np.ascontiguousarray(piece).data)
                if (got := file.tell() - start) != (expected := entry.nbytes):
                    raise FormatError(f"{path}: {got} bytes of {entry.name}, expected {expected}")
                file.write(bytes(-got % ALIGNMENT))
                checkpoint.release()
                if entry.source:
                    done += entry.nbytes
                    progress(done, entry.name)
            checkpoint.check_unchanged()
            if check:
                file.flush()
                check(path.with_name(path.name + PARTIAL))

    def _pieces(self, entry: GgufEntry, checkpoint: Checkpoint) -> Iterator[np.ndarray]:
        if not entry.source:
            plain = inverse_frequencies(RopeSpec(self.spec.rope.theta), self.spec.head_dim)
            factors = plain / inverse_frequencies(self.spec.rope, self.spec.head_dim)
            yield np.asarray(factors, np.float32)
            return
        tensor = checkpoint.tensor(entry.source, verify=True)
        vector = len(entry.shape) == 1 or entry.source.endswith(("_bias", ".bias"))
        count = prod(tensor.shape) if vector else prod(tensor.shape[:-1])
        order = np.arange(count)[entry.order]
        if vector:
            yield tensor.decode().reshape(-1)[order].astype(np.float32)
            return
        step = max(1, _PIECE_ELEMENTS // tensor.shape[-1])
        for start in range(0, len(order), step):
            yield row_blocks(tensor, order[start : start + step], entry.kind)


def _notes(spec: ModelSpec) -> tuple[str, ...]:
    if spec.family == "bitnet":
        return ("llama.cpp has no BitNet with a squared ReLU and refuses the file; bitnet.cpp has",)
    if spec.family == "mistral" and 0 < max(spec.windows) < spec.max_positions:
        return (
            f"llama.cpp has no window in such models: it continues texts of more than "
            f"{max(spec.windows)} tokens differently",
        )
    return ()


def _fields(
    spec: ModelSpec, arch: str, name: str, main: GgmlType, vocab: Mapping[str, Field]
) -> dict[str, Field]:
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
        }
    if spec.moe is not None or (spec.family == "mistral" and max(spec.windows)):
        values["attention.sliding_window"] = max(spec.windows)
    rope = spec.rope
    if rope.kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        values["rope.scaling.original_context_length"] = rope.original_positions
    activation: dict[str, Field] = {ACTIVATION: spec.act} if arch == "bitnet" else {}
    return {
        "general.architecture": arch,
        "general.name": name,
        "general.file_type": main.file_type,
        "general.quantization_version": 2,
        **(vocab or {"tokenizer.ggml.model": "no_vocab"}),
        **activation,
        **{f"{arch}.{key}": value for key, value in values.items()},
    }


def spelled_vocabulary(tokens: Iterable[str]) -> dict[str, Field]:
    """Return the metadata of a byte-level vocabulary without merges."""
    vocab = tuple(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": (NORMAL,) * len(vocab),
        "tokenizer.ggml.merges": (),
    }


def _layout(fields: Mapping[str, Field], entries: Sequence[GgufEntry]) -> tuple[list[int], bytes]:
    """Return the end of each tensor, counted from the first, and the header.

    Integers of `fields` are stored as u32 (in a list as i32), floats as f32.
    """
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(fields))]
    parts += [_string(key) + _value(value) for key, value in fields.items()]
    ends: list[int] = []
    for entry in entries:
        offset = aligned(ends[-1], ALIGNMENT) if ends else 0
        ends.append(offset + entry.nbytes)
        shape = entry.shape[::-1]
        parts.append(_string(entry.name))
        parts.append(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", entry.kind.code, offset))
    header = b"".join(parts)
    return ends, header + bytes(-len(header) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Field) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if not isinstance(value, tuple):
        kind, layout = _SCALARS[type(value)]
        return struct.pack(f"<I{layout}", kind, value)
    kind, layout = _ITEMS[type(value[0]) if value else str]
    items = (
        _string(item) if isinstance(item, str) else struct.pack(f"<{layout}", item)
        for item in value
    )
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(items)
