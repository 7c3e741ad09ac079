"""Small sound files of Hugging Face models, a few kilobytes each."""

import json
from io import BytesIO
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np

from clocher_kernels.dtypes import STORAGE
from clocher_runtime.disk.safetensors_file import DTYPES
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.spec import ModelSpec, RopeSpec

Seed = dict[str, bytes]
"""Name in the directory -> content: the files of one model, or one file."""

Arrays = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> safetensors dtype and shape."""

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
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "truncate": False,
        },
        "quantization_config": {"quant_method": "mxfp4"},
    },
)
_CT_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
            },
        }
    },
}
_QUANTISED: tuple[tuple[dict[str, Any], Arrays], ...] = (
    (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        {"e_blocks": ("U8", (2, 3, 1, 16)), "e_scales": ("U8", (2, 3, 1)), "w": ("BF16", (3, 2))},
    ),
    (
        {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        {"w.weight": ("U8", (2, 5)), "w.weight_scale": ("BF16", (1,)), "n": ("F32", (3,))},
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"w.weight": ("F8_E4M3", (4, 5)), "w.weight_scale_inv": ("F32", (1, 1))},
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
        {
            "w.qweight": ("I32", (8, 8)),
            "w.qzeros": ("I32", (2, 1)),
            "w.scales": ("F16", (2, 8)),
            "w.g_idx": ("I32", (64,)),
        },
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        {
            "w.qweight": ("I32", (64, 1)),
            "w.qzeros": ("I32", (2, 1)),
            "w.scales": ("F16", (2, 8)),
        },
    ),
    (
        _CT_GROUPS,
        {
            "w.weight_packed": ("I32", (4, 8)),
            "w.weight_scale": ("F16", (4, 2)),
            "w.weight_shape": ("I64", (2,)),
        },
    ),
)
_GIVEN = {
    "w.weight_shape": np.array([4, 64], "<i8").tobytes(),
    "w.g_idx": (np.arange(64, dtype="<i4") // 32).tobytes(),
}
_GIVEN_BY = {
    "bitnet": {"w.weight": b"\x15" * 10},  # the digits 1, 1, 1, 0
    "gptq": {"w.qzeros": b"\x77" * 8},  # zero points of 8, less one
}


_TORCH = {"F32": "Float", "F16": "Half", "BF16": "BFloat16"}
"""safetensors dtype -> name of torch's storage."""


