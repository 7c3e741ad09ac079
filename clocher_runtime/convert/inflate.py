"""A small trained model inside of a published shape: the cost of the shape, the text of the model.

What is larger is filled so that it changes nothing:

    stream        zeros, and two copies of the small model's channels. Queries read the second,
                  whose norm has the factor that the larger heads' softmax divides by. Ternary
                  queries have that factor in their scale, and need no second copy.
    norms         weights times sqrt(H / H'), eps less: the rest of it is the energy of 32 channels
                  that hold the same number for every token and that only the padding's logits read.
    heads         the pairs of the rotation stand where the larger head has the same frequencies.
                  A query head stands several times in its group; all but one are not read.
    sub-norms     as norms; the values that they see are scaled so that eps is what it was.
    experts       each stands as often as a token has more of them; the rest are never chosen.
    vocabulary    what is beyond the small model's has logits of -1e4 and less.
    layers        those beyond are random, and what they would add to the stream is zero.

Matrices are quantised in the small model, and their codes and scales are moved.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format, Ternary
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.opening import open_checkpoint
from clocher_runtime.convert.fit import NEVER, PADDING, PLACES, Fit
from clocher_runtime.convert.gguf import SAME, GgufExport, plan_gguf
from clocher_runtime.convert.gguf_model import begins_with_bos
from clocher_runtime.convert.gguf_vocabulary import vocabulary_fields
from clocher_runtime.convert.placed_tensors import (
    CELL,
    Patch,
    in_scales,
    placed_matrix,
    placed_vector,
    zero_tensor,
)
from clocher_runtime.convert.synthetic import (
    Precision,
    Synthesis,
    described,
    random_tensor,
    room,
    stored_config,
)
from clocher_runtime.convert.to_iebin import refuse_hf_folder, vocabulary
from clocher_runtime.engine.load import describe
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import EMBED, HEAD, NORM, head_name, inventory
from clocher_runtime.models.spec import ModelSpec

FAMILIES = ("llama", "bitnet", "gpt_oss")

_VECTOR = Float("f32")
_LAYERS = "model.layers."
_KEPT = (
    "original_max_position_embeddings",
    "max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "swiglu_limit",
    "swiglu_alpha",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "hidden_activation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "block_diffusion",
)
"""Fields of config.json that are the small model's."""
_ADDED = ("o_proj", "down_proj")


def plan_inflation(
    model_dir: Path,
    preset: str,
    precision: Precision,
    out_dir: Path,
    *,
    seed: int = 0,
    layers: int | None = None,
    gguf: str | None = None,
    pre: str | None = None,
) -> Synthesis:
    """Check everything that can be checked before writing.

    Args:
        model_dir: the small model.
        preset: name of a preset of the same family.
        precision: how matrices are stored, in groups of 32.
        out_dir: directory for the output; it is made if need be.
        seed: of the layers beyond the small model's.
        layers: keep only this many layers of the preset.
        gguf: also write GGUF: "same", or a float type for llama-quantize; None: no.
        pre: what GGUF calls how text is split, if that is not to be found.

    Raises:
        ModelError: the small model is missing or damaged.
        UsageError: it does not fit in the preset, or an argument cannot be used.
        UnsupportedModel, FormatError: GGUF cannot hold the model.
        OSError: the disk is too small.
    """
    refuse_hf_folder(out_dir)
    if precision.group != "32":
        raise UsageError(f"--inflate with groups of {precision.group}; expected 32")
    small = open_checkpoint(model_dir)
    if any(file.path.resolve().parent == out_dir.resolve() for file in small.files):
        raise UsageError(f"{out_dir}: holds the small model itself; choose another --out-dir")
    own, _ = describe(small)
    bare = stored_config(preset, precision, layers)
    family = spec_from_config(bare).family
    if own.family != family or family not in FAMILIES:
        raise UsageError(
            f"{model_dir} is a {own.family} model, {preset} a {family} one; expected the same "
            f"family, one of {', '.join(FAMILIES)}"
        )
    config = _config(small.config, bare)
    spec = spec_from_config(config)
    formats = _formats(precision, spec)
    fit = Fit(own, spec, formats[EMBED], _is_scaled(spec, formats))
    fit.check(preset)
    config["rms_norm_eps"] = fit.eps
    fit = replace(fit, large=spec_from_config(config))
    source = {
        "container": "inflated",
        "model": model_dir.resolve().name,
        **described(preset, precision, seed),
    }
    export = _export(small, config, formats, preset, gguf, pre) if gguf else None
    vocab = vocabulary(small)
    nbytes, free = room(fit.large, formats, vocab, export, out_dir)
    settings = (config, small.generation_config, small.tokenizer_config)
    make = _Maker(small, fit, formats, seed)
    return Synthesis(preset, settings, vocab, formats, make, out_dir, export, source, nbytes, free)


