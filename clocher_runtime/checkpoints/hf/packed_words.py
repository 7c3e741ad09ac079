"""GPTQ and AWQ checkpoints: linears whose codes are packed in int32 words; see docs/checkpoints.md.

    W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = k // group_size, or g_idx[k]

GPTQ packs codes along K and zeros along N, in version 1 less one; AWQ "gemm" both along N, nibbles
interleaved; "gemv" both along K, zeros and scales padded. Two of the 32 3-bit codes in three words
cross a word. Symmetric files store 2^(b-1) as zero points. Codes of 2 and 3 bits become `Int4`; a
g_idx in activation order becomes floats.

Source: AutoGPTQ auto_gptq/nn_modules/qlinear; GPTQModel gptqmodel/nn_modules/qlinear; AutoAWQ
awq/modules/linear/gemm.py and gemv.py, awq/utils/packing_utils.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Int4, Int8
from clocher_kernels.formats.base import Group, check_scales, unpacked
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import lazy_tensor
from clocher_runtime.checkpoints.hf import shards
from clocher_runtime.disk.strict_json import one_of, read_as

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbours each nibble of an AWQ word holds, from the lowest."""
_TILE = 64

Make = Callable[[], np.ndarray]


def packed_linear(
    where: str,
    shape: tuple[int, int],
    bits: int,
    symmetric: bool,
    group: Group,
    scales: shards.StoredArray,
    codes: Make,
    zeros: Make | None = None,
    columns: np.ndarray | None = None,
) -> QuantTensor:
    """Return a linear of packed codes, f32 if its columns are in another order.

    `scales`: [N, G]; `codes` makes the codes of each row, u8 [N, >= K*bits/8], low bits first;
    `zeros` makes u8 [N, G], None: the middle, which symmetric codes must have; `columns`: the group
    of each column if not k // group_size, see `activation_order`.
    """
    (n, k), middle, dtype = shape, 1 << (bits - 1), shards.DTYPES[scales.dtype]

    def zero_points() -> np.ndarray:
        found = zeros() if zeros else np.full((n, 1), middle, np.uint8)
        if symmetric and (others := found[found != middle]).size:
            raise FormatError(
                f"a zero point of {others[0]}, expected {middle}: quantization_config says that "
                "codes are symmetric (sym true, zero_point false); correct that, or "
                "checkpoint_format, in config.json if it is wrong"
            )
        return found

    def floats(columns: np.ndarray) -> dict[str, np.ndarray]:
        spread = to_f32(scales.array, dtype)
        offsets = np.broadcast_to(zero_points(), spread.shape)
        check_scales("f32", spread, "f32")
        # Exact: scales have at most 11 significant bits.
        values = unpacked(codes(), bits)[:, :k].astype(np.float32)
        for start in range(0, k, _TILE):  # in tiles, so that what is spread stays small
            part, each = values[:, start : start + _TILE], columns[start : start + _TILE]
            part -= offsets[:, each]
            part *= spread[:, each]
        return {"data": values}

    if columns is not None:  # which no format holds
        return lazy_tensor(shape, Float("f32"), partial(floats, columns), where)
    if bits < 8 and k % 2:
        raise UnsupportedModel(f"{where}: {k} columns, expected an even number")
    fmt: Int4 | Int8 = Int8(group, dtype)
    if bits < 8:  # which has no scale for a whole matrix: every row repeats it
        fmt = Int4(symmetric, "row" if group == "tensor" else group, dtype)

    def planes() -> dict[str, np.ndarray]:
        size = fmt.planes(shape)["scales"].shape
        found, offsets, own = codes(), zero_points(), scales.array
        if group == "tensor" and bits < 8:
            own = np.broadcast_to(own.reshape(1, 1), (n, 1))
        own = own.reshape(size)
        if isinstance(fmt, Int8):
            return {"codes": (found[:, :k] ^ np.uint8(0x80)).view(np.int8), "scales": own}
        if bits < 4:
            steps = unpacked(found, bits)
            if symmetric:  # whose middle is 8
                steps += np.uint8(8 - middle)
            found = fmt.pack(steps, own)["codes"]
        known = {"codes": found[:, : k // 2], "scales": own}
        return known if symmetric else {**known, "zeros": offsets.reshape(size)}

    return lazy_tensor(shape, fmt, planes, where)


def note_floats(source: shards.Source, tensors: shards.Tensors) -> None:
    """Add a note on packed tensors that became floats."""
    floats = [name for name, stored in tensors.items() if isinstance(stored.format, Float)]
    if floats:
        source.notes.append(
            f"{len(floats)} linears, such as {floats[0]}, have their columns in activation order "
            "(desc_act, actorder=group), which no format holds: decoded to f32, exactly, at 4 "
            "bytes a weight; --precision fp16 halves that, `clocher quantize` makes it small again"
        )


def activation_order(
    g_idx: shards.StoredArray, columns: int, group: int | None
) -> np.ndarray | None:
    """Return the group of each column, [K]; None if column k is in group k // group.

    `g_idx`: stored groups, i32 or i64 [K]; `group`: columns of a group; None: the whole row.
    """
    g_idx.expect(("I32", "I64"), (columns,))
    size = group or columns
    if np.array_equal(g_idx.array, np.arange(columns) // size):
        return None
    low, high, groups = int(g_idx.array.min()), int(g_idx.array.max()), -(-columns // size)
    if low < 0 or high >= groups:
        raise FormatError(f"{g_idx.where}: groups {low} to {high}, expected 0 to {groups - 1}")
    return g_idx.array


def row_bytes(words: np.ndarray) -> np.ndarray:
    """Return the bytes of each row of words [A, B], u8 [A, 4B]; of `words.T` for each column."""
    return np.ascontiguousarray(words).view(np.uint8)


def _awq_nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of words [A, B] packed along B in AWQ's order, u8 [A, 8B]."""
    stored = unpacked(words, 4).reshape(words.shape[0], -1, 8)
    out = np.empty_like(stored)
    out[:, :, AWQ_ORDER] = stored
    return out.reshape(words.shape[0], -1)


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """Return AWQ "gemm" words [K, N/8] as `Int4` packs them, u8 [N, K/2]; K is even."""
    rows, columns = words.shape
    out = np.empty((columns, 8, rows // 2), np.uint8)
    for start in range(0, columns, _TILE):
        packed = row_bytes(words[:, start : start + _TILE])
        even, odd = packed[0::2], packed[1::2]
        low, high = even & 15 | odd << 4, even >> 4 | odd & 0xF0
        for byte in range(4):
            out[start : start + _TILE, AWQ_ORDER[2 * byte]] = low[:, byte::4].T
            out[start : start + _TILE, AWQ_ORDER[2 * byte + 1]] = high[:, byte::4].T
    return out.reshape(8 * columns, -1)


_Arrays = tuple[shards.StoredArray, shards.StoredArray, shards.StoredArray]
"""`X.qweight`, `X.qzeros` and `X.scales` of a linear X."""


def _linears(source: shards.Source) -> Iterator[tuple[str, _Arrays]]:
    """Claim the arrays of each linear."""
    for name in source.ending(".qweight"):
        stem = name.removesuffix(".qweight")
        words = source.rest.pop(name)
        zeros, scales = (source.claim(f"{stem}.{part}", words) for part in ("qzeros", "scales"))
        words.expect(("I32",))
        zeros.expect(("I32",))
        scales.expect(shards.FLOATS)
        yield stem, (words, zeros, scales)
    source.refuse_orphans(".qzeros", ".scales", ".g_idx")


def read_gptq(source: shards.Source) -> shards.Tensors:
    """Return the tensors of a GPTQ checkpoint; raises UnsupportedModel, FormatError."""
    bits = source.choice("bits", None, (2, 3, 4, 8), f"{shards.REQUANTISE} with 4 or 8 bits")
    group = shards.columns_per_group(source.settings.get("group_size"))
    symmetric = source.choice("sym", True, (True, False))
    key = "checkpoint_format" if source.settings.get("checkpoint_format") else "format"
    version = source.choice(key, "gptq", ("gptq", "gptq_v2"), "save it in one of these")
    source.choice("is_marlin_format", False, (False,), "save it as gptq")
    source.choice("pack_dtype", "int32", ("int32",))
    act_order = source.choice("desc_act", False, (True, False))
    dynamic = read_as(source.settings.get("dynamic") or {}, dict, f"{shards.SETTINGS}: dynamic")
    if overrides := [key for key in dynamic if not key.startswith("-:")]:
        raise UnsupportedModel(
            f"{shards.SETTINGS}: dynamic has settings of its own for {overrides[0]!r:.60}; known "
            "are only modules left out ('-:...')"
        )
    if bits == 8 and not symmetric:
        raise UnsupportedModel(
            f"{shards.SETTINGS}: 8 bits with zero points (sym false) have no format here; "
            f"{shards.REQUANTISE} with sym=true"
        )
    tensors: shards.Tensors = {}
    for stem, arrays in _linears(source):
        order = source.rest.get(f"{stem}.g_idx")
        if order is not None or act_order:
            order = source.claim(f"{stem}.g_idx", arrays[0])
        one = _gptq(bits, version == "gptq", order, symmetric, group, arrays)
        tensors[f"{stem}.weight"] = one
    note_floats(source, tensors)
    if bits < 4:
        source.notes.append(f"codes of {bits} bits are held in 4, exactly; no format is narrower")
    return tensors


def _gptq(
    bits: int,
    version_1: bool,
    order: shards.StoredArray | None,
    symmetric: bool,
    group: int | None,
    arrays: _Arrays,
) -> QuantTensor:
    """Return a GPTQ linear's tensor; in version 1 zero points are stored less one."""
    words, zeros, scales = arrays
    rows, n = words.matrix()
    k, left = divmod(rows * 32, bits)
    if left or (bits == 3 and n % 32):
        raise FormatError(f"{words.where}: shape {[rows, n]}; {bits}-bit codes fill 3 words of 32")
    groups = -(-k // group) if group else 1
    scales.expect(shards.FLOATS, (groups, n))
    zeros.expect(("I32",), (groups, -(-n * bits // 32)))

    def zero_points() -> np.ndarray:
        found, largest = unpacked(zeros.array, bits)[:, :n], (1 << bits) - 1
        if version_1:
            if not symmetric and found.max() == largest:
                raise UnsupportedModel(
                    f"a zero point stored as {largest} in format gptq, where one reader takes "
                    f"{largest + 1} and another 0; save it as gptq_v2"
                )
            found = found + np.uint8(1)
        return found.T

    columns = None if order is None else activation_order(order, k, group)
    scales = replace(scales, array=scales.array.T)

    def codes() -> np.ndarray:
        return row_bytes(words.array.T)

    return packed_linear(
        words.where, (n, k), bits, symmetric, group or "row", scales, codes, zero_points, columns
    )


def read_awq(source: shards.Source) -> shards.Tensors:
    """Return the tensors of an AWQ checkpoint; raises UnsupportedModel, FormatError."""
    source.choice("bits", 4, (4,), f"{shards.REQUANTISE} with 4 bits")
    symmetric = not source.choice("zero_point", True, (True, False))
    version = source.settings.get("version") or source.settings.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    one_of(
        {"version": version}, "version", "", ("gemm", "gemv"), shards.SETTINGS, "save it as gemm"
    )
    group = shards.columns_per_group(source.settings.get("group_size"))
    tensors: shards.Tensors = {}
    for stem, arrays in _linears(source):
        tensors[f"{stem}.weight"] = _awq(version == "gemv", symmetric, group, arrays)
    return tensors


def _awq(gemv: bool, symmetric: bool, group: int | None, arrays: _Arrays) -> QuantTensor:
    words, zeros, scales = arrays
    n, k = words.matrix() if gemv else words.matrix()[::-1]
    n, k = (n, 8 * k) if gemv else (8 * n, k)
    if k % (group or k):
        raise FormatError(f"{words.where}: {k} columns are no multiple of group_size {group}")
    groups = k // (group or k)
    if not gemv:
        zeros.expect(("I32",), (groups, n // 8))
        scales.expect(shards.FLOATS, (groups, n))
    for stored, per_word in ((zeros, 8), (scales, 1)) if gemv else ():
        rows, width = stored.matrix()
        if rows != n or width * per_word < groups:
            raise FormatError(
                f"{stored.where}: shape {[rows, width]}, expected [{n}, {-(-groups // per_word)}] "
                "or wider"
            )

    def zero_points() -> np.ndarray:
        return unpacked(zeros.array, 4)[:, :groups] if gemv else _awq_nibbles(zeros.array).T

    def codes() -> np.ndarray:
        return row_bytes(words.array) if gemv else _awq_codes(words.array)

    scales = replace(scales, array=scales.array[:, :groups] if gemv else scales.array.T)
    shared: Group = group or "row"
    return packed_linear(words.where, (n, k), 4, symmetric, shared, scales, codes, zero_points)
