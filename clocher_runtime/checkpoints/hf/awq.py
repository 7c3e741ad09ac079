"""AWQ checkpoints (`quant_method: awq`), 4 bits, as AutoAWQ writes them.

With G = K / group_size groups, for each linear X [N, K]:

    version     gemm                    gemv
    X.qweight   i32 [K, N/8]            i32 [N, K/8]
    X.qzeros    i32 [G, N/8]            i32 [N, >= G/8]
    X.scales    float [G, N]            float [N, >= G]
    packed      along N, interleaved    along K (zeros: G), low bits first

    W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = k // group_size

Nibble i of a gemm word holds column [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight; the gemv arrays of
zeros and scales are padded to what its kernel likes.

Source: AutoAWQ awq/modules/linear/gemm.py and gemv.py, awq/utils/packing_utils.py.
"""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Int4
from clocher_runtime.checkpoints.checkpoint import LazyTensor, lazy_tensor
from clocher_runtime.checkpoints.hf.arrays import (
    FLOATS,
    REQUANTISE,
    Source,
    StoredArray,
    Tensors,
    one_of,
)
from clocher_runtime.checkpoints.hf.words import awq_codes, awq_nibbles, nibbles
from clocher_runtime.disk.safetensors_file import DTYPES


def read_awq(source: Source) -> Tensors:
    """Return the tensors of the arrays `X.qweight`, `X.qzeros`, `X.scales`.

    Raises:
        UnsupportedModel: the settings are not known here.
        FormatError: the arrays contradict the settings or each other.
    """
    source.choice("bits", 4, (4,), f"{REQUANTISE} with 4 bits")
    source.choice("zero_point", True, (True,), f"{REQUANTISE} with zero_point=true")
    version = source.settings.get("version") or source.settings.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    make = _VERSIONS[one_of({"version": version}, "version", "", _VERSIONS, "save it as gemm")]
    group = source.group_size()
    tensors: Tensors = {}
    for name in source.ending(".qweight"):
        stem = name.removesuffix(".qweight")
        words = source.rest.pop(name)
        zeros = source.claim(f"{stem}.qzeros", words)
        scales = source.claim(f"{stem}.scales", words)
        words.expect(("I32",))
        zeros.expect(("I32",))
        scales.expect(FLOATS)
        tensors[f"{stem}.weight"] = make(words, zeros, scales, group)
    source.refuse_orphans(".qzeros", ".scales")
    return tensors


def _gemm(
    words: StoredArray, zeros: StoredArray, scales: StoredArray, group: int | None
) -> LazyTensor:
    k, n = words.matrix()[0], words.matrix()[1] * 8
    groups = _groups(words, k, group)
    zeros.expect(("I32",), (groups, n // 8))
    scales.expect(FLOATS, (groups, n))
    fmt = Int4(False, group or "row", DTYPES[scales.dtype])
    shape = (n,) if group is None else (n, groups)

    def make() -> Mapping[str, np.ndarray]:
        return {
            "codes": awq_codes(words.array),
            "scales": scales.array.T.reshape(shape),
            "zeros": awq_nibbles(zeros.array).T.reshape(shape),
        }

    return lazy_tensor((n, k), fmt, make, words.where)


def _gemv(
    words: StoredArray, zeros: StoredArray, scales: StoredArray, group: int | None
) -> LazyTensor:
    n, k = words.matrix()[0], words.matrix()[1] * 8
    groups = _groups(words, k, group)
    for stored, per_word in ((zeros, 8), (scales, 1)):
        rows, width = stored.matrix()
        if rows != n or width * per_word < groups:
            raise FormatError(
                f"{stored.where}: shape {[rows, width]}, expected [{n}, {-(-groups // per_word)}] "
                "or wider"
            )
    fmt = Int4(False, group or "row", DTYPES[scales.dtype])
    shape = (n,) if group is None else (n, groups)

    def make() -> Mapping[str, np.ndarray]:
        return {
            "codes": np.ascontiguousarray(words.array).view(np.uint8),
            "scales": scales.array[:, :groups].reshape(shape),
            "zeros": nibbles(zeros.array)[:, :groups].reshape(shape),
        }

    return lazy_tensor((n, k), fmt, make, words.where)


_VERSIONS = {"gemm": _gemm, "gemv": _gemv}


def _groups(words: StoredArray, k: int, group: int | None) -> int:
    if k % (group or k):
        raise FormatError(f"{words.where}: {k} columns are no multiple of group_size {group}")
    if k % 2:
        raise UnsupportedModel(f"{words.where}: {k} columns, expected an even number")
    return k // (group or k)
