"""GPTQ and AWQ checkpoints: linears whose codes are packed in int32 words, `X.qweight` and others.

With b bits and G = ceil(K / group_size) groups, for each linear X [N, K]:

                GPTQ (`quant_method: gptq`)    AWQ, 4 bits (`quant_method: awq`)
    version                                    gemm                    gemv
    X.qweight   i32 [K*b/32, N], b = 2, 3,     i32 [K, N/8]            i32 [N, K/8]
                4 or 8
    X.qzeros    i32 [G, N*b/32]                i32 [G, N/8]            i32 [N, >= G/8]
    X.scales    float [G, N]                   float [G, N]            float [N, >= G]
    X.g_idx     i32 [K], need not be there
    codes       packed along K                 along N, interleaved    along K
    zeros       along N; version 1: less one   along N, interleaved    along K

    W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = k // group_size, or g_idx[k]

Words are packed low bits first, but nibble i of a gemm word holds column [0, 2, 4, 6, 1, 3, 5,
7][i]; gemv zeros and scales are padded. Two of the 32 3-bit codes in three words cross a word.
Symmetric files store 2^(b-1) as zero points. Codes of 2 and 3 bits become `Int4`; a g_idx in
activation order becomes floats, see `arrays.by_column`.

Source: AutoGPTQ auto_gptq/nn_modules/qlinear; GPTQModel gptqmodel/nn_modules/qlinear; AutoAWQ
awq/modules/linear/gemm.py and gemv.py, awq/utils/packing_utils.py.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Int4, Int8
from clocher_runtime.checkpoints.checkpoint import LazyTensor, lazy_tensor
from clocher_runtime.checkpoints.hf.arrays import (
    FLOATS,
    REQUANTISE,
    SETTINGS,
    Source,
    StoredArray,
    Tensors,
    activation_order,
    awq_codes,
    awq_nibbles,
    by_column,
    note_floats,
    signed,
    transposed_bytes,
    unpacked,
)
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.disk.schema import one_of, read_as

_Linear = tuple[str, StoredArray, StoredArray, StoredArray]


def _linears(source: Source) -> Iterator[_Linear]:
    """Claim X, `X.qweight`, `X.qzeros` and `X.scales` of each linear."""
    for name in source.ending(".qweight"):
        stem = name.removesuffix(".qweight")
        words = source.rest.pop(name)
        zeros, scales = (source.claim(f"{stem}.{part}", words) for part in ("qzeros", "scales"))
        words.expect(("I32",))
        zeros.expect(("I32",))
        scales.expect(FLOATS)
        yield stem, words, zeros, scales
    source.refuse_orphans(".qzeros", ".scales", ".g_idx")


def read_gptq(source: Source) -> Tensors:
    """Return the tensors of a GPTQ checkpoint; raises UnsupportedModel, FormatError."""
    bits = source.choice("bits", None, (2, 3, 4, 8), f"{REQUANTISE} with 4 or 8 bits")
    group = source.group_size()
    symmetric = source.choice("sym", True, (True, False))
    key = "checkpoint_format" if source.settings.get("checkpoint_format") else "format"
    version = source.choice(key, "gptq", ("gptq", "gptq_v2"), "save it in one of these")
    source.choice("is_marlin_format", False, (False,), "save it as gptq")
    source.choice("pack_dtype", "int32", ("int32",))
    act_order = source.choice("desc_act", False, (True, False))
    dynamic = read_as(source.settings.get("dynamic") or {}, dict, f"{SETTINGS}: dynamic")
    if overrides := [key for key in dynamic if not key.startswith("-:")]:
        raise UnsupportedModel(
            f"{SETTINGS}: dynamic has settings of its own for {overrides[0]!r:.60}; known "
            "are only modules left out ('-:...')"
        )
    if bits == 8 and not symmetric:
        raise UnsupportedModel(
            f"{SETTINGS}: 8 bits with zero points (sym false) have no format here; "
            f"{REQUANTISE} with sym=true"
        )
    tensors: Tensors = {}
    for stem, words, zeros, scales in _linears(source):
        order = source.rest.get(f"{stem}.g_idx")
        if order is not None or act_order:
            order = source.claim(f"{stem}.g_idx", words)
        arrays = (words, zeros, scales)
        tensor = _gptq(bits, symmetric, version == "gptq", group, arrays, order)
        tensors[f"{stem}.weight"] = tensor
    note_floats(source, tensors)
    if bits < 4:
        source.notes.append(f"codes of {bits} bits are held in 4, exactly; no format is narrower")
    return tensors


def _gptq(
    bits: int,
    symmetric: bool,
    version_1: bool,
    group: int | None,
    arrays: tuple[StoredArray, StoredArray, StoredArray],
    order: StoredArray | None,
) -> LazyTensor:
    """Return a GPTQ linear's tensor from `arrays` (qweight, qzeros, scales) and `order` (g_idx).

    `version_1`: zero points are stored less one; `group`: columns of a group; None: the row.
    """
    words, zeros, scales = arrays
    rows, n = words.matrix()
    k, left = divmod(rows * 32, bits)
    if left or (bits == 3 and n % 32):
        raise FormatError(f"{words.where}: shape {[rows, n]}; {bits}-bit codes fill 3 words of 32")
    groups = -(-k // group) if group else 1
    scales.expect(FLOATS, (groups, n))
    zeros.expect(("I32",), (groups, -(-n * bits // 32)))
    dtype, middle, largest = DTYPES[scales.dtype], 1 << (bits - 1), (1 << bits) - 1

    def zero_points() -> np.ndarray:
        found = unpacked(zeros.array, bits)[:, :n]
        if version_1:
            if not symmetric and found.max() == largest:
                raise UnsupportedModel(
                    f"a zero point stored as {largest} in format gptq, where one reader takes "
                    f"{largest + 1} and another 0; save it as gptq_v2"
                )
            found = found + np.uint8(1)
        if symmetric:
            _check_middle(found, middle, "sym true; correct sym or checkpoint_format")
        return found

    columns = None if order is None else activation_order(order, k, group)
    if columns is not None:

        def floats() -> Mapping[str, np.ndarray]:
            steps = unpacked(transposed_bytes(words.array).view(np.int32), bits)
            factors = to_f32(scales.array, dtype).T
            return {"data": by_column(steps, zero_points().T, factors, columns)}

        return lazy_tensor((n, k), Float("f32"), floats, words.where)
    fmt: Int4 | Int8 = Int8(group or "row", dtype)
    if bits < 8:
        fmt = Int4(symmetric, group or "row", dtype)

    def by_row(array: np.ndarray) -> np.ndarray:
        """Return [G, N] as [N, G], or [N] if G is 1."""
        return array.reshape(-1) if fmt.group == "row" else np.ascontiguousarray(array.T)

    def planes() -> Mapping[str, np.ndarray]:
        codes, zero, factors = transposed_bytes(words.array), zero_points(), by_row(scales.array)
        if isinstance(fmt, Int8):
            return {"scales": factors, "codes": signed(codes)}
        if bits < 4:
            steps = unpacked(codes.view(np.int32), bits)
            if symmetric:  # whose middle is 8
                steps += np.uint8(8 - middle)
            codes = fmt.pack(steps, factors)["codes"]
        found = {"scales": factors, "codes": codes}
        return found if symmetric else {**found, "zeros": by_row(zero)}

    return lazy_tensor((n, k), fmt, planes, words.where)


def _check_middle(zeros: np.ndarray, middle: int, says: str) -> None:
    """Refuse a symmetric file's zero points that are not the middle of its codes."""
    if (zeros != middle).any():
        odd = int(zeros[zeros != middle][0])
        raise FormatError(
            f"a zero point of {odd}, expected {middle}: quantization_config says {says} in "
            "config.json if it is wrong"
        )


