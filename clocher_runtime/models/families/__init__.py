"""Model families, from config.json to ModelSpec: a class and a row in a module of this folder."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.schema import shown
from clocher_runtime.models.config import WHERE
from clocher_runtime.models.family import Family
from clocher_runtime.models.spec import ModelSpec

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "GptOssForCausalLM": "experts",
        "BitNetForCausalLM": "llama",
        "BitnetForCausalLM": "llama",
        "LlamaForCausalLM": "llama",
        "SmolLM3ForCausalLM": "llama",
        "Llama4ForCausalLM": "llama",
        "MistralForCausalLM": "llama",
        "Ministral3ForCausalLM": "llama",
        "MixtralForCausalLM": "llama",
        "Qwen2ForCausalLM": "qwen",
        "Qwen2MoeForCausalLM": "qwen",
        "Qwen3ForCausalLM": "qwen",
        "SDARForCausalLM": "qwen",
        "Fast_dLLM_QwenForCausalLM": "qwen",
        "Qwen3MoeForCausalLM": "qwen",
        "GemmaForCausalLM": "gemma",
        "Gemma2ForCausalLM": "gemma",
        "Gemma3ForCausalLM": "gemma",
        "Phi3ForCausalLM": "llama",
        "Olmo2ForCausalLM": "llama",
        "Olmo3ForCausalLM": "llama",
        "GraniteForCausalLM": "llama",
        "GraniteMoeHybridForCausalLM": "llama",
        "DeepseekV2ForCausalLM": "experts",
        "DeepseekV3ForCausalLM": "experts",
        "LLaDA2MoeModelLM": "experts",
    }
)
"""Architecture -> the module of its family, which is imported when it is asked for."""

_WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
        "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
        "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    }
)
"""Multimodal architecture -> its text model, described by `text_config`."""
_SHARED = (
    "quantization_config",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "generation_config",
)
"""Fields of the whole model's config that apply to the text, unless its own sets them."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model, maybe in `text_config`. Raises FormatError."""
    inner = config.get("text_config")
    if inner is None and _named(config) in _WRAPPERS:
        raise FormatError(
            f"{WHERE}: text_config is missing, in which {_named(config)} has the text"
        )
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise FormatError(f"{WHERE}: text_config is {shown(inner)}; expected an object")
    names = _architectures(config)
    known = _by_model_type(str(inner.get("model_type")).removesuffix("_text"))
    name = known if known in FAMILIES else _WRAPPERS.get(names[0], names[0])
    outer = {key: config[key] for key in _SHARED if config.get(key) is not None}
    # transformers ties multimodal models by the outer setting.
    if "tie_word_embeddings" in config:
        outer["tie_word_embeddings"] = config["tie_word_embeddings"]
        inner = {key: value for key, value in inner.items() if key != "tie_word_embeddings"}
    return {**outer, **inner, "architectures": [name]}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Turn a config.json into a ModelSpec. Raises UnsupportedModel, FormatError."""
    config = text_config(config)
    spec = family_of(config).read(config)
    if spec.num_heads % spec.num_kv_heads:
        raise FormatError(
            f"{WHERE}: {spec.num_heads} attention heads do not divide into "
            f"{spec.num_kv_heads} key/value heads"
        )
    if spec.head_dim % 2:
        raise FormatError(f"{WHERE}: head_dim is {spec.head_dim}; RoPE needs an even one")
    return spec


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names. Raises UnsupportedModel, FormatError."""
    name = _architectures(config)[0]
    module = FAMILIES.get(name)
    if module == "llama":
        from clocher_runtime.models.families.llama import FAMILIES as found
    elif module == "qwen":
        from clocher_runtime.models.families.qwen import FAMILIES as found
    elif module == "gemma":
        from clocher_runtime.models.families.gemma import FAMILIES as found
    elif module == "experts":
        from clocher_runtime.models.families.experts import FAMILIES as found
    else:
        listed = ", ".join(sorted(each.removesuffix("ForCausalLM") for each in FAMILIES))
        raise UnsupportedModel(
            f"{WHERE}: architecture {shown(name)} is not known{_nearest(name)}; Clocher reads the "
            f"decoders of text that docs/using.md lists: {listed}"
        )
    return found[name]


def _named(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    if names is None:
        names = [_by_model_type(str(config.get("model_type")))]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise FormatError(f"{WHERE}: architectures is {shown(names)}; expected a list of one name")
    return [_with_head(names[0])]


def _with_head(name: str) -> str:
    """Return "LlamaForCausalLM" for "LlamaModel", a model saved without its head."""
    whole = f"{name.removesuffix('Model')}ForCausalLM"
    return whole if name.endswith("Model") and whole in FAMILIES else name


def _by_model_type(name: str) -> str:
    wanted = name.replace("_", "").removesuffix("text") + "forcausallm"
    return next((known for known in FAMILIES if known.lower() == wanted), name)


def _nearest(name: str) -> str:
    from difflib import get_close_matches

    found = get_close_matches(name, FAMILIES, 1, 0.5)
    return f"; the nearest that is is {found[0]}" if found else ""
