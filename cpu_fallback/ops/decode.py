"""Stored weights to fp32 panels: one decoder per format, shared by every op that reads a matrix.

A decoder (`product`) gives exactly what the format's own `decode` does. f32 needs no panel
and returns the stored rows, K * 4 bytes apart. ggml's blocks have theirs in `decode_ggml`.
"""

from collections.abc import Callable

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Float, Fp8, Ggml, Int4, Int8, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.ggml import GGML_KINDS
from clocher_kernels.formats.tcq import STRIP
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, i64
from cpu_fallback.lanes.language import WIDEN, loads_of
from cpu_fallback.ops.product import PITCH, Weight, weight_at

_SCALES = {"one": 0, "f32": 1, "f16": 2, "bf16": 3, "e8m0": 4}
_f16, _bf16, _e8m0 = (loads_of(kind)[1] for kind in ("f16", "bf16", "e8m0"))


@device
def scales_at(weight, index, count):
    """Return the scales from the index-th on, fp32, in the first `count` lanes or more."""
    w = weight_at(weight)
    kind, scales = w.scale_kind, w.scales
    if kind == 0:
        return v.splat(w.factor)
    if kind == 1:
        return v.load_f32_n(scales + 4 * index, count)
    if kind == 2:
        return _f16(scales + 2 * index, count)
    if kind == 3:
        return _bf16(scales + 2 * index, count)
    return _e8m0(scales + index, count)


@device
def first_scale(weight, expert, row):
    """Return the index of the scale of a row's first element."""
    w = weight_at(weight)
    return (expert * w.high + row // w.tall) * w.wide


def _f32(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    return w.codes + 4 * ((expert * w.n + row) * w.k + k0)


def _numbers(kind: str) -> Callable[..., int]:
    """Return the decoder of a kind of number, by runs that share scale and, of u4, zero point."""
    bits, get, has_zero = WIDEN[kind].bits, v.loads_up_to(*loads_of(kind)), kind == "u4"

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        group, zero = w.group, v.splat(np.float32(8))
        for r in range(row, row + count):
            line = w.codes + (expert * w.n + r) * w.stride
            out = panel + (r - row) * PITCH - 4 * k0
            index = first_scale(weight, expert, r) + k0 // group
            k, end = k0, k0 - k0 % group
            while k < k1:
                end = min(end + group, k1)
                scale = v.splat(v.lane(scales_at(weight, index, 1), 0))
                if w.zeros:
                    zero = v.splat(np.float32(v.read_u8(w.zeros + index)))
                index += 1
                while k < end:
                    value = get(line + (bits * k >> 3), end - k)
                    if has_zero:
                        value = v.sub(value, zero)
                    v.store_up_to(out + 4 * k, v.mul(value, scale), end - k)
                    k += 16
                k = end
        return panel

    return decoder


def _ternary(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    packed = w.n >> 2
    scale = scales_at(weight, 0, 1)
    one, three = v.isplat(1), v.isplat(3)
    for r in range(row, row + count):
        line = w.codes + r % packed * w.stride
        shift = 2 * (r // packed)
        out = panel + (r - row) * PITCH - 4 * k0
        for k in range(k0, k1, 16):
            digit = v.isub(v.iand(v.shr(v.load_u8_up_to(line + k, k1 - k), shift), three), one)
            v.store_up_to(out + 4 * k, v.mul(v.to_f32(digit), scale), k1 - k)
    return panel


DECODERS = {
    kind: Kernel(function, i64, f"decode.{kind}")
    for kind, function in {
        "f32": _f32,
        **{kind: _numbers(kind) for kind in ("bf16", "f16", "e4m3", "e5m2")},
        "int8": _numbers("i8"),
        "int4": _numbers("u4"),
        "mxfp4": _numbers("e2m1"),
        "ternary": _ternary,
    }.items()
}
"""Stored kind of code -> decoder. Those of ggml's types are made when a weight needs one."""


def weight_record(op_name: str, tensor: QuantTensor) -> Weight:
    """Return the record of a weight, as far as decoders read it. Raises UnsupportedOp."""
    fmt, planes = tensor.format, tensor.planes
    *_, n, k = tensor.shape
    match fmt:
        case Float(name=kind):
            return plain(DECODERS[kind], planes["data"], n, k)
        case Ternary():
            return plain(DECODERS["ternary"], planes["codes"], n, k, fmt.multiplier(planes))
        case Ggml(kind=kind):
            from cpu_fallback.ops.decode_ggml import blocks_of, decoder_of

            blocks, decoder = blocks_of(tensor), decoder_of(kind)
            return plain(decoder, blocks, n, k)._replace(stride=blocks.shape[-1])
        case Tcq(bits=bits):
            from cpu_fallback.ops.decode_trellis import decoder_of as trellis_of

            found = plain(trellis_of(bits), planes["codes"], n, k)
            size, wide = STRIP * k * bits // 8, k // fmt.turned
            places = {"scales": _address(planes["scales"]), "zeros": _address(planes["rows"])}
            return found._replace(stride=size, wide=wide, **places)
        case Int8(group=scope, scale_dtype=scale):
            kind, codes = "int8", planes["codes"]
        case Int4(group=scope, scale_dtype=scale):
            kind, codes = "int4", planes["codes"]
        case Fp8(code_dtype=kind, scope=scope, scale_dtype=scale):
            codes = planes["codes"]
        case Mxfp4():
            kind, codes, scope, scale = "mxfp4", planes["blocks"], 32, "e8m0"
        case _:
            raise UnsupportedOp(
                f"{op_name}: no CPU kernel reads the format {fmt.name}; there are decoders for "
                f"{', '.join((*DECODERS, *GGML_KINDS))}"
            )
    group, tall = {"tensor": (k, n), "row": (k, 1), "g128": (128, 1), "b128": (128, 128)}.get(
        scope, (scope, 1)
    )
    stride = -(-k // 2) if kind in ("int4", "mxfp4") else k
    zeros = _address(planes["zeros"]) if "zeros" in planes else 0
    return plain(DECODERS[kind], codes, n, k, 0.0)._replace(
        scales=_address(planes["scales"]),
        zeros=zeros,
        stride=stride,
        scale_kind=_SCALES[scale],
        group=group,
        tall=tall,
        wide=-(-k // group),
        high=-(-n // tall),
    )


def plain(decoder: Kernel, codes: np.ndarray, n: int, k: int, multiplier: float = 1.0) -> Weight:
    """Return the record of a weight without scales: codes [n, k] times a multiplier, but f32."""
    pitch = 4 * k if decoder is DECODERS["f32"] else PITCH
    sizes = {"n": n, "k": k, "stride": k * codes.itemsize, "group": k, "tall": n}
    return Weight(decoder, pitch, codes=_address(codes), factor=float(multiplier), **sizes)


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
