"""Rewrites of a Plan: the same model, other ops."""

from collections.abc import Mapping
from dataclasses import replace

from clocher_kernels.formats import Int4, Int8, Mxfp4
from clocher_kernels.formats.base import Format
from clocher_kernels.ops.quantized import groups_of
from clocher_kernels.plan import Buffer, Call, Plan

_UNIT = 32
_INTEGER_OP = {
    "linear": ("quantize_blocks", "linear_q8"),
    "moe_gate_up": ("quantize_blocks", "moe_gate_up_q8"),
    "moe_down": ("quantize_experts", "moe_down_q8"),
}


INTEGER_PRODUCTS = frozenset(product for _, product in _INTEGER_OP.values())
"""Ops that multiply int8 activations with integer weights."""


def takes_int8(fmt: Format) -> bool:
    """Return whether weights of a format are multiplied with int8 activations as integers."""
    match fmt:
        case Int4(group=group) | Int8(group=group):
            return not isinstance(group, int) or group % _UNIT == 0
        case Mxfp4():
            return True
    return False


def quantize_activations(plan: Plan, formats: Mapping[str, Format], group: int) -> Plan:
    """Quantise the inputs of products with integer weights to int8, once for all that read them.

    Products with float weights, and what is no product, stay as they are.

    Args:
        plan: from `build_plan`.
        formats: format of each matrix whose products may be integer ones, by name.
        group: columns per activation scale; 0 for one scale per token.
    """
    buffers = dict(plan.buffers)
    calls: list[Call] = []
    current: set[str] = set()
    for call in plan.calls:
        weight = call.args.get("w", "")
        if call.op in _INTEGER_OP and weight in formats and takes_int8(formats[weight]):
            quantize, product = _INTEGER_OP[call.op]
            x = call.args["x"]
            codes, scale = f"{x}.q8", f"{x}.q8_scale"
            if x not in current:
                source = buffers[x]
                *lead, size = source.shape
                buffers[codes] = Buffer(source.shape, "i8", source.rows)
                shape = (*lead, groups_of(size, group))
                buffers[scale] = Buffer(shape, "f32", source.rows)
                args = {"x": x, "q": codes, "scale": scale}
                calls.append(Call(quantize, args, {"group": group}))
                current.add(x)
            args = {"q": codes, "scale": scale}
            args |= {name: value for name, value in call.args.items() if name != "x"}
            call = Call(product, args, {**call.attrs, "group": group})
        calls.append(call)
        current -= {call.args.get("y", ""), call.args["x"] if call.op == "rope" else ""}
    return replace(plan, buffers=buffers, calls=tuple(calls))
