"""The quantisation manifest (`--q4-map`): which matrices become integers, and how.

    {"version": 1, "rules": [{"pattern": ".*attn.*(q_proj|k_proj).*", "dtype": "int4w",
                              "group": 64, "zero": "per-tensor", "scale": "per-channel"}]}

A rule applies to the tensors whose whole name its pattern matches; the first rule that matches
decides. Matrices stored as floats are quantised, those of experts [E, N, K] too. Vectors, biases,
norms, routers and tensors that the checkpoint already holds quantised are kept as they are; the
latter unless the manifest says `"requantize": true`.

    dtype       "int4", "int8", "fp8" (e4m3), "fp8_e5m2", "mxfp4", "ternary", each with a "w" at its
                end or without (the same storage), or "keep"
    group       32, 64, 128 or 256 columns that share a scale, int4 and int8; without it a whole row
    zero        "per-tensor" (default): symmetric, one fixed zero point; "per-group": affine, int4
    scale       "per-channel" (default): every row has its own scales; "per-tensor": int8, no group;
                "per-block": 128 x 128 elements have one, fp8
    scale_dtype "f16" (default of int4, groups and ternary), "f32" (default of int8 rows and fp8),
                "bf16"; mxfp4 has none
    clip        "none" (default), "percentile:P", "clamp:C", "mse", int4 and int8: see `rounding`
    method      "rtn" (default), "imx", "gptq" (int4 and int8); the latter two need calibration

A manifest that the PTQ scripts have written has more: `document` describes it. Its `tensors`
then say what becomes of each tensor, and the rules record what was asked for.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Bsr, Float, Format, Int4, Int8
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Stored
from clocher_runtime.convert.q4.document import METHODS, SECTIONS, Entry, PartFile, read_sections
from clocher_runtime.convert.q4.parts import check_hashes, read_part
from clocher_runtime.convert.q4.rule_formats import DTYPES, check_method, rule_format
from clocher_runtime.convert.rounding import NO_CLIP, Clip, parse_clip, round_tensor
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, fields, parse_object

VERSION = 1
MAX_RULES = 1000
MAX_PATTERN_CHARS = 500

_MAX_BYTES = MAX_JSON_BYTES
_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": (*(name + w for name in DTYPES for w in ("w", "")), "keep"),
    "group": (None, 32, 64, 128, 256),
    "zero": ("per-tensor", "per-group"),
    "scale": ("per-channel", "per-tensor", "per-block"),
    "scale_dtype": ("f16", "f32", "bf16"),
    "method": METHODS,
}
_OPTIONAL = {"group": int, "zero": str, "scale": str} | {
    "scale_dtype": str,
    "clip": str,
    "method": str,
}
_ROUTER = re.compile(r"(.*\.)?(router|gate|shared_expert_gate)\.weight")
_NORM = re.compile(r"(.*[._])?(layer)?norm\w*\.weight")


class NamePattern:
    """A regular expression that a whole name has to match, from a file that nobody has checked.

    It is matched by RE2, in time linear in the name, where Python's own `re` would try for years
    what a hostile pattern such as `(a+)+b` asks of it. The syntax is that of `re` without what
    cannot be matched so: look-around (`(?=`, `(?!`) and back-references.

    Source: R. Cox, "Regular Expression Matching Can Be Simple And Fast", 2007.

    `text`: the pattern as it was written.
    """

    __slots__ = ("_compiled", "text")

    def __init__(self, text: str) -> None:
        """Compile a pattern.

        Raises UsageError: it is too long, or no regular expression that RE2 knows.
        """
        if len(text) > MAX_PATTERN_CHARS:
            raise UsageError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
        self.text = text
        self._compiled = _compile(text)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return self._compiled.fullmatch(name) is not None


def _compile(text: str) -> Any:
    # Imported here, because a model whose manifest has been applied runs without it.
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except (re2.error, UnicodeError) as error:
        said = error.args[0] if error.args else ""
        reason = said.decode(errors="replace") if isinstance(said, bytes) else str(error)
        raise UsageError(
            f"pattern {text!r:.80}: {reason}; expected a regular expression for tensor names, "
            "without look-around or back-references"
        ) from None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    pattern: NamePattern  # for whole tensor names
    format: Format | None  # of what it matches; None keeps it
    method: str = "rtn"  # how the codes are chosen
    clip: Clip = NO_CLIP  # how rounding chooses the range of a cell


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the rules say about every tensor of a checkpoint."""

    chosen: Mapping[str, int]  # tensors to be quantised -> index of the rule
    kept: Mapping[str, str]  # the others -> why
    notes: tuple[str, ...]  # for people, about each rule that matched tensors which are kept


