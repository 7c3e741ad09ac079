"""Checkpoints of other quantisers, read without loss: bits, logits, and what is refused.

The files are written by the packers below, which follow the text of the formats and not our code:
GPTQ by AutoGPTQ's `QuantLinear.pack` (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; version 2
without the minus one), AWQ by AutoAWQ's `from_linear` (awq/modules/linear/gemm.py, gemv.py),
compressed-tensors by `pack_to_int32` (src/compressed_tensors/compressors/pack_quantized/helpers.py)
and its `naive_quantized`, fp8 by transformers' integrations/finegrained_fp8.py.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import make_session
from weight_files import Array, convert, rng, write_hf

from clocher_kernels.dtypes import E4M3_VALUES, from_f32, to_f32
from clocher_kernels.errors import FormatError, ModelError, UnsupportedModel
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.engine.load import load_model

FP32_RMS = 1e-4
INT8_RMS = 5e-2

NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


# The formats' packers.


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack codes [A, B] into i32 [A, ceil(B * bits / 32)]: place i of a word gets order[i]."""
    if bits == 3:
        return pack_threes(codes)
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint32)
    for word in range(words.shape[1]):
        for place in range(per_word):
            column = word * per_word + (order[place] if per_word == 8 else place)
            if column < codes.shape[1]:
                words[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def pack_threes(codes: np.ndarray) -> np.ndarray:
    """Pack 3-bit codes [A, 32 B] into i32 [A, 3 B]: codes 10 and 21 of 32 cross words."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 32 * 3), np.uint32)
    codes = codes.astype(np.uint32)
    for start in range(0, codes.shape[1], 32):
        row, i = start // 32 * 3, start
        for j in range(i, i + 10):
            words[:, row] |= codes[:, j] << np.uint32(3 * (j - i))
        i += 10
        words[:, row] |= codes[:, i] << np.uint32(30)
        row += 1
        words[:, row] |= (codes[:, i] >> np.uint32(2)) & np.uint32(1)
        i += 1
        for j in range(i, i + 10):
            words[:, row] |= codes[:, j] << np.uint32(3 * (j - i) + 1)
        i += 10
        words[:, row] |= codes[:, i] << np.uint32(31)
        row += 1
        words[:, row] |= (codes[:, i] >> np.uint32(1)) & np.uint32(3)
        i += 1
        for j in range(i, i + 10):
            words[:, row] |= codes[:, j] << np.uint32(3 * (j - i) + 2)
    return words.view(np.int32)


def stored(array: np.ndarray, dtype: str = "") -> Array:
    """Return an array as safetensors stores it; fp32 values become the float type."""
    if dtype in NAMES:
        array = from_f32(np.asarray(array, np.float32), NAMES[dtype])
    names = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
    dtype = dtype or names[str(array.dtype)]
    return dtype, array.shape, np.ascontiguousarray(array).tobytes()


@dataclass
class Written:
    """Arrays of one linear, the values that they mean, and the format they must become."""

    arrays: dict[str, Array]
    values: np.ndarray
    format: str


Write = Callable[[str, tuple[int, int]], Written]


def draw(name: str, shape: tuple[int, int], groups: int, bits: int, symmetric: bool, dtype: str):
    """Draw codes [N, K] (0 and the largest among them), zeros [N, G] and scales [N, G]."""
    random, (n, k) = rng(name), shape
    codes = random.integers(0, 1 << bits, (n, k))
    codes[:, :2] = 0, (1 << bits) - 1
    zeros = np.full((n, groups), 1 << (bits - 1))
    if not symmetric:
        zeros = random.integers(1, (1 << bits) - 1, (n, groups))
        zeros[0, 0] = (1 << bits) - 1
    spread = 2.0**-bits * k**-0.5
    scales = spread * random.uniform(0.5, 4, (n, groups)).astype(np.float32)
    if dtype:
        scales = to_f32(from_f32(scales, NAMES[dtype]), NAMES[dtype])
    return codes, zeros, scales


def by_column(cells: np.ndarray, k: int, group: int) -> np.ndarray:
    """Spread [N, G] over the columns, [N, K]."""
    return cells[:, np.arange(k) // group]


def meaning(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    k = codes.shape[1]
    steps = (codes - by_column(zeros, k, group)).astype(np.float32)
    return steps * by_column(scales, k, group)


def label(bits: int, symmetric: bool, group: int, dtype: str) -> str:
    spelled = "row" if group == -1 else f"g{group}"
    kind = "sym_" if symmetric else "asym_"
    return f"int{max(bits, 4)}_{kind if bits < 8 else ''}{spelled}_{NAMES[dtype]}"


def activation_order(name: str, k: int, group: int) -> np.ndarray:
    """Return the groups of columns that were quantised in the order of their activations."""
    return (rng(f"order-{name}").permutation(k) // group).astype(np.int32)


def gptq(
    bits: int, symmetric: bool, group: int, version: int, dtype: str = "F16", ordered: bool = True
) -> Write:
    def write(name: str, shape: tuple[int, int]) -> Written:
        size = shape[1] if group == -1 else group
        groups = -(-shape[1] // size)
        codes, zeros, scales = draw(name, shape, groups, bits, symmetric, dtype)
        of_column = (np.arange(shape[1]) // size).astype(np.int32)
        expected = label(bits, symmetric, group, dtype)
        if not ordered:
            of_column, expected = activation_order(name, shape[1], size), "f32"
        arrays = {
            f"{name}.qweight": stored(np.ascontiguousarray(pack(codes, bits).T)),
            f"{name}.qzeros": stored(pack((zeros - (version == 1)).T, bits)),
            f"{name}.scales": stored(scales.T, dtype),
            f"{name}.g_idx": stored(of_column),
        }
        # As AutoGPTQ's QuantLinear dequantises: scales[g_idx] * (weight - zeros[g_idx]).
        values = (codes - zeros[:, of_column]).astype(np.float32) * scales[:, of_column]
        return Written(arrays, values, expected)

    return write


def awq(version: str, group: int, dtype: str = "F16", symmetric: bool = False) -> Write:
    def write(name: str, shape: tuple[int, int]) -> Written:
        size = shape[1] if group == -1 else group
        groups = shape[1] // size
        codes, zeros, scales = draw(name, shape, groups, 4, symmetric, dtype)
        zeros[0, 0] = 8 if symmetric else 0
        if version == "gemm":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            arrays = {
                f"{name}.qweight": stored(pack(codes.T, 4, order)),
                f"{name}.qzeros": stored(pack(zeros.T, 4, order)),
                f"{name}.scales": stored(scales.T, dtype),
            }
        else:
            multiple = {32: 4, 64: 2}.get(size, 1)  # calculate_zeros_width
            width = (groups + 8 * multiple - 1) // (8 * multiple) * multiple
            wide = np.zeros((shape[0], 8 * width), np.float32)
            wide[:, :groups] = scales
            padded = np.zeros((shape[0], width), np.int32)
            packed = pack(zeros, 4)
            padded[:, : packed.shape[1]] = packed
            arrays = {
                f"{name}.qweight": stored(pack(codes, 4)),
                f"{name}.qzeros": stored(padded),
                f"{name}.scales": stored(wide, dtype),
            }
        expected = label(4, symmetric, group, dtype)
        return Written(arrays, meaning(codes, zeros, scales, size), expected)

    return write


def ct_pack(
    bits: int,
    symmetric: bool,
    strategy: str,
    group: int,
    dtype: str = "BF16",
    ordered: bool = True,
) -> Write:
    def write(name: str, shape: tuple[int, int]) -> Written:
        (n, k), size = shape, group if strategy == "group" else shape[1]
        groups = -(-k // size)
        codes, zeros, scales = draw(name, shape, groups, bits, symmetric, dtype)
        if strategy == "tensor":
            zeros, scales = zeros[:1], scales[:1]
        arrays = {
            f"{name}.weight_packed": stored(pack(codes, bits)),
            f"{name}.weight_scale": stored(
                scales.reshape(-1) if strategy == "tensor" else scales, dtype
            ),
            f"{name}.weight_shape": stored(np.array(shape, np.int64)),
        }
        if not symmetric:
            packed = pack(zeros.T, bits).T
            if strategy == "tensor":
                packed = (zeros - (1 << (bits - 1))).astype(np.int8).reshape(-1)
            arrays[f"{name}.weight_zero_point"] = stored(np.ascontiguousarray(packed))
        rows, zeros = np.broadcast_to(scales, (n, groups)), np.broadcast_to(zeros, (n, groups))
        values = meaning(codes, zeros, rows, size)
        expected = label(bits, symmetric, group, dtype)
        if not ordered:
            of_column = activation_order(name, k, size)
            arrays[f"{name}.weight_g_idx"] = stored(of_column)
            values = (codes - zeros[:, of_column]).astype(np.float32) * rows[:, of_column]
            expected = "f32"
        if strategy == "tensor" and bits == 8:
            expected = expected.replace("row", "tensor")
        return Written(arrays, values, expected)

    return write


def ct_int8(strategy: str, group: int = -1, dtype: str = "F32", ordered: bool = True) -> Write:
    def write(name: str, shape: tuple[int, int]) -> Written:
        source = ct_pack(8, True, strategy, group, dtype, ordered)(name, shape)
        words = np.frombuffer(source.arrays[f"{name}.weight_packed"][2], np.uint8)
        codes = (words.astype(int) - 128).astype(np.int8).reshape(shape)
        arrays = {
            f"{name}.weight": stored(codes),
            f"{name}.weight_scale": source.arrays[f"{name}.weight_scale"],
            f"{name}.input_scale": stored(np.ones(1), "F32"),
        }
        if not ordered:
            arrays[f"{name}.weight_g_idx"] = source.arrays[f"{name}.weight_g_idx"]
        return Written(arrays, source.values, source.format)

    return write


def fp8(scope: str, dtype: str, suffix: str, column: bool = True) -> Write:
    def write(name: str, shape: tuple[int, int]) -> Written:
        random, (n, k) = rng(name), shape
        codes = random.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7E
        cells = {"b128": (-(-n // 128), -(-k // 128)), "row": (n, 1), "tensor": (1, 1)}[scope]
        scales = (random.uniform(0.5, 2, cells) * k**-0.5 / 100).astype(np.float32)
        scales = to_f32(from_f32(scales, NAMES[dtype]), NAMES[dtype])
        rows, columns = np.arange(n), np.arange(k)
        spread = {"b128": (rows // 128, columns // 128), "row": (rows, columns * 0)}.get(
            scope, (rows * 0, columns * 0)
        )
        values = E4M3_VALUES[codes] * scales[np.ix_(*spread)]
        shaped = scales if column and scope != "tensor" else scales.reshape(-1)
        arrays = {
            f"{name}.weight": ("F8_E4M3", shape, codes.tobytes()),
            f"{name}.{suffix}": stored(shaped, dtype),
        }
        return Written(arrays, values, f"fp8_e4m3_{scope}_{NAMES[dtype]}")

    return write


def ct_mxfp4(name: str, shape: tuple[int, int]) -> Written:
    random, (n, k) = rng(name), shape
    codes = random.integers(0, 16, shape)
    scales = random.integers(119, 123, (n, k // 32)).astype(np.uint8)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.where(codes & 8, -1, 1) * levels[codes & 7]
    values = values * by_column(2.0 ** (scales.astype(np.float32) - 127), k, 32)
    arrays = {
        f"{name}.weight_packed": stored((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)),
        f"{name}.weight_scale": stored(scales),
    }
    return Written(arrays, values.astype(np.float32), "mxfp4")


# The settings beside them.


def ct(form: str, **weights: object) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def gptq_config(bits: int, sym: bool, group: int, **rest: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, **rest}


@dataclass
class Case:
    """A way to store linears, and what config.json says about it."""

    write: Write
    settings: dict[str, Any]
    notes: int = field(default=0)


INT = {"type": "int", "num_bits": 8, "symmetric": True}
INT4 = INT | {"num_bits": 4}
FLOAT = INT | {"type": "float"}
V2 = {"checkpoint_format": "gptq_v2"}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True}
SYMMETRIC_AWQ = AWQ | {"zero_point": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PACK, INTS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
CASES: dict[str, Case] = {
    "gptq-v1-4-sym-g32": Case(gptq(4, True, 32, 1), gptq_config(4, True, 32, desc_act=False)),
    "gptq-v1-4-asym-g32": Case(gptq(4, False, 32, 1), gptq_config(4, False, 32)),
    "gptq-v2-4-asym-g64": Case(gptq(4, False, 64, 2, "BF16"), gptq_config(4, False, 64, **V2)),
    "gptq-v2-4-sym-row": Case(gptq(4, True, -1, 2), gptq_config(4, True, -1, format="gptq_v2")),
    "gptq-v1-4-sym-g128": Case(gptq(4, True, 128, 1), gptq_config(4, True, 128, desc_act=True)),
    "gptq-v1-8-sym-g32": Case(gptq(8, True, 32, 1), gptq_config(8, True, 32)),
    "gptq-v2-8-sym-row": Case(gptq(8, True, -1, 2, "F32"), gptq_config(8, True, -1, **V2)),
    "gptq-v1-3-sym-g32": Case(gptq(3, True, 32, 1), gptq_config(3, True, 32), 1),
    "gptq-v2-3-asym-g64": Case(gptq(3, False, 64, 2), gptq_config(3, False, 64, **V2), 1),
    "gptq-v1-2-sym-row": Case(gptq(2, True, -1, 1, "BF16"), gptq_config(2, True, -1), 1),
    "gptq-v2-2-asym-g32": Case(gptq(2, False, 32, 2), gptq_config(2, False, 32, **V2), 1),
    "gptq-v1-4-sym-order": Case(
        gptq(4, True, 32, 1, ordered=False), gptq_config(4, True, 32, desc_act=True), 1
    ),
    "gptq-v2-4-asym-order": Case(
        gptq(4, False, 32, 2, "BF16", ordered=False), gptq_config(4, False, 32, **V2), 1
    ),
    "gptq-v1-8-sym-order": Case(gptq(8, True, 32, 1, ordered=False), gptq_config(8, True, 32), 1),
    "gptq-v2-3-asym-order": Case(
        gptq(3, False, 32, 2, ordered=False), gptq_config(3, False, 32, **V2), 2
    ),
    "auto-round-gptq": Case(
        gptq(4, True, 32, 1),
        gptq_config(4, True, 32, packing_format="auto_round:auto_gptq", data_type="int")
        | {"quant_method": "auto-round"},
    ),
    "awq-gemm-g32": Case(awq("gemm", 32), AWQ | {"group_size": 32, "version": "GEMM"}),
    "awq-gemm-row": Case(awq("gemm", -1, "BF16"), AWQ | {"group_size": -1}),
    "awq-gemv-g32": Case(awq("gemv", 32), AWQ | {"group_size": 32, "version": "gemv"}),
    "awq-gemm-sym-g32": Case(
        awq("gemm", 32, symmetric=True), SYMMETRIC_AWQ | {"group_size": 32, "version": "gemm"}
    ),
    "awq-gemm-sym-row": Case(
        awq("gemm", -1, "BF16", symmetric=True), SYMMETRIC_AWQ | {"group_size": -1}
    ),
    "awq-gemv-sym-g32": Case(
        awq("gemv", 32, symmetric=True), SYMMETRIC_AWQ | {"group_size": 32, "version": "gemv"}
    ),
    "ct-pack-4-sym-order": Case(
        ct_pack(4, True, "group", 32, ordered=False),
        ct(PACK, **INT4, strategy="group", group_size=32, actorder="group"),
        1,
    ),
    "ct-pack-4-asym-order": Case(
        ct_pack(4, False, "group", 32, "F16", ordered=False),
        ct(PACK, **(INT4 | {"symmetric": False}), strategy="group", group_size=32),
        1,
    ),
    "ct-int-order": Case(
        ct_int8("group", 32, "BF16", ordered=False), ct(INTS, **INT, group_size=32), 2
    ),
    "ct-pack-4-sym-g32": Case(
        ct_pack(4, True, "group", 32), ct(PACK, **INT4, strategy="group", group_size=32)
    ),
    "ct-pack-4-asym-g32": Case(
        ct_pack(4, False, "group", 32, "F16"),
        ct(PACK, **(INT4 | {"symmetric": False}), strategy="group", group_size=32),
    ),
    "ct-pack-4-asym-channel": Case(
        ct_pack(4, False, "channel", -1),
        ct(PACK, **(INT4 | {"symmetric": False}), strategy="channel"),
    ),
    "ct-pack-4-sym-tensor": Case(
        ct_pack(4, True, "tensor", -1, "F32"), ct(PACK, **INT4, strategy="tensor")
    ),
    "ct-pack-4-asym-tensor": Case(
        ct_pack(4, False, "tensor", -1), ct(PACK, **(INT4 | {"symmetric": False}))
    ),
    "ct-pack-8-sym-g32": Case(ct_pack(8, True, "group", 32), ct(PACK, **INT, group_size=32)),
    "ct-pack-8-sym-channel": Case(ct_pack(8, True, "channel", -1), ct(PACK, **INT, group_size=-1)),
    "ct-pack-8-sym-tensor": Case(ct_pack(8, True, "tensor", -1), ct(PACK, **INT)),
    "ct-int-channel": Case(ct_int8("channel"), ct(INTS, **INT, strategy="channel"), 1),
    "ct-int-tensor": Case(ct_int8("tensor", dtype="BF16"), ct(INTS, **INT, strategy="tensor"), 1),
    "ct-naive-int-g32": Case(ct_int8("group", 32), ct("naive-quantized", **INT, group_size=32), 1),
    "ct-float-channel": Case(
        fp8("row", "BF16", "weight_scale"), ct(FLOATS, **FLOAT, strategy="channel")
    ),
    "ct-float-tensor": Case(
        fp8("tensor", "F32", "weight_scale"), ct(FLOATS, **FLOAT, strategy="tensor")
    ),
    "ct-float-block": Case(
        fp8("b128", "BF16", "weight_scale"),
        ct(FLOATS, **FLOAT, strategy="block", block_structure=[128, 128]),
    ),
    "ct-naive-float": Case(
        fp8("row", "F32", "weight_scale"), ct("naive-quantized", **FLOAT, strategy="channel")
    ),
    "ct-mxfp4": Case(
        ct_mxfp4,
        ct("mxfp4-pack-quantized", **(FLOAT | {"num_bits": 4}), strategy="group", group_size=32),
    ),
    "fp8-block": Case(
        fp8("b128", "F32", "weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}
    ),
    "fp8-block-bf16": Case(fp8("b128", "BF16", "weight_scale_inv"), FP8),
    "fp8-tensor": Case(
        fp8("tensor", "F32", "weight_scale"),
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
    ),
    "fp8-row": Case(
        fp8("row", "F32", "weight_scale_inv", False), FP8 | {"weight_block_size": None}
    ),
}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (160, 64),
    "mlp.up_proj": (160, 64),
    "mlp.down_proj": (64, 160),
}


def plain_arrays() -> dict[str, np.ndarray]:
    """Return the tensors that no format here quantises, fp32."""
    shapes = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64)}
    found = {n: 0.3 * rng(n).standard_normal(shape, np.float32) for n, shape in shapes.items()}
    norms = [f"layers.{i}.{n}_layernorm" for i in range(2) for n in ("input", "post_attention")]
    for name in [*norms, "norm"]:
        found[f"model.{name}.weight"] = 1 + 0.2 * rng(name).standard_normal(64, np.float32)
    return found


def write_model(folder: Path, case: Case, head: bool = False) -> tuple[Path, Path, dict[str, str]]:
    """Write a llama whose linears a format stores, and the same model in fp32.

    Args:
        head: whether lm_head is quantised as well.

    Returns:
        The two folders, and the format that each linear must have.
    """
    arrays = {name: stored(value, "F32") for name, value in plain_arrays().items()}
    floats, formats = dict(arrays), {}
    names = {f"model.layers.{i}.{n}": shape for i in range(2) for n, shape in LINEARS.items()}
    if head:
        names["lm_head"] = (96, 64)
        del arrays["lm_head.weight"]
    for name, shape in names.items():
        written = case.write(name, shape)
        arrays |= written.arrays
        floats[f"{name}.weight"] = stored(written.values, "F32")
        formats[f"{name}.weight"] = written.format
    settings = CONFIG | {"quantization_config": case.settings}
    quantised = write_hf(folder / "quantised", arrays, settings)
    return quantised, write_hf(folder / "floats", floats, CONFIG), formats


def logits(folder: Path, act_prec: str) -> np.ndarray:
    ids = rng("prompt").integers(0, 96, 24).tolist()
    model = load_model(open_checkpoint(folder))
    session = make_session(model, threads=2, chunk=11, all_logits=True, act_prec=act_prec)
    try:
        return session.logits(ids)
    finally:
        session.close()


def rms(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))


LAYOUT_OF = {
    "gptq": "AutoGPTQ, GPTQModel",
    "awq": "AutoAWQ",
    "auto-round": "AutoRound",
    "compressed-tensors": "llm-compressor",
    "fp8": "transformers' fp8",
}


@pytest.mark.parametrize("name", CASES)
def test_model_equals_its_dequantised_floats(
    name: str, tmp_path: Path, saw: Callable[..., None]
) -> None:
    """Values bit for bit, logits within the rounding of a matmul, and bytes as the file has."""
    case = CASES[name]
    folder, floats, formats = write_model(tmp_path, case)
    checkpoint, reference = open_checkpoint(folder), open_checkpoint(floats)
    assert len(checkpoint.notes) == case.notes
    assert set(checkpoint.names) == set(reference.names)
    for tensor_name, fmt in formats.items():
        assert checkpoint.tensors[tensor_name].format.name == fmt
        tensor = checkpoint.tensor(tensor_name, verify=True)
        assert tensor.nbytes == checkpoint.tensors[tensor_name].nbytes
        assert tensor.decode().tobytes() == reference.tensor(tensor_name).decode().tobytes()
    expected = logits(floats, "fp32")
    assert np.isfinite(expected).all()
    difference = rms(logits(folder, "fp32"), expected)
    method = case.settings["quant_method"]
    key = "LlamaForCausalLM", method, name, f"the test, as {LAYOUT_OF[method]}"
    saw(*key, "the decoded values in fp32, here", difference=difference)
    assert difference <= FP32_RMS
    assert rms(logits(folder, "int8"), expected) <= INT8_RMS


@pytest.mark.parametrize(
    "name",
    [
        "gptq-v1-4-asym-g32",
        "gptq-v1-3-sym-g32",
        "gptq-v1-4-sym-order",
        "awq-gemm-g32",
        "awq-gemm-sym-g32",
        "ct-pack-4-asym-g32",
    ],
)
def test_quantised_head_and_conversion(name: str, tmp_path: Path) -> None:
    case = Case(CASES[name].write, dict(CASES[name].settings))
    case.settings.pop("ignore", None)
    folder, floats, formats = write_model(tmp_path, case, head=True)
    assert "lm_head.weight" in formats
    assert rms(logits(folder, "fp32"), logits(floats, "fp32")) <= FP32_RMS
    convert(folder, tmp_path / "iebin")
    source, copy = open_checkpoint(folder), open_iebin(tmp_path / "iebin" / "model.ie.json")
    assert set(copy.names) == set(source.names)
    for tensor_name in source.names:
        mine, theirs = copy.tensor(tensor_name), source.tensor(tensor_name)
        assert mine.format.name == theirs.format.name
        for key, plane in theirs.planes.items():
            assert mine.planes[key].tobytes() == plane.tobytes()


SHAPE = (16, 64)


def one(name: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a single linear `p`, and config.json."""
    case = CASES[name]
    shape = (32, 64) if case.settings.get("bits") == 3 else SHAPE
    return dict(case.write("p", shape).arrays), {"quantization_config": dict(case.settings)}


def opened(folder: Path, arrays: dict[str, Array], config: dict[str, Any]) -> list[np.ndarray]:
    """Open a checkpoint and read all of it."""
    checkpoint = open_checkpoint(write_hf(folder, arrays, config))
    with np.errstate(over="ignore"):  # random bytes make large scales
        return [checkpoint.tensor(name).decode() for name in checkpoint.names]


def i32(value: int, *shape: int) -> Array:
    return stored(np.full(shape, value, np.int32))


G32, CHANNEL8 = "gptq-v1-4-sym-g32", "ct-pack-8-sym-channel"
PACK4, ZEROS4 = "ct-pack-4-sym-g32", "ct-pack-4-asym-g32"
ARRAYS: list[tuple[str, str, dict[str, Array | None], type[ModelError], str]] = [
    ("order", G32, {"g_idx": i32(2, 64)}, FormatError, "'p.g_idx': groups 2 to 2, expected 0 to 1"),
    ("negative", G32, {"g_idx": i32(-1, 64)}, FormatError, "groups -1 to -1, expected 0 to 1"),
    ("g_idx shape", G32, {"g_idx": i32(0, 63)}, FormatError, r"shape \[63\], expected \[64\]"),
    ("g_idx float", G32, {"g_idx": stored(np.zeros(64), "F32")}, FormatError, "F32, expected I32"),
    ("no g_idx", "gptq-v1-4-sym-g128", {"g_idx": None}, FormatError, "'p.g_idx' is missing"),
    ("no zeros", G32, {"qzeros": None}, FormatError, "'p.qzeros' is missing"),
    ("no scales", G32, {"scales": None}, FormatError, "'p.scales' is missing"),
    ("no words", G32, {"qweight": None}, FormatError, "'p.qzeros': no packed weight belongs"),
    ("zeros shape", G32, {"qzeros": i32(0, 2, 3)}, FormatError, r"\[2, 3\], expected \[2, 2\]"),
    ("scales shape", G32, {"scales": stored(np.ones((3, 16)), "F16")}, FormatError, "expected"),
    ("scales i32", G32, {"scales": i32(1, 2, 16)}, FormatError, "I32, expected F32 or F16 or BF16"),
    ("words u8", G32, {"qweight": stored(np.ones((8, 16), np.uint8))}, FormatError, "U8, expected"),
    ("words flat", G32, {"qweight": i32(0, 128)}, FormatError, "2 dimensions"),
    ("words empty", G32, {"qweight": i32(0, 0, 16)}, FormatError, "of at least 1"),
    ("not sym", G32, {"qzeros": i32(0x66666666, 2, 2)}, FormatError, "'p.weight': a zero point of"),
    (
        "zero 15 in version 1",
        "gptq-v1-4-asym-g32",
        {"qzeros": i32(-1, 2, 2)},
        UnsupportedModel,
        "stored as 15.*gptq_v2",
    ),
    ("inf", G32, {"scales": stored(np.full((2, 16), np.inf), "F16")}, FormatError, "inf"),
    ("awq zeros", "awq-gemm-g32", {"qzeros": i32(0, 2, 16)}, FormatError, r"expected \[2, 2\]"),
    ("awq scales", "awq-gemm-g32", {"scales": None}, FormatError, "'p.scales' is missing"),
    ("gemv narrow", "awq-gemv-g32", {"qzeros": i32(0, 15, 4)}, FormatError, r"\[16, 1\] or wider"),
    (
        "gemv scales",
        "awq-gemv-g32",
        {"scales": stored(np.ones((16, 1)), "F16")},
        FormatError,
        r"\[16, 2\] or wider",
    ),
    ("ct order", PACK4, {"weight_g_idx": i32(2, 64)}, FormatError, "groups 2 to 2, expected 0 to"),
    ("ct shape", PACK4, {"weight_shape": None}, FormatError, "weight_shape is missing"),
    (
        "ct lies",
        PACK4,
        {"weight_shape": stored(np.array([16, 65]))},
        FormatError,
        r"\[16, 65\], which is no shape of 4-bit codes packed as \[16, 8\]",
    ),
    (
        "ct negative",
        PACK4,
        {"weight_shape": stored(np.array([16, -(2**62)]))},
        FormatError,
        "no shape",
    ),
    ("ct scale", PACK4, {"weight_scale": None}, FormatError, "'p.weight_scale' is missing"),
    ("ct groups", PACK4, {"weight_scale": stored(np.ones((16, 4)), "F16")}, FormatError, "16, 2"),
    ("ct zeros", ZEROS4, {"weight_zero_point": None}, FormatError, "zero_point is missing"),
    (
        "ct zeros shape",
        ZEROS4,
        {"weight_zero_point": i32(0, 16, 2)},
        FormatError,
        r"expected \[2, 2\]",
    ),
    (
        "ct not symmetric",
        CHANNEL8,
        {"weight_zero_point": i32(1, 4, 1)},
        FormatError,
        "not zero, but its config group is symmetric",
    ),
    ("ct alone", PACK4, {"weight_packed": None}, FormatError, "no packed weight belongs"),
    ("both", PACK4, {"weight": stored(np.ones((16, 64)), "F32")}, FormatError, "both packed and"),
    ("fp8 scale", "fp8-row", {"weight_scale_inv": None}, FormatError, "is missing"),
    (
        "fp8 rows",
        "fp8-row",
        {"weight_scale_inv": stored(np.ones((1, 16)), "F32")},
        FormatError,
        r"\[1, 16\], expected .*\[16, 1\]",
    ),
    ("fp8 alone", "fp8-row", {"weight": None}, FormatError, "no packed weight belongs"),
]


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [case[1:] for case in ARRAYS],
    ids=[case[0] for case in ARRAYS],
)
def test_contradicting_arrays_are_refused(
    name: str,
    changes: dict[str, Array | None],
    error: type[ModelError],
    message: str,
    tmp_path: Path,
) -> None:
    arrays, config = one(name)
    opened(tmp_path, arrays, config)
    for key, array in changes.items():
        arrays.pop(f"p.{key}", None)
        if array is not None:
            arrays[f"p.{key}"] = array
    with pytest.raises(error, match=message):
        opened(tmp_path, arrays, config)


