"""A GGUF file, or its parts, as a checkpoint; the configs follow from its metadata.

llama-gguf-split makes parts `NAME-00001-of-00003.gguf`. Source: llama.cpp's gguf-split.cpp,
llama-model-loader.cpp, convert_hf_to_gguf.py (LlamaModel.permute, DeepseekV2Model.modify_tensors);
gguf-py's constants.py and tensor_mapping.py.
"""

import math
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel, counted
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.arranged import taken
from clocher_runtime.checkpoints.checkpoint import Checkpoint, lazy_tensor, planes_of
from clocher_runtime.checkpoints.gguf import architectures, tokenizer
from clocher_runtime.checkpoints.gguf.blocks import FLOATS, I2_S, stored_blocks
from clocher_runtime.checkpoints.gguf.file import MAX_TENSORS, GgufFile, Metadata
from clocher_runtime.checkpoints.locate import SUFFIX, listed, some
from clocher_runtime.models.config import Decoder
from clocher_runtime.models.families import Family, From, fused_mlp, names_of, spec_from_config
from clocher_runtime.models.inventory import Need, inventory
from clocher_runtime.models.spec import ModelSpec

MAX_PARTS = 1024
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
# Keys that change the arithmetic, and the values that leave it as Clocher computes it.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "attn_logit_softcapping"), (0,)),
    **dict.fromkeys(("expert_count", "final_logit_softcapping", "use_parallel_residual"), (0,)),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.output_scale", "embedding_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("expert_weights_scale", "residual_scale", "rope.scaling.alpha"), (0, 1)),
    "attention.causal": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
_POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""Of llama.cpp's `llama_pooling_type`; 0 is none."""
_ON_ARM = (
    "i2_s codes are read in the order of bitnet.cpp on x86; a file made on Arm has another, which "
    "the file does not record; the output is then nonsense"
)
_SIZES = ("attention.value_length", "rope.dimension_count")
_OTHER_SIZES = {"phi3": _SIZES[1:], "deepseek2": _SIZES}
"""Sizes that are the head's, and the architectures where they need not be."""
ASKED = "the metadata asks for"

ACTIVATION = "clocher.hidden_act"
"""Metadata key for the activation; llama.cpp fixes it by architecture."""

# llama.cpp's names, as those of a family: query and key rows of Llama are paired for its RoPE, gate
# and up of experts are two tensors, and some projections are rows of a larger one.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.router": "ffn_gate_inp",
    "mlp.router.choice_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_rope_proj": "attn_kv_a_mqa",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
_GATE_UP = {"mlp.experts.gate_up_proj": "weight", "mlp.experts.gate_up_proj_bias": "bias"}
_PAIRED_FAMILIES = ("llama", "mistral", "mixtral", "smollm3", "llama4", "granite", "granite_hybrid")
_LATENT = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.q_b_proj"), "mla_q"),
    **{"self_attn.kv_a_proj": "mla_latent", "self_attn.k_rope_proj": "mla_rope"},
}


def find_gguf(path: Path) -> Path | None:
    """Return the path of a GGUF file (its first part), or of the only model in a directory."""
    if not os.path.isdir(path):
        return path if path.suffix.lower() == SUFFIX else None
    found = models_among(listed(path))
    if len(found) > 1:
        raise ModelNotFound(f"{path}: {len(found)} GGUF files ({some(found)}); name one of them")
    return path / found[0] if found else None


def models_among(names: Iterable[str]) -> list[str]:
    """Return the GGUF files among file names; of the parts of a model the first one."""
    found = sorted((name for name in names if name.lower().endswith(SUFFIX)), reverse=True)
    parts = {m.group(1, 3, 4) if (m := _PART.fullmatch(name)) else name: name for name in found}
    return sorted(parts.values())


def open_file(path: Path) -> GgufFile:
    """Open a file, and all other parts if it is one of several."""
    named = GgufFile(path)
    count = named.get(_COUNT, int, 1)
    if count <= 1:
        return named
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_PARTS:
        raise FormatError(
            f"{path}: {_COUNT} says that it is one of {count} parts; expected at most {MAX_PARTS} "
            f"and a name like NAME-00001-of-{count:05}{SUFFIX}, which the others follow from"
        )
    paths = [
        path.with_name(f"{match[1]}-{no:05}-of-{match[3]}{match[4]}") for no in range(1, count + 1)
    ]
    if missing := [part.name for part in paths if not os.path.isfile(part)]:
        raise ModelNotFound(
            f"{path}: {len(missing)} of {count} parts are missing: {some(missing)}; put all of "
            f"them in {path.parent}"
        )
    return _joined([named if part == path else GgufFile(part) for part in paths])


