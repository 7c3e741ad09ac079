"""A Hugging Face directory as a checkpoint; `torch_bin` opens pickled weights.

gpt-oss in `original/` has other config keys and tensor names, and the same bytes. Source:
github.com/openai/gpt-oss, gpt_oss/torch/model.py (ModelConfig, AttentionBlock), weights.py.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats import Float, Mxfp4, Ternary
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.floats import Scope
from clocher_runtime.checkpoints.arranged import arranged
from clocher_runtime.checkpoints.checkpoint import Checkpoint, stored_tensor
from clocher_runtime.checkpoints.hf import shards
from clocher_runtime.checkpoints.locate import CONFIG, refuse_foreign_quantisation
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import read_as, unknown
from clocher_runtime.models.families import family_of, text_config

_MAX_TEMPLATE_BYTES = 1_000_000
_MODE = "pooling_mode_"
_POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
# transformers multiplies float experts from the right and stores them [E, K, N]; here, and in MXFP4
# checkpoints, they are [E, N, K].
_TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


def open_hf(directory: Path) -> Checkpoint:
    """Open the checkpoint of a Hugging Face directory."""
    return read_folder(directory, "hf", "model", ".safetensors", shards.open_safetensors)


def read_folder(
    directory: Path, kind: Literal["hf", "bin"], stem: str, suffix: str, read: shards.ReadFile
) -> Checkpoint:
    """Return the checkpoint of a directory from weight files <stem><suffix>; see `read_shards`."""
    folder = shards.HfFolder(directory)
    config = folder.json(CONFIG)
    of_openai = "model_type" not in config and "experts_per_token" in config
    if of_openai:
        config = canonical_config(config, str(directory / CONFIG))
    settings = check_config(config, str(directory))
    arrays, files = shards.read_shards(folder, stem, suffix, read)
    if of_openai:
        arrays = {canonical_name(name): stored for name, stored in arrays.items()}
    try:
        stored, notes = logical_tensors(arrays, settings)
    except UnsupportedModel:
        if "architectures" in config:
            family_of(text_config(config))  # what a model is comes before what its tensors are
        raise
    tensors, more = arranged(stored, config, str(directory))
    return Checkpoint(
        path=directory,
        kind=kind,
        config=text_config(config),
        generation_config=folder.optional_json("generation_config.json"),
        tokenizer_config=_tokenizer_config(folder),
        tokenizer_json=_tokenizer(folder, of_openai),
        tensors=tensors,
        files=files,
        notes=(*notes, *more),
        pooling=_pooling(folder.optional_json("1_Pooling/config.json")),
    )


def check_config(config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the `quantization_config` of a config.json; refuse an unsupported one."""
    refuse_foreign_quantisation(config, where)
    if config.get(shards.SETTINGS) is None:
        return None
    where = f"{where}: {shards.SETTINGS}"
    settings = read_as(config[shards.SETTINGS], dict, where)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise unknown("quant_method", method, _METHODS, where)
    return settings


def _tokenizer(folder: shards.HfFolder, of_openai: bool) -> Path:
    """Return tokenizer.json, which OpenAI keeps above `original/`."""
    above = folder.directory.parent / "tokenizer.json"
    own = os.path.lexists(folder.directory / "tokenizer.json")
    return above if of_openai and not own and above.is_file() else folder.member("tokenizer.json")