SETTINGS: list[tuple[str, str, dict[str, Any], type[ModelError], str]] = [
    ("5 bits", G32, {"bits": 5}, UnsupportedModel, "bits 5.*known: 2, 3, 4, 8; quantise the float"),
    ("3 bits", G32, {"bits": 3}, FormatError, r"shape \[8, 16\]; 3-bit codes fill 3 words of 32"),
    ("bits true", G32, {"bits": True}, UnsupportedModel, "bits True"),
    ("8 asym", "gptq-v1-8-sym-g32", {"sym": False}, UnsupportedModel, "8 bits with zero points"),
    ("other bits", G32, {"bits": 8}, FormatError, "shape"),
    ("other group", G32, {"group_size": 16}, FormatError, r"expected \[4, 16\]"),
    ("group 0", G32, {"group_size": 0}, FormatError, "expected -1 or 1 to 999999"),
    ("huge group", G32, {"group_size": 2**40}, FormatError, "expected -1 or 1 to 999999"),
    ("no group", G32, {"group_size": None}, FormatError, "group_size is None"),
    ("marlin", G32, {"checkpoint_format": "marlin"}, UnsupportedModel, "gptq, gptq_v2"),
    ("is marlin", G32, {"is_marlin_format": True}, UnsupportedModel, "is_marlin_format"),
    ("version 2", G32, {"checkpoint_format": "gptq_v2"}, FormatError, "checkpoint_format"),
    ("dynamic", G32, {"dynamic": {".*q_proj": {"bits": 8}}}, UnsupportedModel, "of its own for"),
    (
        "packing",
        "auto-round-gptq",
        {"packing_format": "auto_round:x"},
        UnsupportedModel,
        "auto_awq",
    ),
    ("awq 8", "awq-gemm-g32", {"bits": 8}, UnsupportedModel, "bits 8"),
    ("awq fast", "awq-gemm-g32", {"version": "gemv_fast"}, UnsupportedModel, "known: gemm, gemv"),
    ("awq list", "awq-gemm-g32", {"version": ["x"]}, UnsupportedModel, "known: gemm, gemv"),
    ("awq group", "awq-gemm-g32", {"group_size": 48}, FormatError, "no multiple of group_size 48"),
    (
        "awq sym",
        "awq-gemm-g32",
        {"zero_point": False},
        FormatError,
        "expected 8: .* zero_point fal",
    ),
    ("awq sym gemv", "awq-gemv-g32", {"zero_point": False}, FormatError, "expected 8: .* zero_poi"),
    ("awq odd", "awq-gemm-g32", {"zero_point": "no"}, UnsupportedModel, "zero_point 'no'"),
    ("ct ignore", PACK4, {"ignore": ["p"]}, FormatError, "ignore lists 'p'"),
    ("ct ignore odd", PACK4, {"ignore": [1]}, FormatError, r"ignore\[0\] is 1; expected text"),
    ("ct format", PACK4, {"format": "nvfp4-pack-quantized"}, UnsupportedModel, "known: pack-"),
    (
        "ct groups",
        PACK4,
        {"config_groups": {}},
        FormatError,
        "config_groups is {}; expected an object of length >= 1",
    ),
    (
        "ct group",
        PACK4,
        {"config_groups": {"a": 1}},
        FormatError,
        "expected an object, got an integer",
    ),
    ("ct no weights", PACK4, {"config_groups": {"a": {}}}, FormatError, "quantises weights"),
    ("ct 24", PACK4, {"sparsity_config": {"format": "sparse-24"}}, UnsupportedModel, "sparse-24"),
    ("ct rotate", PACK4, {"transform_config": {"a": 1}}, UnsupportedModel, "rotations"),
    ("ct status", PACK4, {"quantization_status": "initialized"}, UnsupportedModel, "frozen"),
    ("fp8 fmt", "fp8-row", {"scale_fmt": "ue8m0"}, UnsupportedModel, "ue8m0"),
    ("fp8 block", "fp8-row", {"weight_block_size": [128, 128]}, FormatError, r"expected \[1, 1\]"),
]
WEIGHTS: list[tuple[str, str, dict[str, Any], type[ModelError], str]] = [
    ("bits", PACK4, {"num_bits": 3}, UnsupportedModel, "num_bits 3.*known: 4, 8"),
    ("8 bits", PACK4, {"num_bits": 8}, FormatError, "no shape of 8-bit codes"),
    ("8 asym", CHANNEL8, {"symmetric": False}, UnsupportedModel, "zero points"),
    ("int asym", "ct-int-channel", {"symmetric": False}, UnsupportedModel, "zero points"),
    ("sym", ZEROS4, {"symmetric": True}, FormatError, "not zero, but"),
    ("block", "ct-float-block", {"block_structure": [64, 64]}, UnsupportedModel, "128, 128"),
    ("strategy", PACK4, {"strategy": "tensor_group"}, UnsupportedModel, "strategy"),
    ("odd size", PACK4, {"group_size": 33}, FormatError, "group 33; expected an even number"),
    ("no size", PACK4, {"group_size": None}, FormatError, "strategy group.*None"),
    ("size", PACK4, {"group_size": "x"}, FormatError, "group_size is 'x'"),
    ("type", PACK4, {"type": "float"}, UnsupportedModel, "type 'float'"),
    ("channel", PACK4, {"strategy": "channel", "group_size": None}, FormatError, r"\[16, 1\]"),
]


