"""What the PTQ scripts have in common: flags, the rules that flags spell, reports, exit codes."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.filesize import decimal

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.command.script_run import Report, reporting
from clocher_runtime.convert.name_pattern import NamePattern
from clocher_runtime.convert.q4.map import Q4Map, load_q4_map, parse_q4_map
from clocher_runtime.convert.rounding import parse_clip
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.documents import cut
from clocher_runtime.quality.gate import LIMITS, verdict_code
from clocher_runtime.quantize.alloc import allocation_table
from clocher_runtime.quantize.job import CalibrationText, GateText, Job, Outcome, run_job
from clocher_runtime.quantize.plan import QuantPlan
from clocher_runtime.text.tokenizer import Tokenizer

KEPT = r".*(embed|lm_head|wte|wpe).*"
"""What is not quantised without --rules: embeddings and head."""

EXIT_CODES = """\b
Exit codes:
  0  done: the manifest is written (and the gate, if there is one, accepts it)
  2  a flag, the rules or a text cannot be used
  3  the input is missing, damaged or of an unknown kind
  5  a file cannot be written
  6  out of memory
  8  the gate rejects: the manifest is NAME.rejected.json, nothing is at --out
  9  the gate is undecided and needs more text: as 8
130  interrupted; run it again to go on after the last finished layer"""

_GATE_WINDOW = 256
_DOCUMENT_TOKENS = 1024
_NOT_RECORDED = {"out", "threads", "calib_text", "gate", "rules"}

F = TypeVar("F", bound=Callable[..., Any])


def ptq_options(function: F) -> F:
    """Add the flags of a PTQ script to a command."""
    text = click.Path(path_type=Path, exists=True, dir_okay=False)
    decorators = [
        click.option(
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            required=True,
            help="Manifest to write (JSON). Planes of imx and gptq go to NAME.parts beside it.",
        ),
        click.option("--bits", type=click.Choice(["4", "8"]), help="Bits of a code.  [default: 4]"),
        click.option(
            "--weights-only",
            type=click.IntRange(0, 1),
            default=1,
            show_default=True,
            help="Only 1: activations are never quantised by a manifest (see --act-prec of "
            "clocher-run).",
        ),
        click.option(
            "--granularity",
            type=click.Choice(["per-tensor", "per-row", "per-group"]),
            help="What shares a scale.  [default: per-group for 4 bits, per-row for 8]",
        ),
        click.option(
            "--group",
            type=click.Choice(["32", "64", "128", "256"]),
            help="Columns that share a scale.  [default: 32]",
        ),
        click.option(
            "--symmetric/--affine",
            "symmetric",
            default=None,
            help="Without or with a zero point per group.  [default: affine for 4 bits]",
        ),
        click.option("--scale-dtype", type=click.Choice(["f16", "bf16", "f32"])),
        click.option("--clamp", type=float, help="Clamp weights to [-CLAMP, CLAMP] first."),
        click.option(
            "--percentile", type=float, help="Leave the largest 100 - PERCENTILE % out of a range."
        ),
        click.option("--mse", is_flag=True, help="Search each scale for the least squared error."),
        click.option(
            "--rules",
            type=text,
            help="Manifest with rules (regex, first match wins) in place of the flags above.",
        ),
        click.option(
            "--method",
            type=click.Choice(["rtn", "imx", "gptq"]),
            help="Rounding; search weighted by activations; GPTQ.  [default: rtn, or imx with "
            "--calib-text]",
        ),
        click.option("--calib-text", type=text, help="UTF-8 text for imx, gptq and --target-bpw."),
        click.option("--samples", type=click.IntRange(1), default=128, show_default=True),
        click.option("--seq-len", type=click.IntRange(8), default=512, show_default=True),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
        click.option(
            "--target-bpw",
            type=float,
            help="Choose formats per tensor for so many bits per quantised weight.",
        ),
        click.option(
            "--requantize",
            is_flag=True,
            help="Quantise tensors that are MXFP4, ternary or integers already; lossy.",
        ),
        click.option("--gate", type=text, help="UTF-8 held-out text to judge the result on."),
        click.option(
            "--gate-window", type=click.IntRange(2), default=_GATE_WINDOW, show_default=True
        ),
        click.option("--gate-limits", type=click.Choice(list(LIMITS)), help="Default: by format."),
        click.option("--max-ppl-ratio", type=float),
        click.option("--max-kld", type=float),
        click.option("--min-same-top", type=float),
        click.option("--max-rms-dp", type=float),
        click.option("--min-tokens", type=click.IntRange(1)),
        click.option("--min-documents", type=click.IntRange(1)),
        click.option(
            "--cosine-threshold",
            type=click.FloatRange(-1, 1),
            help="Least cosine of each quantised tensor with the float one; below it: rejected.",
        ),
        click.option("--threads", type=click.IntRange(1), help="Default: all usable cores."),
        click.option(
            "--no-hash", is_flag=True, help="Record a hash of each file's first MiB alone."
        ),
        click.option("--dry-run", is_flag=True, help="Print the plan, write nothing."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def run_ptq(name: str, opener: Callable[[], Checkpoint], options: dict[str, Any]) -> int:
    """Run one PTQ script and return its exit code.

    Args:
        name: of the script, for messages.
        opener: opens the input.
        options: what `ptq_options` has read.
    """
    with reporting(name) as report:
        rules_of(options, ())  # refuses flags before a model is opened, or even fetched
        checkpoint = opener()
        rules = rules_of(options, checkpoint.names)
        job = _job(checkpoint, rules, options)
        plan = job.plan()
        _say_plan(report, checkpoint, plan)
        if options["dry_run"]:
            return ExitCode.OK
        with _Bars(report) as bars:
            outcome = run_job(job, plan, bars.tell)
        return _say_outcome(report, outcome)


def rules_of(options: dict[str, Any], names: Iterable[str]) -> Q4Map:
    """Return the rules that the flags spell, or those of --rules.

    Args:
        options: the flags.
        names: tensors of the checkpoint. What the flags leave out gets a rule if there is any of
            it, because a rule that matches nothing is an error.

    Raises:
        UsageError: flags contradict each other.
    """
    if not options["weights_only"]:
        raise UsageError(
            "--weights-only 0: a manifest quantises weights alone; int8 activations are a setting "
            "of the run (clocher-run --act-prec int8)"
        )
    method = options["method"] or ("imx" if options["calib_text"] else "rtn")
    if options["rules"] is None:
        kept = NamePattern(KEPT)
        exceptions = [{"pattern": KEPT, "dtype": "keep"}] if any(map(kept.matches, names)) else []
        document: dict[str, Any] = {"version": 1, "rules": [*exceptions, _rule(options, method)]}
        where = Path("the flags")
    else:
        where = options["rules"]
        given = [flag for flag in _FORMAT_FLAGS if options[flag] not in (None, False)]
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(f"--{flag} has no place beside --rules: write it into the rules")
        loaded = load_q4_map(where)
        rules = [dict(rule) for rule in loaded.document["rules"]]
        for rule in rules:
            if rule["dtype"] != "keep" and "clip" not in rule and method != "rtn":
                rule.setdefault("method", method)
        document = {"version": 1, "rules": rules}
        if loaded.requantize:
            document["requantize"] = True
    if options["requantize"]:
        document["requantize"] = True
    return parse_q4_map(document, where)


_FORMAT_FLAGS = (
    "bits",
    "granularity",
    "group",
    "symmetric",
    "scale_dtype",
    "clamp",
    "percentile",
    "mse",
)


def _rule(options: dict[str, Any], method: str) -> dict[str, Any]:
    bits = int(options["bits"] or 4)
    group = int(options["group"]) if options["group"] else None
    granularity = options["granularity"] or ("per-group" if bits == 4 or group else "per-row")
    if group and granularity != "per-group":
        raise UsageError(f"--group has no place beside --granularity {granularity}")
    symmetric = options["symmetric"]
    if symmetric is None:
        symmetric = bits == 8
    rule: dict[str, Any] = {"pattern": ".*", "dtype": "int4w" if bits == 4 else "int8w"}
    if granularity == "per-group":
        rule["group"] = group or 32
    rule["zero"] = "per-tensor" if symmetric else "per-group"
    rule["scale"] = "per-tensor" if granularity == "per-tensor" else "per-channel"
    if options["scale_dtype"]:
        rule["scale_dtype"] = options["scale_dtype"]
    clips = [f"{k}:{options[k]:.12g}" for k in ("clamp", "percentile") if options[k] is not None]
    clips += ["mse"] if options["mse"] else []
    if len(clips) > 1:
        raise UsageError("--clamp, --percentile and --mse exclude each other")
    if clips:
        if method != "rtn":
            raise UsageError(f"--{clips[0].split(':')[0]} is for --method rtn: {method} searches")
        rule["clip"] = str(parse_clip(clips[0]))
    if method != "rtn":
        rule["method"] = method
    return rule


def _job(checkpoint: Checkpoint, rules: Q4Map, options: dict[str, Any]) -> Job:
    calibration = gate = None
    if options["calib_text"]:
        calibration = _calibration(checkpoint, options)
    if options["gate"]:
        gate = _gate(checkpoint, options)
    record = {
        key: value
        for key, value in sorted(options.items())
        if key not in _NOT_RECORDED and value is not None and value is not False
    }
    return Job(
        checkpoint=checkpoint,
        out=options["out"],
        rules=rules,
        options=record,
        seed=options["seed"],
        threads=options["threads"] or default_threads(),
        whole_hash=not options["no_hash"],
        calibration=calibration,
        target_bpw=options["target_bpw"],
        gate=gate,
        min_cosine=options["cosine_threshold"],
    )


def _calibration(checkpoint: Checkpoint, options: dict[str, Any]) -> CalibrationText:
    """Cut the text into sequences, and draw as many as were asked for."""
    tokenizer = _tokenizer(checkpoint)
    text, record = _read_text(options["calib_text"])
    ids = tokenizer.encode(text, special=False)
    first = tokenizer.encode("a")[:1]
    prefix = [] if first == tokenizer.encode("a", special=False)[:1] else first
    length = options["seq_len"] - len(prefix)
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise UsageError(
            f"{options['calib_text']}: {len(ids)} tokens are less than one sequence of "
            f"{options['seq_len']}; give a longer text or a smaller --seq-len"
        )
    drawn = np.random.default_rng(options["seed"]).permutation(len(starts))[: options["samples"]]
    sequences = tuple(
        (*prefix, *ids[starts[index] : starts[index] + length]) for index in sorted(drawn.tolist())
    )
    digest = hashlib.sha256(np.array(sequences, "<i8").tobytes()).hexdigest()
    record |= {
        "sequences": len(sequences),
        "seq_len": options["seq_len"],
        "tokens": sum(map(len, sequences)),
        "tokens_sha256": digest,
        "bos": bool(prefix),
        "seed": options["seed"],
    }
    return CalibrationText(sequences, record)


def _gate(checkpoint: Checkpoint, options: dict[str, Any]) -> GateText:
    window = options["gate_window"]
    text, record = _read_text(options["gate"])
    per_document = max(1, _DOCUMENT_TOKENS // window)
    encode = _tokenizer(checkpoint).encode
    documents = cut(text, encode, window, windows_per_document=per_document)
    names = ("max_ppl_ratio", "max_kld", "min_same_top", "max_rms_dp")
    given = {name: options[name] for name in (*names, "min_tokens", "min_documents")}
    return GateText(documents, options["gate_limits"], given, {"text": record, "window": window})


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if not os.path.isfile(checkpoint.tokenizer_json):
        raise UsageError(
            "the input has no tokenizer.json, so texts cannot be read: --calib-text and --gate "
            "need a model directory (scripts/ptq_from_hf.py)"
        )
    return Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)


def _read_text(path: Path) -> tuple[str, dict[str, Any]]:
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from None
    digest = hashlib.sha256(data).hexdigest()
    return text, {"name": path.name, "nbytes": len(data), "sha256": digest}


class _Bars:
    """Shows one progress bar after the other, a new one for each thing that is done."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._what = ""
        self._bar: Any = None
        self._advance: Callable[[int, str], None] | None = None

    def __enter__(self) -> "_Bars":
        return self

    def __exit__(self, *error: Any) -> None:
        self._end(*error)

    def tell(self, what: str, done: int, total: int) -> None:
        """Show that so much of something is done."""
        kind = what.split(":")[0]
        if kind != self._what:
            self._end(None, None, None)
            self._what = kind
            self._bar = self._report.progress(total)
            self._advance = self._bar.__enter__()
        if self._advance:
            self._advance(done, what)

    def _end(self, *error: Any) -> None:
        if self._bar is not None:
            bar, self._bar, self._advance = self._bar, None, None
            bar.__exit__(*error)


