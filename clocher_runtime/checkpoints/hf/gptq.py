"""GPTQ checkpoints (`quant_method: gptq`), as AutoGPTQ and GPTQModel write them.

With G = ceil(K / group_size) groups and b = 4 or 8 bits, for each linear X [N, K]:

    X.qweight  i32 [K*b/32, N]  codes packed along K, low bits first
    X.qzeros   i32 [G, N*b/32]  zero points packed along N; version 1 stores them minus one
    X.scales   float [G, N]
    X.g_idx    i32 [K]          group of each column; need not be there

    W[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),  g = g_idx[k] = k // group_size

Source: AutoGPTQ auto_gptq/nn_modules/qlinear; GPTQModel gptqmodel/nn_modules/qlinear.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Int4, Int8
from clocher_runtime.checkpoints.checkpoint import lazy_tensor
from clocher_runtime.checkpoints.hf.arrays import (
    FLOATS,
    REQUANTISE,
    Source,
    Tensors,
    refuse_act_order,
)
from clocher_runtime.checkpoints.hf.words import nibbles, signed, transposed_bytes
from clocher_runtime.disk.safetensors_file import DTYPES


def read_gptq(source: Source) -> Tensors:
    """Return the tensors of the arrays `X.qweight`, `X.qzeros`, `X.scales`, `X.g_idx`.

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
    if overrides := [key for key in _overrides(source) if not key.startswith("-:")]:
        raise UnsupportedModel(
            f"quantization_config: dynamic has settings of its own for {overrides[0]!r:.60}; known "
            "are only modules left out ('-:...')"
        )
    if bits == 8 and not symmetric:
        raise UnsupportedModel(
            "quantization_config: 8 bits with zero points (sym false) have no format here; "
            f"{REQUANTISE} with sym=true"
        )
    tensors: Tensors = {}
    for name in source.ending(".qweight"):
        stem = name.removesuffix(".qweight")
        words = source.rest.pop(name)
        zeros = source.claim(f"{stem}.qzeros", words)
        scales = source.claim(f"{stem}.scales", words)
        words.expect(("I32",))
        k, n = words.matrix()[0] * 32 // bits, words.matrix()[1]
        groups = -(-k // group) if group else 1
        scales.expect(FLOATS, (groups, n))
        zeros.expect(("I32",), (groups, -(-n * bits // 32)))
        if act_order or f"{stem}.g_idx" in source.rest:
            refuse_act_order(source.claim(f"{stem}.g_idx", words), k, group)
        fmt: Int4 | Int8
        if bits == 4:
            fmt = Int4(symmetric, group or "row", DTYPES[scales.dtype])
        else:
            fmt = Int8(group or "row", DTYPES[scales.dtype])
        make = partial(_planes, fmt, words.array, zeros.array, scales.array, version == "gptq")
        tensors[f"{stem}.weight"] = lazy_tensor((n, k), fmt, make, words.where)
    source.refuse_orphans(".qzeros", ".scales", ".g_idx")
    return tensors


def _overrides(source: Source) -> list[str]:
    dynamic = source.settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise FormatError("quantization_config: dynamic is not an object")
    return list(dynamic)


def _planes(
    fmt: Int4 | Int8, words: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, version_1: bool
) -> Mapping[str, np.ndarray]:
    """Repack; the planes of `Int4` or symmetric `Int8`."""
    n = words.shape[1]
    planes = {"scales": _by_row(fmt, scales)}
    if isinstance(fmt, Int8):
        zeros = np.ascontiguousarray(qzeros).view(np.uint8)[:, :n]
        planes["codes"] = signed(transposed_bytes(words))
    else:
        zeros = nibbles(qzeros)[:, :n]
        planes["codes"] = transposed_bytes(words)
    if version_1:
        if isinstance(fmt, Int4) and not fmt.symmetric and zeros.max() == 15:
            raise UnsupportedModel(
                "a zero point stored as 15 in format gptq, where one reader takes 16 and another "
                "0; save it as gptq_v2"
            )
        zeros = zeros + np.uint8(1)
    if isinstance(fmt, Int4) and not fmt.symmetric:
        planes["zeros"] = _by_row(fmt, zeros)
        return planes
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
