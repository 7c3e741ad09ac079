"""Rewrites of a Plan: the same model, activations stored in fewer bits, or zeros left out."""

from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.base import Format
from clocher_kernels.ops import OPS, written
from clocher_kernels.ops.contract import has_codes
from clocher_kernels.ops.quantize import BITNET, FLOAT8, GROUPED, groups_of
from clocher_kernels.plan import Attr, Buffer, Call, Plan

CODES = ".codes"
"""What a buffer's name ends with that holds the codes which ternary weights multiply."""

ROUNDED: Mapping[str, Mapping[str, Attr]] = {
    "int8": {"dtype": "i8", "group": 128, "floor": GROUPED["floor"]},
    "fp8": {"dtype": "e4m3", **FLOAT8},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "f16"},
}
"""Precision of activations -> attributes of the `fake_quantize` that rounds to it."""

_KEEPS_ZEROS = {"rms_norm": "y", "fake_quantize": "y", "quantize": "q"}
"""Op -> what it writes that is zero where what it reads is."""
_UNIT = 32
_GROUP = 128


def act_group(fmt: Format) -> int:
    """Return the columns per scale of the int8 activations that weights of a format multiply.

    Weights with a scale for 32 columns are summed in int32 over 32 columns anyway, and an outlier
    then coarsens 31 others, not 127 (docs/adr/0014-int8-activations.md).
    """
    match fmt:
        case Int4(group=32) | Int8(group=32) | Mxfp4() | Ggml(block=32):
            return _UNIT
    return _GROUP


def takes_int8(fmt: Format) -> bool:
    """Return whether weights of a format are multiplied with int8 activations if that is wanted."""
    match fmt:
        case Int4(group=group) | Int8(group=group):
            return not isinstance(group, int) or group % _UNIT == 0
        case Mxfp4() | Ggml():
            return True
    return False


def quantize_for_ternary(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """Quantise the inputs of linears with ternary weights as BitNet does; `formats` by matrix."""

    def wanted(call: Call) -> bool:
        return call.op == "linear" and isinstance(formats.get(call.args["w"]), Ternary)

    return _with_codes(plan, wanted, (CODES, ".scale"), lambda call: 0, BITNET)


def quantize_activations(
    plan: Plan, formats: Mapping[str, Format], group: int | None = None
) -> Plan:
    """Quantise the inputs of matmuls with integer weights, of those in `formats`, to int8.

    A scale is for `group` columns, 0: for a token, None: as `act_group` of the weight says.
    """

    def wanted(call: Call) -> bool:
        fmt = formats.get(call.args.get("w", ""))
        either = any("i8" in param.dtypes for param in OPS[call.op].params if param.name == "x")
        return either and fmt is not None and takes_int8(fmt)

    def own(call: Call) -> int:
        return act_group(formats[call.args["w"]]) if group is None else group

    return _with_codes(plan, wanted, (".q8", ".q8_scale"), own, GROUPED)


def round_activations(plan: Plan, precision: str) -> Plan:
    """Round the inputs of matmuls to a precision of `ROUNDED`; they stay fp32.

    What is int8 codes already stays as it is. What BitNet's `quantize` reads is rounded before it,
    but for int8, which it makes itself.
    """
    buffers = dict(plan.buffers)
    calls: list[Call] = []
    current: set[str] = set()
    for call in plan.calls:
        product = "x" in call.args and OPS[call.op].matrix is not None and not has_codes(call)
        if product or (call.op == "quantize" and precision != "int8"):
            x = call.args["x"]
            rounded = f"{x}.{precision}"
            if x not in current:
                buffers[rounded] = Buffer(buffers[x].shape, "f32", buffers[x].rows)
                calls.append(Call("fake_quantize", {"x": x, "y": rounded}, ROUNDED[precision]))
                current.add(x)
            call = Call(call.op, {**call.args, "x": rounded}, call.attrs)
        calls.append(call)
        current -= written(call)
    return replace(plan, buffers=buffers, calls=tuple(calls))


def skip_zeros(plan: Plan, formats: Mapping[str, Format], scope: Set[str]) -> Plan:
    """Leave out what the zeros of squared ReLUs would multiply; no result changes.

    A product of codes with ternary weights whose input has such zeros becomes `skip_linear`.
    `scope`: weights that may be in memory a second time.
    """
    calls: list[Call] = []
    sparse: set[str] = set()
    for call in plan.calls:
        weight = call.args.get("w", "")
        exact = isinstance(formats.get(weight), Ternary) and has_codes(call)
        if call.op == "linear" and call.args["x"] in sparse and exact and weight in scope:
            call = replace(call, op="skip_linear")
        zeros = _keeps_zeros(call, sparse)
        sparse -= written(call)
        sparse |= zeros
        calls.append(call)
    return replace(plan, calls=tuple(calls))


def twice_packed(plan: Plan) -> list[str]:
    """Return the weights that are in memory as tiles and by column."""
    return [call.args["w"] for call in plan.calls if call.op == "skip_linear"]


def _keeps_zeros(call: Call, sparse: Set[str]) -> set[str]:
    """Return what a call writes that is zero where a squared ReLU was."""
    if call.attrs.get("activation") == "relu2" and "residual" not in call.args:
        return {call.args["y"]}
    if call.args.get("x") in sparse and "residual" not in call.args:
        kept = _KEEPS_ZEROS.get(call.op)
        return {call.args[kept]} if kept else set()
    return set()


def _with_codes(
    plan: Plan,
    wanted: Callable[[Call], bool],
    endings: tuple[str, str],
    group_of: Callable[[Call], int],
    attrs: Mapping[str, Attr],
) -> Plan:
    """Store the `x` of wanted calls as int8, quantised once for all that read it in one group.

    `endings`: of the names of the buffers of codes and scales, with the group where it is 32;
    `attrs`: of `quantize`.
    """
    buffers = dict(plan.buffers)
    calls: list[Call] = []
    current: dict[str, str] = {}  # buffer of codes -> what it was made of
    for call in plan.calls:
        if wanted(call) and not has_codes(call):
            x, group = call.args["x"], group_of(call)
            short = "32" if group == _UNIT else ""
            codes, scale = (f"{x}{ending}{short}" for ending in endings)
            if codes not in current:
                source = buffers[x]
                *lead, size = source.shape
                buffers[codes] = Buffer(source.shape, "i8", source.rows)
                shape = (*lead, groups_of(size, group))
                buffers[scale] = Buffer(shape, "f32", source.rows)
                made = {"x": x, "q": codes, "scale": scale}
                calls.append(Call("quantize", made, {"group": group, **attrs}))
                current[codes] = x
            args = {**call.args, "x": codes, "x_scale": scale}
            call = Call(call.op, args, {**call.attrs, "group": group})
        calls.append(call)
        changed = written(call)
        current = {codes: x for codes, x in current.items() if x not in changed}
    return replace(plan, buffers=buffers, calls=tuple(calls))
