"""Tables of cosines and sines for the rotary embedding and its long-context variants."""

import math

import numpy as np

from clocher_runtime.models.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Return the angle per position of each pair, [head_dim / 2] fp32.

    Source: Su et al. 2021 (arXiv 2104.09864); llama3 and YaRN as transformers' rope functions.
    """
    pairs = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(spec.theta) ** pairs).astype(np.float32)
    if spec.kind == "default":
        return plain
    stretched = (plain / np.float32(spec.factor)).astype(np.float32)
    if spec.kind == "linear":
        return stretched
    if spec.kind == "llama3":
        return _llama3(spec, plain, stretched)
    keep = 1 - _yarn_ramp(spec, head_dim)
    return np.asarray(stretched * (1 - keep) + plain * keep, np.float32)


def rope_tables(spec: RopeSpec, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines [positions, head_dim / 2] fp32, attention factor included."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(spec, head_dim)
    factor = np.float32(spec.attention_factor)
    cos, sin = np.cos(angles), np.sin(angles, out=angles)  # a long context has large tables
    cos *= factor
    sin *= factor
    return cos, sin


def _llama3(spec: RopeSpec, plain: np.ndarray, stretched: np.ndarray) -> np.ndarray:
    """Stretch long wavelengths, keep short ones, blend between."""
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


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> np.ndarray:
    """Return 0 where a pair keeps its frequency, 1 where it is fully stretched, [head_dim / 2]."""

    def pair_of(rotations: float) -> float:
        wave = spec.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(spec.theta))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does, to avoid dividing by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)
    return np.asarray(np.clip(ramp, 0, 1))
