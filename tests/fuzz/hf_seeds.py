"""Small sound files of Hugging Face models, a few kilobytes each."""

from collections import OrderedDict
from io import BytesIO
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np
from weight_files import Array, array, safetensors_of

from clocher_runtime.checkpoints.hf.shards import DTYPES
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from fuzz import text_seeds
from fuzz.text_seeds import Seed, json_bytes

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False}
_FAMILIES: tuple[dict[str, Any], ...] = (
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
    {"model_type": "mistral", "architectures": None, "sliding_window": 16},
    {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False},
    {
        "architectures": ["BitNetForCausalLM"],
        "hidden_act": "relu2",
        "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"},
    },
    {
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"],
        "swiglu_limit": 7.0,
        "rope_parameters": _YARN,
        "quantization_config": {"quant_method": "mxfp4"},
    },
)
_CT_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}
_SCALES = array("F16", 2, 8)
_QUANTISED: tuple[tuple[dict[str, Any], dict[str, Array]], ...] = (
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {
            "e_blocks": array("U8", 2, 3, 1, 16),
            "e_scales": array("U8", 2, 3, 1),
            "w": array("BF16", 3, 2),
        },
    ),
    (
        {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        {
            "w.weight": array("U8", 2, 5, fill=0x15),  # the digits 1, 1, 1, 0
            "w.weight_scale": array("BF16", 1),
            "n": array("F32", 3),
        },
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"w.weight": array("F8_E4M3", 4, 5), "w.weight_scale_inv": array("F32", 1, 1)},
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        {
            "w.qweight": array("I32", 8, 8),
            "w.qzeros": array("I32", 2, 1, fill=0x77),  # zero points of 8, less one
            "w.scales": _SCALES,
            "w.g_idx": ("I32", (64,), (np.arange(64, dtype="<i4") // 32).tobytes()),
        },
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        {"w.qweight": array("I32", 64, 1), "w.qzeros": array("I32", 2, 1), "w.scales": _SCALES},
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _CT_WEIGHTS}},
        },
        {
            "w.weight_packed": array("I32", 4, 8),
            "w.weight_scale": array("F16", 4, 2),
            "w.weight_shape": ("I64", (2,), np.array([4, 64], "<i8").tobytes()),
        },
    ),
)


def safetensors() -> list[Seed]:
    """Return single safetensors files: all dtypes, scalars, empty tensors."""
    every = {f"t{index}": array(dtype, 2, 3) for index, dtype in enumerate(DTYPES)}
    small = {"a": array("F32"), "b": array("U8", 0, 4), "model.c.weight": array("BF16", 1, 2, 3)}
    return [{"model.safetensors": safetensors_of(found, format="pt")} for found in (every, small)]


def hf_quantised() -> list[Seed]:
    """Return Hugging Face directories, one for each way that weights come quantised."""
    return [
        {
            "config.json": json_bytes({"model_type": "llama", "quantization_config": settings}),
            "model.safetensors": safetensors_of(arrays),
        }
        for settings, arrays in _QUANTISED
    ]


def hf_sharded() -> list[Seed]:
    """Return a whole Llama in two shards with their index, and all its side files."""
    files, arrays = llama(), llama_arrays()
    del files["model.safetensors"]
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        files[shard] = safetensors_of({name: arrays[name] for name in held})
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return [files | {"model.safetensors.index.json": json_bytes(index)}]


def configs() -> list[Seed]:
    """Return config.json with generation_config.json of every family."""
    generation = json_bytes({"eos_token_id": [2, 3], "bos_token_id": 1})
    return [
        {
            "config.json": json_bytes({k: v for k, v in (CONFIG | more).items() if v is not None}),
            "generation_config.json": generation,
        }
        for more in ({}, *_FAMILIES)
    ]


def torch_archive(dtypes: dict[str, str]) -> bytes:
    """Return what torch.save writes for tensors [2, 3] of these dtypes, as of a module's state."""
    import torch  # takes seconds, and only one reader needs it

    state = OrderedDict(
        (name, torch.arange(6).reshape(2, 3).to(getattr(torch, dtype)))
        for name, dtype in dtypes.items()
    )
    state._metadata = OrderedDict()  # type: ignore[attr-defined]
    out = BytesIO()
    torch.save(state, out)
    return out.getvalue()


def archive_bytes(records: dict[str, bytes]) -> bytes:
    """Return a ZIP archive of records that are stored as they are."""
    out = BytesIO()
    with ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(ZipInfo(name), data)
    return out.getvalue()


def llama_arrays() -> dict[str, Array]:
    """Return the tensors of the smallest Llama."""
    needed = inventory(spec_from_config(CONFIG))
    return {name: array("BF16", *need.shape) for name, need in needed.items()}


def llama() -> Seed:
    """Return the Hugging Face directory of the smallest Llama."""
    byte_level = text_seeds.tokenizers()[0]
    del byte_level["text.txt"]
    return {
        "config.json": json_bytes(CONFIG),
        "generation_config.json": json_bytes({"eos_token_id": [2]}),
        "model.safetensors": safetensors_of(llama_arrays()),
        **byte_level,
    }
