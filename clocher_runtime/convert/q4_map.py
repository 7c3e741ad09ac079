"""The quantisation manifest (`--q4-map`): which matrices become integers, and how.

    {"version": 1, "rules": [{"pattern": ".*attn.*(q_proj|k_proj).*", "dtype": "int4w",
                              "group": 64, "zero": "per-tensor", "scale": "per-channel"}]}

The first rule whose pattern matches the whole name decides. Float matrices are quantised, experts
[E, N, K] too; vectors, biases, norms, routers and, unless `"requantize": true`, quantised tensors
are kept. A manifest with `tensors` is expanded: it says what was done, tensor by tensor. See
docs/q4-manifest.schema.json, docs/quantisation.md.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float, Format, Fp8, Int4, Int8, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.formats.tcq import GROUP, TCQ
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.convert import q4_entries
from clocher_runtime.convert.rounding import NO_CLIP, Clip, parse_clip, round_tensor
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.plane_index import check_hashes, dump
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, fields, parse_object

VERSION = 1
MAX_RULES = 1000
MAX_PATTERN_CHARS = 500
ALREADY = "already "
"""Begins the reason why a quantised tensor stays."""

_DTYPES = ("int4", "int8", "fp8", "fp8_e5m2", "mxfp4", "ternary", *TCQ)
_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": (*(name + end for name in _DTYPES for end in ("w", "")), "keep"),
    "group": (32, 64, 128, 256),
    "zero": ("per-tensor", "per-group"),
    "scale": ("per-channel", "per-tensor", "per-block"),
    "scale_dtype": ("f16", "f32", "bf16"),
    "method": q4_entries.METHODS,
}
_OPTIONAL = {"group": int, **dict.fromkeys(("zero", "scale", "scale_dtype", "clip", "method"), str)}
_SECTIONS: dict[str, type] = {
    **dict.fromkeys(("tool", "source", "options", "calibration", "allocation", "tuning"), dict),
    **dict.fromkeys(("gate", "size", "planes"), dict),
    **dict.fromkeys(("tensors", "kept", "gates"), list),
    "requantize": bool,
    "tied": bool,
}
_ROUTER = re.compile(r"(.*\.)?(router|gate|shared_expert_gate)\.weight")
_NORM = re.compile(r"(.*[._])?(layer)?norm\w*\.weight")


def name_pattern(text: str) -> Any:
    """Compile a regular expression for whole names, from an unchecked file; see its `fullmatch`.

    RE2 matches in linear time; patterns like `(a+)+b` would hang `re`. Source: R. Cox, "Regular
    Expression Matching Can Be Simple And Fast", 2007. Raises UsageError.
    """
    import re2  # late: a model whose manifest has been applied runs without it

    if len(text) > MAX_PATTERN_CHARS:
        raise UsageError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
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

    pattern: Any  # for whole tensor names, of `name_pattern`
    format: Format | None  # of what it matches; None keeps it
    method: str = "rtn"  # how the codes are chosen
    clip: Clip = NO_CLIP  # how rounding chooses the range of a cell


class Assignment(NamedTuple):
    """What the rules decide about every tensor."""

    chosen: Mapping[str, int]  # tensors to be quantised -> index of the rule
    kept: Mapping[str, str]  # the others -> why
    notes: tuple[str, ...]  # for people, about each rule that matched tensors which are kept


@dataclass(frozen=True, slots=True)
class Q4Map:
    """A manifest."""

    path: Path
    rules: tuple[Rule, ...]  # in order; the first match decides
    document: Mapping[str, Any]  # its JSON for the record, its hash instead of `tensors`, `kept`
    requantize: bool = False  # whether tensors that are quantised already are quantised anew
    tied: bool = False  # whether it is of a checkpoint whose head became its embeddings, too
    # What was done; None in a manifest of rules alone.
    entries: Mapping[str, q4_entries.Entry] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)  # the other tensors, with the reason
    planes: q4_entries.Planes | None = None  # the file with planes that rounding does not give

    def choose(self, tensors: Mapping[str, QuantTensor]) -> tuple[dict[str, Format], list[str]]:
        """Return the new format of each tensor to quantise, and notes. Raises UsageError."""
        if self.entries is not None:
            self._check_model(self.entries, tensors)
            return {name: entry.format for name, entry in self.entries.items()}, []
        assigned = assign(self.rules, tensors, self.requantize, str(self.path))
        for index in sorted(set(assigned.chosen.values())):
            if (method := self.rules[index].method) != "rtn":
                raise UsageError(
                    f"{self.path}: rules[{index}] asks for {method}, which needs calibration; "
                    "give these rules to scripts/ptq_from_hf.py --rules and convert with the "
                    "manifest that it writes"
                )
        formats = {name: self.rules[index].format for name, index in assigned.chosen.items()}
        return {name: fmt for name, fmt in formats.items() if fmt}, list(assigned.notes)

    def stored(self, name: str, source: QuantTensor, threads: int = 1) -> QuantTensor:
        """Return a tensor named by `choose`, quantised. Raises FormatError, ModelNotFound."""
        if self.entries is None:
            rule = next(rule for rule in self.rules if rule.pattern.fullmatch(name))
            assert rule.format is not None, "choose names no tensor for a rule that keeps"
            return round_tensor(source, rule.format, rule.clip, threads)
        entry = self.entries[name]
        if entry.regions and self.planes:
            path = self.path.with_name(self.planes.file)
            return q4_entries.read_planes(path, self.planes.nbytes, entry)
        encoded = round_tensor(source, entry.format, self.rules[entry.rule].clip, threads)
        check_hashes(encoded.planes, entry.hashes, f"{self.path}: ", q4_entries.OTHER_WEIGHTS)
        return encoded

    def _check_model(
        self, entries: Mapping[str, q4_entries.Entry], tensors: Mapping[str, QuantTensor]
    ) -> None:
        made_for = "; the manifest was made for another model: run the PTQ script on this one"
        known = set(entries) | set(self.kept)
        if missing := sorted(known - set(tensors)):
            raise UsageError(f"{self.path}: the model has no tensor {missing[0]!r}{made_for}")
        if extra := sorted(set(tensors) - known):
            raise UsageError(f"{self.path}: says nothing about tensor {extra[0]!r}{made_for}")
        for name, entry in entries.items():
            tensor = tensors[name]
            if tensor.shape != entry.shape:
                raise UsageError(
                    f"{self.path}: tensor {name!r} is {list(entry.shape)}, in the model "
                    f"{list(tensor.shape)}{made_for}"
                )
            if reason := reason_to_keep(name, tensor, self.requantize):
                raise UsageError(f"{self.path}: tensor {name!r} is kept ({reason}){made_for}")


def assign(
    rules: tuple[Rule, ...], tensors: Mapping[str, QuantTensor], requantize: bool, where: str
) -> Assignment:
    """Apply rules to a checkpoint's tensors; UsageError if one applies to none."""
    chosen: dict[str, int] = {}
    kept: dict[str, str] = {}
    notes = []
    left = dict(tensors)
    for index, rule in enumerate(rules):
        matched = {name: left.pop(name) for name in list(left) if rule.pattern.fullmatch(name)}
        if not matched:
            raise UsageError(
                f"{where}: pattern {rule.pattern.pattern!r} matches no tensor that an "
                f"earlier rule left; tensors are named like {', '.join(list(tensors)[:3])}"
            )
        reasons = {name: reason_to_keep(name, t, requantize) for name, t in matched.items()}
        if rule.format is None:
            kept |= {name: reason or f"rule {index}" for name, reason in reasons.items()}
            continue
        stay = {name: reason for name, reason in reasons.items() if reason}
        same = [n for n, t in matched.items() if t.format.name == rule.format.name]
        stay |= dict.fromkeys(same, f"{ALREADY}{rule.format.name}")
        if isinstance(rule.format, Tcq):
            odd = [n for n, t in matched.items() if n not in stay and t.shape[-1] % GROUP]
            stay |= dict.fromkeys(odd, f"columns are no multiple of {GROUP}")
            if odd:
                notes.append(
                    f"kept matrices: {len(odd)}, such as {odd[0]} {list(matched[odd[0]].shape)}: "
                    f"{rule.format.name} needs a multiple of {GROUP} columns"
                )
        kept |= stay
        chosen |= {name: index for name in matched if name not in stay}
        if stay:
            formats = ", ".join(sorted({matched[name].format.name for name in stay}))
            notes.append(
                f"pattern {rule.pattern.pattern!r}: matrices to {rule.format.name}: "
                f"{len(matched) - len(stay)}; tensors kept: {len(stay)} ({formats}): vectors, "
                f"biases and already quantised ones, such as {next(iter(stay))}"
            )
    kept |= {name: reason_to_keep(name, t, requantize) or "no rule" for name, t in left.items()}
    return Assignment(chosen, kept, tuple(notes))


