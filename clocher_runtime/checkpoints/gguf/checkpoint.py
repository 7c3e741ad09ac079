"""A GGUF file as a checkpoint: config, tokenizer and tensors of one file, named as elsewhere.

From its metadata follows what a config.json and a generation_config.json would say.

Source: gguf-py's constants.py for the keys; llama.cpp's llama-model.cpp for their defaults.
"""

import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound, UnsupportedModel
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.gguf.blocks import F32
from clocher_runtime.checkpoints.gguf.file import GgufFile
from clocher_runtime.checkpoints.gguf.tensors import (
    ACTIVATION,
    ROPE_FACTORS,
    heads_of,
    logical_tensor,
    pieces,
)
from clocher_runtime.checkpoints.gguf.tokenizer import (
    has_vocabulary,
    stop_ids,
    token_id,
    tokenizer_config,
    tokenizer_json,
)
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import inventory
from clocher_runtime.models.rope import inverse_frequencies
from clocher_runtime.models.spec import RopeSpec

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "bitnet-25": "BitNetForCausalLM",
    "bitnet-b1.58": "BitNetForCausalLM",
}
# Keys that change the arithmetic, and the values that leave it as Clocher computes it.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (1,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (0,),
}


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file's model.

    Raises:
        UnsupportedModel: the architecture or one of its settings is not known.
        FormatError: an entry is missing or of the wrong type.
    """
    arch = file.text("general.architecture")
    where = str(file.file.path)
    if file.text("general.type", "model") == "adapter":
        raise UnsupportedModel(
            f"{where}: a LoRA adapter, not a model; merge it into its base first (llama.cpp's "
            "llama-export-lora), and give the result"
        )
    if arch not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {arch!r:.60} is not known; Clocher reads GGUF files of "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if file.integer("split.count", 1) > 1:
        raise UnsupportedModel(
            f"{where}: one of {file.integer('split.count')} parts; join them with "
            "llama-gguf-split --merge"
        )
    if arch == "bitnet" and file.text(ACTIVATION, "silu") != "relu2":
        raise UnsupportedModel(
            f"{where}: llama.cpp computes 'bitnet' with SiLU, Clocher's BitNet (2B-4T) has a "
            "squared ReLU; files of that model say bitnet-b1.58"
        )
    for key, neutral in _NEUTRAL.items():
        value = file.value(f"{arch}.{key}")
        if value is not None and not (isinstance(value, int | float) and value in neutral):
            raise UnsupportedModel(
                f"{where}: {arch}.{key} is {value!r:.60}; Clocher knows {neutral[0]}"
            )
    return _Reader(file, arch).config()


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the generation_config.json of a file's model: the ids that end a turn."""
    ids = stop_ids(file)
    return {"eos_token_id": ids} if ids else {}


_GUESSES = 8


