"""GGUF files written by the gguf package, following llama.cpp's convert_hf_to_gguf.py."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ggml_encode import encode

from clocher_kernels.formats import parse_format
from clocher_kernels.formats.ggml import GGML_KINDS
from clocher_runtime.checkpoints.checkpoint import Checkpoint

Kind = gguf.GGMLQuantizationType
F32 = Kind.F32
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GptOssForCausalLM": "gpt-oss",
    "BitNetForCausalLM": "bitnet-b1.58",
}
_ONLY_READ = set(GGML_KINDS) - {"q4_1", "q5_0", "q5_1", "tq1_0"}
_NAMES = {"bitnet-b1.58": "bitnet"}


def raw_blocks(kind: Kind, values: np.ndarray) -> tuple[np.ndarray, Kind]:
    """Return values as gguf-py quantises them, or Clocher where gguf-py only reads the type."""
    values, name = np.ascontiguousarray(values, np.float32), kind.name.lower()
    if name in _ONLY_READ:
        return encode(values, parse_format(name)).planes["blocks"], kind
    return gguf.quants.quantize(values, kind), kind


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows as llama.cpp rotates them (LlamaModel.permute)."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Return a model's values, fp32, under llama.cpp's names and in its rows."""
    config = checkpoint.config
    arch = ARCHITECTURES[config["architectures"][0]]
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == _NAMES.get(arch, arch))
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {}
    for source in checkpoint.names:
        values = checkpoint.tensor(source).decode()
        stem, tail = source, ""
        for suffix in (".weight", ".bias", "_bias"):
            if source.endswith(suffix):
                stem, tail = source.removesuffix(suffix), "." + suffix.strip("._")
        tail = tail or ".weight"
        if stem.endswith("gate_up_proj"):
            layer = stem.split(".")[2]
            found[f"blk.{layer}.ffn_gate_exps{tail}"] = values[:, 0::2]
            found[f"blk.{layer}.ffn_up_exps{tail}"] = values[:, 1::2]
            continue
        if arch == "llama" and stem.split(".")[-1] in heads:
            values = permuted(values, heads[stem.split(".")[-1]])
        name = names.get_name(stem) or names.get_name(source)
        assert name is not None, source
        found[name + tail] = values
    return found


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a config.json that depend on the architecture, without the prefix."""
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if "num_local_experts" in config:
        values["expert_count"] = config["num_local_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        values["attention.sliding_window"] = config["sliding_window"]
    if rope.get("rope_type") in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    return values


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """Return rope_freqs.weight of a Llama 3, as convert_hf_to_gguf.py computes it."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    freqs = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for wavelength in 2 * np.pi / freqs:
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        plain = wavelength < original / high
        factors.append(1 if plain else factor if wavelength > original / low else between)
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, Kind]],
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a file with the gguf package.

    Args:
        path: the file.
        config: the model's config.json.
        tensors: what the file holds: values, or the bytes of blocks with their type.
        extra: adds more metadata.
    """
    arch = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    for key, value in settings(config).items():
        kinds = {str: "string", float: "float32", int: "uint32"}
        getattr(writer, f"add_{kinds[type(value)]}")(f"{arch}.{key}", value)
    if extra:
        extra(writer)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=None if kind == F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_f32(checkpoint: Checkpoint) -> dict[str, tuple[np.ndarray, Kind]]:
    """Return a model's tensors for `write_gguf`, all in fp32."""
    return {name: (values, F32) for name, values in gguf_tensors(checkpoint).items()}


def add_tokenizer(folder: Path, pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """Return what adds the byte-level tokenizer of a Hugging Face directory to a file."""
    document = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["id"] for token in document["added_tokens"]}

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_token_types([control if i in special else normal for i in range(len(tokens))])
        writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
        writer.add_bos_token_id(vocab[config["bos_token"]])
        writer.add_eos_token_id(vocab[config["eos_token"]])
        writer.add_add_bos_token(False)
        writer.add_chat_template(config["chat_template"])

    return add
