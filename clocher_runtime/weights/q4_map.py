"""The quantisation manifest (`--q4-map`): rules that say which matrices become integers, and how.

    {"version": 1, "rules": [{"pattern": ".*attn.*(q_proj|k_proj).*", "dtype": "int4w",
                              "group": 64, "zero": "per-tensor", "scale": "per-channel"}]}

A rule applies to the tensors whose whole name its pattern matches; the first rule that matches
decides. Matrices stored as floats are quantised. Vectors, biases and tensors that the checkpoint
already holds quantised are kept as they are.

    dtype   "int4w" or "int4" (the same storage), "int8w"
    group   32, 64 or 128 columns that share a scale; without it, a whole row
    zero    "per-tensor" (default): symmetric, one fixed zero point; "per-group": affine, int4 only
    scale   "per-channel" (default): every row has its own scales; "per-tensor": int8w, no group
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float, Format, Int4, Int8
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.weights.files import read_bytes
from clocher_runtime.weights.strict_json import fields, parse_object

MAX_RULES = 1000
MAX_PATTERN_CHARS = 500

_MAX_BYTES = 1_000_000
_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": ("int4w", "int4", "int8w"),
    "group": (None, 32, 64, 128),
    "zero": ("per-tensor", "per-group"),
    "scale": ("per-channel", "per-tensor"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: a pattern for whole tensor names and the format of what it matches."""

    pattern: re.Pattern[str]
    format: Format


@dataclass(frozen=True, slots=True)
class Q4Map:
    """A manifest.

    Attributes:
        path: where it was read from.
        rules: in order; the first match decides.
        document: its JSON, to be recorded with the result.
    """

    path: Path
    rules: tuple[Rule, ...]
    document: Mapping[str, Any]

    def choose(self, tensors: Mapping[str, QuantTensor]) -> tuple[dict[str, Format], list[str]]:
        """Apply the rules.

        Returns:
            The new format of each tensor that is to be quantised, and a note for people about each
            rule that matched tensors which are kept.

        Raises:
            UsageError: a rule decides about no tensor at all.
        """
        chosen: dict[str, Format] = {}
        notes = []
        left = dict(tensors)
        for rule in self.rules:
            matched = {name: t for name, t in left.items() if rule.pattern.fullmatch(name)}
            left = {name: t for name, t in left.items() if name not in matched}
            if not matched:
                raise UsageError(
                    f"{self.path}: pattern {rule.pattern.pattern!r} matches no tensor that an "
                    f"earlier rule left; tensors are named like {', '.join(list(tensors)[:3])}"
                )
            floats = [name for name, tensor in matched.items() if _quantisable(name, tensor)]
            chosen |= dict.fromkeys(floats, rule.format)
            if kept := {name: t for name, t in matched.items() if name not in chosen}:
                formats = ", ".join(sorted({tensor.format.name for tensor in kept.values()}))
                notes.append(
                    f"pattern {rule.pattern.pattern!r}: {len(floats)} matrices become "
                    f"{rule.format.name}; {len(kept)} tensors are kept ({formats}): vectors, "
                    f"biases and already quantised ones, such as {next(iter(kept))}"
                )
        return chosen, notes


def load_q4_map(path: Path) -> Q4Map:
    """Read a manifest.

    Raises:
        UsageError: it is missing, or it is not what this module's text describes.
    """
    if not os.path.isfile(path):
        raise UsageError(f"--q4-map not found: {path}; pass the path of a quantisation manifest")
    try:
        document = parse_object(read_bytes(path, _MAX_BYTES), str(path))
        fields(document, str(path), {"version": int, "rules": list})
        rules = [
            fields(
                value,
                f"{path}: rules[{index}]",
                {"pattern": str, "dtype": str},
                {"group": int, "zero": str, "scale": str},
            )
            for index, value in enumerate(document["rules"])
        ]
    except ModelError as error:
        raise UsageError(str(error)) from None
    if document["version"] != 1:
        raise UsageError(f"{path}: version {document['version']}; this Clocher reads version 1")
    if not 0 < len(rules) <= MAX_RULES:
        raise UsageError(f"{path}: {len(rules)} rules; expected 1 to {MAX_RULES}")
    built = tuple(_rule(rule, f"{path}: rules[{index}]") for index, rule in enumerate(rules))
    return Q4Map(path, built, document)


def _rule(rule: Mapping[str, Any], where: str) -> Rule:
    for key, known in _CHOICES.items():
        if key in rule and rule[key] not in known:
            names = ", ".join(str(value) for value in known if value is not None)
            raise UsageError(f"{where}: {key} is {rule[key]!r:.60}; known: {names}")
    pattern = rule["pattern"]
    if len(pattern) > MAX_PATTERN_CHARS:
        raise UsageError(f"{where}: a pattern has at most {MAX_PATTERN_CHARS} characters")
    try:
        return Rule(re.compile(pattern), _format(rule))
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{where}: pattern {pattern!r:.80}: {error}") from None
    except FormatError as error:
        raise UsageError(f"{where}: {error}") from None


def _format(rule: Mapping[str, Any]) -> Format:
    group = rule.get("group")
    affine = rule.get("zero") == "per-group"
    whole = rule.get("scale") == "per-tensor"
    if rule["dtype"] == "int8w":
        if affine:
            raise FormatError("int8w is symmetric: zero must be per-tensor")
        if whole and group:
            raise FormatError("scale per-tensor leaves no place for a group")
        if group:
            return Int8(group, "f16")
        return Int8("tensor" if whole else "row", "f32")
    if whole:
        raise FormatError("scale per-tensor is for int8w; int4 needs per-channel")
    return Int4(not affine, group or "row", "f16")


def _quantisable(name: str, tensor: QuantTensor) -> bool:
    is_matrix = isinstance(tensor.format, Float) and len(tensor.shape) == 2
    return is_matrix and not name.endswith("bias")
