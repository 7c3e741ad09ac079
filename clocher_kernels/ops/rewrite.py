"""Rewrites of a Plan: LoRA adapters, activations in fewer bits, zeros left out, fused calls."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Tcq, Ternary
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
LORA = "lora."
"""What the names of adapters' matrices begin with."""
_UNIT = 32
_GROUP = 128
_MOST_SIDE_BY_SIDE = 3
"""Matrices that a run multiplies the same activations by."""


class Adapted(NamedTuple):
    """A linear that LoRA adapters change: the rank of all together, and their table of scales."""

    rank: int
    scales: str


def adapt(plan: Plan, linears: Mapping[str, Adapted], in_linears: bool = False) -> Plan:
    """Let linears add (x A^T * s) B^T of all adapters at once; `linears` by weight.

    A [rank, K] and B [N, rank] are those of the adapters one after the other: "lora.a.W" and
    "lora.b.W" of weight W. s is a row of the table [1 + adapters, rank], zero but for the adapter
    that the input "adapters", i32 [M], names for the token; 0 is none. `in_linears`: those that
    are no `bsr_linear` add it themselves, else calls behind them do.
    """
    if not linears:
        return plan
    buffers, calls = dict(plan.buffers), list[Call]()
    buffers["adapters"] = Buffer((plan.tokens,), "i32", "M", "input")

    def scratch(name: str, size: int) -> str:
        buffers[name] = Buffer((plan.tokens, size), "f32", "M")
        return name

    for rank, table in dict.fromkeys(linears.values()):
        args = {"ids": "adapters", "table": table, "y": scratch(f"{table}.of_token", rank)}
        calls.append(Call("embed", args, {"scale": 1.0}))
    smalls: dict[str, str] = {}
    for i, call in enumerate(plan.calls):
        weight, x = call.args.get("w", ""), call.args.get("x", "")
        if weight in linears and weight not in smalls:
            # Of all that read the same x, one after the other: threads meet once behind them.
            same = takewhile(lambda c, x=x: "w" in c.args and c.args["x"] == x, plan.calls[i:])  # type: ignore[misc]
            for place, w in enumerate(c.args["w"] for c in same if c.args["w"] in linears):
                rank, table = linears[w]
                smalls[w] = scratch(f"{LORA}x{rank}.{place}", rank)
                down = {"x": x, "w": f"{LORA}a.{w}", "times": f"{table}.of_token", "y": smalls[w]}
                calls.append(Call("linear", down))
        if weight not in linears:
            calls.append(call)
        elif in_linears and call.op == "linear":
            own = {"lora_x": smalls[weight], "lora_b": f"{LORA}b.{weight}"}
            calls.append(replace(call, args={**call.args, **own}))
        else:
            size = buffers[call.args["y"]].shape[-1]
            calls += _adding(call, smalls[weight], size, scratch)
    named = (name for call in calls for name in call.args.values() if name.startswith(LORA))
    weights = dict.fromkeys((*plan.weights, *(name for name in named if name not in buffers)))
    return replace(plan, buffers=buffers, calls=tuple(calls), weights=tuple(weights))


def _adding(call: Call, small: str, size: int, scratch: Callable[[str, int], str]) -> list[Call]:
    """Return a linear to `size` columns, and what adds the adapters' part to its sum."""
    args = call.args
    up = {"x": small, "w": f"{LORA}b.{args['w']}"}
    after = {name: args[name] for name in ("times", "residual") if name in args}
    first, last, y = call, list[Call](), args["y"]
    if "activation" in call.attrs:  # it and what follows it come after the addition
        y = scratch(f"{LORA}y{size}", size)
        first = Call(call.op, {name: args[name] for name in args if name not in after} | {"y": y})
        identity = {"x": y, "w": f"{LORA}identity.{size}", **after, "y": args["y"]}
        last = [Call("bsr_linear", identity, call.attrs)]
    elif "times" in after:
        up["times"] = after["times"]
    up |= {"residual": y, "y": y}
    return [first, Call("linear", up), *last]


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
        case Mxfp4() | Ggml() | Tcq():
            return True
    return False


