"""Read config.json strictly: every field has a type and a range, and errors name the field."""

from collections.abc import Mapping
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.models.spec import RopeSpec

_LARGEST = 1 << 24  # no dimension of a model is larger; keeps products far from overflow
_SCALED = ("linear", "llama3", "yarn")

# Wide of everything published, and so narrow that no table of angles overflows or divides by zero.
_THETA = (1.001, 1e12)
_FACTOR = (1e-3, 1e6)
_ROTATIONS = (1e-3, 1e6)
_MAGNITUDE = (0.0, 100.0)
_ATTENTION = (1e-3, 1e3)


def shown(value: object) -> str:
    """Return the start of a value as a message quotes it."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of very many digits"


class Fields:
    """The fields of a config, with a default for those it leaves out.

    `null` counts as left out, as transformers writes it for unset fields.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config, self._where = config, where

    def raw(self, name: str) -> Any:
        """Return a field as it stands, None if left out."""
        return self._config.get(name)

    def has(self, name: str) -> bool:
        """Return whether a field is spelled, be it as null."""
        return name in self._config

    def integer(self, name: str, default: int, least: int = 1, most: int = _LARGEST) -> int:
        """Return an integer field in [least, most]."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise FormatError(
                f"{self._where}: {name} is {shown(value)}; "
                f"expected an integer from {least} to {most}"
            )
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number field in [least, most]."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(f"{self._where}: {name} is {shown(value)}; expected a number")
        if not least <= value <= most:  # also refuses NaN and infinities
            raise FormatError(
                f"{self._where}: {name} is {shown(value)}; expected a number from {least} to {most}"
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{self._where}: {name} is {shown(value)}; expected true or false")
        return value

    def choice(self, name: str, default: str, known: tuple[str, ...]) -> str:
        """Return a string field that must be one of `known`."""
        value = self.raw(name)
        if value is None:
            return default
        if value not in known:
            raise UnsupportedModel(
                f"{self._where}: {name} is {shown(value)}; Clocher knows {', '.join(known)}"
            )
        return str(value)

    def section(self, name: str) -> "Fields | None":
        """Return a nested object, None if left out."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise FormatError(f"{self._where}: {name} is {shown(value)}; expected an object")
        return Fields(value, f"{self._where}: {name}")

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return a field that holds one token id or a list of them."""
        value = self.raw(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise FormatError(f"{self._where}: {name} holds {shown(token)}; expected token ids")
        return tuple(token for token in ids if token < vocab_size)

    def refuse(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a field whose value would change the arithmetic in a way nobody wrote yet."""
        value = self.raw(name)
        if value is not None and value not in allowed:
            listed = ", ".join(repr(a) for a in allowed)
            raise UnsupportedModel(
                f"{self._where}: {name} is {shown(value)}; Clocher knows {listed}"
            )


def rope_spec(
    fields: Fields, theta: float, max_positions: int, default: RopeSpec | None
) -> RopeSpec:
    """Read the rotary embedding in either spelling.

    Old: `rope_theta` beside `rope_scaling` {"type" or "rope_type", ...}. New (transformers 5):
    `rope_parameters` with all of it.

    Args:
        theta: the family's published base.
        max_positions: context of the model.
        default: the family's published scaling, used when the config has neither spelling.

    Source: transformers modeling_rope_utils; YaRN is Peng et al. 2023 (arXiv 2309.00071).
    """
    theta = fields.number("rope_theta", theta, *_THETA)
    fields.refuse("partial_rotary_factor", (1, 1.0))
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if scaling is None:
        return default if default is not None else RopeSpec(theta)
    scaling.refuse("partial_rotary_factor", (1, 1.0))
    theta = scaling.number("rope_theta", theta, *_THETA)
    spelled = "rope_type" if scaling.raw("rope_type") is not None else "type"
    kind = scaling.choice(spelled, "default", ("default", *_SCALED))
    if kind == "default":
        return RopeSpec(theta)
    factor = scaling.number("factor", 1.0, *_FACTOR)
    if scaling.raw("factor") is None:
        raise FormatError(f"config.json: a {kind} rope needs a factor")
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    original = scaling.integer(
        "original_max_position_embeddings",
        fields.integer("original_max_position_embeddings", max_positions),
    )
    if kind == "llama3":
        low = scaling.number("low_freq_factor", 1.0, *_ROTATIONS)
        high = scaling.number("high_freq_factor", 4.0, *_ROTATIONS)
        if high <= low:
            raise FormatError(f"config.json: high_freq_factor {high} must exceed {low}")
        return RopeSpec(
            theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high
        )
    return RopeSpec(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0, *_ROTATIONS),
        beta_slow=scaling.number("beta_slow", 1.0, *_ROTATIONS),
        truncate=scaling.flag("truncate", True),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: Fields, factor: float) -> float:
    from math import log

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0

    mscale = scaling.number("mscale", 0.0, *_MAGNITUDE)
    all_dim = scaling.number("mscale_all_dim", 0.0, *_MAGNITUDE)
    derived = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return scaling.number("attention_factor", derived, *_ATTENTION)