@dataclass(frozen=True, slots=True)
class Q4Map:
    """A manifest."""

    path: Path  # where it was read from
    rules: tuple[Rule, ...]  # in order; the first match decides
    # its JSON, to be recorded with the result: instead of the expanded form with every tensor its
    # SHA-256
    document: Mapping[str, Any]
    requantize: bool = False  # whether tensors that are quantised already are quantised anew
    # what was done to each quantised tensor, None in a manifest of rules alone
    entries: Mapping[str, Entry] | None = None
    # name -> reason of the tensors that stay, beside `entries`
    kept: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[PartFile, ...] = ()  # the files with planes that rounding does not give

    @property
    def parts_dir(self) -> Path:
        """Folder of the parts, beside the manifest."""
        return parts_dir(self.path)

    def choose(self, tensors: Mapping[str, Stored]) -> tuple[dict[str, Format], list[str]]:
        """Apply the manifest.

        Returns the new format of each tensor that is to be quantised, and a note for people about
        each rule that matched tensors which are kept. Raises UsageError: a rule decides about no
        tensor at all, or asks for a method that needs calibration, or the manifest was made for
        another model.
        """
        if self.entries is not None:
            _same_model(self, self.entries, tensors)
            return {name: entry.format for name, entry in self.entries.items()}, []
        assigned = assign(self.rules, tensors, self.requantize, str(self.path))
        formats = {}
        for name, index in assigned.chosen.items():
            rule = self.rules[index]
            if rule.method != "rtn":
                raise UsageError(
                    f"{self.path}: rules[{index}] asks for {rule.method}, which needs calibration; "
                    "give these rules to scripts/ptq_from_hf.py --rules and convert with the "
                    "manifest that it writes"
                )
            formats[name] = _format_of(rule)
        return formats, list(assigned.notes)

    def stored(self, name: str, source: QuantTensor, threads: int = 1) -> QuantTensor:
        """Return a tensor that `choose` has chosen, quantised.

        Its planes come from the manifest's parts if they are there, else they are rounded, some
        rows at a time. Where the manifest records their hashes, they are checked.

        `source`: as the checkpoint stores it, [N, K] or [E, N, K]. Raises FormatError: a value
        cannot be stored, or the planes are not those that the manifest records: the checkpoint is
        not the one that it was made from; ModelNotFound: a part is missing.
        """
        if self.entries is None:
            rule = next(rule for rule in self.rules if rule.pattern.matches(name))
            return round_tensor(source, _format_of(rule), rule.clip, threads)
        entry = self.entries[name]
        if entry.part:
            return read_part(self.parts_dir, self.parts, name, entry)
        encoded = round_tensor(source, entry.format, self.rules[entry.rule].clip, threads)
        check_hashes(encoded, entry, str(self.path))
        return encoded


def parts_dir(manifest: Path) -> Path:
    """Return the folder of a manifest's parts: `q4.json` has `q4.parts`."""
    return manifest.with_name(f"{manifest.stem}.parts")


def assign(
    rules: tuple[Rule, ...], tensors: Mapping[str, Stored], requantize: bool, where: str
) -> Assignment:
    """Apply rules to the tensors of a checkpoint.

    Raises UsageError: a rule decides about no tensor at all.
    """
    chosen: dict[str, int] = {}
    kept: dict[str, str] = {}
    notes = []
    left = dict(tensors)
    for index, rule in enumerate(rules):
        matched = {name: t for name, t in left.items() if rule.pattern.matches(name)}
        left = {name: t for name, t in left.items() if name not in matched}
        if not matched:
            raise UsageError(
                f"{where}: pattern {rule.pattern.text!r} matches no tensor that an "
                f"earlier rule left; tensors are named like {', '.join(list(tensors)[:3])}"
            )
        reasons = {name: reason_to_keep(name, t, requantize) for name, t in matched.items()}
        if rule.format is None:
            kept |= {name: reason or f"rule {index}" for name, reason in reasons.items()}
            continue
        stay = {name: reason for name, reason in reasons.items() if reason}
        same = [n for n, t in matched.items() if t.format.name == rule.format.name]
        stay |= dict.fromkeys(same, f"already {rule.format.name}")
        kept |= stay
        chosen |= {name: index for name in matched if name not in stay}
        if stay:
            formats = ", ".join(sorted({matched[name].format.name for name in stay}))
            notes.append(
                f"pattern {rule.pattern.text!r}: {len(matched) - len(stay)} matrices become "
                f"{rule.format.name}; {len(stay)} tensors are kept ({formats}): vectors, "
                f"biases and already quantised ones, such as {next(iter(stay))}"
            )
    kept |= {name: reason_to_keep(name, t, requantize) or "no rule" for name, t in left.items()}
    return Assignment(chosen, kept, tuple(notes))