@pytest.mark.parametrize(
    ("name", "changes", "error", "message"),
    [case[1:] for case in SETTINGS + WEIGHTS],
    ids=[case[0] for case in SETTINGS] + [f"weights {case[0]}" for case in WEIGHTS],
)
def test_settings_that_are_unknown_or_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    arrays, config = one(name)
    settings = json.loads(json.dumps(config["quantization_config"]))
    inner = any(changes is case[2] for case in WEIGHTS)
    (settings["config_groups"]["group_0"]["weights"] if inner else settings).update(changes)
    with pytest.raises(error, match=message):
        opened(tmp_path, arrays, {"quantization_config": settings})


def test_a_linear_takes_the_config_group_that_fits(tmp_path: Path) -> None:
    four, config = one(PACK4)
    eight = CASES[CHANNEL8].write("q", SHAPE).arrays
    other = CASES[CHANNEL8].settings["config_groups"]["group_0"]
    config["quantization_config"]["config_groups"] = {
        "group_0": other,
        "activations": {"input_activations": {"num_bits": 8}, "weights": None},
        "group_1": CASES[PACK4].settings["config_groups"]["group_0"],
    }
    folder = write_hf(tmp_path, four | eight, config)
    checkpoint = open_checkpoint(folder)
    assert {n: t.format.name for n, t in checkpoint.tensors.items()} == {
        "p.weight": "int4_sym_g32_bf16",
        "q.weight": "int8_row_bf16",
    }
    four["p.weight_scale"] = stored(np.ones((16, 5)), "F16")
    with pytest.raises(FormatError, match=r"fits no config group; group_0: .*group_1: "):
        open_checkpoint(write_hf(tmp_path, four | eight, config))


