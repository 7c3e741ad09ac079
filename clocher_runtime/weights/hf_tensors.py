"""From arrays of a Hugging Face checkpoint to logical tensors, as `quantization_config` says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Fp8, Mxfp4, Ternary
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.weights.base import stored_tensor
from clocher_runtime.weights.safetensors_file import DTYPES


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array as a shard holds it.

    Attributes:
        dtype: safetensors name.
        array: view of the mapped file.
        where: file and tensor, for messages.
    """

    dtype: str
    array: np.ndarray
    where: str


Arrays = dict[str, StoredArray]
Tensors = dict[str, QuantTensor]
Settings = Mapping[str, Any]

_FLOATS = ("F32", "F16", "BF16")

# transformers multiplies float experts from the right and stores them [E, K, N]; here, and in MXFP4
# checkpoints, they are [E, N, K].
_TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


def logical_tensors(arrays: Mapping[str, StoredArray], settings: Settings | None) -> Tensors:
    """Return the logical tensors of a checkpoint.

    `X_blocks` with `X_scales` is X in MXFP4; a packed `X.weight` with its `X.weight_scale` (BitNet)
    or `X.weight_scale_inv` (fp8) is `X.weight`. Everything else is a plain float.

    Args:
        arrays: what the shards hold, by name.
        settings: `quantization_config`, or None.

    Raises:
        UnsupportedModel: a quantisation method, one of its settings or a dtype is not known.
        FormatError: the arrays contradict the settings or each other.
    """
    rest = dict(arrays)
    tensors: Tensors = {}
    if settings is not None:
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in _METHODS:
            raise _unknown("quant_method", method, _METHODS)
        tensors = _METHODS[method](rest, settings)
    for name, stored in rest.items():
        if name in tensors:
            raise FormatError(f"{stored.where}: stored both packed and plain")
        if stored.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"{stored.where}: dtype {stored.dtype} has no meaning here; known without "
                f"quantization_config: {', '.join(_FLOATS)}"
            )
        fmt = Float(DTYPES[stored.dtype])
        array = stored.array
        if array.ndim == 3 and name.endswith(_TRANSPOSED):
            array = array.transpose(0, 2, 1)
        tensors[name] = stored_tensor(array.shape, fmt, {"data": array}, stored.where)
    return tensors


def _mxfp4(rest: Arrays, settings: Settings) -> Tensors:
    tensors: Tensors = {}
    for name in [name for name in rest if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        blocks, scales = _pair(rest, name, f"{base}_scales", ("U8", "U8"))
        if blocks.array.ndim < 3:
            raise FormatError(f"{blocks.where}: {blocks.array.ndim} dimensions, expected 3 or more")
        *rows, groups, _ = blocks.array.shape
        planes = {"blocks": blocks.array, "scales": scales.array}
        tensors[base] = stored_tensor((*rows, 32 * groups), Mxfp4(), planes, blocks.where)
    return _packed(tensors, "mxfp4", "*_blocks")


def _bitnet(rest: Arrays, settings: Settings) -> Tensors:
    linear_class = settings.get("linear_class", "bitlinear")
    if linear_class not in ("autobitlinear", "bitlinear"):
        raise _unknown("linear_class", linear_class, ("autobitlinear", "bitlinear"))
    mode = settings.get("quantization_mode", "offline")
    if mode not in ("offline", "online"):
        raise _unknown("quantization_mode", mode, ("offline", "online"))
    packed = [name for name, stored in rest.items() if stored.dtype == "U8"]
    scales = [name for name in rest if name.endswith(".weight_scale")]
    if mode == "online":
        # The weights are plain floats; the model makes them ternary at run time.
        if packed or scales:
            odd = rest[(packed + scales)[0]]
            raise FormatError(f"{odd.where}: packed, but quantization_mode is online")
        return {}
    tensors: Tensors = {}
    inverse = linear_class == "bitlinear"
    for name in packed:
        codes, scale = _pair(rest, name, f"{name}_scale", ("U8", *_FLOATS))
        if codes.array.ndim != 2:
            raise FormatError(f"{codes.where}: {codes.array.ndim} dimensions, expected 2")
        rows, columns = codes.array.shape
        planes = {"codes": codes.array, "scale": scale.array}
        fmt = Ternary(inverse, DTYPES[scale.dtype])
        tensors[name] = stored_tensor((4 * rows, columns), fmt, planes, codes.where)
    if alone := [name for name in scales if name in rest]:
        raise FormatError(f"{rest[alone[0]].where}: no packed weight belongs to this scale")
    return _packed(tensors, "bitnet, offline", "U8")


def _fp8(rest: Arrays, settings: Settings) -> Tensors:
    if settings.get("weight_block_size", [128, 128]) != [128, 128]:
        raise _unknown("weight_block_size", settings["weight_block_size"], ("[128, 128]",))
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        raise _unknown("activation_scheme", settings["activation_scheme"], ("dynamic",))
    tensors: Tensors = {}
    for name in [name for name, stored in rest.items() if stored.dtype == "F8_E4M3"]:
        codes, scales = _pair(rest, name, f"{name}_scale_inv", ("F8_E4M3", "F32"))
        planes = {"codes": codes.array, "scales": scales.array}
        fmt = Fp8("e4m3", "b128", "f32")
        tensors[name] = stored_tensor(codes.array.shape, fmt, planes, codes.where)
    return _packed(tensors, "fp8", "F8_E4M3")


_METHODS: dict[str, Callable[[Arrays, Settings], Tensors]] = {
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
    "fp8": _fp8,
}


def _pair(
    rest: Arrays, name: str, scale: str, dtypes: tuple[str, ...]
) -> tuple[StoredArray, StoredArray]:
    """Take a packed array and its scales out of the rest.

    Args:
        dtypes: that of the packed array, then those that its scales may have.
    """
    codes = rest.pop(name)
    if scale not in rest:
        raise FormatError(f"{codes.where}: packed, but {scale!r} is missing")
    scales = rest.pop(scale)
    for stored, expected in ((codes, dtypes[:1]), (scales, dtypes[1:])):
        if stored.dtype not in expected:
            raise FormatError(
                f"{stored.where}: dtype {stored.dtype}, expected {' or '.join(expected)}"
            )
    return codes, scales


def _packed(tensors: Tensors, method: str, what: str) -> Tensors:
    if not tensors:
        raise FormatError(f"quantization_config says {method}, but no tensor is packed ({what})")
    return tensors


def _unknown(key: str, value: object, known: Mapping[str, object] | tuple[str, ...]) -> Exception:
    return UnsupportedModel(
        f"quantization_config: {key} {value!r:.60} is not known; known: {', '.join(known)}"
    )
