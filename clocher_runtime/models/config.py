"""config.json, field by field: what every family has, the rotary embedding, windows, BitNet.

A `Struct` says of each field its type, its range and its default. Null counts as left out, as
transformers writes it for unset fields, except where a family says otherwise.
"""

from collections.abc import Mapping
from math import log
from typing import Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.disk.schema import given, one_of, read_as, shown, unknown
from clocher_runtime.models.spec import ModelSpec, RopeSpec

WHERE = "config.json"
LAYER_TYPES = ("sliding_attention", "full_attention")

# No dimension of a model is larger; keeps products far from overflow.
Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Heads = Annotated[int, Meta(ge=1, le=4096)]
Layers = Annotated[int, Meta(ge=1, le=1024)]
Epsilon = Annotated[float, Meta(ge=1e-12, le=1.0)]
# Wide of everything published, and so narrow that no table of angles overflows or divides by zero.
Theta = Annotated[float, Meta(ge=1.001, le=1e12)]
_Rotations = Annotated[float, Meta(ge=1e-3, le=1e6)]
_Magnitude = Annotated[float, Meta(ge=0.0, le=100.0)]
_TokenId = Annotated[int, Meta(ge=0)]


class Ends(Struct):
    """The tokens that end a text, of config.json and of generation_config.json."""

    eos_token_id: _TokenId | list[_TokenId] = []

    def eos_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return those that the vocabulary has."""
        ids = self.eos_token_id
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if i < vocab_size)


class Decoder(Ends, kw_only=True):
    """The fields of every decoder; defaults are those of transformers' LlamaConfig.

    Attributes:
        num_key_value_heads: None: as many as attention heads.
        head_dim: None: hidden_size / heads.
    """

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
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta = 10000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    quantization_config: dict[str, Any] | None = None

    def spec(self, family: str, windows: tuple[int, ...] = (), **more: Any) -> ModelSpec:
        """Return the model: these fields, and what the family adds.

        Args:
            family: its name.
            windows: of each layer; (): all keys are visible.
            **more: fields of `ModelSpec`.
        """
        heads, act = self.num_attention_heads, self.ACTIVATION
        return ModelSpec(
            family=family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=heads,
            num_kv_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or max(self.hidden_size // heads, 1),
            windows=windows or (0,) * self.num_hidden_layers,
            max_positions=self.max_position_embeddings,
            norm_eps=self.rms_norm_eps,
            rope=_rope(self),
            act="relu2" if act == "relu2" else "silu",
            tied=self.tie_word_embeddings,
            eos_ids=self.eos_ids(self.vocab_size),
            **more,
        )


_D = TypeVar("_D", bound=Decoder)


def read_config(config: Mapping[str, Any], kind: type[_D]) -> _D:
    """Return the fields of a config as a family declares them.

    `sliding_window` alone may be null: nothing slides then.

    Raises:
        FormatError: a field is of the wrong type or out of range.
        UnsupportedModel: the activation is another one, or only a part of a head is rotated.
    """
    one_of(config, "hidden_act", kind.ACTIVATION, (kind.ACTIVATION,), WHERE)
    _whole_heads(config, WHERE)
    fields = given(config)
    if "sliding_window" in config:
        fields["sliding_window"] = config["sliding_window"]
    return read_as(fields, kind, WHERE)


class _Linear(Struct):
    factor: _Rotations


class _Llama3(_Linear):
    original_max_position_embeddings: Size | None = None
    low_freq_factor: _Rotations = 1.0
    high_freq_factor: _Rotations = 4.0


class _Yarn(_Linear):
    original_max_position_embeddings: Size | None = None
    beta_fast: _Rotations = 32.0
    beta_slow: _Rotations = 1.0
    truncate: bool = True
    mscale: _Magnitude = 0.0
    mscale_all_dim: _Magnitude = 0.0
    attention_factor: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None


class _Theta(Struct):
    rope_theta: Theta


def _rope(config: Decoder) -> RopeSpec:
    """Read the rotary embedding in either spelling.

    Old: `rope_theta` beside `rope_scaling` {"type" or "rope_type", ...}. New (transformers 5):
    `rope_parameters` with all of it.

    Source: transformers modeling_rope_utils; YaRN is Peng et al. 2023 (arXiv 2309.00071).
    """
    name = "rope_scaling" if config.rope_parameters is None else "rope_parameters"
    stated = getattr(config, name)
    if stated is None:
        return config.ROPE or RopeSpec(config.rope_theta)
    where, scaling = f"{WHERE}: {name}", given(stated)
    _whole_heads(scaling, where)
    theta = read_as({"rope_theta": config.rope_theta, **scaling}, _Theta, where).rope_theta
    spelled = "rope_type" if "rope_type" in scaling else "type"
    kind = one_of(scaling, spelled, "default", ("default", "linear", "llama3", "yarn"), where)
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", read_as(scaling, _Linear, where).factor)
    known = config.original_max_position_embeddings or config.max_position_embeddings
    if kind == "llama3":
        llama = read_as(scaling, _Llama3, where)
        low, high = llama.low_freq_factor, llama.high_freq_factor
        if high <= low:
            raise FormatError(f"{WHERE}: high_freq_factor {high} must exceed {low}")
        original = llama.original_max_position_embeddings or known
        return RopeSpec(theta, kind, llama.factor, original, low, high)
    yarn = read_as(scaling, _Yarn, where)
    return RopeSpec(
        theta,
        "yarn",
        yarn.factor,
        yarn.original_max_position_embeddings or known,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        truncate=yarn.truncate,
        attention_factor=yarn.attention_factor or _attention_factor(yarn),
    )


def _attention_factor(yarn: _Yarn) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if yarn.factor <= 1 else 0.1 * mscale * log(yarn.factor) + 1.0

    if yarn.mscale and yarn.mscale_all_dim:
        return magnitude(yarn.mscale) / magnitude(yarn.mscale_all_dim)
    return magnitude(1.0)


def _whole_heads(fields: Mapping[str, Any], where: str) -> None:
    """Refuse a rotation of a part of each head, which would change the arithmetic."""
    one_of(fields, "partial_rotary_factor", 1, (1, 1.0), where)


def layer_windows(
    types: list[Any] | None, layers: int, window: int | None, default: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the window of each layer from `layer_types`, or from the family's own pattern.

    Args:
        types: `layer_types`; None: the config has none.
        layers: number of layers.
        window: visible keys of a sliding layer, the query included; None: nothing slides.
        default: layer type of each layer without `layer_types`.

    Raises:
        FormatError: the list has another length.
        UnsupportedModel: it names a type that is not known, or one slides without a window.
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
    """Read what a BitNet quantization_config changes in the graph.

    Returns:
        Keyword arguments of ModelSpec: ternarize, input_norm_eps.

    Source: transformers BitNetQuantConfig.
    """
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
