"""compressed-tensors checkpoints (`quant_method: compressed-tensors`), as llm-compressor writes.

For each linear X [N, K], by the `format` of the checkpoint or of the config group:

    pack-quantized   X.weight_packed i32 along K, low bits first: code + 2^(b-1), b = 4 or 8;
                     X.weight_shape; X.weight_zero_point i32 along N, the same way; asymmetric
    int-, float- and naive-quantized   X.weight i8 or e4m3 [N, K]
    mxfp4-pack-quantized               X.weight_packed u8 [N, K/2], as MXFP4 blocks
    all              X.weight_scale [1], [N, 1], [N, G], or of 128 x 128 blocks; u8 for MXFP4

A linear belongs to the config group that describes its arrays exactly; the regular expressions of
`targets` and `ignore` are not run, as they could take forever.

Source: compressed-tensors src/compressed_tensors/{compressors,quantization}.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Int8, Mxfp4
from clocher_kernels.formats.base import unpacked
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.floats import MXFP4_BLOCK, Scope
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.hf import packed_words, shards
from clocher_runtime.disk.strict_json import given, one_of, read_as, unknown

_PACKED, _INT, _FLOAT, _NAIVE = (f"{kind}-quantized" for kind in ("pack", "int", "float", "naive"))
_MXFP4 = "mxfp4-pack-quantized"
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, _MXFP4)
_SCOPES: dict[str, Scope] = {"tensor": "tensor", "channel": "row", "block": "b128"}


class _Group(Struct):
    """A config group; one without weights quantises activations alone."""

    weights: dict[str, Any] | None = None
    format: str | None = None


class _Settings(Struct):
    config_groups: Annotated[dict[str, _Group], Meta(min_length=1, max_length=256)]
    ignore: list[str] = []
    format: Any = None
    sparsity_config: dict[str, Any] = {}
    transform_config: Any = None


class _Scheme:
    """How the linears of a config group are stored.

    `form` is one of `_FORMATS`, naive-quantized resolved; `scope` is what shares a scale: columns
    of a group, a "row", the "tensor", or the blocks "b128".
    """

    def __init__(self, label: str, form: str, weights: Mapping[str, Any]) -> None:
        def choice(key: str, default: Any, known: tuple[Any, ...], way_out: str = "") -> Any:
            return one_of(weights, key, default, known, shards.SETTINGS, way_out)

        kinds = {_PACKED: ("int",), _INT: ("int",), _FLOAT: ("float",), _MXFP4: ("float",)}
        kind = choice("type", "int", kinds.get(form, ("int", "float")))
        if form == _NAIVE:
            form = _INT if kind == "int" else _FLOAT
        known_bits = {_PACKED: (4, 8), _INT: (4, 8), _FLOAT: (8,), _MXFP4: (4,)}[form]
        bits = choice("num_bits", 8, known_bits, f"{shards.REQUANTISE} with one of these")
        symmetric = choice("symmetric", True, (True, False))
        if not symmetric and (form != _PACKED or bits != 4):
            raise UnsupportedModel(
                f"{shards.SETTINGS}: {form} of {bits} bits with zero points (symmetric false) has "
                f"no format here; {shards.REQUANTISE} symmetrically, or as pack-quantized with 4 "
                "bits"
            )
        size = weights.get("group_size")
        group = None if size is None else shards.columns_per_group(size)
        inferred = "group" if group else "channel" if size else "tensor"
        cells = "block" if form == _FLOAT else "group"
        strategies = ("group",) if form == _MXFP4 else ("tensor", "channel", cells)
        strategy = choice("strategy", inferred, strategies, shards.REQUANTISE)
        if (strategy == "group") != (group is not None) or (form == _MXFP4 and group != 32):
            raise FormatError(
                f"{shards.SETTINGS}: strategy {strategy} of {form} with group_size {group}"
            )
        block = weights.get("block_structure")
        if strategy == "block" and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
            known = (f"[{BLOCK}, {BLOCK}]",)
            raise unknown("block_structure", block, known, shards.SETTINGS, shards.REQUANTISE)
        self.label, self.form, self.bits, self.symmetric = label, form, bits, symmetric
        self.scope: Any = group or _SCOPES[strategy]  # as in `Int8`, or in `Fp8`


class _Linear:
    """The arrays of one linear X."""

    def __init__(self, source: shards.Source, name: str, stem: str) -> None:
        """Claim the weight of this name and what belongs to it. Raises FormatError."""
        self.weight = source.rest.pop(name)
        self.scale = source.claim(f"{stem}.weight_scale", self.weight)
        self.shape = source.rest.pop(f"{stem}.weight_shape", None)
        self.zero = source.rest.pop(f"{stem}.weight_zero_point", None)
        self.g_idx = source.rest.pop(f"{stem}.weight_g_idx", None)


def read_compressed(source: shards.Source) -> shards.Tensors:
    """Return the tensors of the packed arrays; raises UnsupportedModel, FormatError."""
    source.choice("quantization_status", "compressed", ("compressed", "frozen"))
    settings = read_as(given(source.settings), _Settings, shards.SETTINGS)
    way_out = "save it without sparse compression"
    one_of(settings.sparsity_config, "format", "dense", ("dense",), shards.SETTINGS, way_out)
    if settings.transform_config:
        raise UnsupportedModel(
            f"{shards.SETTINGS}: transform_config asks for rotations at run time, which are not "
            f"known here; {shards.REQUANTISE} without them"
        )
    schemes = []
    for label, group in settings.config_groups.items():
        if group.weights is not None:
            form = group.format or settings.format
            if form not in _FORMATS:
                raise unknown("format", form, _FORMATS, shards.SETTINGS, "save it in one of these")
            schemes.append(_Scheme(label, str(form), group.weights))
    if not schemes:
        raise FormatError(f"{shards.SETTINGS}: no config group quantises weights")
    tensors: shards.Tensors = {}
    packed = source.ending(".weight_packed")
    plain = [n for n, a in source.rest.items() if a.dtype in ("I8", "F8_E4M3")]
    for name in (*packed, *(name for name in plain if name.endswith(".weight"))):
        stem = name.removesuffix("_packed").removesuffix(".weight")
        if stem in settings.ignore:
            raise FormatError(f"{source.rest[name].where}: packed, but ignore lists {stem!r}")
        tensors[f"{stem}.weight"] = _tensor(schemes, _Linear(source, name, stem))
    source.refuse_orphans(".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
    packed_words.note_floats(source, tensors)
    return tensors


def _tensor(schemes: list[_Scheme], linear: _Linear) -> QuantTensor:
    """Return a linear's tensor, read by the first scheme that describes its arrays."""
    misfits, zero = [], linear.zero
    for scheme in schemes:
        try:
            # Old writers store the zero points of symmetric codes as well.
            if scheme.symmetric and zero is not None and zero.array.any():
                raise FormatError(f"{zero.where}: not zero, but its config group is symmetric")
            if scheme.form == _FLOAT:
                return shards.fp8_tensor(linear.weight, linear.scale, (scheme.scope,))
            return {_PACKED: _packed, _INT: _integers, _MXFP4: _mxfp4}[scheme.form](scheme, linear)
        except FormatError as error:
            misfits.append(f"{scheme.label}: {error}")
    if len(misfits) == 1:
        raise FormatError(misfits[0].partition(": ")[2])
    raise FormatError(f"{linear.weight.where}: fits no config group; {'; '.join(misfits[:4])}")