def reason_to_keep(name: str, tensor: QuantTensor, requantize: bool) -> str | None:
    """Return why a tensor is never quantised, None if a rule may quantise it."""
    for end in ("sinks", "bias"):
        if name.endswith(end):
            return end
    if len(tensor.shape) < 2:
        return "norm" if _NORM.fullmatch(name) else "vector"
    if _ROUTER.fullmatch(name):
        return "router"
    if isinstance(tensor.format, Bsr) or not (requantize or isinstance(tensor.format, Float)):
        return f"{ALREADY}{tensor.format.name}"
    return None


def load_q4_map(path: Path) -> Q4Map:
    """Read a manifest; UsageError if it is missing or malformed."""
    if not os.path.isfile(path):
        raise UsageError(f"--q4-map not found: {path}; pass the path of a quantisation manifest")
    try:
        data = read_bytes(path, MAX_JSON_BYTES)
        return parse_q4_map(parse_object(data, str(path)), path, hashlib.sha256(data).hexdigest())
    except ModelError as error:
        raise UsageError(str(error)) from None


def parse_q4_map(document: Mapping[str, Any], path: Path, sha256: str = "") -> Q4Map:
    """Build a manifest from its JSON; UsageError for an unknown rule, else FormatError."""
    fields(document, str(path), {"version": int, "rules": list}, _SECTIONS)
    rules = [
        fields(value, f"{path}: rules[{index}]", {"pattern": str, "dtype": str}, _OPTIONAL)
        for index, value in enumerate(document["rules"])
    ]
    if document["version"] != VERSION:
        raise UsageError(f"{path}: version {document['version']}; this Clocher reads version 1")
    if not 0 < len(rules) <= MAX_RULES:
        raise UsageError(f"{path}: {len(rules)} rules; expected 1 to {MAX_RULES}")
    built = tuple(_rule(rule, f"{path}: rules[{index}]") for index, rule in enumerate(rules))
    entries, kept, planes = q4_entries.read_tensors(document, str(path), len(built))
    requantize = bool(document.get("requantize"))
    if entries is not None:
        long = ("tensors", "kept")
        document = {key: value for key, value in document.items() if key not in long}
        document["sha256"] = sha256
    tied = bool(document.get("tied"))
    return Q4Map(path, built, document, requantize, tied, entries, kept, planes)


