"""Shared by readers of quantised Hugging Face checkpoints; packed words are little-endian."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Float, Fp8
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.floats import Scope
from clocher_kernels.formats.scaling import check_scales
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Stored, stored_tensor
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.disk.schema import one_of, shown

FLOATS = ("F32", "F16", "BF16")

REQUANTISE = "quantise the float checkpoint again"
SETTINGS = "quantization_config"

_MAX_GROUP = 999_999

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbours each nibble of an AWQ word holds, from the lowest."""
_TILE = 64

# They scale activations and the KV cache, which run as the session's settings say.
_ACTIVATION_SCALES = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".q_scale", ".k_scale", ".v_scale"),
)


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array of a shard: safetensors `dtype`, a view of the mapped file, `where` for messages."""

    dtype: str
    array: np.ndarray
    where: str

    def expect(self, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise FormatError unless the array has one of these dtypes and shapes (if any given)."""
        if self.dtype not in dtypes:
            raise FormatError(f"{self.where}: dtype {self.dtype}, expected {' or '.join(dtypes)}")
        if shapes and self.array.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise FormatError(f"{self.where}: shape {list(self.array.shape)}, expected {expected}")

    def matrix(self) -> tuple[int, int]:
        """Return the two dimensions; raise FormatError if there are others, or an empty one."""
        if self.array.ndim != 2 or 0 in self.array.shape:
            raise FormatError(
                f"{self.where}: shape {list(self.array.shape)}, expected 2 dimensions of at least 1"
            )
        return self.array.shape


Arrays = dict[str, StoredArray]
Tensors = dict[str, Stored]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checkpoint while its tensors are recognised; `rest` are the arrays not claimed yet."""

    rest: Arrays
    settings: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def ending(self, suffix: str) -> list[str]:
        """Return the names of unclaimed arrays with a suffix."""
        return [name for name in self.rest if name.endswith(suffix)]

    def claim(self, name: str, owner: StoredArray) -> StoredArray:
        """Claim an array that belongs to another one; raises FormatError."""
        if name not in self.rest:
            raise FormatError(f"{owner.where}: packed, but {name!r} is missing")
        return self.rest.pop(name)

    def drop_activation_scales(self) -> None:
        """Drop the scales of activations and of the KV cache, with a note."""
        dropped = [name for name in self.rest if name.endswith(_ACTIVATION_SCALES)]
        for name in dropped:
            del self.rest[name]
        if dropped:
            self.notes.append(
                f"{len(dropped)} stored scales of activations or of the KV cache are not used, "
                f"such as {dropped[0]}: these run as act_prec and kv_dtype say"
            )

    def refuse_orphans(self, *suffixes: str) -> None:
        """Raise FormatError for a leftover array that belongs to a packed weight."""
        for name, stored in self.rest.items():
            if name.endswith(suffixes):
                raise FormatError(f"{stored.where}: no packed weight belongs to it")

    def choice(self, key: str, default: Any, known: Iterable[Any], way_out: str = "") -> Any:
        """Return a setting limited to known values; null counts as absent."""
        return one_of(self.settings, key, default, known, SETTINGS, way_out)

    def group_size(self) -> int | None:
        """Return the setting `group_size`, None for -1: a scale per row."""
        return columns_per_group(self.settings.get("group_size"))


def note_floats(source: Source, tensors: Tensors) -> None:
    """Add a note on packed tensors that became floats."""
    floats = [name for name, stored in tensors.items() if isinstance(stored.format, Float)]
    if floats:
        source.notes.append(
            f"{len(floats)} linears, such as {floats[0]}, have their columns in activation order "
            "(desc_act, actorder=group), which no format holds: decoded to f32, exactly, at 4 "
            "bytes a weight; --precision fp16 halves that, `clocher quantize` makes it small again"
        )


def columns_per_group(value: object) -> int | None:
    """Return a setting `group_size`, None for -1: a scale per row; raises FormatError."""
    if type(value) is not int or not (value == -1 or 1 <= value <= _MAX_GROUP):
        raise FormatError(
            f"{SETTINGS}: group_size is {shown(value)}; expected -1 or 1 to {_MAX_GROUP}"
        )
    return None if value == -1 else value


def activation_order(g_idx: StoredArray, columns: int, group: int | None) -> np.ndarray | None:
    """Return the group of each column, [K]; None if column k is in group k // group.

    `g_idx`: stored groups, i32 or i64 [K]; `group`: columns of a group; None: the whole row. No
    format can hold other orders; see `by_column`.
    """
    g_idx.expect(("I32", "I64"), (columns,))
    size = group or columns
    if np.array_equal(g_idx.array, np.arange(columns) // size):
        return None
    low, high, groups = int(g_idx.array.min()), int(g_idx.array.max()), -(-columns // size)
    if low < 0 or high >= groups:
        raise FormatError(f"{g_idx.where}: groups {low} to {high}, expected 0 to {groups - 1}")
    return g_idx.array


def by_column(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Return the exact values, fp32 [N, K], of codes whose columns have groups in any order.

    `codes`: u8 [N, K]; `zeros`: u8 [N, G]; `scales`: fp32 [N, G], of at most 11 significant bits;
    `groups`: integers [K].
    """
    check_scales("f32", scales, "f32")
    values = codes.astype(np.float32)
    for start in range(0, len(groups), _TILE):  # in tiles, so that what is spread stays small
        part = values[:, start : start + _TILE]
        each = groups[start : start + _TILE]
        part -= zeros[:, each]
        part *= scales[:, each]
    return values


