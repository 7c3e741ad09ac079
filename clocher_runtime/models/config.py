"""config.json: the fields of every family, their limits, RoPE in both spellings. Null: absent.

Source: transformers modeling_rope_utils; YaRN (arXiv 2309.00071), LongRoPE (2402.13753).
"""

from collections.abc import Callable, Mapping
from math import log, sqrt
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.strict_json import given, one_of, read_as, shown, unknown
from clocher_runtime.models.spec import Act, BlockDiffusion, ModelSpec, RopeSpec

WHERE = "config.json"
LAYER_TYPES = ("sliding_attention", "full_attention")

# Above any real dimension; keeps products far from overflow.
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Experts = Annotated[int, Meta(ge=1, le=4096)]
Count = Annotated[int, Meta(ge=0, le=65536)]
MaskId = Annotated[int, Meta(ge=0, le=1 << 24)]
BlockSize = Annotated[int, Meta(ge=2, le=64)]
LayerNumber = Annotated[int, Meta(ge=0, le=1024)]
Interval = Annotated[int, Meta(ge=1, le=1024)]
Epsilon = Annotated[float, Meta(ge=1e-12, le=1.0)]
# Beyond everything published, but no table of angles overflows or divides by zero.
Theta = Annotated[float, Meta(ge=1.001, le=1e12)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
_TokenId = Annotated[int, Meta(ge=0)]
_Rotations = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Magnitude = Annotated[float, Meta(ge=0.0, le=100.0)]
_Factors = Annotated[list[_Rotations], Meta(min_length=1, max_length=1 << 12)]

ACTIVATIONS: Mapping[str, Act] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Activation names in transformers configs."""
_NULL_IS_NONE = (
    "sliding_window",
    "q_lora_rank",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
"""Fields where null, or 0, is a value of its own, not the default."""


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


class Usual(NamedTuple):
    """Fields that a config leaves out, as published; here those of transformers' LlamaConfig."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class Decoder(Ends, kw_only=True):
    """The fields of every decoder; further defaults are those of transformers' LlamaConfig.

    A family is a subclass: what is `USUAL`, its own fields and defaults, and `more` made of them.
    """

    USUAL: ClassVar[Usual] = Usual()
    ACTIVATION: ClassVar[str] = "silu"
    SCALING: ClassVar[dict[str, Any] | None] = None
    """The published RoPE scaling, where a config has neither spelling."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None
    head_dim: Heads | None
    max_position_embeddings: Size
    rms_norm_eps: Epsilon
    rope_theta: Theta
    original_max_position_embeddings: Size | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    partial_rotary_factor: Fraction = 1.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    layer_types: list[Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    quantization_config: dict[str, Any] | None = None
    block_diffusion: BlockDiffusionFields | None = None

    def more(self) -> dict[str, Any]:
        """Return the fields of ModelSpec that differ from Llama's."""
        return {}

    def spec(self, family: str) -> ModelSpec:
        """Return the ModelSpec. Raises FormatError, UnsupportedModel."""
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
            "windows": (0,) * self.num_hidden_layers,
            "max_positions": positions,
            "norm_eps": self.rms_norm_eps,
            "rope": rope,
            "act": ACTIVATIONS[self.hidden_activation or self.hidden_act or self.ACTIVATION],
            "tied": self.tie_word_embeddings,
            "eos_ids": self.eos_ids(self.vocab_size),
            "diffusion": _diffusion(self.blocks(), self.vocab_size),
            "qkv_bias": self.attention_bias,
            "o_bias": self.attention_bias,
        }
        return ModelSpec(family=family, **{**fields, **self.more()})

    def blocks(self) -> BlockDiffusionFields | None:
        """Return the block-diffusion settings, if any."""
        return self.block_diffusion

    @property
    def dim(self) -> int:
        """Values of a head."""
        return int(self.head_dim or max(self.hidden_size // self.num_attention_heads, 1))

    @property
    def scaling(self) -> dict[str, Any] | None:
        """What the config states of RoPE."""
        stated = self.rope_scaling if self.rope_parameters is None else self.rope_parameters
        return self.SCALING if stated is None else stated

    def rope(self, layer_type: str = LAYER_TYPES[1]) -> RopeSpec:
        """Return the rotary embedding of a layer type."""
        name = "rope_scaling" if self.rope_parameters is None else "rope_parameters"
        stated: Any = self.scaling
        if stated is not None and any(kind in stated for kind in LAYER_TYPES):
            name, stated = f"{name}.{layer_type}", stated.get(layer_type)
            if stated is not None and not isinstance(stated, dict):
                raise FormatError(f"{WHERE}: {name} is {shown(stated)}; expected an object")
        return _rope(self, given(stated or {}), f"{WHERE}: {name}")

    def windows(self, window: int | None, slides: Callable[[int], object]) -> tuple[int, ...]:
        """Return the window of each layer, 0 for none; `window` None: no layer may slide.

        `slides` says which layers do if `layer_types` is absent.
        """
        layers = range(self.num_hidden_layers)
        types = self.layer_types
        if types is None:
            types = [LAYER_TYPES[not slides(layer)] for layer in layers]
        checked(types, LAYER_TYPES, len(layers))
        if window is None and LAYER_TYPES[0] in types:
            raise UnsupportedModel(
                f"{WHERE}: layer_types has sliding layers, but no sliding_window"
            )
        return tuple((window or 0) if kind == LAYER_TYPES[0] else 0 for kind in types)


_D = TypeVar("_D", bound=Decoder)


def read_config(config: Mapping[str, Any], kind: type[_D]) -> _D:
    """Return a config as a family declares it. Raises FormatError, UnsupportedModel."""
    for name in ("hidden_act", "hidden_activation"):
        one_of(config, name, kind.ACTIVATION, ACTIVATIONS, WHERE)
    own = {name: config[name] or None for name in _NULL_IS_NONE if name in config}
    return read_as({**kind.USUAL._asdict(), **given(config), **own}, kind, WHERE)


def checked(types: list[Any], known: tuple[str, ...], layers: int) -> None:
    """Refuse a `layer_types` of another length, or of unknown types."""
    if len(types) != layers:
        raise FormatError(f"{WHERE}: layer_types is {shown(types)}; expected {layers} names")
    for kind in types:
        if kind not in known:
            raise unknown("layer type", kind, known, WHERE)


def missing(name: str, where: str = WHERE) -> FormatError:
    """Return the error for a field that has no default."""
    return FormatError(f"{where}: field {name!r} is missing")


def _diffusion(stated: BlockDiffusionFields | None, vocab_size: int) -> BlockDiffusion | None:
    if stated is None:
        return None
    if stated.shift and stated.context == "causal":
        raise UnsupportedModel(
            f"{WHERE}: block_diffusion.shift is true and context is causal; expected context "
            "block with shifted logits"
        )
    size, part = stated.block_size, stated.sub_block_size or stated.block_size
    if 64 % size:  # a page of the cache ends where a block does
        raise FormatError(f"{WHERE}: block_size is {size}; expected 2, 4, 8, 16, 32 or 64")
    if stated.mask_token_id >= vocab_size:
        raise FormatError(
            f"{WHERE}: the mask token is {stated.mask_token_id}; expected an id below "
            f"vocab_size, {vocab_size}"
        )
    if size % part:
        raise FormatError(
            f"{WHERE}: sub_block_size is {part}; expected a divisor of block_size, {size}"
        )
    return BlockDiffusion(size, stated.mask_token_id, stated.context, stated.shift, part)


_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Older names: Phi-3's "su"; for text alone, Qwen's three-dimensional positions are plain."""


class _Rope(Struct):
    rope_theta: Theta
    partial_rotary_factor: Fraction
    factor: _Rotations | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: _Rotations = 1.0
    high_freq_factor: _Rotations = 4.0
    beta_fast: _Rotations = 32.0
    beta_slow: _Rotations = 1.0
    truncate: bool = True
    mscale: _Magnitude = 0.0
    mscale_all_dim: _Magnitude = 0.0
    attention_factor: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    short_factor: _Factors | None = None
    long_factor: _Factors | None = None


def _rope(config: Decoder, fields: dict[str, Any], where: str) -> RopeSpec:
    usual = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.partial_rotary_factor}
    read = read_as({**usual, **fields}, _Rope, where)
    rotated = int(config.dim * read.partial_rotary_factor)
    positions = config.max_position_embeddings
    if rotated < 2 or rotated % 2:
        raise FormatError(
            f"{where}: {rotated} of {config.dim} values of a head are rotated; expected an even "
            "number of at least 2"
        )
    spelled = "rope_type" if "rope_type" in fields else "type"
    named = fields.get(spelled, "default")
    kind = _OTHER_NAMES.get(named, named) if isinstance(named, str) else named
    one_of({spelled: kind}, spelled, "default", _KINDS, where)
    spec: dict[str, Any] = {"theta": read.rope_theta, "kind": kind}
    spec["rotated"] = 0 if rotated == config.dim else rotated
    if kind == "default":
        return RopeSpec(**spec)
    known = read.original_max_position_embeddings or config.original_max_position_embeddings
    original, factor, attention = known or positions, read.factor, read.attention_factor
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            factors = getattr(read, name)
            if factors is None:
                raise missing(name, where)
            if len(factors) != rotated // 2:
                raise FormatError(
                    f"{where}: {len(factors)} numbers in {name}; expected {rotated // 2}"
                )
            spec[f"{name}s"] = tuple(factors)
        factor = factor or positions / original
        if attention is None:
            attention = 1.0 if factor <= 1 else sqrt(1 + log(factor) / log(max(original, 2)))
        spec["attention_factor"] = attention
    if factor is None:
        raise missing("factor", where)
    if kind == "llama3":
        spec |= {name: getattr(read, name) for name in ("low_freq_factor", "high_freq_factor")}
        if read.high_freq_factor <= read.low_freq_factor:
            raise FormatError(
                f"{where}: high_freq_factor {read.high_freq_factor} must exceed "
                f"{read.low_freq_factor}"
            )
    elif kind == "yarn":
        spec |= {name: getattr(read, name) for name in ("beta_fast", "beta_slow", "truncate")}
        if attention is None:
            attention = magnitude(factor)
            if read.mscale and read.mscale_all_dim:
                attention = magnitude(factor, read.mscale) / magnitude(factor, read.mscale_all_dim)
        spec["attention_factor"] = attention
    if kind != "linear":
        spec["original_positions"] = positions if kind == "dynamic" else original
    return RopeSpec(**spec, factor=factor)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0