def test_scales_of_activations_and_cache_are_left_out_with_a_note(tmp_path: Path) -> None:
    arrays, config = one("fp8-row")
    for name in ("p.input_scale", "attn.k_scale", "attn.v_scale", "k_proj.output_scale"):
        arrays[name] = stored(np.ones(1), "F32")
    checkpoint = open_checkpoint(write_hf(tmp_path, arrays, config))
    assert checkpoint.names == ("p.weight",)
    assert checkpoint.notes[0].startswith("4 stored scales of activations or of the KV cache are")


def test_what_a_file_costs_more_is_said(tmp_path: Path) -> None:
    """Activation order needs floats, 2 and 3 bits need 4: notes say so, with the way out."""
    folder, _, _ = write_model(tmp_path / "order", CASES["gptq-v1-4-sym-order"])
    note = open_checkpoint(folder).notes[0]
    assert note.startswith("14 linears, such as model.layers.0.self_attn.q_proj.weight, have their")
    assert "decoded to f32, exactly" in note and "`clocher quantize`" in note
    halved = load_model(open_checkpoint(folder), "fp16")
    assert halved.precision.startswith("f16")
    folder, _, _ = write_model(tmp_path / "three", CASES["gptq-v2-3-asym-g64"])
    assert "3 bits are held in 4, exactly" in open_checkpoint(folder).notes[0]


