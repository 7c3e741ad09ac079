"""The work of `clocher quantize` and `clocher gate`: rules, texts, verdicts and reports."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from clocher_kernels.errors import UsageError, counted
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.command.console import Console, size
from clocher_runtime.config.engine import NUMERICS, WEIGHTS_ALONE
from clocher_runtime.convert import q4_map
from clocher_runtime.convert.rounding import parse_clip
from clocher_runtime.convert.tied import tied
from clocher_runtime.disk.files import read_text
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import finite
from clocher_runtime.engine.backends import choose
from clocher_runtime.engine.load import Model, load_model, model_spec
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.models.spec import EMBED, HEAD
from clocher_runtime.quality.compare import Documents, cut
from clocher_runtime.quality.evaluate import Evaluation, Row, Size, decode_speed, evaluate, table
from clocher_runtime.quality.gate import Limits, verdict_code, worst
from clocher_runtime.quantize.alloc import LEAST_FRACTION, allocation_table
from clocher_runtime.quantize.job import (
    CalibrationText,
    GateText,
    Job,
    Outcome,
    records_beside,
    records_of_gptq,
    run_job,
)
from clocher_runtime.quantize.plan import QuantPlan, nothing_to_quantise
from clocher_runtime.text.tokenizer import Tokenizer

KEPT = r".*(embed|lm_head|wte|wpe).*"
"""Not quantised without --rules: embeddings and head."""
ENDS = r"(.*\.)?(embed_tokens|lm_head|wte)\.weight"
"""Those of them that are quantised with trellises."""

_PROMPT = 32
_NOT_RECORDED = {"out", "threads", "calib_text", "gate", "rules"}


def planned(
    console: Console, opener: Callable[[], Checkpoint], options: dict[str, Any]
) -> tuple[Job, QuantPlan]:
    """Open the input and report the plan; `options`: flag values, and `out`, the manifest."""
    asked = rules_of(options, ())  # checks flags before a model is opened or fetched
    judging = ("gate_limits", *(field.name for field in fields(Limits)))
    if options["gate"] is None and (idle := [n for n in judging if options.get(n) is not None]):
        raise UsageError(f"--{idle[0].replace('_', '-')} judges a text: give --gate FILE, too")
    given = opener()
    # Own rules name the tensors of the file, or say that there is one matrix.
    ties = asked.tied if options["rules"] else _changes_ends(given, options)
    checkpoint = tied(given) if ties else given
    if asked.tied and HEAD in checkpoint.names:
        raise UsageError(
            f'{options["rules"]}: "tied" is true, but embeddings and head of this model are two '
            "matrices; leave it out"
        )
    record = {
        key: value
        for key, value in sorted(options.items())
        if key not in _NOT_RECORDED and value is not None and value is not False
    }
    job = Job(
        checkpoint=checkpoint,
        out=options["out"],
        rules=rules_of(options, checkpoint.names),
        options=record,
        seed=options["seed"],
        threads=options["threads"] or default_threads(),
        calibration=_calibration(checkpoint, options) if options["calib_text"] else None,
        target_bpw=options["target_bpw"] or _fraction(options["bits"]),
        gate=_gate(checkpoint, options) if options["gate"] else None,
        min_cosine=options["cosine_threshold"],
        given=None if checkpoint is given else given,
    )
    plan = job.plan()
    blocks = len(job.rules.rules) - 1  # the rule of the flags for the blocks
    if options["rules"] is None and all(each.rule < blocks for each in plan.tensors.values()):
        raise nothing_to_quantise(plan.kept, job.rules.requantize)
    if job.calibration and (count := len(job.calibration.sequences)) < options["samples"]:
        console.note(
            f"note: {options['calib_text']} is enough for {counted(count, 'sequence')} of "
            f"{options['seq_len']} tokens, --samples is {options['samples']}; a longer text, or a "
            "smaller --seq-len, gives more"
        )
    for note in (*checkpoint.notes, *plan.notes):
        console.note(f"note: {note}")
    formats = Counter(f"{each.format.name} by {each.method}" for each in plan.tensors.values())
    what = ", ".join(f"{count} become {name}" for name, count in formats.items())
    what += ", before formats are chosen" if job.target_bpw is not None else ""
    console.note(f"{len(plan.tensors) + len(plan.kept)} tensors: {what}; {len(plan.kept)} stay")
    of, most = plan.size, "at most " if job.target_bpw else ""
    console.note(
        f"{size(given.nbytes)} -> {most}{size(of['nbytes'])}: {of['bpw']:.3f} bits per "
        f"weight, {of['quantised_bpw']:.3f} of the quantised ones"
    )
    return job, plan


def _changes_ends(checkpoint: Checkpoint, options: dict[str, Any]) -> bool:
    """Return whether the rules of the flags quantise the embeddings."""
    rules = rules_of(options, checkpoint.names)
    known = q4_map.assign(rules.rules, checkpoint.tensors, rules.requantize, str(rules.path))
    return EMBED in known.chosen


def quantised(console: Console, job: Job, plan: QuantPlan) -> Outcome:
    """Quantise and evaluate a plan, and report the result."""
    with console.counting() as tell:
        outcome = run_job(job, plan, tell, console.note)
    if outcome.allocation:
        for line in allocation_table(outcome.allocation):
            console.note(line)
    fallen = [each.entry for each in outcome.done if "fallback" in each.entry]
    if fallen:
        reasons = {each["fallback"]: each["name"] for each in reversed(fallen)}
        what = "; ".join(f"{reason}, such as {name}" for reason, name in reasons.items())
        console.note(f"note: {counted(len(fallen), 'tensor')} fell back: {what}")
    worst = max((each.error for each in outcome.done), key=lambda error: error.rms_rel)
    console.note(f"largest relative error: {worst.rms_rel:.4f}, {worst.name}")
    for check in outcome.checks:
        console.note(f"gate: {check}")
    said = {"pass": "wrote", "fail": "rejected; wrote", "undecided": "undecided; wrote"}
    console.say(f"{said[outcome.verdict]} {outcome.path} ({counted(len(outcome.done), 'tensor')})")
    return outcome


def rules_of(options: dict[str, Any], names: Iterable[str]) -> q4_map.Q4Map:
    """Return the rules of --rules or of the flags; raises UsageError if they conflict."""
    if not options["weights_only"]:
        raise UsageError(
            "--weights-only 0: a manifest quantises weights alone; int8 activations are a setting "
            "of the run (clocher run --act-prec int8)"
        )
    method = options["method"] or ("gptq" if options["calib_text"] else "rtn")
    if options["rules"] is None:
        if options["method"] is None and method != "rtn":
            method = q4_map.best_method(q4_map.rule_format(_rule(options, "rtn")), method)
        rule = _rule(options, method)
        exceptions = [{"pattern": KEPT, "dtype": "keep"}]
        if rule["dtype"].startswith("tcq"):
            head = f"tcq{max(round(options['bits'] or int(rule['dtype'][3:])), 4)}"
            exceptions.insert(0, rule | {"pattern": ENDS, "dtype": head})
        every = [*exceptions, rule]
        used = [
            next(r for r in every if q4_map.name_pattern(r["pattern"]).fullmatch(n)) for n in names
        ]
        rules = [each for each in every if each is rule or each in used]
        document: dict[str, Any] = {"version": 1, "rules": rules}
        where = Path("the flags")
    else:
        where = options["rules"]
        given = [flag for flag in _FORMAT_FLAGS if options[flag] not in (None, False)]
        if given:
            flag = given[0].replace("_", "-")
            raise UsageError(f"--{flag} has no place beside --rules: write it into the rules")
        loaded = q4_map.load_q4_map(where)
        rules = [dict(rule) for rule in loaded.document["rules"]]
        for rule in rules:
            if rule["dtype"] != "keep" and "clip" not in rule and method != "rtn":
                rule.setdefault("method", q4_map.best_method(q4_map.rule_format(rule), method))
        document = {"version": 1, "rules": rules}
        document |= {key: True for key in ("requantize", "tied") if getattr(loaded, key)}
    if options["requantize"]:
        document["requantize"] = True
    return q4_map.parse_q4_map(document, where)


_FORMAT_FLAGS = (
    *("format", "bits", "granularity", "group", "symmetric"),
    *("scale_dtype", "clamp", "percentile", "mse"),
)


def _rule(options: dict[str, Any], method: str) -> dict[str, Any]:
    dtype = _dtype(options)
    integers = dtype in ("int4", "int8")
    group = int(options["group"]) if options["group"] else None
    granularity = options["granularity"]
    if granularity is None:
        granularity = "per-group" if dtype == "int4" or group else "per-row"
    if granularity == "per-group" and not integers:
        flag = "--group" if group else "--granularity per-group"
        raise UsageError(f"{flag} is for int4 and int8; {dtype} has no groups to choose")
    if group and granularity != "per-group":
        raise UsageError(f"--group has no place beside --granularity {granularity}")
    rule: dict[str, Any] = {"pattern": ".*", "dtype": f"{dtype}w" if integers else dtype}
    if granularity == "per-group":
        rule["group"] = group or 32
    symmetric = options["symmetric"]
    if symmetric is None:
        symmetric = dtype != "int4"
    rule["zero"] = "per-tensor" if symmetric else "per-group"
    rule["scale"] = granularity if granularity in ("per-tensor", "per-block") else "per-channel"
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


def _dtype(options: dict[str, Any]) -> str:
    bits = options["bits"]
    integer = bits in (None, 4, 8)
    if not (integer or bits == 2 or LEAST_FRACTION <= bits <= 5):
        raise UsageError(
            f"--bits {bits:g}: expected 4 or 8 (integers), 2, 3 or 5 (trellises), or a fraction "
            "from 2.25 to 5, which chooses among trellises"
        )
    of_bits = f"{'int' if integer else 'tcq'}{int(bits or 4)}"
    dtype = str(options["format"] or of_bits)
    if bits and dtype != of_bits:
        raise UsageError(f"--format {dtype} and --bits {bits:g} contradict each other")
    if bits and options["target_bpw"]:
        raise UsageError(f"--bits {bits:g} is a target already: leave --target-bpw out")
    if _fraction(bits) and not options["calib_text"]:
        raise UsageError(
            f"--bits {bits:g} measures which tensors need how many bits: give --calib-text "
            f"FILE, or a whole number such as {int(bits)}"
        )
    return dtype


def _fraction(bits: float | None) -> float | None:
    return None if bits is None or bits == int(bits) else bits


def _calibration(checkpoint: Checkpoint, options: dict[str, Any]) -> CalibrationText:
    tokenizer = _tokenizer(checkpoint, "--seq-len", options["seq_len"])
    text, record = _read_text(options["calib_text"])
    ids = tokenizer.encode(text, special=False)
    first = tokenizer.encode("a")[:1]
    prefix = [] if first == tokenizer.encode("a", special=False)[:1] else first
    length = options["seq_len"] - len(prefix)
    starts = range(0, len(ids) - length + 1, length)
    if not starts:
        raise UsageError(
            f"{options['calib_text']}: {counted(len(ids), 'token')}: less than one sequence of "
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
    documents = cut(text, _tokenizer(checkpoint, "--gate-window", window).encode, window)
    given = {field.name: options.get(field.name) for field in fields(Limits)}
    return GateText(documents, options["gate_limits"], given, {"text": record, "window": window})


def _tokenizer(checkpoint: Checkpoint, flag: str, length: int) -> Tokenizer:
    """Return the tokenizer; sequences that the model has no room for are refused before work."""
    source = checkpoint.tokenizer_source
    if isinstance(source, Path) and not source.is_file():
        raise UsageError(
            "the input has no tokenizer, so texts cannot be read: give a "
            "directory with tokenizer.json, or a GGUF file with a vocabulary"
        )
    if length > (most := model_spec(checkpoint).max_positions):
        raise UsageError(f"{flag}: got {length}, this model takes at most {most}")
    return Tokenizer(source, checkpoint.tokenizer_config)


def _read_text(path: Path) -> tuple[str, dict[str, Any]]:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return read_text(path), {"name": path.name, "nbytes": len(data), "sha256": digest}


def judge(console: Console, options: dict[str, Any]) -> ExitCode:
    """Evaluate all models, print and write the results; return the exit code."""
    if options["directory"] is not None:
        options["directory"].mkdir(parents=True, exist_ok=True)
    if options["backend"] != "reference":
        choose(options["backend"])  # checks that the device exists
    config = replace(
        WEIGHTS_ALONE,
        act_prec=None if options["act_prec"] == "default" else options["act_prec"],
        **{name: options[name] for name in ("backend", NUMERICS[1], "threads")},
    )
    models = tuple(locate(path, "MODEL") for path in options["model"])
    checkpoint = open_checkpoint(locate(options["reference"], "--reference"))
    reference = load_model(checkpoint)
    documents = cut(
        read_text(options["text"])[: options["chars"]],
        _tokenizer(checkpoint, "--window", options["window"]).encode,
        options["window"],
        windows_per_document=options["document_windows"],
        separator=options["document_separator"],
        limit=options["documents"],
    )

    def speed(model: Model) -> float | None:
        prompt = list(documents.windows[0][:_PROMPT])
        return decode_speed(model, prompt, config) if options["speed"] else None

    def one(path: Path) -> tuple[Evaluation, float | None]:
        model = load_model(open_checkpoint(path, verify=True), options["precision"])
        with console.counting() as tell:
            evaluation = evaluate(
                reference,
                model,
                documents,
                config=config,
                limits_class=options["limits"],
                given={field.name: options[field.name] for field in fields(Limits)},
                records=records_beside(path) or records_of_gptq(model.checkpoint),
                progress=lambda what, done, total: tell(f"{path.name}: {what}", done, total),
            )
        return evaluation, speed(model)

    names = [path.resolve().name.removesuffix(".json") for path in models]
    found = {
        name if names.count(name) == 1 else str(path): one(path)
        for name, path in zip(names, models, strict=True)
    }
    whole = Size(reference)
    origin = next(iter(found.values()))[0].summary.perplexity_reference
    rows = [Row("reference", whole.bpw, whole.nbytes, origin, tokens_per_s=speed(reference))]
    for label, (evaluation, rate) in found.items():
        said, stored = evaluation.summary, evaluation.size
        scores = (said.perplexity, said.ppl_ratio, said.kld, said.same_top, said.rms_dp)
        verdict = evaluation.gate.verdict
        rows.append(Row(label, stored.bpw, stored.nbytes, *scores, rate, verdict))
    click.echo(table(rows))
    for label, (evaluation, _) in found.items():
        click.echo(f"\n{label}: {evaluation.gate.verdict} ({evaluation.gate.limits_class} limits)")
        for check in evaluation.gate.checks:
            click.echo(f"  {check}")
    _write(rows, {label: each for label, (each, _) in found.items()}, documents, options)
    return verdict_code(worst(evaluation.gate.verdict for evaluation, _ in found.values()))


def _write(
    rows: list[Row], found: dict[str, Evaluation], documents: Documents, options: dict[str, Any]
) -> None:
    document = {
        "schema": "clocher.quality/1",
        "text": {
            "windows": len(documents.windows),
            "window": documents.window,
            "tokens": documents.tokens,
            "documents": documents.count,
            "sha256": documents.digest.hex(),
        },
        "options": {k: options[k] for k in (*NUMERICS, "act_prec", "backend")},
        "rows": [finite(asdict(row)) for row in rows],
        "models": {
            label: {
                **evaluation.gate.to_json(),
                "summary": finite(asdict(evaluation.summary)),
                "tensors": [finite(asdict(error)) for error in evaluation.errors],
            }
            for label, evaluation in found.items()
        },
    }
    data = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    if options["json_path"] is not None:
        write_file(options["json_path"], data)
    if options["directory"] is not None:
        directory = options["directory"]
        write_file(directory / "quality.json", data)
        write_file(directory / "quality.md", table(rows).encode() + b"\n")
        click.echo(f"wrote quality.json and quality.md to {directory}", err=True)
