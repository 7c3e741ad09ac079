"""The arrays of one linear of a compressed-tensors checkpoint, by its storage format.

`compressed` describes the layouts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Int4, Int8, Mxfp4
from clocher_kernels.formats.fp8 import Scope
from clocher_kernels.formats.mxfp4 import BLOCK
from clocher_kernels.formats.scaling import Group
from clocher_runtime.checkpoints.checkpoint import Stored, lazy_tensor, stored_tensor
from clocher_runtime.checkpoints.hf.arrays import FLOATS, StoredArray, refuse_act_order
from clocher_runtime.checkpoints.hf.fp8 import fp8_tensor
from clocher_runtime.checkpoints.hf.words import nibbles, signed, transposed_bytes
from clocher_runtime.disk.safetensors_file import DTYPES

PACKED, INT, FLOAT, NAIVE = (f"{kind}-quantized" for kind in ("pack", "int", "float", "naive"))
MXFP4 = "mxfp4-pack-quantized"
FORMATS = (PACKED, INT, FLOAT, NAIVE, MXFP4)

_SCOPES: dict[str, Scope] = {"tensor": "tensor", "channel": "row", "block": "b128"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the linears of a config group are stored.

    Attributes:
        label: name of the config group.
        form: one of `FORMATS`, with naive-quantized resolved.
        bits: of a code.
        strategy: "tensor", "channel", "group" or "block".
        group: columns of a group, or None.
    """

    label: str
    form: str
    bits: int
    symmetric: bool
    strategy: str
    group: int | None

    @property
    def scope(self) -> Group:
        """What shares a scale, as `Int8` spells it."""
        if self.group is not None:
            return self.group
        return "tensor" if self.strategy == "tensor" else "row"


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """The arrays of one linear X.

    Attributes:
        weight: X.weight_packed or X.weight.
        scale: X.weight_scale; shape, zero, g_idx: the optional ones, X.weight_shape and so on.
    """

    weight: StoredArray
    scale: StoredArray
    shape: StoredArray | None
    zero: StoredArray | None
    g_idx: StoredArray | None


def read_linear(scheme: Scheme, linear: Linear) -> Stored:
    """Return the tensor of a linear.

    Raises:
        FormatError: the arrays are not those that the scheme stores.
        UnsupportedModel: no format here can hold them.
    """
    readers = {PACKED: _packed, INT: _integers, FLOAT: _floats, MXFP4: _mxfp4}
    return readers[scheme.form](scheme, linear)