def safetensors_bytes(arrays: Arrays, values: dict[str, bytes] | None = None) -> bytes:
    """Return a safetensors file. Without given values, every float in it is small and finite."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, (dtype, shape) in arrays.items():
        count = int(np.prod(shape, dtype=np.int64)) * STORAGE[DTYPES[dtype]].itemsize
        data = (values or {}).get(name) or bytes(index * 7 % 0x40 for index in range(count))
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def safetensors() -> list[Seed]:
    """Return single safetensors files: all dtypes, scalars, empty tensors."""
    every: Arrays = {f"t{index}": (dtype, (2, 3)) for index, dtype in enumerate(DTYPES)}
    small: Arrays = {"a": ("F32", ()), "b": ("U8", (0, 4)), "model.c.weight": ("BF16", (1, 2, 3))}
    return [{"model.safetensors": safetensors_bytes(arrays)} for arrays in (every, small)]


def hf_quantised() -> list[Seed]:
    """Return Hugging Face directories, one for each way that weights come quantised."""
    return [
        {
            "config.json": json_bytes({"model_type": "llama", "quantization_config": settings}),
            "model.safetensors": safetensors_bytes(
                arrays, _GIVEN | _GIVEN_BY.get(str(settings["quant_method"]), {})
            ),
        }
        for settings, arrays in _QUANTISED
    ]


def hf_sharded() -> list[Seed]:
    """Return a whole Llama in two shards with their index, and all its side files."""
    files = llama()
    arrays = llama_arrays()
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        files[shard] = safetensors_bytes({name: arrays[name] for name in held})
    del files["model.safetensors"]
    files["model.safetensors.index.json"] = json_bytes(
        {
            "metadata": {"total_size": 1},
            "weight_map": {name: shard for shard, held in shards.items() for name in held},
        }
    )
    return [files]


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


def tokenizers() -> list[Seed]:
    """Return a small byte-level BPE tokenizer with its settings."""
    vocab = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ã": 4, "©": 5, "Ċ": 6}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = True
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 7,
                "content": "<s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "fuse_unk": False,
            "vocab": vocab,
            "merges": [["a", "b"]],
        },
    }
    settings = {"bos_token": "<s>", "eos_token": {"content": "<s>"}, "add_bos_token": True}
    return [{"tokenizer.json": json_bytes(document), "tokenizer_config.json": json_bytes(settings)}]


def torch_bin() -> list[Seed]:
    """Return Hugging Face directories of pickled weights: one file of all dtypes, and two shards.

    Their pickles are what torch.save writes.
    """
    every: Arrays = {f"t{index}": (dtype, (2, 3)) for index, dtype in enumerate(_TORCH)}
    shards: dict[str, Arrays] = {
        f"pytorch_model-{n}.bin": {name: ("F32", (2, 3))} for n, name in enumerate("ab")
    }
    config = {"config.json": json_bytes({"model_type": "llama"})}
    weight_map = {name: shard for shard, arrays in shards.items() for name in arrays}
    return [
        config | {"pytorch_model.bin": torch_archive(every)},
        config
        | {shard: torch_archive(arrays) for shard, arrays in shards.items()}
        | {"pytorch_model.bin.index.json": json_bytes({"weight_map": weight_map})},
    ]


def torch_archive(arrays: Arrays) -> bytes:
    """Return what torch.save writes for a dictionary of tensors; their values are small."""
    records = {"data.pkl": _tensors_pickle(arrays), "byteorder": b"little"}
    for key, (dtype, shape) in enumerate(arrays.values()):
        count = int(np.prod(shape, dtype=np.int64)) * STORAGE[DTYPES[dtype]].itemsize
        records[f"data/{key}"] = bytes(index * 7 % 0x40 for index in range(count))
    return archive_bytes(
        {f"m/{name}": data for name, data in (records | {"version": b"3"}).items()}
    )


def archive_bytes(records: dict[str, bytes]) -> bytes:
    """Return a ZIP archive of records that are stored as they are."""
    out = BytesIO()
    with ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(ZipInfo(name), data)
    return out.getvalue()


def _tensors_pickle(arrays: Arrays) -> bytes:
    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    out = b"\x80\x02ccollections\nOrderedDict\nq\0)Rq\1("
    for key, (name, (dtype, shape)) in enumerate(arrays.items()):
        storage = b"(" + text("storage") + f"ctorch\n{_TORCH[dtype]}Storage\n".encode()
        count = int(np.prod(shape))
        storage += text(str(key)) + text("cpu") + number(count) + b"tQ"
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        sizes = b"".join(b"(" + b"".join(map(number, found)) + b"t" for found in (shape, strides))
        out += text(name) + b"ctorch._utils\n_rebuild_tensor_v2\nq\2(" + storage + number(0)
        out += sizes + b"\x89h\0)RtR"
    return out + b"u}" + text("_metadata") + b"h\1sb."


def llama_spec() -> ModelSpec:
    """Return the smallest Llama."""
    return ModelSpec(
        family="llama",
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        windows=(0,),
        rope=RopeSpec(10000.0),
        max_positions=64,
        norm_eps=1e-5,
    )


def llama_arrays() -> Arrays:
    """Return the tensors of the smallest Llama."""
    return {name: ("BF16", need.shape) for name, need in inventory(llama_spec()).items()}


def llama() -> Seed:
    """Return the Hugging Face directory of the smallest Llama."""
    (tokenizer,) = tokenizers()
    return {
        "config.json": json_bytes(CONFIG),
        "generation_config.json": json_bytes({"eos_token_id": [2]}),
        "model.safetensors": safetensors_bytes(llama_arrays()),
        **tokenizer,
    }


def json_bytes(document: Any) -> bytes:
    """Return a document as JSON text."""
    return json.dumps(document).encode()