ALREADY = "already "
"""How the reason begins why a tensor stays that is quantised."""


def reason_to_keep(name: str, tensor: Stored, requantize: bool) -> str | None:
    """Return why a tensor is never quantised, None if a rule may quantise it."""
    if name.endswith("sinks"):
        return "sinks"
    if name.endswith("bias"):
        return "bias"
    if len(tensor.shape) < 2:
        return "norm" if _NORM.fullmatch(name) else "vector"
    if _ROUTER.fullmatch(name):
        return "router"
    if isinstance(tensor.format, Bsr) or not (requantize or isinstance(tensor.format, Float)):
        return f"{ALREADY}{tensor.format.name}"
    return None


def load_q4_map(path: Path) -> Q4Map:
    """Read a manifest.

    Raises UsageError: it is missing, or it is not what this module and `document` describe.
    """
    if not os.path.isfile(path):
        raise UsageError(f"--q4-map not found: {path}; pass the path of a quantisation manifest")
    try:
        data = read_bytes(path, _MAX_BYTES)
        return parse_q4_map(parse_object(data, str(path)), path, hashlib.sha256(data).hexdigest())
    except ModelError as error:
        raise UsageError(str(error)) from None


def parse_q4_map(document: Mapping[str, Any], path: Path, sha256: str = "") -> Q4Map:
    """Build a manifest from its JSON.

    Raises UsageError: a rule is not one that is known; FormatError: a field is missing, unknown or
    of another type.
    """
    fields(document, str(path), {"version": int, "rules": list}, SECTIONS)
    rules = [
        fields(value, f"{path}: rules[{index}]", {"pattern": str, "dtype": str}, _OPTIONAL)
        for index, value in enumerate(document["rules"])
    ]
    if document["version"] != VERSION:
        raise UsageError(f"{path}: version {document['version']}; this Clocher reads version 1")
    if not 0 < len(rules) <= MAX_RULES:
        raise UsageError(f"{path}: {len(rules)} rules; expected 1 to {MAX_RULES}")
    built = tuple(_rule(rule, f"{path}: rules[{index}]") for index, rule in enumerate(rules))
    entries, kept, parts = read_sections(document, str(path), len(built))
    requantize = bool(document.get("requantize"))
    if entries is not None:
        long = ("tensors", "kept")
        document = {key: value for key, value in document.items() if key not in long}
        document["sha256"] = sha256
    return Q4Map(path, built, document, requantize, entries, kept, parts)


def _rule(rule: Mapping[str, Any], where: str) -> Rule:
    for key, known in _CHOICES.items():
        if key in rule and rule[key] not in known:
            names = ", ".join(str(value) for value in known if value is not None)
            raise UsageError(f"{where}: {key} is {rule[key]!r:.60}; known: {names}")
    try:
        pattern = NamePattern(rule["pattern"])
        if rule["dtype"] == "keep":
            if extra := sorted(set(rule) - {"pattern", "dtype"}):
                raise FormatError(f"dtype keep leaves no place for {extra[0]}")
            return Rule(pattern, None)
        fmt, method = rule_format(rule), rule.get("method", "rtn")
        clip = parse_clip(rule.get("clip", "none"))
        if clip != NO_CLIP and not isinstance(fmt, Int4 | Int8):
            raise FormatError(f"clip is for int4 and int8, not for {fmt.name}")
        check_method(fmt, method)
        return Rule(pattern, fmt, method, clip)
    except (FormatError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None


def _format_of(rule: Rule) -> Format:
    assert rule.format is not None, "assign chooses no tensor for a rule that keeps"
    return rule.format


def _same_model(q4_map: Q4Map, entries: Mapping[str, Entry], tensors: Mapping[str, Stored]) -> None:
    """Refuse a manifest whose tensors are not those of the checkpoint."""
    made_for = "; the manifest was made for another model: run the PTQ script on this one"
    known = set(entries) | set(q4_map.kept)
    if missing := sorted(known - set(tensors)):
        raise UsageError(f"{q4_map.path}: the model has no tensor {missing[0]!r}{made_for}")
    if extra := sorted(set(tensors) - known):
        raise UsageError(f"{q4_map.path}: says nothing about tensor {extra[0]!r}{made_for}")
    for name, entry in entries.items():
        tensor = tensors[name]
        if tensor.shape != entry.shape:
            raise UsageError(
                f"{q4_map.path}: tensor {name!r} is {list(entry.shape)}, in the model "
                f"{list(tensor.shape)}{made_for}"
            )
        if reason := reason_to_keep(name, tensor, q4_map.requantize):
            raise UsageError(f"{q4_map.path}: tensor {name!r} is kept ({reason}){made_for}")
