"""Formats: what the bytes of a tensor mean, one module per family.

`parse_format` turns a format's name, as it stands in files and on command lines, into the format.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import FormatError
from clocher_kernels.formats.base import Format, Plane
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.floats import Float, Fp8, Mxfp4
from clocher_kernels.formats.ggml import GGML_KINDS, TRIED_KINDS, Ggml
from clocher_kernels.formats.integers import Int4, Int8
from clocher_kernels.formats.tcq import Tcq
from clocher_kernels.formats.ternary import Ternary

__all__ = [
    "FAMILIES",
    "Bsr",
    "Family",
    "Float",
    "Format",
    "Fp8",
    "Ggml",
    "Int4",
    "Int8",
    "Mxfp4",
    "Plane",
    "Tcq",
    "Ternary",
    "known_formats",
    "parse_format",
]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of formats, for the parser and for the documentation.

    Attributes:
        spelling: how its names are built: alternatives in braces, numbers in angle brackets.
        summary: one line on what it holds.
        examples: the names that are tested, benchmarked and documented.
        pattern: the regular expression that a name matches whole.
        build: takes the groups of the pattern.
    """

    spelling: str
    summary: str
    examples: tuple[str, ...]
    pattern: str
    build: Callable[..., Format]


def _group(text: str) -> Any:
    return int(text[1:]) if text.startswith("g") else text


_FLOAT = "(f32|f16|bf16)"
_COUNT = "[1-9][0-9]{0,5}"

FAMILIES: tuple[Family, ...] = (
    Family("{f32|f16|bf16}", "plain floats", ("f32", "f16", "bf16"), _FLOAT, Float),
    Family(
        "int8_{tensor|row|g<G>}_{f32|f16|bf16}",
        "8-bit integers, symmetric; a scale per matrix, per row or per G columns of a row",
        ("int8_tensor_f32", "int8_row_f32", "int8_row_bf16", "int8_g32_f16", "int8_g128_bf16"),
        f"int8_(tensor|row|g{_COUNT})_{_FLOAT}",
        lambda group, scale: Int8(_group(group), scale),
    ),
    Family(
        "int4_{sym|asym}_{row|g<G>}_{f32|f16|bf16}",
        "4-bit integers, symmetric or with zero points; a scale per row or per G columns, G even",
        tuple(
            f"int4_{kind}_{scales}"
            for kind in ("sym", "asym")
            for scales in ("g32_f16", "g64_f16", "g128_bf16", "row_f32")
        ),
        f"int4_(sym|asym)_(row|g{_COUNT})_{_FLOAT}",
        lambda kind, group, scale: Int4(kind == "sym", _group(group), scale),
    ),
    Family(
        "fp8_{e4m3|e5m2}_{tensor|row|g128|b128}_{f32|f16|bf16}",
        "fp8; a scale per matrix, per row, per 128 columns of a row or per 128 x 128 block",
        (
            *(f"fp8_e4m3_{scales}" for scales in ("tensor_f32", "row_f32", "row_bf16", "g128_f32")),
            *("fp8_e4m3_b128_f32", "fp8_e4m3_b128_bf16"),
            *(f"fp8_e5m2_{scope}_f32" for scope in ("tensor", "row", "b128")),
        ),
        f"fp8_(e4m3|e5m2)_(tensor|row|g128|b128)_{_FLOAT}",
        Fp8,
    ),
    Family(
        "ternary{|_inverse}{|_f16|_f32}",
        "-1, 0, 1 times a scale (BitNet, linear_class autobitlinear) or divided by it (bitlinear)",
        ("ternary", "ternary_inverse", "ternary_f32", "ternary_inverse_f32"),
        "ternary(_inverse)?(?:_(f16|f32))?",
        lambda inverse, scale: Ternary(inverse is not None, scale or "bf16"),
    ),
    Family(
        "mxfp4",
        "FP4 with a power-of-two scale per 32 columns (OCP MX, gpt-oss)",
        ("mxfp4",),
        "mxfp4",
        Mxfp4,
    ),
    Family(
        "tcq{2|3|4|5}",
        "so many bits, rotated and trellis-coded; a scale of 8 bits per 64 columns, K a multiple",
        ("tcq2", "tcq3", "tcq4", "tcq5"),
        "tcq([2-5])",
        lambda bits: Tcq(int(bits)),
    ),
    Family(
        f"{{{'|'.join(GGML_KINDS)}}}",
        "ggml's blocks, as GGUF files store them",
        TRIED_KINDS,
        f"({'|'.join(GGML_KINDS)})",
        Ggml,
    ),
    Family(
        "bsr_<R>x<C>_{f32|f16|bf16|int8|int4}",
        "block-sparse rows, blocks of R x C",
        ("bsr_16x32_f32", "bsr_8x8_bf16", "bsr_1x16_f16", "bsr_16x32_int8", "bsr_16x32_int4"),
        f"bsr_({_COUNT})x({_COUNT})_(f32|f16|bf16|int8|int4)",
        lambda rows, columns, inner: Bsr((int(rows), int(columns)), inner),
    ),
)


def parse_format(name: str) -> Format:
    """Return the format with this name.

    Raises:
        FormatError: no family spells its names like that.
    """
    for family in FAMILIES:
        if match := re.fullmatch(family.pattern, name):
            return family.build(*match.groups())
    spellings = ", ".join(family.spelling for family in FAMILIES)
    raise FormatError(f"unknown format {name!r}; expected one of {spellings}")


def known_formats() -> tuple[str, ...]:
    """Return the names that are tested, benchmarked and documented, family by family."""
    return tuple(name for family in FAMILIES for name in family.examples)