def read_instead(plan: Plan, maker_of: Callable[[Call], Call | None]) -> Plan:
    """Let calls read what others make of their `x`, made once for all that read it.

    `maker_of`: call -> the call that makes its new input, values or codes and scales; None: none.
    """
    buffers, calls, current = dict(plan.buffers), list[Call](), dict[str, str]()
    for call in plan.calls:
        maker = maker_of(call)
        if maker is not None:
            params = [param for param in OPS[maker.op].params if param.kind == "out"]
            made, group = [maker.args[p.name] for p in params], int(maker.attrs.get("group", 0))
            if made[0] not in current:
                x = buffers[maker.args["x"]]
                scales = (*x.shape[:-1], groups_of(x.shape[-1], group))
                for name, param, shape in zip(made, params, (x.shape, scales), strict=False):
                    buffers[name] = Buffer(shape, param.dtype, x.rows)
                calls.append(maker)
                current[made[0]] = maker.args["x"]
            args, attrs = {**call.args, "x": made[0]}, call.attrs
            if made[1:]:
                args, attrs = {**args, "x_scale": made[1]}, {**attrs, "group": group}
            call = Call(call.op, args, attrs)
        calls.append(call)
        changed = written(call)
        current = {name: x for name, x in current.items() if x not in changed}
    return replace(plan, buffers=buffers, calls=tuple(calls))