def transposed_bytes(words: np.ndarray) -> np.ndarray:
    """Return the bytes of words [A, N] with N first, u8 [N, 4A]."""
    rows, columns = words.shape
    out = np.empty((columns, rows), np.int32)
    for left in range(0, columns, _TILE):  # in tiles, which stay in cache
        for top in range(0, rows, _TILE):
            tile = words[top : top + _TILE, left : left + _TILE]
            out[left : left + _TILE, top : top + _TILE] = tile.T
    return out.view(np.uint8)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return 2, 3, 4 or 8-bit codes of i32 words [A, B], low bits first, u8 [A, 32B / bits]."""
    packed = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, bits)
    out = np.empty((*packed.shape[:2], 8), np.uint8)  # any `bits` bytes hold 8 codes
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = packed[..., byte] >> shift
        if shift + bits > 8:
            code |= packed[..., byte + 1] << (8 - shift)
        out[..., place] = code & ((1 << bits) - 1)
    return out.reshape(len(words), -1)


def awq_nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of words [A, B] packed along B in AWQ's order, u8 [A, 8B]."""
    stored = unpacked(words, 4).reshape(words.shape[0], -1, 8)
    out = np.empty_like(stored)
    out[:, :, AWQ_ORDER] = stored
    return out.reshape(words.shape[0], -1)


def awq_codes(words: np.ndarray) -> np.ndarray:
    """Return AWQ "gemm" words [K, N/8] as `Int4` packs them, u8 [N, K/2]; K is even."""
    rows, columns = words.shape
    out = np.empty((columns, 8, rows // 2), np.uint8)
    for start in range(0, columns, _TILE):
        packed = np.ascontiguousarray(words[:, start : start + _TILE]).view(np.uint8)
        even, odd = packed[0::2], packed[1::2]
        low, high = even & 15 | odd << 4, even >> 4 | odd & 0xF0
        for byte in range(4):
            out[start : start + _TILE, AWQ_ORDER[2 * byte]] = low[:, byte::4].T
            out[start : start + _TILE, AWQ_ORDER[2 * byte + 1]] = high[:, byte::4].T
    return out.reshape(8 * columns, -1)


def signed(codes: np.ndarray) -> np.ndarray:
    """Return 8-bit codes with zero at 128 as i8."""
    return (codes ^ np.uint8(0x80)).view(np.int8)


def fp8_tensor(codes: StoredArray, scales: StoredArray, scopes: tuple[Scope, ...]) -> QuantTensor:
    """Return a tensor of e4m3 codes, with the first of `scopes` that fits the scales' shape."""
    codes.expect(("F8_E4M3",))
    n, k = codes.matrix()
    scales.expect(FLOATS)
    shapes: dict[Scope, tuple[tuple[int, ...], ...]] = {
        "b128": ((-(-n // BLOCK), -(-k // BLOCK)),),
        "tensor": ((1,), (), (1, 1)),
        "row": ((n,), (n, 1)),
    }
    for scope in scopes:
        if scales.array.shape in shapes[scope]:
            fmt = Fp8("e4m3", scope, DTYPES[scales.dtype])
            planes = {"codes": codes.array, "scales": scales.array.reshape(shapes[scope][0])}
            return stored_tensor((n, k), fmt, planes, codes.where)
    expected = " or ".join(str(list(shape)) for scope in scopes for shape in shapes[scope])
    raise FormatError(f"{scales.where}: shape {list(scales.array.shape)}, expected {expected}")
