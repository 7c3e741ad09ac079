"""The cases of the op table at sizes of real models.

Whatever a case says of formats, attributes and optional parameters stays; its sizes become those
of a model. An op without an entry in `REAL` keeps its cases, so a new op is there at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from clocher_kernels.ops import OPS, OpSpec
from clocher_kernels.ops.contract import Case
from clocher_kernels.ops.quantized import groups_of

_PAGE = 16  # cells of a page in every case
_KIND = {"aligned", "wide"}  # what the ids of cases say of sizes that are replaced


@dataclass(frozen=True, slots=True)
class Real:
    """Sizes for the cases of an op.

    Attributes:
        cases: a pattern of case ids, as `fnmatch` has it.
        sizes: dimension letter -> size; what follows from other sizes is left out.
        label: how ids begin; None: like the case's, without its sizes.
    """

    cases: str
    sizes: Mapping[str, int]
    label: str | None = None


_GPT_OSS = {"E": 4, "A": 4}  # the experts that one token chooses
_QWEN3_A3B = {"E": 8, "A": 8}
_CACHE = {"H": 8, "D": 64, "S": 1, "B": 128}

REAL: Mapping[str, tuple[Real, ...]] = {
    "rms_norm": (
        Real("m1-*", {"M": 1, "F": 2880, "D": 2880}),
        Real("heads-m3-*", {"M": 1, "F": 4096, "D": 128}),
    ),
    "rope": (Real("m1-*", {"M": 1, "F": 4096, "P": 32, "C": 4096}, label=""),),
    "glu": (
        Real("silu-m1-*", {"M": 1, "I": 14336}),
        Real("relu2-m1-*", {"M": 1, "I": 6912}),
    ),
    "embed": (Real("*", {"M": 1, "V": 4096, "K": 2880}),),
    "gather_rows": (Real("r1-*", {"M": 16, "R": 1, "K": 2880}),),
    "linear": (
        Real("*-aligned-m1-*", {"M": 1, "N": 4096, "K": 2880}),
        Real("bf16-wide-*", {"M": 32, "N": 4096, "K": 2880}),
        Real("int4_sym_g32_f16-wide-*", {"M": 32, "N": 4096, "K": 2880}),
        Real("mxfp4-wide-*", {"M": 32, "N": 4096, "K": 2880}),
    ),
    "quantize_act": (Real("m1-*", {"M": 1, "K": 6912}),),
    "linear_i8": (
        Real("*-aligned-m1-*", {"M": 1, "N": 2560, "K": 6912}),
        Real("ternary-wide-*", {"M": 32, "N": 2560, "K": 6912}),
    ),
    "bsr_linear": (
        Real("16x32-aligned", {"M": 1, "N": 4096, "K": 2880}),
        Real("32x32-*-m1", {"M": 1, "N": 4096, "K": 2880}),
    ),
    "topk_softmax": (Real("m1-*", {"M": 1, "E": 128, "A": 8}),),
    "moe_gate_up": (
        Real("mxfp4-m1-*", {"M": 1, **_GPT_OSS, "J": 5760, "I": 2880, "K": 2880}),
        Real("*16-m1-*", {"M": 1, **_QWEN3_A3B, "J": 1536, "I": 768, "K": 2048}),
        Real("int8_row_f32-m1-*", {"M": 1, **_QWEN3_A3B, "J": 1536, "I": 768, "K": 2048}),
    ),
    "moe_down": (
        Real("mxfp4-m1-*", {"M": 1, **_GPT_OSS, "N": 2880, "I": 2880}),
        Real("*16-m1-*", {"M": 1, **_QWEN3_A3B, "N": 2048, "I": 768}),
        Real("int8_row_f32-m1-*", {"M": 1, **_QWEN3_A3B, "N": 2048, "I": 768}),
    ),
    "quantize_blocks": (Real("*-m1-*", {"M": 1, "K": 2880}),),
    "quantize_experts": (Real("*-m1-*", {"M": 1, "A": 4, "I": 2880}),),
    "linear_q8": (
        Real("*-aligned-m1-*", {"M": 1, "N": 4096, "K": 2880}),
        Real("int4_sym_g32_f16-wide-*", {"M": 32, "N": 4096, "K": 2880}),
        Real("mxfp4-wide-*", {"M": 32, "N": 4096, "K": 2880}),
    ),
    "moe_gate_up_q8": (
        Real("mxfp4-m1-*", {"M": 1, **_GPT_OSS, "J": 5760, "I": 2880, "K": 2880}),
        Real("int*-m1-*", {"M": 1, **_QWEN3_A3B, "J": 1536, "I": 768, "K": 2048}),
    ),
    "moe_down_q8": (
        Real("mxfp4-m1-*", {"M": 1, **_GPT_OSS, "N": 2880, "I": 2880}),
        Real("int*-m1-*", {"M": 1, **_QWEN3_A3B, "N": 2048, "I": 768}),
    ),
    "kv_append": (
        Real("append-*-m3-*", {"M": 1, "N": 8, **_CACHE}),
        Real("append-chunk-*", {"M": 64, "N": 8, **_CACHE}),
    ),
    "attention": (
        Real("decode-*", {"M": 1, "N": 64, **_CACHE}),
        Real("prefill-bf16-*", {"M": 64, "N": 64, **_CACHE}),
    ),
    "sample": (Real("*-r1-*", {"R": 1, "V": 201088}),),
    "advance": (Real("*", {"M": 32, "R": 32}),),
}


def real_cases() -> list[tuple[OpSpec, Case]]:
    """Return every op with its cases at real sizes."""
    found = []
    for spec in OPS.values():
        entries = REAL.get(spec.name, ())
        cases = [
            resized(case, entry)
            for entry in entries
            for case in spec.cases
            if fnmatchcase(case.id, entry.cases)
        ]
        by_id = {case.id: case for case in (cases if entries else spec.cases)}
        found += [(spec, case) for case in by_id.values()]
    return found


def resized(case: Case, real: Real) -> Case:
    """Return a case with other sizes, and what follows from them."""
    attrs, sizes = dict(case.attrs), dict(real.sizes)
    if "group" in attrs:
        sizes["B"] = groups_of(sizes.get("K") or sizes["I"], int(attrs["group"]))
    if "kv_dtype" in attrs:
        sizes |= {"F": sizes["N"] * sizes["D"], "T": _PAGE, "P": sizes["S"] * sizes["B"]}
    if "scale" in attrs:
        attrs["scale"] = sizes["D"] ** -0.5
    words = case.id.split("-") if real.label is None else [real.label]
    kept = [word for word in words if word and word not in _KIND and not _is_size(word, case)]
    spelled = [f"{letter.lower()}{size}" for letter, size in real.sizes.items()]
    return replace(case, id="-".join(kept + spelled), sizes=sizes, attrs=attrs)


def _is_size(word: str, case: Case) -> bool:
    return word[1:].isdigit() and case.sizes.get(word[0].upper()) == int(word[1:])