def _say_plan(report: Report, checkpoint: Checkpoint, plan: QuantPlan) -> None:
    for note in (*checkpoint.notes, *plan.notes):
        report.note(f"note: {note}")
    formats: dict[str, int] = {}
    for tensor in plan.tensors.values():
        key = f"{tensor.format.name} by {tensor.method}"
        formats[key] = formats.get(key, 0) + 1
    what = ", ".join(f"{count} become {name}" for name, count in formats.items())
    report.note(f"{len(plan.tensors) + len(plan.kept)} tensors: {what}; {len(plan.kept)} stay")
    report.note(
        f"{decimal(plan.source_nbytes)} -> {decimal(plan.nbytes)}: {plan.bpw:.3f} bits per "
        f"weight, {plan.quantised_bpw:.3f} of the quantised ones"
    )


def _say_outcome(report: Report, outcome: Outcome) -> int:
    if outcome.allocation:
        for line in allocation_table(outcome.allocation):
            report.note(line)
    fallen = [entry for entry in outcome.done if entry.fallback]
    if fallen:
        report.note(
            f"note: {len(fallen)} tensors fell back, such as {fallen[0].planned.name}: "
            f"{fallen[0].fallback}"
        )
    worst = max(outcome.done, key=lambda entry: entry.error.rms_rel)
    report.note(f"largest relative error: {worst.error.rms_rel:.4f}, {worst.planned.name}")
    if outcome.evaluation:
        for check in outcome.evaluation.gate.checks:
            sign = "<=" if check.at_most else ">="
            interval = "" if not check.tokens else f" [{check.low:.5g}, {check.high:.5g}]"
            where = f" ({check.where})" if check.where else ""
            report.note(
                f"gate {check.verdict}: {check.name} {check.value:.5g}{interval} {sign} "
                f"{check.limit:.5g}{where}"
            )
        if outcome.verdict == "undecided":
            more = outcome.evaluation.gate.more_tokens
            report.note(
                f"undecided: add about {more} tokens" if more else "undecided: at the limit"
            )
    said = {"pass": "wrote", "fail": "rejected; wrote", "undecided": "undecided; wrote"}
    report.done(f"{said[outcome.verdict]} {outcome.path} ({len(outcome.done)} tensors)")
    return verdict_code(outcome.verdict)
