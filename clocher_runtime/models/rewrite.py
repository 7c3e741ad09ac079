"""Rewrites of a Plan: the same model, its products' activations stored as int8."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import OPS, written
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.quantize import BITNET, GROUPED, groups_of
from clocher_kernels.plan import Attr, Buffer, Call, Plan

CODES = ".codes"
"""What a buffer's name ends with that holds the codes which ternary weights multiply."""

_UNIT = 32
_GGML_KINDS = ("q4_k", "q5_k", "q6_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs")


def takes_int8(fmt: Format) -> bool:
    """Return whether weights of a format are multiplied with int8 activations if that is wanted."""
    match fmt:
        case Int4(group=group) | Int8(group=group):
            return not isinstance(group, int) or group % _UNIT == 0
        case Mxfp4():
            return True
        case Ggml(kind=kind):
            return kind in _GGML_KINDS
    return False


def quantize_for_ternary(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """Quantise the inputs of linears with ternary weights as BitNet does, which they ask for.

    Args:
        plan: what is rewritten.
        formats: format of each matrix by name.
    """

    def wanted(call: Call) -> bool:
        return call.op == "linear" and isinstance(formats.get(call.args["w"]), Ternary)

    return _with_codes(plan, wanted, (CODES, ".scale"), {"group": 0, **BITNET})


def quantize_activations(plan: Plan, formats: Mapping[str, Format], group: int) -> Plan:
    """Quantise the inputs of products with integer weights to int8.

    Products with float weights, and what is no product, stay as they are.

    Args:
        plan: from `build_plan`.
        formats: format of each matrix whose products may be integer ones, by name.
        group: columns per activation scale; 0 for one scale per token.
    """

    def wanted(call: Call) -> bool:
        fmt = formats.get(call.args.get("w", ""))
        either = any("i8" in param.dtypes for param in OPS[call.op].params if param.name == "x")
        return either and fmt is not None and takes_int8(fmt)

    return _with_codes(plan, wanted, (".q8", ".q8_scale"), {"group": group, **GROUPED})


def _with_codes(
    plan: Plan,
    wanted: Callable[[Call], bool],
    endings: tuple[str, str],
    attrs: Mapping[str, Attr],
) -> Plan:
    """Store the `x` of calls as int8, quantised once for all that read it.

    Args:
        plan: what is rewritten.
        wanted: which calls; those whose `x` is int8 already stay as they are.
        endings: what the names of the buffers of codes and scales end with.
        attrs: of `quantize`.
    """
    buffers = dict(plan.buffers)
    calls: list[Call] = []
    current: set[str] = set()
    for call in plan.calls:
        if wanted(call) and not has_codes(call):
            x = call.args["x"]
            codes, scale = (f"{x}{ending}" for ending in endings)
            if x not in current:
                source, group = buffers[x], int(attrs["group"])
                *lead, size = source.shape
                buffers[codes] = Buffer(source.shape, "i8", source.rows)
                shape = (*lead, groups_of(size, group))
                buffers[scale] = Buffer(shape, "f32", source.rows)
                calls.append(Call("quantize", {"x": x, "q": codes, "scale": scale}, attrs))
                current.add(x)
            args = {**call.args, "x": codes, "x_scale": scale}
            call = Call(call.op, args, {**call.attrs, "group": attrs["group"]})
        calls.append(call)
        current -= written(call)
    return replace(plan, buffers=buffers, calls=tuple(calls))
