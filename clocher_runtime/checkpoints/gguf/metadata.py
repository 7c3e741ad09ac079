"""A GGUF model's metadata and RoPE. Source: gguf-py's constants.py; llama.cpp's llama-model.cpp."""

import math
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.gguf.blocks import F32
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.models.build import inverse_frequencies
from clocher_runtime.models.spec import RopeSpec

ROPE_FACTORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (ROPE_FACTORS, LONG, SHORT)
"""RoPE tensors, not weights."""
_GUESSES = 8
SLIDING, FULL = "sliding_attention", "full_attention"


class Metadata:
    """A file's entries without the architecture prefix; `window` is 0 for full attention."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.where = file, str(file.file.path)
        self.arch = file.text("general.architecture")
        self.layers = self.integer("block_count")
        heads = self.integer("attention.head_count")
        size = self.integer("embedding_length") // max(heads, 1)
        self.head_dim = self.integer("attention.key_length", size)
        self.window = self.integer("attention.sliding_window", 0)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; see `GgufFile.integer`, also for the methods below."""
        return self.file.integer(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        return self.file.number(f"{self.arch}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool."""
        return self.file.flag(f"{self.arch}.{key}", default)

    def has(self, key: str) -> bool:
        """Return whether there is such an entry."""
        return f"{self.arch}.{key}" in self.file.keys

    def layer_types(self, every: int) -> list[str]:
        """Return the layer types: all but every n-th have a window, unless a list says which."""
        key = "attention.sliding_window_pattern"
        value = self.file.value(f"{self.arch}.{key}")
        value = every if value is None else value
        if isinstance(value, np.ndarray) and len(value) == self.layers:
            return [SLIDING if slides else FULL for slides in value]
        if isinstance(value, np.ndarray) or not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"{self.where}: {key} is {value!r:.60}; Clocher knows a number of layers and "
                f"a list of {self.layers}"
            )
        return [SLIDING if (layer + 1) % value else FULL for layer in range(self.layers)]


def rope_parameters(meta: Metadata) -> dict[str, Any]:
    """Return `rope_parameters` of a config.json; raises UnsupportedModel, FormatError."""
    theta = meta.number("rope.freq_base", 10000.0)
    rotated = meta.integer("rope.dimension_count", meta.head_dim)
    part = {"partial_rotary_factor": rotated / meta.head_dim} if rotated != meta.head_dim else {}
    base = {"rope_theta": theta, **part}
    kind = meta.file.text(f"{meta.arch}.rope.scaling.type", "linear")
    if LONG in meta.file.tensors:
        original = meta.integer("rope.scaling.original_context_length")
        longrope = {
            "rope_type": "longrope",
            "long_factor": _table(meta, LONG, rotated // 2).tolist(),
            "short_factor": _table(meta, SHORT, rotated // 2).tolist(),
            "original_max_position_embeddings": original,
        }
        if meta.has("rope.scaling.attn_factor"):
            longrope["attention_factor"] = meta.number("rope.scaling.attn_factor")
        return {**base, **longrope}
    factor = 1.0
    if kind != "none":
        older = meta.number("rope.scale_linear", 1.0) or 1.0
        factor = meta.number("rope.scaling.factor", older) or 1.0
    if ROPE_FACTORS in meta.file.tensors:
        if meta.arch == "gpt-oss" or kind == "yarn" or factor != 1.0:
            raise UnsupportedModel(
                f"{meta.where}: {ROPE_FACTORS} in a {meta.arch} model with rope scaling "
                f"{kind!r:.60}; Clocher knows it from Llama 3, without other scaling"
            )
        return {**base, **_llama3(meta, theta)}
    if kind in ("none", "linear"):
        if factor == 1.0:
            return {"rope_type": "default", **base}
        return {"rope_type": "linear", **base, "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"{meta.where}: rope scaling {kind!r:.60}; Clocher knows none, linear, yarn, "
            f"Llama 3's ({ROPE_FACTORS}) and longrope ({LONG})"
        )
    return {**base, **_yarn(meta, factor)}


def _yarn(meta: Metadata, factor: float) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
        # Of the model, not of the file: gpt-oss alone does not round the two bounds.
        "truncate": meta.arch != "gpt-oss",
    }
    scale = meta.number("rope.scaling.attn_factor", 1.0)
    scale *= meta.number("rope.scaling.yarn_attn_factor", 1.0)
    if scale != 1.0:
        rope["attention_factor"] = scale * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    # llama.cpp's converter writes a tenth of it.
    if multiplier := meta.number("rope.scaling.yarn_log_multiplier", 0.0):
        mscale = round(10 * multiplier, 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def _table(meta: Metadata, name: str, pairs: int) -> np.ndarray:
    info = meta.file.tensors.get(name)
    if info is None:
        raise FormatError(f"{meta.where}: tensor {name!r} is missing")
    if info.kind != F32 or info.shape != (pairs,):
        raise FormatError(
            f"{meta.where}: {name} is {info.kind.name} {list(info.shape)}; expected f32 [{pairs}]"
        )
    factors = meta.file.data(name).view(np.float32).astype(np.float64)
    if not (np.isfinite(factors).all() and factors.min() > 0):
        raise FormatError(f"{meta.where}: {name} has a factor that is not a positive number")
    return factors


def _llama3(meta: Metadata, theta: float) -> dict[str, Any]:
    """Return the Llama 3 scaling that gives the file's table of factors."""
    factors = _table(meta, ROPE_FACTORS, meta.head_dim // 2)
    largest = float(factors.max())
    if factors.min() < 1 or not 1 <= theta <= 1e12:
        raise FormatError(
            f"{meta.where}: {ROPE_FACTORS} has a factor below 1, or the base frequency {theta} is "
            "absurd"
        )
    if largest == 1:
        return {"rope_type": "default"}
    plain = inverse_frequencies(RopeSpec(theta), meta.head_dim)
    wavelengths = 2 * np.pi / plain.astype(np.float64)
    between = (factors > 1.0001) & (factors < largest * 0.9999)
    blend = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
    guesses = np.rint(wavelengths[between] * (3 * blend + 1))[:_GUESSES]
    # Where no factor is between, any number of positions between the two kinds gives the table.
    shortest = 4 * wavelengths[factors <= 1.0001].max(initial=1.0)
    longest = wavelengths[factors >= largest * 0.9999].min(initial=float(1 << 24))
    guesses = np.append(guesses, np.rint(np.sqrt(shortest * longest)))
    for original in [*map(int, guesses), *(1 << power for power in range(13, 21))]:
        spec = RopeSpec(theta, "llama3", largest, original)
        if np.allclose(plain / inverse_frequencies(spec, meta.head_dim), factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "original_max_position_embeddings": original,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
    raise UnsupportedModel(
        f"{meta.where}: {ROPE_FACTORS} are not those of Llama 3's scaling with low_freq_factor "
        "1 and high_freq_factor 4"
    )
