"""From arrays of a Hugging Face checkpoint to logical tensors, as `quantization_config` says."""

from collections.abc import Callable, Mapping
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Mxfp4, Ternary
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.hf.arrays import FLOATS, Source, StoredArray, Tensors, unknown
from clocher_runtime.checkpoints.hf.awq import read_awq
from clocher_runtime.checkpoints.hf.compressed import read_compressed
from clocher_runtime.checkpoints.hf.fp8 import read_fp8
from clocher_runtime.checkpoints.hf.gptq import read_gptq
from clocher_runtime.disk.safetensors_file import DTYPES

# transformers multiplies float experts from the right and stores them [E, K, N]; here, and in MXFP4
# checkpoints, they are [E, N, K].
_TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


def logical_tensors(
    arrays: Mapping[str, StoredArray], settings: Mapping[str, Any] | None
) -> tuple[Tensors, tuple[str, ...]]:
    """Return the logical tensors of a checkpoint, and notes on what was left out of it.

    `X_blocks` with `X_scales` is X in MXFP4; a packed `X.weight` with its `X.weight_scale` (BitNet)
    is `X.weight`, and so on: `_METHODS` names the readers, which describe their layouts. Everything
    else is a plain float.

    Args:
        arrays: what the shards hold, by name.
        settings: `quantization_config`, or None.

    Raises:
        UnsupportedModel: a quantisation method, one of its settings or a dtype is not known.
        FormatError: the arrays contradict the settings or each other.
    """
    source = Source(dict(arrays), settings or {})
    tensors: Tensors = {}
    if settings is not None:
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in _METHODS:
            raise unknown("quant_method", method, _METHODS)
        source.drop_activation_scales()
        tensors = _METHODS[method](source)
        if not tensors and (method, settings.get("quantization_mode")) != ("bitnet", "online"):
            raise FormatError(f"quantization_config says {method}, but no tensor is packed")
    for name, stored in source.rest.items():
        if name in tensors:
            raise FormatError(f"{stored.where}: stored both packed and plain")
        if stored.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{stored.where}: dtype {stored.dtype} has no meaning here; known without "
                f"quantization_config: {', '.join(FLOATS)}"
            )
        fmt = Float(DTYPES[stored.dtype])
        array = stored.array
        if array.ndim == 3 and name.endswith(_TRANSPOSED):
            array = array.transpose(0, 2, 1)
        tensors[name] = stored_tensor(array.shape, fmt, {"data": array}, stored.where)
    return tensors, tuple(source.notes)


def _mxfp4(source: Source) -> Tensors:
    tensors: Tensors = {}
    for name in source.ending("_blocks"):
        base = name.removesuffix("_blocks")
        blocks = source.rest.pop(name)
        scales = source.claim(f"{base}_scales", blocks)
        blocks.expect(("U8",))
        scales.expect(("U8",))
        if blocks.array.ndim < 3:
            raise FormatError(f"{blocks.where}: {blocks.array.ndim} dimensions, expected 3 or more")
        *rows, groups, _ = blocks.array.shape
        planes = {"blocks": blocks.array, "scales": scales.array}
        tensors[base] = stored_tensor((*rows, 32 * groups), Mxfp4(), planes, blocks.where)
    return tensors


def _bitnet(source: Source) -> Tensors:
    linear_class = source.choice("linear_class", "bitlinear", ("autobitlinear", "bitlinear"))
    mode = source.choice("quantization_mode", "offline", ("offline", "online"))
    packed = [name for name, stored in source.rest.items() if stored.dtype == "U8"]
    if mode == "online":
        # The weights are plain floats; the model makes them ternary at run time.
        if odd := [*packed, *source.ending(".weight_scale")]:
            raise FormatError(
                f"{source.rest[odd[0]].where}: packed, but quantization_mode is online"
            )
        return {}
    tensors: Tensors = {}
    for name in packed:
        codes = source.rest.pop(name)
        scale = source.claim(f"{name}_scale", codes)
        scale.expect(FLOATS)
        if codes.array.ndim != 2:
            raise FormatError(f"{codes.where}: {codes.array.ndim} dimensions, expected 2")
        rows, columns = codes.array.shape
        planes = {"codes": codes.array, "scale": scale.array}
        fmt = Ternary(linear_class == "bitlinear", DTYPES[scale.dtype])
        tensors[name] = stored_tensor((4 * rows, columns), fmt, planes, codes.where)
    source.refuse_orphans(".weight_scale")
    return tensors


def _auto_round(source: Source) -> Tensors:
    source.choice("data_type", "int", ("int",))
    known = ("auto_round:auto_gptq", "auto_round:auto_awq")
    packing = source.choice("packing_format", "left out", known, "export it as auto_gptq")
    return read_gptq(source) if packing == known[0] else read_awq(source)


_METHODS: dict[str, Callable[[Source], Tensors]] = {
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "awq": read_awq,
    "auto-round": _auto_round,
    "compressed-tensors": read_compressed,
}
