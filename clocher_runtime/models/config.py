"""config.json fields common to all families, layer types, BitNet settings. Null: absent."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import given, one_of, read_as, shown, unknown
from clocher_runtime.models.config_fields import (
    WHERE,
    BlockSize,
    Epsilon,
    Fraction,
    Heads,
    Layers,
    MaskId,
    Size,
    Theta,
    read_rope,
)
from clocher_runtime.models.spec import Act, BlockDiffusion, ModelSpec, RopeSpec

LAYER_TYPES = ("sliding_attention", "full_attention")

_TokenId = Annotated[int, Meta(ge=0)]


ACTIVATIONS: Mapping[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Activation names in transformers configs."""


class Ends(Struct):
    """End-of-text tokens, of config.json and of generation_config.json."""

    eos_token_id: _TokenId | list[_TokenId] = []

    def eos_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return those within the vocabulary."""
        ids = self.eos_token_id
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if i < vocab_size)


class BlockDiffusionFields(Struct, forbid_unknown_fields=True):
    """`block_diffusion` of a config.json, of any family; see `BlockDiffusion`."""

    block_size: BlockSize
    mask_token_id: MaskId
    context: Literal["causal", "block"] = "causal"
    shift: bool = False
    sub_block_size: BlockSize | None = None


class Decoder(Ends, kw_only=True):
    """The fields of every decoder; defaults are those of transformers' LlamaConfig."""

    ACTIVATION: ClassVar[str] = "silu"
    ROPE: ClassVar[RopeSpec | None] = None
    """The published scaling, where a config has neither spelling."""

    vocab_size: Size = 32000
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Heads = 32
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    max_position_embeddings: Size = 2048
    original_max_position_embeddings: Size | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    partial_rotary_factor: Fraction = 1.0
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta = 10000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    quantization_config: dict[str, Any] | None = None
    block_diffusion: BlockDiffusionFields | None = None

    def spec(self, family: str, windows: tuple[int, ...] = (), **more: Any) -> ModelSpec:
        """Return the ModelSpec from these fields and the family's own."""
        heads, rope = self.num_attention_heads, self.rope()
        positions = self.max_position_embeddings
        if rope.kind == "dynamic":  # a longer context only changes its base
            positions = int(positions * max(rope.factor, 1.0))
        fields: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_heads": heads,
            "num_kv_heads": self.num_key_value_heads or heads,
            "head_dim": self.dim,
            "windows": windows or (0,) * self.num_hidden_layers,
            "max_positions": positions,
            "norm_eps": self.rms_norm_eps,
            "rope": rope,
            "act": ACTIVATIONS[self.hidden_activation or self.hidden_act or self.ACTIVATION],
            "tied": self.tie_word_embeddings,
            "eos_ids": self.eos_ids(self.vocab_size),
            "diffusion": self.diffusion(),
            "qkv_bias": self.attention_bias,
            "o_bias": self.attention_bias,
        }
        return ModelSpec(family=family, **{**fields, **more})

    def diffusion(self) -> BlockDiffusion | None:
        """Return the block diffusion settings, if any. Raises FormatError, UnsupportedModel."""
        stated = self.block_diffusion
        if stated is None:
            return None
        if stated.shift and stated.context == "causal":
            raise UnsupportedModel(
                f"{WHERE}: block_diffusion.shift is true and context is causal; expected context "
                "block with shifted logits"
            )
        if 64 % stated.block_size:  # a page of the cache ends where a block does
            raise FormatError(
                f"{WHERE}: block_size is {stated.block_size}; expected 2, 4, 8, 16, 32 or 64"
            )
        if stated.mask_token_id >= self.vocab_size:
            raise FormatError(
                f"{WHERE}: the mask token is {stated.mask_token_id}; expected an id below "
                f"vocab_size, {self.vocab_size}"
            )
        part = stated.sub_block_size or stated.block_size
        if stated.block_size % part:
            raise FormatError(
                f"{WHERE}: sub_block_size is {part}; expected a divisor of block_size, "
                f"{stated.block_size}"
            )
        return BlockDiffusion(
            stated.block_size, stated.mask_token_id, stated.context, stated.shift, part
        )

    @property
    def dim(self) -> int:
        """Values of a head."""
        return int(self.head_dim or max(self.hidden_size // self.num_attention_heads, 1))

    def rope(self, layer_type: str = LAYER_TYPES[1]) -> RopeSpec:
        """Return the rotary embedding of a layer type."""
        name = "rope_scaling" if self.rope_parameters is None else "rope_parameters"
        stated = getattr(self, name)
        if stated is None and self.ROPE is not None:
            return self.ROPE
        if stated is not None and any(kind in stated for kind in LAYER_TYPES):
            name, stated = f"{name}.{layer_type}", stated.get(layer_type)
            if stated is not None and not isinstance(stated, dict):
                raise FormatError(f"{WHERE}: {name} is {shown(stated)}; expected an object")
        return read_rope(
            stated,
            f"{WHERE}: {name}",
            theta=self.rope_theta,
            part=self.partial_rotary_factor,
            head_dim=self.dim,
            positions=self.max_position_embeddings,
            original=self.original_max_position_embeddings,
        )


_D = TypeVar("_D", bound=Decoder)


def read_config(config: Mapping[str, Any], kind: type[_D]) -> _D:
    """Return a config as a family declares it. Raises FormatError, UnsupportedModel."""
    for name in ("hidden_act", "hidden_activation"):
        one_of(config, name, kind.ACTIVATION, ACTIVATIONS, WHERE)
    fields = given(config)
    if "sliding_window" in config:
        fields["sliding_window"] = config["sliding_window"] or None
    return read_as(fields, kind, WHERE)


def layer_windows(
    types: list[Any] | None, layers: int, window: int | None, default: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the window of each layer. Raises FormatError, UnsupportedModel.

    `default`: type of each layer; `window` includes the query; None: no layer slides.
    """
    types = list(default) if types is None else types
    if len(types) != layers:
        raise FormatError(f"{WHERE}: layer_types is {shown(types)}; expected {layers} names")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise unknown("layer type", kind, LAYER_TYPES, WHERE)
    if window is None and LAYER_TYPES[0] in types:
        raise UnsupportedModel(f"{WHERE}: layer_types has sliding layers, but no sliding_window")
    return tuple((window or 0) if kind == LAYER_TYPES[0] else 0 for kind in types)


class _OnlineNorm(Struct):
    use_rms_norm: bool = False
    rms_norm_eps: Epsilon = 1e-6


def bitnet_settings(config: Decoder) -> dict[str, Any]:
    """Return ModelSpec keywords of a BitNetQuantConfig (transformers)."""
    settings, where = config.quantization_config, f"{WHERE}: quantization_config"
    if settings is None or settings.get("quant_method") != "bitnet":
        return {}
    mode = one_of(settings, "quantization_mode", "offline", ("offline", "online"), where)
    linear = one_of(settings, "linear_class", "bitlinear", ("bitlinear", "autobitlinear"), where)
    norm = read_as(given(settings), _OnlineNorm, where)
    return {
        "ternarize": mode == "online" and linear == "autobitlinear",
        "input_norm_eps": norm.rms_norm_eps if norm.use_rms_norm else 0.0,
    }
