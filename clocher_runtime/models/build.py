"""Turn a ModelSpec into a Plan with its rotary tables. One builder serves every family."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from clocher_kernels.formats.base import Format
from clocher_kernels.guards import require
from clocher_kernels.ops.rewrite import Adapted, adapt, quantize_for_ternary, rotate
from clocher_kernels.plan import Plan
from clocher_runtime.models.builder import COUNTS, ONES, Builder, Sizes, tables_of
from clocher_runtime.models.spec import PAGE_CELLS, ModelSpec, QueryGrowth, RopeSpec

__all__ = ["COUNTS", "PAGE_CELLS", "Sizes", "build_plan", "lay_out", "table_bytes"]

_NONE: Mapping[str, Adapted] = MappingProxyType({})


def build_plan(
    spec: ModelSpec,
    formats: Mapping[str, Format],
    sizes: Sizes,
    adapted: Mapping[str, Adapted] = _NONE,
    buffers: bool = False,
) -> Plan:
    """Build the forward pass of a model. Outputs: logits [R, V], sampled [R].

    `formats`: by tensor name; ternary matrices get int8 activations; `adapted`: by weight, what
    LoRA adapters change; `buffers`: they are in the host's memory, and its linears add adapters
    themselves. Raises OutOfMemory.
    """
    plan = lay_out(spec, formats, sizes, adapted, buffers)
    require(
        table_bytes(spec, sizes.context) + (plan.scratch_bytes() if buffers else 0),
        "KV cache and buffers need",
        "lower --context or --batch, or choose a smaller --kv-dtype",
    )
    consts: dict[str, np.ndarray] = {}
    for name, (rope, growth) in _tables(spec).items():
        cos, sin = rope_tables(rope, spec.head_dim, sizes.context, growth)
        consts |= {f"{name}.cos": cos, f"{name}.sin": sin}
    if spec.qk_norm == "after":
        consts[ONES] = np.ones(spec.head_dim, np.float32)
    return replace(plan, consts=consts)


def lay_out(
    spec: ModelSpec,
    formats: Mapping[str, Format],
    sizes: Sizes,
    adapted: Mapping[str, Adapted] = _NONE,
    on_host: bool = True,
) -> Plan:
    """Return the Plan of `build_plan` without its rotary tables, for sizes of buffers."""
    plan = adapt(Builder(spec, formats, sizes).build(), adapted, on_host)
    return rotate(quantize_for_ternary(plan, formats), formats)


def _tables(spec: ModelSpec) -> dict[str, tuple[RopeSpec | None, QueryGrowth | None]]:
    found: dict[str, tuple[RopeSpec | None, QueryGrowth | None]] = {}
    for layer in range(spec.num_layers):
        for name, growth in tables_of(spec, layer).values():
            found[name] = spec.rope_of(layer), growth
    return found


def table_bytes(spec: ModelSpec, context: int) -> int:
    """Return the bytes of the rotary tables for a context."""
    halves = (rope.rotated if rope else 0 for rope, _ in _tables(spec).values())
    return sum(4 * context * (size or spec.head_dim) for size in halves)


def inverse_frequencies(spec: RopeSpec, head_dim: int, context: int = 0) -> np.ndarray:
    """Return the angle per position of each rotated pair, [pairs] fp32 (arXiv 2104.09864).

    Where frequencies depend on length (dynamic, longrope), that of `context` (the longest; 0: as in
    training) applies from the first token, so keys do not depend on when they were made.
    """
    size = spec.rotated or head_dim
    pairs = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    theta = spec.theta
    if spec.kind == "dynamic" and context > spec.original_positions:
        growth = spec.factor * context / spec.original_positions - (spec.factor - 1)
        theta *= growth ** (size / max(size - 2, 1))
    plain = (1.0 / np.float32(theta) ** pairs).astype(np.float32)
    if spec.kind in ("default", "dynamic"):
        return plain
    if spec.kind == "longrope":
        is_long = context > spec.original_positions
        factors = np.array(spec.long_factors if is_long else spec.short_factors, np.float32)
        return (1.0 / (factors * np.float32(theta) ** pairs)).astype(np.float32)
    stretched = (plain / np.float32(spec.factor)).astype(np.float32)
    if spec.kind == "linear":
        return stretched
    if spec.kind == "llama3":
        return _llama3(spec, plain, stretched)
    keep = 1 - _yarn_ramp(spec, size)
    return np.asarray(stretched * (1 - keep) + plain * keep, np.float32)


def rope_tables(
    spec: RopeSpec | None, head_dim: int, positions: int, growth: QueryGrowth | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines [positions, pairs] fp32, attention factor and growth included."""
    if spec is None:
        cos = np.ones((positions, head_dim // 2), np.float32)
        sin = np.zeros_like(cos)
    else:
        frequencies = inverse_frequencies(spec, head_dim, positions)
        angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
        factor = np.float32(spec.attention_factor)
        cos, sin = np.cos(angles), np.sin(angles, out=angles)  # a long context has large tables
        cos *= factor
        sin *= factor
    if growth is not None:
        steps = np.floor((np.arange(positions) + growth.after) / growth.every)
        scale = (1 + growth.strength * np.log1p(steps)).astype(np.float32)[:, None]
        cos *= scale
        sin *= scale
    return cos, sin


def _llama3(spec: RopeSpec, plain: np.ndarray, stretched: np.ndarray) -> np.ndarray:
    wavelength = 2 * np.pi / plain
    longest = spec.original_positions / spec.low_freq_factor
    shortest = spec.original_positions / spec.high_freq_factor
    blend = (spec.original_positions / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - blend) * stretched + blend * plain
    return np.where(
        wavelength > longest, stretched, np.where(wavelength < shortest, plain, blended)
    ).astype(np.float32)


def _yarn_ramp(spec: RopeSpec, size: int) -> np.ndarray:
    """Return 0 where a pair keeps its frequency, 1 where it is fully stretched, [size / 2]."""

    def pair_of(rotations: float) -> float:
        wave = spec.original_positions / (rotations * 2 * math.pi)
        return size * math.log(wave) / (2 * math.log(spec.theta))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # as transformers does, to avoid dividing by zero
    ramp = (np.arange(size // 2, dtype=np.float32) - low) / (high - low)
    return np.asarray(np.clip(ramp, 0, 1))
