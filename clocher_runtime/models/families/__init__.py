"""Model families: each turns a config.json into a ModelSpec. Adding one is adding a file here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.models.families import bitnet, gpt_oss, llama, qwen
from clocher_runtime.models.fields import Fields, shown
from clocher_runtime.models.spec import ModelSpec

FAMILIES: Mapping[str, Callable[[Fields], ModelSpec]] = MappingProxyType(
    {
        "GptOssForCausalLM": gpt_oss.spec,
        "BitNetForCausalLM": bitnet.spec,
        "BitnetForCausalLM": bitnet.spec,
        "LlamaForCausalLM": llama.llama,
        "MistralForCausalLM": llama.mistral,
        "Qwen2ForCausalLM": qwen.qwen2,
        "Qwen3ForCausalLM": qwen.qwen3,
    }
)
_BY_MODEL_TYPE = {
    "gpt_oss": "GptOssForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a config.json into a ModelSpec.

    Raises:
        UnsupportedModel: the architecture or one of its settings is not known.
        FormatError: a field is missing, of the wrong type or out of range.
    """
    names = config.get("architectures")
    if names is None:
        names = [_BY_MODEL_TYPE.get(str(config.get("model_type")), str(config.get("model_type")))]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise FormatError(
            f"config.json: architectures is {shown(names)}; expected a list of one name"
        )
    if names[0] not in FAMILIES:
        raise UnsupportedModel(
            f"config.json: architecture {names[0]!r:.80} is not known; Clocher runs "
            f"{', '.join(FAMILIES)}"
        )
    spec = FAMILIES[names[0]](Fields(config))
    if spec.num_heads % spec.num_kv_heads:
        raise FormatError(
            f"config.json: {spec.num_heads} attention heads do not divide into "
            f"{spec.num_kv_heads} key/value heads"
        )
    if spec.head_dim % 2:
        raise FormatError(f"config.json: head_dim is {spec.head_dim}; RoPE needs an even one")
    return spec