def _packed(scheme: _Scheme, linear: _Linear) -> QuantTensor:
    words, bits = linear.weight, scheme.bits
    words.expect(("I32",))
    n, width = words.matrix()
    if linear.shape is None:
        raise FormatError(f"{words.where}: packed, but its weight_shape is missing")
    linear.shape.expect(("I64", "I32"), (2,))
    rows, k = (int(dim) for dim in linear.shape.array)
    if rows != n or k < 1 or -(-k * bits // 32) != width:
        raise FormatError(
            f"{linear.shape.where}: says [{rows}, {k}], which is no shape of {bits}-bit "
            f"codes packed as [{n}, {width}]"
        )
    groups, columns = _check_groups(scheme, linear, n, k)
    zeros = None if scheme.symmetric else _packed_zeros(scheme, linear, n, groups)
    own = (n, k), bits, scheme.symmetric, scheme.scope, linear.scale
    return packed_words.packed_linear(
        words.where, *own, lambda: packed_words.row_bytes(words.array), zeros, columns
    )


def _packed_zeros(scheme: _Scheme, linear: _Linear, n: int, groups: int) -> packed_words.Make:
    """Return a function that computes the zero points plus 8, u8 [N, G]."""
    zero = linear.zero
    if zero is None:
        raise FormatError(f"{linear.weight.where}: not symmetric, but weight_zero_point is missing")
    if scheme.scope == "tensor":
        zero.expect(("I8",), (1,), (), (1, 1))
        one = zero.array.reshape(1, 1).view(np.uint8)
        return lambda: np.broadcast_to(one + np.uint8(8), (n, 1))
    zero.expect(("I32",), (-(-n // 8), groups))
    return lambda: unpacked(zero.array.T, 4).T[:n]


def _integers(scheme: _Scheme, linear: _Linear) -> QuantTensor:
    linear.weight.expect(("I8",))
    n, k = linear.weight.matrix()
    _, columns = _check_groups(scheme, linear, n, k)
    codes = linear.weight.array
    if columns is not None:
        own = (n, k), scheme.bits, True, scheme.scope, linear.scale
        return packed_words.packed_linear(
            linear.weight.where, *own, lambda: codes.view(np.uint8) ^ np.uint8(0x80), None, columns
        )
    fmt = Int8(scheme.scope, shards.DTYPES[linear.scale.dtype])
    shape = fmt.planes((n, k))["scales"].shape
    planes = {"codes": codes, "scales": linear.scale.array.reshape(shape)}
    return stored_tensor((n, k), fmt, planes, linear.weight.where)


def _mxfp4(scheme: _Scheme, linear: _Linear) -> QuantTensor:
    linear.weight.expect(("U8",))
    n, width = linear.weight.matrix()
    if 2 * width % MXFP4_BLOCK:
        raise FormatError(
            f"{linear.weight.where}: {2 * width} columns, no multiple of {MXFP4_BLOCK}"
        )
    linear.scale.expect(("U8",), (n, 2 * width // MXFP4_BLOCK))
    blocks = linear.weight.array.reshape(n, -1, MXFP4_BLOCK // 2)
    planes = {"blocks": blocks, "scales": linear.scale.array}
    return stored_tensor((n, 2 * width), Mxfp4(), planes, linear.weight.where)


def _check_groups(
    scheme: _Scheme, linear: _Linear, n: int, k: int
) -> tuple[int, np.ndarray | None]:
    """Return the groups of a row, and the group of each column if in activation order."""
    group = scheme.scope if isinstance(scheme.scope, int) else None
    groups = -(-k // group) if group else 1
    shapes = {"tensor": [(1,), (), (1, 1)], "row": [(n, 1), (n,)]}.get(scheme.scope, [(n, groups)])
    linear.scale.expect(shards.FLOATS, *shapes)
    # -1 stands for columns in their own order.
    if linear.g_idx is None or (linear.g_idx.array == -1).all():
        return groups, None
    return groups, packed_words.activation_order(linear.g_idx, k, group)
