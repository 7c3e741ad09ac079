"""Types and limits of config.json fields, and RoPE in both of its spellings.

Source: transformers modeling_rope_utils; YaRN (arXiv 2309.00071), LongRoPE (2402.13753).
"""

from collections.abc import Mapping
from math import log, sqrt
from typing import Annotated, Any

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import given, one_of, read_as
from clocher_runtime.models.spec import RopeSpec

WHERE = "config.json"

# Above any real dimension; keeps products far from overflow.
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Experts = Annotated[int, Meta(ge=1, le=4096)]
MaskId = Annotated[int, Meta(ge=0, le=1 << 24)]
BlockSize = Annotated[int, Meta(ge=2, le=64)]
LayerNumber = Annotated[int, Meta(ge=0, le=1024)]
Epsilon = Annotated[float, Meta(ge=1e-12, le=1.0)]
# Beyond everything published, but no table of angles overflows or divides by zero.
Theta = Annotated[float, Meta(ge=1.001, le=1e12)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Older names: Phi-3's "su"; for text alone, Qwen's three-dimensional positions are plain."""

_Rotations = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Magnitude = Annotated[float, Meta(ge=0.0, le=100.0)]
_Scale = Annotated[float, Meta(ge=1e-3, le=1e3)]
_Factors = Annotated[list[_Rotations], Meta(min_length=1, max_length=1 << 12)]


class _Linear(Struct):
    factor: _Rotations


class _Llama3(_Linear):
    original_max_position_embeddings: Size | None = None
    low_freq_factor: _Rotations = 1.0
    high_freq_factor: _Rotations = 4.0


class _Yarn(_Linear):
    original_max_position_embeddings: Size | None = None
    beta_fast: _Rotations = 32.0
    beta_slow: _Rotations = 1.0
    truncate: bool = True
    mscale: _Magnitude = 0.0
    mscale_all_dim: _Magnitude = 0.0
    attention_factor: _Scale | None = None


class _LongRope(Struct):
    short_factor: _Factors
    long_factor: _Factors
    factor: _Rotations | None = None
    original_max_position_embeddings: Size | None = None
    attention_factor: _Scale | None = None


class _Base(Struct):
    rope_theta: Theta
    partial_rotary_factor: Fraction = 1.0


def read_rope(
    scaling: Mapping[str, Any] | None,
    where: str,
    *,
    theta: float,
    part: float,
    head_dim: int,
    positions: int,
    original: int | None = None,
) -> RopeSpec:
    """Read a rotary embedding. Raises UnsupportedModel, FormatError.

    `theta`, `part` (rotated fraction of a head) and `original` apply where `scaling` lacks them.
    """
    fields = given(scaling or {})
    base = read_as({"rope_theta": theta, "partial_rotary_factor": part, **fields}, _Base, where)
    rotated = int(head_dim * base.partial_rotary_factor)
    if rotated < 2 or rotated % 2:
        raise FormatError(
            f"{where}: {rotated} of {head_dim} values of a head are rotated; expected an even "
            "number of at least 2"
        )
    spelled = "rope_type" if "rope_type" in fields else "type"
    named = fields.get(spelled, "default")
    kind = _OTHER_NAMES.get(named, named) if isinstance(named, str) else named
    one_of({spelled: kind}, spelled, "default", KINDS, where)
    part_of_head = 0 if rotated == head_dim else rotated
    common: dict[str, Any] = {"theta": base.rope_theta, "rotated": part_of_head}
    known = original or positions
    if kind == "default":
        return RopeSpec(**common)
    if kind == "linear":
        return RopeSpec(**common, kind="linear", factor=read_as(fields, _Linear, where).factor)
    if kind == "dynamic":
        factor = read_as(fields, _Linear, where).factor
        return RopeSpec(**common, kind="dynamic", factor=factor, original_positions=positions)
    if kind == "llama3":
        return RopeSpec(**common, kind="llama3", **_llama3(fields, where, known))
    if kind == "yarn":
        return RopeSpec(**common, kind="yarn", **_yarn(fields, where, known))
    return RopeSpec(
        **common, kind="longrope", **_longrope(fields, where, rotated, positions, known)
    )


def _llama3(fields: Mapping[str, Any], where: str, known: int) -> dict[str, Any]:
    llama = read_as(fields, _Llama3, where)
    low, high = llama.low_freq_factor, llama.high_freq_factor
    if high <= low:
        raise FormatError(f"{where}: high_freq_factor {high} must exceed {low}")
    return {
        "factor": llama.factor,
        "original_positions": llama.original_max_position_embeddings or known,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(fields: Mapping[str, Any], where: str, known: int) -> dict[str, Any]:
    yarn = read_as(fields, _Yarn, where)
    attention = yarn.attention_factor
    if attention is None and yarn.mscale and yarn.mscale_all_dim:
        attention = magnitude(yarn.factor, yarn.mscale)
        attention /= magnitude(yarn.factor, yarn.mscale_all_dim)
    return {
        "factor": yarn.factor,
        "original_positions": yarn.original_max_position_embeddings or known,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
        "attention_factor": magnitude(yarn.factor) if attention is None else attention,
    }


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _longrope(
    fields: Mapping[str, Any], where: str, rotated: int, positions: int, known: int
) -> dict[str, Any]:
    long = read_as(fields, _LongRope, where)
    for name, factors in (("short_factor", long.short_factor), ("long_factor", long.long_factor)):
        if len(factors) != rotated // 2:
            raise FormatError(f"{where}: {len(factors)} numbers in {name}; expected {rotated // 2}")
    original = long.original_max_position_embeddings or known
    factor = long.factor or positions / original
    attention = long.attention_factor
    if attention is None:
        attention = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(max(original, 2)))
    return {
        "factor": factor,
        "original_positions": original,
        "attention_factor": attention,
        "short_factors": tuple(long.short_factor),
        "long_factors": tuple(long.long_factor),
    }