def _config(small: Mapping[str, Any], large: Mapping[str, Any]) -> dict[str, Any]:
    """Return the large model's config.json with all that is no size from the small one's."""
    config = {key: value for key, value in large.items() if key not in _KEPT}
    config |= {key: small[key] for key in _KEPT if key in small}
    config["head_dim"] = spec_from_config(large).head_dim
    kinds = small.get("layer_types")
    if "layer_types" in config and kinds:
        count = config["num_hidden_layers"]
        config["layer_types"] = [*kinds, *config["layer_types"][len(kinds) :]][:count]
    return config


def _formats(precision: Precision, spec: ModelSpec) -> dict[str, Format]:
    """Return the format of every tensor: vectors and ternary scales are fp32, to be exact."""
    needs, formats = inventory(spec), precision.formats(spec)
    for name, fmt in formats.items():
        if needs[name].kind == "vector":
            formats[name] = _VECTOR
        elif isinstance(fmt, Ternary):
            formats[name] = Ternary(scale_dtype="f32")
    return formats


def _is_scaled(spec: ModelSpec, formats: Mapping[str, Format]) -> bool:
    """Return whether queries are ternary, and with them all that a factor must go into.

    Raises:
        UsageError: not all that the sub-norms read is.
    """
    kinds = {
        isinstance(formats[name], Ternary)
        for name, need in inventory(spec).items()
        if need.kind == "linear" and (spec.sub_norms or name.endswith(".q_proj.weight"))
    }
    if spec.sub_norms and False in kinds:
        raise UsageError(
            "--inflate of a BitNet needs all its linears ternary; leave out --precision"
        )
    return True in kinds


def _export(
    small: Checkpoint,
    config: Mapping[str, Any],
    formats: Mapping[str, Format],
    preset: str,
    gguf: str,
    pre: str | None,
) -> GgufExport:
    if gguf == SAME and any(isinstance(fmt, Ternary) for fmt in formats.values()):
        raise UsageError(
            "--gguf of an inflated ternary model; its scales are fp32, ggml's are f16; leave out "
            "--gguf, or choose --gguf f32"
        )
    tokenizer, spec = vocabulary(small), spec_from_config(config)
    names: Mapping[str, Any] = {}
    if tokenizer is not None:
        begins = begins_with_bos(small)
        ends, size = spec.eos_ids, spec.vocab_size
        names = vocabulary_fields(tokenizer, small.tokenizer_config, ends, size, begins, pre)
    return plan_gguf(config, formats, preset, gguf, names)


@dataclass(frozen=True, slots=True, eq=False)
class _Maker:
    """Makes the tensors of a large model.

    Attributes:
        small: the small model's weights.
        fit: how it stands in the large one.
        formats: of the large model's tensors.
        seed: of random layers.
    """

    small: Checkpoint
    fit: Fit
    formats: Mapping[str, Format]
    seed: int

    def __call__(self, name: str) -> QuantTensor:
        """Return a tensor."""
        need, fmt = inventory(self.fit.large)[name], self.formats[name]
        part = name
        if name.startswith(_LAYERS):
            layer, part = name.removeprefix(_LAYERS).split(".", 1)
            if int(layer) >= self.fit.own.num_layers:
                is_added = any(stem in part for stem in _ADDED)
                zero = zero_tensor(need.shape, fmt) if is_added else None
                return zero or random_tensor(name, need, fmt, self.seed)
        source = head_name(self.fit.own) if name == HEAD else name
        stored = self.small.tensor(source, verify=True)
        factor = self.fit.factors().get(part, 1.0)
        axes = [self.fit.axes()[axis] for axis in PLACES[part]]
        if need.kind == "vector":
            values = placed_vector(stored.decode() * np.float32(factor), axes)
            self._finish(part, values)
            return encode(values, fmt)
        small = in_scales(stored, fmt, factor)
        return placed_matrix(small, axes, self._patches(part))

    def _finish(self, part: str, values: np.ndarray) -> None:
        """Put numbers into a vector that the small model's has not."""
        fit = self.fit
        if part == NORM:
            values[fit.spare : fit.spare + CELL] = fit.alarm
        elif part == "input_layernorm.weight" and not fit.scaled:
            values[fit.own.hidden_size : fit.spare] *= np.float32(math.sqrt(fit.stretch))
        elif part == "mlp.router.bias" and fit.own.moe:
            values[fit.own.moe.experts * fit.twins :] = NEVER

    def _patches(self, part: str) -> tuple[Patch, ...]:
        fit, vocab = self.fit, self.fit.own.vocab_size
        constant = Patch(slice(None), fit.spare, fit.constant)
        padding = Patch(slice(vocab, None), fit.spare, PADDING)
        if part == EMBED:
            return (constant, padding) if fit.large.tied else (constant,)
        return (padding,) if part == HEAD else ()