def _joined(parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    total = first.get(_TENSORS, int)
    for no, part in enumerate(parts):
        for key, expected in ((_NO, no), (_COUNT, len(parts))):
            if (got := part.get(key, int)) != expected:
                raise FormatError(
                    f"{part.file.path}: {key} is {got}; expected {expected}, as its name says"
                )
        for key, theirs in part.metadata.items():
            ours = first.metadata.get(key)
            # Arrays, and what the first part lacks, are not compared.
            if key != _NO and isinstance(ours, str | int | float) and ours != theirs:
                raise FormatError(
                    f"{part.file.path}: metadata {key!r} is {theirs!r:.60}, in "
                    f"{first.file.path.name} {ours!r:.60}: parts of two models?"
                )
        if no and (both := first.tensors.keys() & part.tensors.keys()):
            name = min(both)
            there = first.tensors[name].file.path.name
            raise FormatError(f"{part.file.path}: tensor {name!r} is in {there}, too")
        first.tensors |= part.tensors
    first.files = tuple(part.file for part in parts)
    if len(first.tensors) != total or total > MAX_TENSORS:
        raise FormatError(
            f"{first.file.path}: {len(first.tensors)} tensors in {len(parts)} parts; {_TENSORS} "
            f"says {total}, and the limit is {MAX_TENSORS}"
        )
    return first


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file's model; raises UnsupportedModel, FormatError."""
    arch = file.get("general.architecture", str)
    where = str(file.file.path)
    if file.get("general.type", str, "model") == "adapter":
        raise UnsupportedModel(
            f"{where}: a LoRA adapter, not a model; merge it into its base first (llama.cpp's "
            "llama-export-lora), and give the result"
        )
    if arch not in architectures.ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {arch!r:.60} is not known; Clocher reads GGUF files of "
            f"{', '.join(architectures.ARCHITECTURES)}"
        )
    if arch == "bitnet" and file.get(ACTIVATION, str, "silu") != "relu2":
        raise UnsupportedModel(
            f"{where}: llama.cpp computes 'bitnet' with SiLU, Clocher's BitNet (2B-4T) has a "
            "squared ReLU; files of that model say bitnet-b1.58"
        )
    meta = Metadata(file)
    name, more = architectures.ARCHITECTURES[arch]
    config = _common(meta, name)
    config |= more(meta, config)
    for key, neutral in _NEUTRAL.items():
        value = None if key in meta.read else meta.value(key)
        if value is not None and not (isinstance(value, int | float) and value in neutral):
            raise UnsupportedModel(
                f"{where}: {arch}.{key} is {value!r:.60}; Clocher knows {neutral[0]}"
            )
    return config