def test_symmetric_zero_points_and_column_order_that_say_nothing_are_accepted(
    tmp_path: Path,
) -> None:
    arrays, config = one("ct-int-channel")
    arrays["p.weight_zero_point"] = stored(np.zeros((16, 1), np.int8))
    arrays["p.weight_g_idx"] = i32(-1, 64)
    assert opened(tmp_path, arrays, config)[0].shape == SHAPE


def test_biases_of_zeros_are_accepted_and_others_are_not(tmp_path: Path) -> None:
    """AutoGPTQ once wrote a bias for every linear."""
    folder, floats, _ = write_model(tmp_path, CASES[G32])
    checkpoint = open_checkpoint(folder)
    config = dict(checkpoint.config)
    arrays = {name: stored(value, "F32") for name, value in plain_arrays().items()}
    for i in range(2):
        for name, shape in LINEARS.items():
            arrays |= CASES[G32].write(f"model.layers.{i}.{name}", shape).arrays
    arrays["model.layers.0.mlp.up_proj.bias"] = stored(np.zeros(160), "F16")
    write_hf(folder, arrays, config)
    assert rms(logits(folder, "fp32"), logits(floats, "fp32")) <= FP32_RMS
    arrays["model.layers.0.mlp.up_proj.bias"] = stored(np.eye(160)[3], "F16")
    with pytest.raises(FormatError, match=r"no place in a llama model.*up_proj\.bias"):
        load_model(open_checkpoint(write_hf(folder, arrays, config)))


