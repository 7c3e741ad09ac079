"""GPTQ and AWQ checkpoints: linears whose codes are packed in int32 words, `X.qweight` and others.

With b bits and G = ceil(K / group_size) groups, for each linear X [N, K]:

                GPTQ (`quant_method: gptq`)    AWQ, 4 bits (`quant_method: awq`)
    version                                    gemm                    gemv
    X.qweight   i32 [K*b/32, N], b = 4, 8      i32 [K, N/8]            i32 [N, K/8]
    X.qzeros    i32 [G, N*b/32]                i32 [G, N/8]            i32 [N, >= G/8]
    X.scales    float [G, N]                   float [G, N]            float [N, >= G]
    X.g_idx     i32 [K], need not be there
    codes       packed along K                 along N, interleaved    along K
    zeros       along N; version 1: less one   along N, interleaved    along K

    W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = k // group_size, or g_idx[k]

Words are packed low bits first, but nibble i of a gemm word holds column [0, 2, 4, 6, 1, 3, 5,
7][i] of its eight; the gemv arrays of zeros and scales are padded to what its kernel likes.

Source: AutoGPTQ auto_gptq/nn_modules/qlinear; GPTQModel gptqmodel/nn_modules/qlinear; AutoAWQ
awq/modules/linear/gemm.py and gemv.py, awq/utils/packing_utils.py.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Int4, Int8
from clocher_runtime.checkpoints.checkpoint import LazyTensor, lazy_tensor
from clocher_runtime.checkpoints.hf.arrays import (
    FLOATS,
    REQUANTISE,
    SETTINGS,
    Source,
    StoredArray,
    Tensors,
    awq_codes,
    awq_nibbles,
    nibbles,
    refuse_act_order,
    signed,
    transposed_bytes,
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
    """Return the tensors of a GPTQ checkpoint.

    Raises:
        UnsupportedModel: the settings or the order of the columns are not known here.
        FormatError: the arrays contradict the settings or each other.
    """
    bits = source.choice("bits", None, (4, 8), f"{REQUANTISE} with 4 or 8 bits")
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
        k, n = words.matrix()[0] * 32 // bits, words.matrix()[1]
        groups = -(-k // group) if group else 1
        scales.expect(FLOATS, (groups, n))
        zeros.expect(("I32",), (groups, -(-n * bits // 32)))
        if act_order or f"{stem}.g_idx" in source.rest:
            refuse_act_order(source.claim(f"{stem}.g_idx", words), k, group)
        fmt: Int4 | Int8 = Int8(group or "row", DTYPES[scales.dtype])
        if bits == 4:
            fmt = Int4(symmetric, group or "row", DTYPES[scales.dtype])
        make = partial(_gptq_planes, fmt, words.array, zeros.array, scales.array, version == "gptq")
        tensors[f"{stem}.weight"] = lazy_tensor((n, k), fmt, make, words.where)
    return tensors


def _gptq_planes(
    fmt: Int4 | Int8, words: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, version_1: bool
) -> Mapping[str, np.ndarray]:
    """Repack; the planes of `Int4` or symmetric `Int8`."""
    n = words.shape[1]
    planes = {"scales": _by_row(fmt, scales), "codes": transposed_bytes(words)}
    if isinstance(fmt, Int8):
        zeros = np.ascontiguousarray(qzeros).view(np.uint8)[:, :n]
        planes["codes"] = signed(planes["codes"])
    else:
        zeros = nibbles(qzeros)[:, :n]
    affine = isinstance(fmt, Int4) and not fmt.symmetric
    if version_1:
        if affine and zeros.max() == 15:
            raise UnsupportedModel(
                "a zero point stored as 15 in format gptq, where one reader takes 16 and another "
                "0; save it as gptq_v2"
            )
        zeros = zeros + np.uint8(1)
    if affine:
        return {**planes, "zeros": _by_row(fmt, zeros)}
    middle = 8 if isinstance(fmt, Int4) else 128
    if (zeros != middle).any():
        odd = int(zeros[zeros != middle][0])
        raise FormatError(
            f"a zero point of {odd}, expected {middle}: quantization_config says sym true; "
            "correct sym or checkpoint_format in config.json if it is wrong"
        )
    return planes


def _by_row(fmt: Int4 | Int8, array: np.ndarray) -> np.ndarray:
    """Return an array [G, N] as [N, G], or [N] if there is one group, the row."""
    return array.reshape(-1) if fmt.group == "row" else np.ascontiguousarray(array.T)


def read_awq(source: Source) -> Tensors:
    """Return the tensors of an AWQ checkpoint.

    Raises:
        UnsupportedModel: the settings are not known here.
        FormatError: the arrays contradict the settings or each other.
    """
    source.choice("bits", 4, (4,), f"{REQUANTISE} with 4 bits")
    source.choice("zero_point", True, (True,), f"{REQUANTISE} with zero_point=true")
    version = source.settings.get("version") or source.settings.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    one_of({"version": version}, "version", "", ("gemm", "gemv"), SETTINGS, "save it as gemm")
    group, tensors = source.group_size(), Tensors()
    for stem, words, zeros, scales in _linears(source):
        tensors[f"{stem}.weight"] = _awq(version == "gemv", words, zeros, scales, group)
    return tensors


def _awq(
    gemv: bool, words: StoredArray, zeros: StoredArray, scales: StoredArray, group: int | None
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
    fmt = Int4(False, group or "row", DTYPES[scales.dtype])
    shape = (n,) if group is None else (n, groups)

    def make() -> Mapping[str, np.ndarray]:
        if gemv:
            codes = np.ascontiguousarray(words.array).view(np.uint8)
            zero, scale = nibbles(zeros.array)[:, :groups], scales.array[:, :groups]
        else:
            codes, zero, scale = awq_codes(words.array), awq_nibbles(zeros.array).T, scales.array.T
        return {"codes": codes, "scales": scale.reshape(shape), "zeros": zero.reshape(shape)}

    return lazy_tensor((n, k), fmt, make, words.where)