def _common(meta: Metadata, name: str) -> dict[str, Any]:
    file, heads = meta.file, meta.get("attention.head_count", int)
    for key in _SIZES:
        got = meta.get(key, int, meta.head_dim)
        if got != meta.head_dim and key not in _OTHER_SIZES.get(meta.arch, ()):
            raise UnsupportedModel(
                f"{meta.where}: {meta.arch}.{key} is {got}; Clocher needs that of the keys, "
                f"{meta.head_dim}"
            )
    if "token_embd.weight" not in file.tensors:
        raise FormatError(f"{meta.where}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [name],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": meta.get("embedding_length", int),
        "intermediate_size": meta.get("feed_forward_length", int),
        "num_hidden_layers": meta.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", int, heads),
        "head_dim": meta.head_dim,
        "max_position_embeddings": meta.get("context_length", int),
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": architectures.rope_parameters(meta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokenizer.token_id(file, "bos"),
        "eos_token_id": tokenizer.token_id(file, "eos"),
    }
    if meta.arch not in ("qwen2", "qwen2moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config


def file_family(spec: ModelSpec, names: Iterable[str] = ()) -> Family:
    """Return llama.cpp's names of a model's tensors; `names` are a file's, which may fuse some."""
    within = {name.split(".", 2)[-1] for name in names}
    tensors: dict[str, tuple[From, ...]] = {key: (From(name),) for key, name in _NAMES.items()}
    for key, tail in _GATE_UP.items():
        tensors[key] = From(f"ffn_gate_exps.{tail}"), From(f"ffn_up_exps.{tail}")
        if f"ffn_gate_up_exps.{tail}" in within:
            tensors[key] = (From(f"ffn_gate_up_exps.{tail}", "halves"),)
    if spec.family == "gpt_oss" or spec.post_norms:  # the norm after attention, or before the MLP
        tensors["post_attention_layernorm"] = (From("post_attention_norm"),)
    fused, paired = "attn_qkv.weight" in within, spec.family in _PAIRED_FAMILIES
    for part in "qkv":
        order = [part] * fused + ["paired"] * (paired and part != "v")
        origin = From("attn_qkv" if fused else f"attn_{part}", "_".join(order) or "all")
        tensors[f"self_attn.{part}_proj"] = (origin,)
    if spec.mla is not None:
        tensors |= {key: (From(_NAMES[key], order),) for key, order in _LATENT.items()}
    if "ffn_up.weight" in within and "ffn_gate.weight" not in within:
        tensors |= fused_mlp("ffn_up")
    return Family("gguf", Decoder, tensors, "blk.{}.")


def logical_tensor(
    file: GgufFile, family: Family, spec: ModelSpec, source: str, need: Need, where: str
) -> QuantTensor:
    """Return a tensor of the model from those of the file."""
    names = [name for name, _ in names_of(family, source, need)]
    named = {name: _stored(file, spec, name, need, where) for name in names}
    found = taken(family, spec, named, source, need, where, ASKED)
    if found.shape != need.shape:
        raise FormatError(
            f"{where}: {names[0]} has shape {list(file.tensors[names[0]].shape)}; {ASKED} "
            f"{list(need.shape)}"
        )
    return found


def _stored(file: GgufFile, spec: ModelSpec, name: str, need: Need, where: str) -> QuantTensor:
    """Return a tensor as the file has it, in as many dimensions as the model's."""
    info, rank = file.tensors[name], len(need.shape)
    if need.kind == "vector" and info.kind.name not in FLOATS:
        raise UnsupportedModel(
            f"{where}: a vector of {info.kind.name}; expected {', '.join(FLOATS)}"
        )
    # A matrix of one row has one dimension in a file, and a stack may be one matrix here.
    shape = (1,) * (rank - len(info.shape)) + info.shape
    shape = (math.prod(shape[: len(shape) - rank + 1]), *shape[len(shape) - rank + 1 :])
    found = stored_blocks(file.data(name), info.kind, shape, where)
    info.file.release()  # the scales show which format some types have
    if not name.endswith(".attn_k_b.weight"):
        return found
    # A stack of matrices, each transposed.
    heads, columns = spec.num_heads, shape[-1]
    if len(info.shape) != 3 or info.shape[0] != heads:
        raise FormatError(f"{where}: {name} has shape {list(info.shape)}; {ASKED} {heads} matrices")

    def make() -> dict[str, np.ndarray]:
        values = QuantTensor(shape, found.format, planes_of(found)).decode()
        turned = values.reshape(heads, -1, columns).swapaxes(1, 2)
        return {"data": np.ascontiguousarray(turned).reshape(heads * columns, -1)}

    return lazy_tensor((heads * columns, shape[0] // heads), Float("f32"), make, where)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF checkpoint; data is repacked tensor by tensor on demand.

    Headers, metadata, names and shapes are checked here, and the scales of tq2_0 matrices read.
    Raises ModelNotFound, FormatError, UnsupportedModel, WindowError.
    """
    file = open_file(path)
    config = model_config(file)
    try:
        spec = spec_from_config(config)
    except (FormatError, UnsupportedModel) as error:
        raise type(error)(f"{path}: the metadata give this {error}") from None
    needs, family = inventory(spec), file_family(spec, file.tensors)
    wanted = dict(pair for source in needs for pair in names_of(family, source, needs[source]))
    if missing := [name for name in wanted if name not in file.tensors]:
        count = counted(len(missing), "tensor")
        raise FormatError(f"{path}: {count} missing, the first is {missing[0]!r}")
    if extra := [
        name for name in file.tensors if name not in wanted and name not in architectures.TABLES
    ]:
        raise UnsupportedModel(
            f"{path}: {counted(len(extra), 'tensor')} with no place in a {spec.family} model, the "
            f"first is {extra[0]!r}"
        )
    has_text = tokenizer.has_vocabulary(file)
    return Checkpoint(
        path=path,
        kind="gguf",
        config=config,
        generation_config={"eos_token_id": ids} if (ids := tokenizer.stop_ids(file)) else {},
        tokenizer_config=tokenizer.tokenizer_config(file) if has_text else {},
        tokenizer_json=path / "tokenizer.json",
        tensors={
            source: logical_tensor(file, family, spec, source, need, f"{path}: tensor {source!r}")
            for source, need in needs.items()
        },
        files=file.files,
        notes=(_ON_ARM,) if any(t.kind == I2_S for t in file.tensors.values()) else (),
        make_tokenizer=partial(tokenizer.tokenizer_json, file) if has_text else None,
        pooling=_POOLINGS.get(Metadata(file).value("pooling_type"), ""),
    )