def rotate(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """Rotate what weights of formats that are `turned` multiply; turn rows of such tables back."""

    def turned(call: Call) -> Call | None:
        size, x = _turned(formats, call, "w"), call.args.get("x", "")
        return Call("hadamard", {"x": x, "y": f"{x}.turned"}, {"size": size}) if size else None

    calls: list[Call] = []
    for call in plan.calls:
        calls.append(call)
        if size := _turned(formats, call, "table"):
            y = call.args["y"]
            calls.append(Call("hadamard", {"x": y, "y": y}, {"size": size}))
    return read_instead(replace(plan, calls=tuple(calls)), turned)


def _turned(formats: Mapping[str, Format], call: Call, param: str) -> int:
    fmt = formats.get(call.args.get(param, ""))
    return fmt.turned if fmt else 0


def quantize_for_ternary(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """Quantise the inputs of linears with ternary weights as BitNet does; `formats` by matrix."""

    def codes(call: Call) -> Call | None:
        ternary = call.op == "linear" and isinstance(formats.get(call.args["w"]), Ternary)
        return _codes(call, CODES, ".scale", 0, BITNET) if ternary else None

    return read_instead(plan, codes)


def quantize_activations(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """Quantise the inputs of matmuls with integer weights, of those in `formats`, to int8.

    A scale is for as many columns as `act_group` of the weight says.
    """

    def codes(call: Call) -> Call | None:
        fmt = formats.get(call.args.get("w", ""))
        either = any("i8" in param.dtypes for param in OPS[call.op].params if param.name == "x")
        if not either or fmt is None or not takes_int8(fmt):
            return None
        group = act_group(fmt)
        short = "32" if group == _UNIT else ""
        return _codes(call, f".q8{short}", f".q8_scale{short}", group, GROUPED)

    return read_instead(plan, codes)


def _codes(call: Call, q: str, scale: str, group: int, attrs: Mapping[str, Attr]) -> Call | None:
    """Return the call that quantises the `x` of a call, if it does not read codes already."""
    x = call.args["x"]
    made = {"x": x, "q": x + q, "scale": x + scale}
    return None if has_codes(call) else Call("quantize", made, {"group": group, **attrs})


def round_activations(plan: Plan, precision: str) -> Plan:
    """Round the inputs of matmuls to a precision of `ROUNDED`; they stay fp32.

    What is int8 codes already stays as it is. What BitNet's `quantize` reads is rounded before it,
    but for int8, which it makes itself.
    """

    def rounded(call: Call) -> Call | None:
        product = "x" in call.args and OPS[call.op].matrix is not None and not has_codes(call)
        product = product and not call.args["w"].startswith(LORA)  # adapters are small and exact
        if not product and (call.op != "quantize" or precision == "int8"):
            return None
        x = call.args["x"]
        return Call("fake_quantize", {"x": x, "y": f"{x}.{precision}"}, ROUNDED[precision])

    return read_instead(plan, rounded)


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


@dataclass(frozen=True, slots=True)
class Run:
    """Calls of a Plan, one after the other, that a back end may execute as one; kind "": one call.

    "products": matrices that multiply the same x, first its norm or its codes, if they are made for
    them alone; of two the second may be a gate that is multiplied by the first. "router": the same
    with one matrix, and the choice of experts. "heads": norms and rotations of queries and keys,
    their way into the cache, and attention if that follows.
    """

    kind: str
    calls: tuple[Call, ...]


def runs(plan: Plan) -> tuple[Run, ...]:
    """Return a Plan's calls, in order, as runs. What a back end declines is executed call by call.

    What a run leaves unwritten (a norm in place before codes are made of it, rotated queries and
    keys) no later call reads.
    """
    found: list[Run] = []
    calls = plan.calls
    while calls:
        run = _heads(calls) or _products(calls) or Run("", calls[:1])
        found.append(run)
        calls = calls[len(run.calls) :]
    return tuple(found)


def _products(calls: Sequence[Call]) -> Run | None:
    end, x, unwritten = 0, calls[0].args.get("x", ""), ""
    if calls[0].op == "rms_norm" and "residual" not in calls[0].args:
        end, x = 1, calls[0].args["y"]
        unwritten = x if calls[0].args["x"] == x else ""
    codes = [c for c in calls[end : end + 1] if c.op == "quantize" and not c.attrs["group"]]
    if codes and codes[0].args["x"] == x:
        unwritten = x if end else ""
        x, end = codes[0].args["q"], end + 1
    elif unwritten:
        return None
    first = end
    while end < len(calls) and calls[end].op == "linear" and calls[end].args["x"] == x:
        y = calls[first].args["y"]
        gates = end == first + 1 and (calls[end].args.get("times"), calls[end].args["y"]) == (y, y)
        if end > first and not (gates or _plain(calls[end])):
            break
        end += 1
        if gates or not _plain(calls[end - 1]) or end - first == _MOST_SIDE_BY_SIDE:
            break
    made = {y for call in calls[first:end] for y in written(call)}
    over = made & {x, calls[0].args.get("x", "")}
    if end == first or over or (unwritten and _is_read(calls[end:], unwritten)):
        return None
    scores = calls[first].args["y"] if end == first + 1 and _plain(calls[first]) else ""
    if calls[end : end + 1] and calls[end].op == "route" and calls[end].args["logits"] == scores:
        return Run("router", tuple(calls[: end + 1]))
    return Run("products", tuple(calls[:end])) if end > 1 else None


def _plain(call: Call) -> bool:
    """Return whether a linear does no more than multiply and add a bias."""
    return {"times", "residual"}.isdisjoint(call.args) and "activation" not in call.attrs


def _heads(calls: Sequence[Call]) -> Run | None:
    end = next((i for i, call in enumerate(calls[:5]) if call.op == "kv_append"), None)
    if end is None:
        return None
    attends = end + 1 < len(calls) and calls[end + 1].op == "attention"
    key, turned = calls[end].args["k"], dict[str, list[str]]()
    for call in calls[:end]:
        x = call.args.get("x", "")
        if call.op not in ("rms_norm", "rope") or call.args.get("y", x) != x:
            return None
        turned.setdefault(x, []).append(call.op)
    query = {calls[end + 1].args["q"]} if attends else turned.keys() - {key}
    rest = calls[end + 1 + attends :]
    if any(ops not in (["rms_norm"], ["rope"], ["rms_norm", "rope"]) for ops in turned.values()):
        return None
    if len(turned.keys() | query | {key}) > 2 or _is_read(rest, key):
        return None
    if attends and any(_is_read(rest, name) for name in query):
        return None
    return Run("heads", tuple(calls[: end + 1 + attends])) if end or attends else None


def _is_read(calls: Sequence[Call], name: str) -> bool:
    """Return whether calls read a buffer before they write all of it."""
    for call in calls:
        kinds = {p.kind for p in OPS[call.op].params if call.args.get(p.name) == name}
        if kinds:
            return not kinds <= {"out"}
    return False
