"""Models of published shapes (assets/presets.json) with random weights of std 1/sqrt(K).

Weights are drawn from 65 536 encoded cells by seed and tensor name.
"""

import copy
import json
import zlib
from functools import lru_cache
from math import prod
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ShapeError, UsageError
from clocher_kernels.formats import Float, Format, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Shape
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.iebin import IebinWriter, Progress, model_bytes, open_iebin, quiet
from clocher_runtime.convert import PRESETS
from clocher_runtime.convert.gguf import GgufExport, spelled_vocabulary
from clocher_runtime.convert.to_iebin import refuse_hf_folder
from clocher_runtime.disk.output_file import check_free
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import Need, inventory
from clocher_runtime.models.spec import ModelSpec
from clocher_runtime.text.tokenizer import BYTE_OF

_FORMATS: dict[str, Format] = {
    "bf16": Float("bf16"),
    "int8w": Int8(32, "f16"),
    "int4": Int4(True, 32, "f16"),
    "ternary": Ternary(),
    "mxfp4": Mxfp4(),
}
GGUF_NAME = "model.gguf"

_BYTES = 256
_CELLS = 1 << 16
_PIECE = 1 << 20


def preset_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """Return a preset's config.json with the first `layers` layers; None keeps all. UsageError."""
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; known: {', '.join(PRESETS)}")
    config: dict[str, Any] = copy.deepcopy(PRESETS[name]["config"])
    most = config["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= most:
        raise UsageError(f"{name} has {most} layers, got {layers}; expected 1 to {most}")
    config["num_hidden_layers"] = layers or most
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return config


def formats_of(spec: ModelSpec, precision: str) -> dict[str, Format]:
    """Return the format of every tensor; UsageError if a tensor does not fit its format.

    Head and embedding are bf16 where published so, else as the linears (int4 beside ternary);
    attention is as the linears, bf16 for gpt-oss as published.
    """
    native = _native(spec)
    linears = native if precision == "native" else precision
    published = spec.family in ("gpt_oss", "bitnet")
    head = "bf16" if published else "int4" if linears == "ternary" else linears
    formats: dict[str, Format] = {}
    for name, need in inventory(spec).items():
        stored = linears
        if need.kind in ("vector", "router"):
            stored = "bf16"
        elif need.kind in ("embedding", "head"):
            stored = head
        elif spec.family == "gpt_oss" and linears == native and ".self_attn." in name:
            stored = "bf16"
        formats[name] = _FORMATS[stored]
        try:
            formats[name].planes(need.shape)
        except ShapeError as error:
            raise UsageError(f"{name}: {error}; choose another precision") from None
    return formats


class Synthesis:
    """A model of random weights: checked, ready to be written; `nbytes` is an upper bound."""

    def __init__(
        self,
        preset: str,
        precision: str,
        out_dir: Path,
        *,
        seed: int = 0,
        layers: int | None = None,
        gguf: bool = False,
    ) -> None:
        """Check the arguments; `layers` keeps the first ones; `gguf`: write that file, too."""
        refuse_hf_folder(out_dir)
        self.out_dir, self._seed = out_dir, seed
        self._config = preset_config(preset, layers)
        if precision not in ("native", _native(spec_from_config(self._config))):
            self._config.pop("quantization_config", None)
        spec = spec_from_config(self._config)
        self._needs, self.formats = inventory(spec), formats_of(spec, precision)
        self._vocab, vocab = byte_tokenizer(spec.vocab_size), _byte_vocab(spec.vocab_size)
        self._gguf: GgufExport | None = None
        if gguf:
            spelled = spelled_vocabulary(vocab)
            self._gguf = GgufExport(self._config, self.formats, preset, spelled, timed=True)
        made = {"preset": preset, "seed": seed, "precision": precision}
        self._source = {"container": "synthetic", **made}
        self.nbytes = model_bytes((fmt, self._needs[n].shape) for n, fmt in self.formats.items())
        self.nbytes += len(self._vocab) + (self._gguf.nbytes if self._gguf else 0)
        check_free(out_dir / BIN_NAME, self.nbytes)

    def run(self, progress: Progress = quiet) -> None:
        """Write the model, removing another model's model.gguf. Raises UsageError, OSError."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        (self.out_dir / GGUF_NAME).unlink(missing_ok=True)
        with IebinWriter(self.out_dir, progress=progress) as writer:
            for name, fmt in self.formats.items():
                writer.add(name, random_tensor(name, self._needs[name], fmt, self._seed))
            done = writer.nbytes
            writer.commit(self._config, {}, {}, self._vocab, self._source)
        if self._gguf is not None:
            source, path = open_iebin(self.out_dir / JSON_NAME), self.out_dir / GGUF_NAME
            self._gguf.write(source, path, lambda nbytes, name: progress(done + nbytes, name))


def _native(spec: ModelSpec) -> str:
    return {"gpt_oss": "mxfp4", "bitnet": "ternary"}.get(spec.family, "bf16")


def random_tensor(name: str, need: Need, fmt: Format, seed: int) -> QuantTensor:
    """Return a random tensor; FormatError for a format that cannot hold it."""
    if need.kind != "vector":
        return normal_matrix(name, need.shape, seed, need.shape[-1] ** -0.5, fmt)
    mean, std = (1.0, 0.05) if "norm" in name else (0.0, 1.0 if "sinks" in name else 0.02)
    values = np.float32(mean) + np.float32(std) * _normal(_stream(name, seed), prod(need.shape))
    return encode(values.reshape(need.shape), fmt)


def normal_matrix(name: str, shape: Shape, seed: int, std: float, fmt: Format) -> QuantTensor:
    """Return a matrix [N, K] or stack [E, N, K] of values with mean 0; FormatError, ShapeError.

    `fmt`: one with cells, of floats, groups of integers, MXFP4 blocks or four ternary rows.
    """
    planes, stream = fmt.planes(shape), _stream(name, seed)
    columns = 1 if isinstance(fmt, Float | Ternary) else getattr(fmt, "group", 32)
    cells, shared = _pool(fmt, columns, std, seed)
    rows = prod(shape[:-1]) // (4 if isinstance(fmt, Ternary) else 1)
    count = rows * -(-shape[-1] // columns)
    drawn = {key: np.empty((count, *cell.shape[1:]), cell.dtype) for key, cell in cells.items()}
    for start in range(0, count, _PIECE):
        index = _draws(stream, min(_PIECE, count - start))
        for key, cell in cells.items():
            np.take(cell, index, axis=0, out=drawn[key][start : start + len(index)], mode="clip")
    whole = {key: plane.copy() for key, plane in shared.items()}
    for key in drawn:
        # Where K is no multiple of the cell, a row ends inside one.
        width = prod(planes[key].shape[len(shape) - 1 :])
        full = drawn[key].reshape(rows, -1)
        whole[key] = np.ascontiguousarray(full[:, :width]).reshape(planes[key].shape)
    return QuantTensor(shape, fmt, whole)


@lru_cache(maxsize=4)
def _pool(
    fmt: Format, columns: int, std: float, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return 65536 encoded cells by plane, and the planes that all share."""
    shape = (4, _CELLS) if isinstance(fmt, Ternary) else (_CELLS, columns)
    values = np.float32(std) * _normal(_stream(f"{fmt.name} {std}", seed), prod(shape))
    planes = fmt.encode(values.reshape(shape))
    cells = {key: p.reshape(_CELLS, -1) for key, p in planes.items() if p.size >= _CELLS}
    return cells, {key: plane for key, plane in planes.items() if key not in cells}


def _stream(name: str, seed: int) -> np.random.SFC64:
    return np.random.SFC64([seed, zlib.crc32(name.encode())])


def _draws(stream: np.random.SFC64, count: int) -> np.ndarray:
    raw = np.asarray(stream.random_raw(-(-count // 4)), "<u8")
    return raw.view("<u2")[:count]


def _normal(stream: np.random.SFC64, count: int) -> np.ndarray:
    return np.asarray(_quantiles()[_draws(stream, count)])


@lru_cache(maxsize=1)
def _quantiles() -> np.ndarray:
    """Return the standard normal quantiles at (i + 1/2) / 65536, fp32."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / _CELLS) for i in range(_CELLS)], np.float32)


def byte_tokenizer(vocab_size: int) -> bytes:
    """Return a tokenizer.json: a token for each byte, and words that are never encoded."""
    level: dict[str, Any] = dict.fromkeys(("add_prefix_space", "use_regex"), False)
    level |= {"type": "ByteLevel", "trim_offsets": True}
    model = {"type": "BPE", "vocab": _byte_vocab(vocab_size), "merges": []}
    document: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    document |= dict.fromkeys(("pre_tokenizer", "decoder"), level)
    return json.dumps(document, ensure_ascii=False).encode()


def _byte_vocab(vocab_size: int) -> dict[str, int]:
    if vocab_size < _BYTES:
        raise FormatError(f"a vocabulary of {vocab_size}; a byte tokenizer needs {_BYTES}")
    spelled = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    words = (f"{spelled[32]}w{token}" for token in range(_BYTES, vocab_size))
    return {token: index for index, token in enumerate((*spelled, *words))}
