"""Linears as the arrays of compressed-tensors: the codes and scales that a format has, moved.

`checkpoints.hf.compressed` reads them and says where everything lies.

Source: compressed-tensors src/compressed_tensors/{compressors,quantization}.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Format, Fp8, Int4, Int8, Mxfp4
from clocher_kernels.formats.fp8 import BLOCK
from clocher_kernels.quant_tensor import QuantTensor

Arrays = Mapping[str, tuple[str, tuple[int, ...]]]
"""Name after that of the linear -> safetensors dtype and shape."""

NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
"""Float type -> safetensors dtype."""
_STRATEGIES = {"tensor": "tensor", "row": "channel", "b128": "block"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How linears of one format are stored."""

    form: str  # `format` of the config group
    weights: Mapping[str, Any]  # `weights` of the config group
    arrays: Callable[[tuple[int, ...]], Arrays]  # of a linear of this shape
    make: Callable[[QuantTensor], list[np.ndarray]]  # the arrays of a tensor, in the same order


def scheme_of(fmt: Format) -> Scheme:
    """Return how a linear is stored.

    Raises FormatError: compressed-tensors has no form that holds these values exactly.
    """
    if isinstance(fmt, Float):
        return Scheme(
            "dense", {}, lambda shape: {"weight": (NAMES[fmt.dtype], shape)}, lambda t: [_data(t)]
        )
    if isinstance(fmt, Int4 | Int8):
        return _integers(fmt)
    if isinstance(fmt, Fp8) and fmt.code_dtype == "e4m3":
        return _fp8(fmt)
    if isinstance(fmt, Mxfp4):
        return _mxfp4(fmt)
    raise FormatError(
        f"{fmt.name}: compressed-tensors has no form for it; it has int4, int8, fp8 (e4m3), mxfp4"
    )


def _data(tensor: QuantTensor) -> np.ndarray:
    return tensor.planes["data"]


def _args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    known = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    return {**known, "dynamic": False, **more}


def _scale(fmt: Int4 | Int8 | Fp8, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    scales = fmt.planes(shape)["scales"].shape
    group = fmt.scope if isinstance(fmt, Fp8) else fmt.group
    return NAMES[fmt.scale_dtype], (*scales, 1) if group == "row" else scales


def _integers(fmt: Int4 | Int8) -> Scheme:
    bits, affine = (4 if isinstance(fmt, Int4) else 8), isinstance(fmt, Int4) and not fmt.symmetric
    if isinstance(fmt.group, int):
        more: dict[str, Any] = {"group_size": fmt.group}
        strategy = "group"
    else:
        strategy, more = _STRATEGIES[fmt.group], {}

    def arrays(shape: tuple[int, ...]) -> Arrays:
        n, k = shape
        scale = _scale(fmt, shape)
        zero = {"weight_zero_point": ("I32", (-(-n // 8), scale[1][1]))} if affine else {}
        packed = ("I32", (n, -(-k * bits // 32)))
        return {
            "weight_packed": packed,
            "weight_scale": scale,
            **zero,
            "weight_shape": ("I64", (2,)),
        }

    def make(tensor: QuantTensor) -> list[np.ndarray]:
        codes = tensor.planes["codes"]
        words = _words(codes if bits == 4 else codes.view(np.uint8) ^ np.uint8(0x80))
        zeros = tensor.planes.get("zeros")
        zero = [] if zeros is None else [_packed_rows(zeros.reshape(len(codes), -1))]
        shape = np.array(tensor.shape, np.int64)
        return [words, tensor.planes["scales"], *zero, shape]

    args = _args(bits, "int", strategy, **more) | {"symmetric": not affine}
    return Scheme("pack-quantized", args, arrays, make)


def _words(codes: np.ndarray) -> np.ndarray:
    """Return the bytes of rows as int32 words; the last word is filled up with zeros."""
    rows, width = codes.shape
    whole = np.zeros((rows, -(-width // 4) * 4), np.uint8)
    whole[:, :width] = codes
    return whole.view(np.int32)


def _packed_rows(zeros: np.ndarray) -> np.ndarray:
    """Return zero points u8 [N, G] as words of eight rows, i32 [ceil(N/8), G], low bits first."""
    rows, groups = zeros.shape
    whole = np.zeros((-(-rows // 8) * 8, groups), np.uint32)
    whole[:rows] = zeros
    shifts = np.arange(0, 32, 4, dtype=np.uint32)[None, :, None]
    words = np.bitwise_or.reduce(whole.reshape(-1, 8, groups) << shifts, axis=1)
    return np.asarray(words.view(np.int32))


def _fp8(fmt: Fp8) -> Scheme:
    def arrays(shape: tuple[int, ...]) -> Arrays:
        return {"weight": ("F8_E4M3", shape), "weight_scale": _scale(fmt, shape)}

    more = {"block_structure": [BLOCK, BLOCK]} if fmt.scope == "b128" else {}
    args = _args(8, "float", _STRATEGIES[fmt.scope], **more)
    return Scheme(
        "float-quantized", args, arrays, lambda t: [t.planes["codes"], t.planes["scales"]]
    )


def _mxfp4(fmt: Mxfp4) -> Scheme:
    def arrays(shape: tuple[int, ...]) -> Arrays:
        n, k = shape
        return {"weight_packed": ("U8", (n, k // 2)), "weight_scale": ("U8", (n, k // 32))}

    dtypes = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    args = _args(4, "float", "group", group_size=32, **dtypes)
    return Scheme(
        "mxfp4-pack-quantized", args, arrays, lambda t: [t.planes["blocks"], t.planes["scales"]]
    )
