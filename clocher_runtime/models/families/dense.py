"""The fields that every dense family reads the same way."""

from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.models.fields import Fields, rope_spec, shown

EPS = (1e-12, 1.0)
LAYER_TYPES = ("sliding_attention", "full_attention")


def sizes(fields: Fields, **published: Any) -> dict[str, Any]:
    """Read the sizes of a decoder; `published` holds the family's defaults.

    Args:
        fields: the config.
        published: vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads (None: as
            many as heads), head_dim (None: hidden_size / heads), positions, eps, theta, tied;
            optionally rope, a RopeSpec.

    Returns:
        Keyword arguments of ModelSpec, and "layers".
    """
    hidden = fields.integer("hidden_size", published["hidden_size"])
    heads = fields.integer("num_attention_heads", published["heads"], most=4096)
    positions = fields.integer("max_position_embeddings", published["positions"])
    vocab = fields.integer("vocab_size", published["vocab_size"])
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", published["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": fields.integer(
            "num_key_value_heads", published["kv_heads"] or heads, most=4096
        ),
        "head_dim": fields.integer(
            "head_dim", published["head_dim"] or max(hidden // heads, 1), most=4096
        ),
        "max_positions": positions,
        "norm_eps": fields.number("rms_norm_eps", published["eps"], *EPS),
        "rope": rope_spec(fields, published["theta"], positions, published.get("rope")),
        "tied": fields.flag("tie_word_embeddings", published["tied"]),
        "eos_ids": fields.token_ids("eos_token_id", vocab),
        "layers": fields.integer("num_hidden_layers", published["layers"], most=1024),
    }


def layer_windows(
    fields: Fields, layers: int, window: int | None, default: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the window of each layer from `layer_types`, or from the family's own pattern.

    Args:
        fields: the config.
        layers: number of layers.
        window: visible keys of a sliding layer, the query included; None: nothing slides.
        default: layer type of each layer when the config has no `layer_types`.

    Raises:
        FormatError: the list has another length.
        UnsupportedModel: it names a type that is not known, or one slides without a window.
    """
    types = fields.raw("layer_types")
    if types is None:
        types = list(default)
    if not isinstance(types, list) or len(types) != layers:
        raise FormatError(f"config.json: layer_types is {shown(types)}; expected {layers} names")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise UnsupportedModel(
                f"config.json: layer type {shown(kind)} is not known; Clocher knows "
                f"{', '.join(LAYER_TYPES)}"
            )
    if window is None and LAYER_TYPES[0] in types:
        raise UnsupportedModel("config.json: layer_types has sliding layers, but no sliding_window")
    return tuple((window or 0) if kind == LAYER_TYPES[0] else 0 for kind in types)


def bitnet_settings(fields: Fields) -> dict[str, Any]:
    """Read what a BitNet quantization_config changes in the graph.

    Returns:
        Keyword arguments of ModelSpec: ternarize, input_norm_eps.

    Source: transformers BitNetQuantConfig.
    """
    quant = fields.section("quantization_config")
    if quant is None or quant.raw("quant_method") != "bitnet":
        return {}
    online = quant.choice("quantization_mode", "offline", ("offline", "online")) == "online"
    auto = quant.choice("linear_class", "bitlinear", ("bitlinear", "autobitlinear"))
    norm = quant.flag("use_rms_norm", False)
    return {
        "ternarize": online and auto == "autobitlinear",
        "input_norm_eps": quant.number("rms_norm_eps", 1e-6, *EPS) if norm else 0.0,
    }
