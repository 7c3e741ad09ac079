"""A GGUF file, or its parts, as a checkpoint; the configs follow from its metadata.

llama-gguf-split makes parts `NAME-00001-of-00003.gguf`. Source: llama.cpp's gguf-split.cpp and
llama-model-loader.cpp.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf import architectures, tokenizer
from clocher_runtime.checkpoints.gguf.blocks import I2_S
from clocher_runtime.checkpoints.gguf.file import MAX_TENSORS, GgufFile, Metadata
from clocher_runtime.checkpoints.gguf.tensors import ACTIVATION, file_family, logical_tensor
from clocher_runtime.checkpoints.locate import SUFFIX, listed, some
from clocher_runtime.models.families import names_of, spec_from_config
from clocher_runtime.models.inventory import inventory

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
        for key in part.keys:
            ours, theirs = first.value(key), part.value(key)
            # Arrays, and what the first part lacks, are not compared.
            if key != _NO and isinstance(ours, str | int | float) and ours != theirs:
                raise FormatError(
                    f"{part.file.path}: metadata {key!r} is {theirs!r:.60}, in "
                    f"{first.file.path.name} {ours!r:.60}: parts of two models?"
                )
        if no:
            first.attach(part)
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
        raise FormatError(
            f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}"
        )
    if extra := [
        name for name in file.tensors if name not in wanted and name not in architectures.TABLES
    ]:
        raise UnsupportedModel(
            f"{path}: {len(extra)} tensors have no place in a {spec.family} model, the first is "
            f"{extra[0]!r}"
        )
    return Checkpoint(
        path=path,
        kind="gguf",
        config=config,
        generation_config={"eos_token_id": ids} if (ids := tokenizer.stop_ids(file)) else {},
        tokenizer_config=tokenizer.tokenizer_config(file) if tokenizer.has_vocabulary(file) else {},
        tokenizer_json=path / "tokenizer.json",
        tensors={
            source: logical_tensor(file, family, spec, source, need, f"{path}: tensor {source!r}")
            for source, need in needs.items()
        },
        files=file.files,
        notes=(_ON_ARM,) if any(t.kind == I2_S for t in file.tensors.values()) else (),
        make_tokenizer=(lambda: tokenizer.tokenizer_json(file))
        if tokenizer.has_vocabulary(file)
        else None,
        pooling=_POOLINGS.get(Metadata(file).value("pooling_type"), ""),
    )
