"""What the fields of a rule mean: the format that they spell, and the methods that it has."""

from collections.abc import Mapping
from typing import Any, Literal

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Format, Fp8, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.fp8 import Scope
from clocher_runtime.convert.q4.document import METHODS

DTYPES = ("int4", "int8", "fp8", "fp8_e5m2", "mxfp4", "ternary")
"""What a rule may make of a matrix; a "w" at the end means the same."""


def rule_format(rule: Mapping[str, Any]) -> Format:
    """Return the format that a rule other than "keep" asks for.

    `rule`: its fields, each with a value that is known. Raises FormatError: fields contradict each
    other.
    """
    dtype = rule["dtype"].removesuffix("w")
    group = rule.get("group")
    affine = rule.get("zero") == "per-group"
    scale = rule.get("scale", "per-channel")
    if affine and dtype != "int4":
        raise FormatError(f"{dtype} is symmetric: zero must be per-tensor")
    if group and dtype not in ("int4", "int8"):
        raise FormatError(f"{dtype} has no groups to choose: leave group out")
    scales = {"int8": ("per-tensor",), "fp8": ("per-block",), "fp8_e5m2": ("per-block",)}
    if scale != "per-channel" and scale not in scales.get(dtype, ()):
        raise FormatError(
            "scale per-tensor is for int8, per-block for fp8; "
            f"{dtype} needs per-channel, which is the default"
        )
    if dtype == "int8":
        whole = scale == "per-tensor"
        if whole and group:
            raise FormatError("scale per-tensor leaves no place for a group")
        default = "f16" if group else "f32"
        return Int8(group or ("tensor" if whole else "row"), rule.get("scale_dtype", default))
    if dtype == "int4":
        return Int4(not affine, group or "row", rule.get("scale_dtype", "f16"))
    if dtype == "ternary":
        return Ternary(scale_dtype=rule.get("scale_dtype", "f16"))
    if dtype == "mxfp4":
        if "scale_dtype" in rule:
            raise FormatError("the scales of mxfp4 are powers of two: leave scale_dtype out")
        return Mxfp4()
    scope: Scope = "b128" if scale == "per-block" else "row"
    code: Literal["e4m3", "e5m2"] = "e5m2" if dtype == "fp8_e5m2" else "e4m3"
    return Fp8(code, scope, rule.get("scale_dtype", "f32"))


def check_method(fmt: Format, method: str) -> None:
    """Raise UsageError if a method has no way to choose the codes of a format."""
    ints = isinstance(fmt, Int4 | Int8) and fmt.group != "tensor"
    searched = isinstance(fmt, Mxfp4) or (isinstance(fmt, Fp8) and fmt.scope != "tensor")
    if method == "gptq" and not ints:
        way_out = "imx or rtn" if searched else "rtn"
        raise UsageError(
            f"gptq needs an int4 or int8 format with scales per row or group, got {fmt.name}; "
            f"give it the method {way_out}"
        )
    if method == "imx" and not (ints or searched):
        raise UsageError(f"imx has no scales to search in {fmt.name}; give it the method rtn")


def best_method(fmt: Format, wanted: str) -> str:
    """Return the method that comes nearest to the one that is wanted and that a format has."""
    for method in METHODS[METHODS.index(wanted) :: -1]:
        try:
            check_method(fmt, method)
        except UsageError:
            continue
        return method
    return "rtn"