def read_awq(source: Source) -> Tensors:
    """Return the tensors of an AWQ checkpoint; raises UnsupportedModel, FormatError."""
    source.choice("bits", 4, (4,), f"{REQUANTISE} with 4 bits")
    symmetric = not source.choice("zero_point", True, (True, False))
    version = source.settings.get("version") or source.settings.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    one_of({"version": version}, "version", "", ("gemm", "gemv"), SETTINGS, "save it as gemm")
    group, tensors = source.group_size(), Tensors()
    for stem, words, zeros, scales in _linears(source):
        tensors[f"{stem}.weight"] = _awq(version == "gemv", symmetric, words, zeros, scales, group)
    return tensors


def _awq(
    gemv: bool,
    symmetric: bool,
    words: StoredArray,
    zeros: StoredArray,
    scales: StoredArray,
    group: int | None,
) -> LazyTensor:
    n, k = words.matrix() if gemv else words.matrix()[::-1]
    n, k = (n, 8 * k) if gemv else (8 * n, k)
    if k % (group or k):
        raise FormatError(f"{words.where}: {k} columns are no multiple of group_size {group}")
    if k % 2:
        raise UnsupportedModel(f"{words.where}: {k} columns, expected an even number")
    groups = k // (group or k)
    if not gemv:
        zeros.expect(("I32",), (groups, n // 8))
        scales.expect(FLOATS, (groups, n))
    for stored, per_word in ((zeros, 8), (scales, 1)) if gemv else ():
        rows, width = stored.matrix()
        if rows != n or width * per_word < groups:
            raise FormatError(
                f"{stored.where}: shape {[rows, width]}, expected [{n}, {-(-groups // per_word)}] "
                "or wider"
            )
    fmt = Int4(symmetric, group or "row", DTYPES[scales.dtype])
    shape = (n,) if group is None else (n, groups)

    def make() -> Mapping[str, np.ndarray]:
        if gemv:
            codes = np.ascontiguousarray(words.array).view(np.uint8)
            zero, scale = unpacked(zeros.array, 4)[:, :groups], scales.array[:, :groups]
        else:
            codes, zero, scale = awq_codes(words.array), awq_nibbles(zeros.array).T, scales.array.T
        planes = {"codes": codes, "scales": scale.reshape(shape)}
        if symmetric:
            _check_middle(zero, 8, "zero_point false; correct it")
            return planes
        return {**planes, "zeros": zero.reshape(shape)}

    return lazy_tensor((n, k), fmt, make, words.where)
