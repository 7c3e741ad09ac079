"""compressed-tensors checkpoints (`quant_method: compressed-tensors`), as llm-compressor writes.

For each linear X [N, K], by the `format` of the checkpoint or of the config group:

    pack-quantized   X.weight_packed     i32 [N, ceil(K*b/32)]  along K, low bits first: code +
                                         2^(b-1), with b = 4 or 8
                     X.weight_shape      i64 [2]                N, K
                     X.weight_zero_point i32 [ceil(N*b/32), G]  along N, the same way; asymmetric
    int-quantized    X.weight            i8 [N, K]
    float-quantized  X.weight            e4m3 [N, K]
    naive-quantized  X.weight            either of the two
    mxfp4-pack-...   X.weight_packed     u8 [N, K/2], as MXFP4 blocks
    all              X.weight_scale      float [1], [N, 1], [N, G] or, e4m3, [ceil(N/128),
                                         ceil(K/128)]; u8 [N, K/32] for MXFP4

    W[n, k] = scale[n, g] * (code[n, k] - zero[n, g]),  g = k // group_size

The arrays of a linear decide which config group it belongs to: one that describes them exactly.
The patterns of `targets` and `ignore` are not run, because a pattern from a file can run forever.

Source: compressed-tensors src/compressed_tensors/{compressors,quantization}.
"""

from collections.abc import Mapping
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats.fp8 import BLOCK
from clocher_runtime.checkpoints.checkpoint import Stored
from clocher_runtime.checkpoints.hf.arrays import (
    REQUANTISE,
    Source,
    Tensors,
    columns_per_group,
    one_of,
    unknown,
)
from clocher_runtime.checkpoints.hf.compressed_layouts import (
    FLOAT,
    FORMATS,
    INT,
    MXFP4,
    NAIVE,
    PACKED,
    Linear,
    Scheme,
    read_linear,
)

_MAX_GROUPS = 256


def read_compressed(source: Source) -> Tensors:
    """Return the tensors of the packed arrays.

    Raises:
        UnsupportedModel: a config group or the order of the columns is not known here.
        FormatError: the arrays contradict the settings or each other.
    """
    source.choice("quantization_status", "compressed", ("compressed", "frozen"))
    _refuse_sparsity(source.settings)
    schemes = _schemes(source.settings)
    ignored = _names(source.settings.get("ignore"))
    tensors: Tensors = {}
    packed = source.ending(".weight_packed")
    plain = [n for n, a in source.rest.items() if a.dtype in ("I8", "F8_E4M3")]
    for name in (*packed, *(name for name in plain if name.endswith(".weight"))):
        stem = name.removesuffix("_packed").removesuffix(".weight")
        if stem in ignored:
            raise FormatError(f"{source.rest[name].where}: packed, but ignore lists {stem!r}")
        linear = _linear(source, name, stem)
        tensors[f"{stem}.weight"] = _tensor(schemes, linear)
    source.refuse_orphans(".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
    return tensors


def _refuse_sparsity(settings: Mapping[str, Any]) -> None:
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict):
        raise FormatError("quantization_config: sparsity_config is not an object")
    one_of(sparsity, "format", "dense", ("dense",), "save it without sparse compression")
    if settings.get("transform_config"):
        raise UnsupportedModel(
            "quantization_config: transform_config asks for rotations at run time, which are not "
            f"known here; {REQUANTISE} without them"
        )


def _names(value: object) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FormatError("quantization_config: ignore must be a list of names")
    return frozenset(value)


def _schemes(settings: Mapping[str, Any]) -> list[Scheme]:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= _MAX_GROUPS:
        raise FormatError(
            f"quantization_config: config_groups must be an object of 1 to {_MAX_GROUPS} groups"
        )
    schemes = []
    for label, group in groups.items():
        if not isinstance(group, dict):
            raise FormatError(f"quantization_config: config group {label!r:.60} is not an object")
        weights = group.get("weights")
        if weights is None:
            continue  # it quantises activations alone
        if not isinstance(weights, dict):
            raise FormatError(f"quantization_config: weights of {label!r:.60} is not an object")
        form = group.get("format") or settings.get("format")
        if form not in FORMATS:
            raise unknown("format", form, FORMATS, "save it in one of these")
        schemes.append(_scheme(label, str(form), weights))
    if not schemes:
        raise FormatError("quantization_config: no config group quantises weights")
    return schemes


def _scheme(label: str, form: str, weights: Mapping[str, Any]) -> Scheme:
    kinds = {PACKED: ("int",), INT: ("int",), FLOAT: ("float",), MXFP4: ("float",)}
    kind = one_of(weights, "type", "int", kinds.get(form, ("int", "float")))
    if form == NAIVE:
        form = INT if kind == "int" else FLOAT
    known_bits = {PACKED: (4, 8), INT: (4, 8), FLOAT: (8,), MXFP4: (4,)}[form]
    bits = one_of(weights, "num_bits", 8, known_bits, f"{REQUANTISE} with one of these")
    symmetric = one_of(weights, "symmetric", True, (True, False))
    if not symmetric and (form != PACKED or bits != 4):
        raise UnsupportedModel(
            f"quantization_config: {form} of {bits} bits with zero points (symmetric false) has no "
            f"format here; {REQUANTISE} symmetrically, or as pack-quantized with 4 bits"
        )
    size = weights.get("group_size")
    group = None if size is None else columns_per_group(size)
    inferred = "group" if group else "channel" if size else "tensor"
    cells = "block" if form == FLOAT else "group"
    strategies = ("group",) if form == MXFP4 else ("tensor", "channel", cells)
    strategy = one_of(weights, "strategy", inferred, strategies, REQUANTISE)
    if (strategy == "group") != (group is not None) or (form == MXFP4 and group != 32):
        raise FormatError(
            f"quantization_config: strategy {strategy} of {form} with group_size {group}"
        )
    block = weights.get("block_structure")
    if strategy == "block" and block not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise unknown("block_structure", block, (f"[{BLOCK}, {BLOCK}]",), REQUANTISE)
    return Scheme(label, form, bits, symmetric, strategy, group)


def _linear(source: Source, name: str, stem: str) -> Linear:
    weight = source.rest.pop(name)
    optional = [
        source.rest.pop(f"{stem}.weight_{part}", None) for part in ("shape", "zero_point", "g_idx")
    ]
    return Linear(weight, source.claim(f"{stem}.weight_scale", weight), *optional)


def _tensor(schemes: list[Scheme], linear: Linear) -> Stored:
    """Return the tensor of a linear, read by the first scheme that describes its arrays."""
    misfits = []
    for scheme in schemes:
        try:
            return read_linear(scheme, linear)
        except FormatError as error:
            misfits.append(f"{scheme.label}: {error}")
    if len(misfits) == 1:
        raise FormatError(misfits[0].partition(": ")[2])
    raise FormatError(f"{linear.weight.where}: fits no config group; {'; '.join(misfits[:4])}")