def write_manifest(path: Path, document: Mapping[str, Any]) -> None:
    """Write a manifest atomically: a line per tensor, rule, part and gate."""
    lines = []
    for key, value in document.items():
        text = dump(value)
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {dump(item)}" for item in value)
            text = f"[\n{items}\n]"
        lines.append(f"{dump(key)}: {text}")
    write_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _rule(rule: Mapping[str, Any], where: str) -> Rule:
    for key, known in _CHOICES.items():
        if key in rule and rule[key] not in known:
            names = ", ".join(map(str, known))
            raise UsageError(f"{where}: {key} is {rule[key]!r:.60}; known: {names}")
    try:
        pattern = name_pattern(rule["pattern"])
        if rule["dtype"] == "keep":
            if extra := sorted(set(rule) - {"pattern", "dtype"}):
                raise FormatError(f"dtype keep leaves no place for {extra[0]}")
            return Rule(pattern, None)
        fmt, method = rule_format(rule), rule.get("method", "rtn")
        clip = parse_clip(rule.get("clip", "none"))
        if clip != NO_CLIP and not isinstance(fmt, Int4 | Int8):
            raise FormatError(f"clip is for int4 and int8, not for {fmt.name}")
        if method not in (known := methods_of(fmt)):
            raise UsageError(
                f"{method} does not choose codes of {fmt.name}; give it the method "
                f"{' or '.join(reversed(known))}"
            )
        return Rule(pattern, fmt, method, clip)
    except (FormatError, UsageError) as error:
        raise UsageError(f"{where}: {error}") from None


def rule_format(rule: Mapping[str, Any]) -> Format:
    """Return the format of a rule other than "keep"; FormatError if fields contradict."""
    dtype = rule["dtype"].removesuffix("w")
    group, scale = rule.get("group"), rule.get("scale", "per-channel")
    affine = rule.get("zero") == "per-group"
    if affine and dtype != "int4":
        raise FormatError(f"{dtype} is symmetric: zero must be per-tensor")
    if group and dtype not in ("int4", "int8"):
        raise FormatError(f"{dtype} has no groups to choose: leave group out")
    scales = {"int8": "per-tensor", "fp8": "per-block", "fp8_e5m2": "per-block"}
    if scale not in ("per-channel", scales.get(dtype)):
        raise FormatError(
            f"scale {scale} is not for {dtype}: per-tensor is for int8, per-block for fp8; "
            "leave it out"
        )
    whole, stored = scale == "per-tensor", rule.get("scale_dtype")
    if whole and group:
        raise FormatError("scale per-tensor leaves no place for a group")
    if dtype == "int8":
        shared: Any = group or ("tensor" if whole else "row")
        return Int8(shared, stored or ("f16" if group else "f32"))
    if dtype == "int4":
        return Int4(not affine, group or "row", stored or "f16")
    if dtype == "ternary":
        return Ternary(scale_dtype=stored or "f16")
    if stored and dtype in ("mxfp4", *TCQ):
        kind = "powers of two" if dtype == "mxfp4" else "bytes"
        raise FormatError(f"the scales of {dtype} are {kind}: leave scale_dtype out")
    if dtype == "mxfp4":
        return Mxfp4()
    if dtype in TCQ:
        return Tcq(TCQ[dtype])
    return Fp8(
        "e5m2" if dtype == "fp8_e5m2" else "e4m3",
        "b128" if scale == "per-block" else "row",
        stored or "f32",
    )


def methods_of(fmt: Format) -> tuple[str, ...]:
    """Return the methods that choose codes of a format, the best one last."""
    if isinstance(fmt, Int4 | Int8) and fmt.group != "tensor":
        return q4_entries.METHODS
    if isinstance(fmt, Tcq):
        return ("rtn", "gptq")
    searched = isinstance(fmt, Mxfp4) or (isinstance(fmt, Fp8) and fmt.scope != "tensor")
    return ("rtn", "imx") if searched else ("rtn",)


def best_method(fmt: Format, wanted: str) -> str:
    """Return the supported method that is closest to the wanted one."""
    known = methods_of(fmt)
    return wanted if wanted in known else known[-1]