class _Reader:
    """Metadata of one architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch, self.where = file, arch, str(file.file.path)
        heads = self.integer("attention.head_count")
        self.head_dim = self.integer(
            "attention.key_length", self.integer("embedding_length") // max(heads, 1)
        )

    def config(self) -> dict[str, Any]:
        self._require("attention.value_length")
        self._require("rope.dimension_count")
        if "token_embd.weight" not in self.file.tensors:
            raise FormatError(f"{self.where}: tensor 'token_embd.weight' is missing")
        heads = self.integer("attention.head_count")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.arch]],
            "vocab_size": self.file.tensors["token_embd.weight"].shape[0],
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": self.head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "bos_token_id": token_id(self.file, "bos"),
            "eos_token_id": token_id(self.file, "eos"),
        }
        if self.arch != "qwen2":
            config["attention_bias"] = "blk.0.attn_q.bias" in self.file.tensors
        return config | self._family(config)

    def integer(self, key: str, default: int | None = None) -> int:
        return self.file.integer(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.file.number(f"{self.arch}.{key}", default)

    def _require(self, key: str) -> None:
        if self.integer(key, self.head_dim) != self.head_dim:
            raise UnsupportedModel(
                f"{self.where}: {self.arch}.{key} is {self.integer(key)}; Clocher needs that of "
                f"the keys, {self.head_dim}"
            )

    def _family(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what only this architecture has."""
        experts = self.integer("expert_count", 0)
        window = self.integer("attention.sliding_window", 0)
        if self.arch == "gpt-oss":
            return {
                "intermediate_size": self.integer(
                    "expert_feed_forward_length", config["intermediate_size"]
                ),
                "num_local_experts": experts,
                "num_experts_per_tok": self.integer("expert_used_count"),
                "sliding_window": window,
                **self._pattern(config["num_hidden_layers"]),
            }
        if experts:
            raise UnsupportedModel(
                f"{self.where}: {self.arch} with {experts} experts; Clocher knows only gpt-oss's"
            )
        if self.arch == "llama":
            bias = {"mlp_bias": "blk.0.ffn_gate.bias" in self.file.tensors}
            if window:
                return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
            return bias
        if window and window < config["max_position_embeddings"]:
            raise UnsupportedModel(
                f"{self.where}: {self.arch}.attention.sliding_window is {window}; llama.cpp has no "
                f"window in {self.arch} models, and the file does not say which layers have it"
            )
        return {}

    def _pattern(self, layers: int) -> dict[str, Any]:
        """Return the layer types: llama.cpp's default is Clocher's, every second layer slides."""
        value = self.file.value(f"{self.arch}.attention.sliding_window_pattern")
        if value is None or (isinstance(value, int) and value == 2):
            return {}
        if not isinstance(value, np.ndarray) or len(value) != layers:
            raise UnsupportedModel(
                f"{self.where}: attention.sliding_window_pattern is {value!r:.60}; Clocher knows 2 "
                f"and a list of {layers}"
            )
        kinds = ("full_attention", "sliding_attention")
        return {"layer_types": [kinds[bool(slides)] for slides in value]}

    def _rope(self) -> dict[str, Any]:
        theta = self.number("rope.freq_base", 10000.0)
        kind = self.file.text(f"{self.arch}.rope.scaling.type", "linear")
        factor = 1.0
        if kind != "none":
            older = self.number("rope.scale_linear", 1.0) or 1.0
            factor = self.number("rope.scaling.factor", older) or 1.0
        if ROPE_FACTORS in self.file.tensors:
            if self.arch != "llama" or kind == "yarn" or factor != 1.0:
                raise UnsupportedModel(
                    f"{self.where}: {ROPE_FACTORS} in a {self.arch} model with rope scaling "
                    f"{kind!r:.60}; Clocher knows it from Llama 3, without other scaling"
                )
            return {"rope_theta": theta, **self._llama3(theta)}
        if kind in ("none", "linear"):
            if factor == 1.0:
                return {"rope_type": "default", "rope_theta": theta}
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "yarn":
            raise UnsupportedModel(
                f"{self.where}: rope scaling {kind!r:.60}; Clocher knows none, linear, yarn and "
                f"Llama 3's ({ROPE_FACTORS})"
            )
        rope = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": self.integer(
                "rope.scaling.original_context_length"
            ),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
            # Of the model, not of the file: gpt-oss alone does not round the two bounds.
            "truncate": self.arch != "gpt-oss",
        }
        scale = self.number("rope.scaling.attn_factor", 1.0)
        scale *= self.number("rope.scaling.yarn_attn_factor", 1.0)
        if scale != 1.0:
            rope["attention_factor"] = scale * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return rope

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Return the Llama 3 scaling whose table of factors the file has.

        A factor is 1 for short wavelengths, the scaling's own for long ones and 1 / ((1 - b) / F +
        b) between, b = (original / wavelength - low) / (high - low), with low 1 and high 4 in all
        published models: the number of positions follows from any factor between.
        """
        info = self.file.tensors[ROPE_FACTORS]
        if info.kind != F32 or info.shape != (self.head_dim / 2,):
            raise FormatError(
                f"{self.where}: {ROPE_FACTORS} is {info.kind.name} {list(info.shape)}; expected "
                f"f32 [{self.head_dim / 2:g}]"
            )
        factors = self.file.data(ROPE_FACTORS).view(np.float32).astype(np.float64)
        largest = float(factors.max())
        if not (np.isfinite(factors).all() and factors.min() >= 1 and 1 <= theta <= 1e12):
            raise FormatError(
                f"{self.where}: {ROPE_FACTORS} has a factor below 1 or not finite, or the base "
                f"frequency {theta} is absurd"
            )
        if largest == 1:
            return {"rope_type": "default"}
        plain = inverse_frequencies(RopeSpec(theta), self.head_dim)
        wavelengths = 2 * np.pi / plain.astype(np.float64)
        between = (factors > 1.0001) & (factors < largest * 0.9999)
        blend = (1 / factors[between] - 1 / largest) / (1 - 1 / largest)
        guesses = np.rint(wavelengths[between] * (3 * blend + 1))[:_GUESSES]
        for original in [*map(int, guesses), *(1 << power for power in range(13, 21))]:
            spec = RopeSpec(theta, "llama3", largest, original)
            if np.allclose(plain / inverse_frequencies(spec, self.head_dim), factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": largest,
                    "original_max_position_embeddings": original,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
        raise UnsupportedModel(
            f"{self.where}: {ROPE_FACTORS} are not those of Llama 3's scaling with low_freq_factor "
            "1 and high_freq_factor 4"
        )


SUFFIX = ".gguf"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def find_gguf(path: Path) -> Path | None:
    """Return the path of a GGUF file: the path itself, or the only such file in the directory.

    Raises:
        ModelNotFound: the directory has several, or may not be listed.
    """
    if not os.path.isdir(path):
        return path if path.suffix.lower() == SUFFIX else None
    try:
        found = sorted(name for name in os.listdir(path) if name.lower().endswith(SUFFIX))
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be listed: {error.strerror}") from None
    if len(found) > 1:
        joined = "; the parts of one are joined with llama-gguf-split --merge"
        parts = joined if any(_PART.search(name) for name in found) else ""
        raise ModelNotFound(
            f"{path}: {len(found)} GGUF files ({', '.join(found[:3])}); name one of them{parts}"
        )
    return path / found[0] if found else None


def open_gguf(path: Path) -> Checkpoint:
    """Open the checkpoint in a GGUF file.

    Headers, metadata, tensor names and shapes are checked here. Of the data only the scales of
    ternary (tq2_0) matrices are read; the rest is repacked tensor by tensor when it is asked for.

    Raises:
        ModelNotFound: there is no such file.
        FormatError: the file is damaged or contradicts itself.
        UnsupportedModel: it is sound, but of a kind that is not read.
        WindowError: a timed window is open.
    """
    file = GgufFile(path)
    config = model_config(file)
    try:
        spec = spec_from_config(config)
    except (FormatError, UnsupportedModel) as error:
        raise type(error)(f"{path}: the metadata give this {error}") from None
    parts = {source: pieces(spec, source, need) for source, need in inventory(spec).items()}
    wanted = {part.name: source for source, group in parts.items() for part in group}
    if missing := [name for name in wanted if name not in file.tensors]:
        raise FormatError(
            f"{path}: {len(missing)} tensors are missing, the first is {missing[0]!r}"
        )
    if extra := [name for name in file.tensors if name not in wanted and name != ROPE_FACTORS]:
        raise UnsupportedModel(
            f"{path}: {len(extra)} tensors have no place in a {spec.family} model, the first is "
            f"{extra[0]!r}"
        )
    return Checkpoint(
        path=path,
        kind="gguf",
        config=config,
        generation_config=generation_config(file),
        tokenizer_config=tokenizer_config(file) if has_vocabulary(file) else {},
        tokenizer_json=path / "tokenizer.json",
        tensors={
            source: logical_tensor(
                file, parts[source], need, heads_of(spec, source), f"{path}: tensor {source!r}"
            )
            for source, need in inventory(spec).items()
        },
        files=(file.file,),
        make_tokenizer=(lambda: tokenizer_json(file)) if has_vocabulary(file) else None,
    )
