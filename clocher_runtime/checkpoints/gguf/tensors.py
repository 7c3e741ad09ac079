"""llama.cpp's tensor names and row orders, as those of a family, for reading and writing.

Query and key rows of Llama are paired for its RoPE, gate and up of experts are two tensors, and
some projections are rows of a larger one. Source: gguf-py's constants.py and tensor_mapping.py;
convert_hf_to_gguf.py (LlamaModel.permute, DeepseekV2Model.modify_tensors).
"""

import math
from collections.abc import Iterable

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.arranged import taken
from clocher_runtime.checkpoints.checkpoint import Stored, lazy_tensor, planes_of
from clocher_runtime.checkpoints.gguf.blocks import FLOATS, stored_blocks
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.models.config import Decoder
from clocher_runtime.models.families import Family, From, fused_mlp, names_of
from clocher_runtime.models.inventory import Need
from clocher_runtime.models.spec import ModelSpec

ASKED = "the metadata asks for"

ACTIVATION = "clocher.hidden_act"
"""Metadata key for the activation; llama.cpp fixes it by architecture."""

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
) -> Stored:
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


def _stored(file: GgufFile, spec: ModelSpec, name: str, need: Need, where: str) -> Stored:
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
    file.release()  # the scales show which format some types have
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