MUTANTS = 20


@pytest.mark.parametrize("name", CASES)
def test_mutants_give_typed_errors_or_sound_tensors(name: str, tmp_path: Path) -> None:
    """Shapes, dtypes, missing arrays, odd settings: never another exception, never a bad shape."""
    random = rng(f"mutants-{name}")
    values = [None, -1, 0, 1, 3, 8, 2**70, "gptq", True, [], {}, {"a": 1}, 128, "group", "tensor"]
    refused = 0
    for _ in range(MUTANTS):
        arrays, config = one(name)
        settings = json.loads(json.dumps(config["quantization_config"]))
        for _ in range(random.integers(1, 3)):
            key = str(random.choice(list(arrays)))
            dtype, shape, data = arrays[key]
            match random.integers(5):
                case 0:
                    del arrays[key]
                    arrays.setdefault("x", stored(np.ones(2), "F32"))
                case 1:
                    arrays[key] = "U8", (len(data),), data
                case 2:
                    arrays[key] = dtype, shape[::-1], data
                case 3:
                    arrays[key] = dtype, shape, random.bytes(len(data))
                case _:
                    target = settings
                    while inner := [v for v in target.values() if isinstance(v, dict) and v]:
                        if random.integers(2):
                            break
                        target = inner[0]
                    target[str(random.choice(list(target)))] = values[random.integers(len(values))]
        try:
            opened(tmp_path, arrays, {"quantization_config": settings})
        except ModelError:
            refused += 1
    assert refused > MUTANTS // 4