def _tokenizer_config(folder: shards.HfFolder) -> dict[str, Any]:
    config = folder.optional_json("tokenizer_config.json")
    if folder.has("chat_template.jinja"):
        path = folder.member("chat_template.jinja")
        try:
            config["chat_template"] = read_bytes(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8: {error}") from None
    return config


def _pooling(config: Mapping[str, Any]) -> str:
    """Return the pooling of sentence-transformers' config."""
    modes = config.get("pooling_mode", [])
    modes = [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    modes += [name.removeprefix(_MODE) for name in config if config[name] is True and _MODE in name]
    return "+".join(_POOLINGS.get(name, name) for name in modes)


def logical_tensors(
    arrays: Mapping[str, shards.StoredArray], settings: Mapping[str, Any] | None
) -> tuple[shards.Tensors, tuple[str, ...]]:
    """Return the logical tensors of a checkpoint, and notes on what was left out.

    `X_blocks` with `X_scales` is X in MXFP4, packed `X.weight` with `X.weight_scale` is BitNet, and
    so on, see `_METHODS`; anything else is plain float. `settings` is `quantization_config`.
    """
    source = shards.Source(dict(arrays), settings or {})
    tensors: shards.Tensors = {}
    if settings is not None:
        method = settings["quant_method"]
        source.drop_activation_scales()
        tensors = _METHODS[method](source)
        if not tensors and (method, settings.get("quantization_mode")) != ("bitnet", "online"):
            raise FormatError(f"quantization_config says {method}, but no tensor is packed")
    for name, stored in source.rest.items():
        if name in tensors:
            raise FormatError(f"{stored.where}: stored both packed and plain")
        if stored.dtype not in shards.FLOATS:
            raise UnsupportedModel(
                f"{stored.where}: dtype {stored.dtype} has no meaning here; known without "
                f"quantization_config: {', '.join(shards.FLOATS)}"
            )
        fmt = Float(shards.DTYPES[stored.dtype])
        array = stored.array
        if array.ndim == 3 and name.endswith(_TRANSPOSED):
            array = array.transpose(0, 2, 1)
        tensors[name] = stored_tensor(array.shape, fmt, {"data": array}, stored.where)
    return tensors, tuple(source.notes)


def _mxfp4(source: shards.Source) -> shards.Tensors:
    tensors: shards.Tensors = {}
    for name in source.ending("_blocks"):
        base = name.removesuffix("_blocks")
        blocks = source.rest.pop(name)
        scales = source.claim(f"{base}_scales", blocks)
        blocks.expect(("U8",))
        scales.expect(("U8",))
        if blocks.array.ndim < 3:
            raise FormatError(f"{blocks.where}: {blocks.array.ndim} dimensions, expected 3 or more")
        *rows, groups, _ = blocks.array.shape
        planes = {"blocks": blocks.array, "scales": scales.array}
        tensors[base] = stored_tensor((*rows, 32 * groups), Mxfp4(), planes, blocks.where)
    return tensors


def _bitnet(source: shards.Source) -> shards.Tensors:
    linear_class = source.choice("linear_class", "bitlinear", ("autobitlinear", "bitlinear"))
    mode = source.choice("quantization_mode", "offline", ("offline", "online"))
    packed = [name for name, stored in source.rest.items() if stored.dtype == "U8"]
    if mode == "online":
        # The weights are plain floats; the model makes them ternary at run time.
        if odd := [*packed, *source.ending(".weight_scale")]:
            raise FormatError(
                f"{source.rest[odd[0]].where}: packed, but quantization_mode is online"
            )
        return {}
    tensors: shards.Tensors = {}
    for name in packed:
        codes = source.rest.pop(name)
        scale = source.claim(f"{name}_scale", codes)
        scale.expect(shards.FLOATS)
        if codes.array.ndim != 2:
            raise FormatError(f"{codes.where}: {codes.array.ndim} dimensions, expected 2")
        rows, columns = codes.array.shape
        planes = {"codes": codes.array, "scale": scale.array}
        fmt = Ternary(linear_class == "bitlinear", shards.DTYPES[scale.dtype])
        tensors[name] = stored_tensor((4 * rows, columns), fmt, planes, codes.where)
    source.refuse_orphans(".weight_scale")
    return tensors


def _fp8(source: shards.Source) -> shards.Tensors:
    """Read fp8: DeepSeek's 128 x 128 blocks, whole tensors, or rows."""
    block = source.settings.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        raise unknown("weight_block_size", block, (f"[{BLOCK}, {BLOCK}]", None), shards.SETTINGS)
    source.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    source.choice("scale_fmt", "float", ("float",))
    # transformers takes blocks for granted where the key is left out; others mean whole tensors.
    left_out = "weight_block_size" not in source.settings
    scopes: tuple[Scope, ...] = ("b128",) if block else ("tensor", "row")
    tensors: shards.Tensors = {}
    for name in [name for name, stored in source.rest.items() if stored.dtype == "F8_E4M3"]:
        codes = source.rest.pop(name)
        other = f"{name}_scale"
        scales = source.claim(other if other in source.rest else f"{name}_scale_inv", codes)
        tensors[name] = shards.fp8_tensor(codes, scales, ("b128", *scopes) if left_out else scopes)
    source.refuse_orphans(".weight_scale", ".weight_scale_inv")
    return tensors


def _packed(source: shards.Source) -> shards.Tensors:
    """Read what few need: compressed-tensors; GPTQ or AWQ, also under AutoRound's name for them."""
    method = source.settings["quant_method"]
    if method == "compressed-tensors":
        from clocher_runtime.checkpoints.hf.compressed import read_compressed

        return read_compressed(source)
    if method == "auto-round":
        source.choice("data_type", "int", ("int",))
        known = ("auto_round:auto_gptq", "auto_round:auto_awq")
        packing = source.choice("packing_format", "left out", known, "export it as auto_gptq")
        method = packing.removeprefix("auto_round:auto_")
    from clocher_runtime.checkpoints.hf.packed_words import read_awq, read_gptq

    return read_gptq(source) if method == "gptq" else read_awq(source)


_METHODS: dict[str, Callable[[shards.Source], shards.Tensors]] = {
    "mxfp4": _mxfp4,
    "bitnet": _bitnet,
    "fp8": _fp8,
    **dict.fromkeys(("gptq", "awq", "auto-round", "compressed-tensors"), _packed),
}


_EPS = 1e-5
_HARMONY_VOCABULARY = 201_088
_HARMONY_ENDS = [200002, 199999, 200012]
"""<|return|>, <|endoftext|>, <|call|>; the published files have no such list."""

_WHOLE = {
    "embedding.weight": "model.embed_tokens.weight",
    "unembedding.weight": "lm_head.weight",
    "norm.scale": "model.norm.weight",
}
_OF_LAYER = {
    "attn.norm.scale": "input_layernorm.weight",
    "attn.qkv.weight": "self_attn.qkv_proj.weight",
    "attn.qkv.bias": "self_attn.qkv_proj.bias",
    "attn.out.weight": "self_attn.o_proj.weight",
    "attn.out.bias": "self_attn.o_proj.bias",
    "attn.sinks": "self_attn.sinks",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales",
    "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales",
    "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}
_SAME = (
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "sliding_window", "swiglu_limit"),
)
_BLOCK = re.compile(r"block\.([0-9]{1,4})\.(.+)", re.ASCII)


class _OpenAi(Struct):
    """The fields of OpenAI's config.json that transformers names otherwise; `Family` checks all."""

    num_experts: int
    experts_per_token: int
    initial_context_length: Annotated[int, Meta(ge=1, le=1 << 30)]
    rope_theta: float = 150000.0
    rope_scaling_factor: Annotated[float, Meta(ge=1, le=1 << 20)] = 32.0
    rope_ntk_alpha: float = 1.0
    rope_ntk_beta: float = 32.0


def canonical_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return OpenAI's config.json with transformers' keys; raises FormatError."""
    own = read_as(config, _OpenAi, where)
    rope: dict[str, Any] = {"rope_theta": own.rope_theta, "rope_type": "default"}
    if own.rope_scaling_factor > 1:
        rope |= {
            "rope_type": "yarn",
            "factor": own.rope_scaling_factor,
            "beta_fast": own.rope_ntk_beta,
            "beta_slow": own.rope_ntk_alpha,
            "original_max_position_embeddings": own.initial_context_length,
            "truncate": False,
        }
    found = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": own.num_experts,
        "num_experts_per_tok": own.experts_per_token,
        **{name: config[name] for name in _SAME if name in config},
        "hidden_act": "silu",
        "attention_bias": True,
        "rms_norm_eps": _EPS,
        "tie_word_embeddings": False,
        "max_position_embeddings": int(own.initial_context_length * own.rope_scaling_factor),
        "rope_parameters": rope,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    if config.get("vocab_size") == _HARMONY_VOCABULARY:
        found["eos_token_id"] = _HARMONY_ENDS
    return found


def canonical_name(name: str) -> str:
    """Return transformers' name of one of OpenAI's tensors; an unknown one stays."""
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in _OF_LAYER:
        return _WHOLE.get(name, name)
    return f"model.layers.{block[1]}.{_OF_LAYER[block[2]]}"