def _packed(scheme: Scheme, linear: Linear) -> Stored:
    words = linear.weight
    words.expect(("I32",))
    n, width = words.matrix()
    if linear.shape is None:
        raise FormatError(f"{words.where}: packed, but its weight_shape is missing")
    linear.shape.expect(("I64", "I32"), (2,))
    rows, k = (int(dim) for dim in linear.shape.array)
    if rows != n or k < 1 or -(-k * scheme.bits // 32) != width:
        raise FormatError(
            f"{linear.shape.where}: says [{rows}, {k}], which is no shape of {scheme.bits}-bit "
            f"codes packed as [{n}, {width}]"
        )
    groups = _check_groups(scheme, linear, n, k)
    return (_packed_int4 if scheme.bits == 4 else _packed_int8)(scheme, linear, n, k, groups)


def _packed_int8(scheme: Scheme, linear: Linear, n: int, k: int, groups: int) -> Stored:
    _refuse_zeros(linear)
    fmt = Int8(scheme.scope, DTYPES[linear.scale.dtype])
    shape = fmt.planes((n, k))["scales"].shape

    def make() -> Mapping[str, np.ndarray]:
        codes = np.ascontiguousarray(linear.weight.array).view(np.uint8)[:, :k]
        return {"codes": signed(codes), "scales": linear.scale.array.reshape(shape)}

    return lazy_tensor((n, k), fmt, make, linear.weight.where)


def _packed_int4(scheme: Scheme, linear: Linear, n: int, k: int, groups: int) -> Stored:
    if k % 2:
        raise UnsupportedModel(f"{linear.weight.where}: {k} columns, expected an even number")
    zeros = None
    if scheme.symmetric:
        _refuse_zeros(linear)
    else:
        zeros = _packed_zeros(scheme, linear, n, groups)
    fmt = Int4(scheme.symmetric, scheme.group or "row", DTYPES[linear.scale.dtype])
    shape = (n, groups) if scheme.group else (n,)

    def make() -> Mapping[str, np.ndarray]:
        codes = np.ascontiguousarray(linear.weight.array).view(np.uint8)[:, : k // 2]
        # Int4 has no scale for a whole matrix: every row repeats it.
        scales = np.broadcast_to(linear.scale.array.reshape(-1, groups), (n, groups))
        planes = {"codes": codes, "scales": scales.reshape(shape)}
        return planes if zeros is None else {**planes, "zeros": zeros().reshape(shape)}

    return lazy_tensor((n, k), fmt, make, linear.weight.where)


def _packed_zeros(scheme: Scheme, linear: Linear, n: int, groups: int) -> Callable[[], np.ndarray]:
    """Return what computes the zero points plus 8, u8 [N, G]."""
    zero = linear.zero
    if zero is None:
        raise FormatError(f"{linear.weight.where}: not symmetric, but weight_zero_point is missing")
    if scheme.strategy == "tensor":
        zero.expect(("I8",), (1,), (), (1, 1))
        return lambda: np.broadcast_to(
            zero.array.reshape(1, 1).view(np.uint8) + np.uint8(8), (n, 1)
        )
    zero.expect(("I32",), (-(-n // 8), groups))
    return lambda: nibbles(transposed_bytes(zero.array)).T[:n]


def _integers(scheme: Scheme, linear: Linear) -> Stored:
    linear.weight.expect(("I8",))
    n, k = linear.weight.matrix()
    _check_groups(scheme, linear, n, k)
    _refuse_zeros(linear)
    fmt = Int8(scheme.scope, DTYPES[linear.scale.dtype])
    shape = fmt.planes((n, k))["scales"].shape
    planes = {"codes": linear.weight.array, "scales": linear.scale.array.reshape(shape)}
    return stored_tensor((n, k), fmt, planes, linear.weight.where)


def _floats(scheme: Scheme, linear: Linear) -> Stored:
    _refuse_zeros(linear)
    return fp8_tensor(linear.weight, linear.scale, (_SCOPES[scheme.strategy],))


def _mxfp4(scheme: Scheme, linear: Linear) -> Stored:
    linear.weight.expect(("U8",))
    n, width = linear.weight.matrix()
    if 2 * width % BLOCK:
        raise FormatError(f"{linear.weight.where}: {2 * width} columns, no multiple of {BLOCK}")
    linear.scale.expect(("U8",), (n, 2 * width // BLOCK))
    blocks = linear.weight.array.reshape(n, -1, BLOCK // 2)
    planes = {"blocks": blocks, "scales": linear.scale.array}
    return stored_tensor((n, 2 * width), Mxfp4(), planes, linear.weight.where)


def _check_groups(scheme: Scheme, linear: Linear, n: int, k: int) -> int:
    """Check the scales of integer codes and the order of the columns; return the groups a row."""
    groups = -(-k // scheme.group) if scheme.group else 1
    tensor = scheme.strategy == "tensor"
    shapes = [(1,), (), (1, 1)] if tensor else [(n, groups)]
    linear.scale.expect(FLOATS, *shapes, *([(n,)] if scheme.strategy == "channel" else []))
    # -1 stands for columns in their own order.
    if linear.g_idx is not None and not (linear.g_idx.array == -1).all():
        refuse_act_order(linear.g_idx, k, scheme.group)
    return groups


def _refuse_zeros(linear: Linear) -> None:
    """Old writers store the zero points of symmetric codes as well; they must be zero."""
    if linear.zero is not None and linear.zero.array.any():
        raise FormatError(f"{linear.zero.where}: not zero, but its config group is symmetric")
