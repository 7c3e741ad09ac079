"""The job of `clocher gate`: evaluate models, print a table and a verdict."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.command.script_run import Report
from clocher_runtime.config.engine import NUMERICS, EngineConfig
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import finite
from clocher_runtime.engine.backends import choose
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.compare import Documents, cut
from clocher_runtime.quality.evaluate import (
    WEIGHTS_ALONE,
    Evaluation,
    Row,
    decode_speed,
    evaluate,
    size_of,
    table,
)
from clocher_runtime.quality.gate import Limits, verdict_code, worst
from clocher_runtime.quantize.job import (
    Records,
    open_candidate,
    records_by_model,
    records_of_gptq,
)
from clocher_runtime.text.tokenizer import Tokenizer

_PROMPT = 32


def judge(report: Report, options: dict[str, Any]) -> ExitCode:
    """Evaluate all models, print and write the results; return the exit code."""
    if options["directory"] is not None:
        options["directory"].mkdir(parents=True, exist_ok=True)
    config = _config(options)
    # A file is a manifest.
    models = tuple(p if p.is_file() else locate(p, "MODEL") for p in options["model"])
    checkpoint = open_checkpoint(locate(options["reference"], "--reference"))
    reference = load_model(checkpoint)
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    documents = cut(
        options["text"].read_text(encoding="utf-8")[: options["chars"]],
        tokenizer.encode,
        options["window"],
        windows_per_document=options["document_windows"],
        separator=options["document_separator"],
        limit=options["documents"],
    )

    def speed(model: Model) -> float | None:
        prompt = list(documents.windows[0][:_PROMPT])
        return decode_speed(model, prompt, config) if options["speed"] else None

    def one(path: Path, records: Records | None) -> tuple[Evaluation, float | None]:
        threads = options["threads"] or default_threads()
        model = open_candidate(path, checkpoint, options["precision"], threads)
        with report.counting() as tell:
            evaluation = evaluate(
                reference,
                model,
                documents,
                config=config,
                limits_class=options["limits"],
                given={field.name: options[field.name] for field in fields(Limits)},
                records=records_of_gptq(model.checkpoint) if records is None else records,
                progress=lambda what, done, total: tell(f"{path.name}: {what}", done, total),
            )
        return evaluation, speed(model)

    records = records_by_model(models, options["manifests"])
    found = {label: one(path, records.get(path)) for label, path in _labels(models).items()}
    size = size_of(reference)
    origin = next(iter(found.values()))[0].summary.perplexity_reference
    rows = [Row("reference", size.bpw, size.nbytes, origin, tokens_per_s=speed(reference))]
    rows += [_row(label, evaluation, rate) for label, (evaluation, rate) in found.items()]
    click.echo(table(rows))
    for label, (evaluation, _) in found.items():
        click.echo(f"\n{label}: {evaluation.gate.verdict} ({evaluation.gate.limits_class} limits)")
        for check in evaluation.gate.checks:
            click.echo(f"  {check}")
    _write(rows, {label: each for label, (each, _) in found.items()}, documents, options)
    return verdict_code(worst(evaluation.gate.verdict for evaluation, _ in found.values()))


def _config(options: dict[str, Any]) -> EngineConfig:
    act_prec = None if options["act_prec"] == "default" else options["act_prec"]
    if options["backend"] != "reference":
        choose(options["backend"])  # checks that the device exists
    named = {name: options[name] for name in ("backend", NUMERICS[1], "threads")}
    return replace(WEIGHTS_ALONE, act_prec=act_prec, **named)


def _labels(paths: tuple[Path, ...]) -> dict[str, Path]:
    names = [path.resolve().name.removesuffix(".json") for path in paths]
    return {
        name if names.count(name) == 1 else str(path): path
        for name, path in zip(names, paths, strict=True)
    }


def _row(label: str, evaluation: Evaluation, speed: float | None) -> Row:
    said, size = evaluation.summary, evaluation.size
    scores = (said.perplexity, said.ppl_ratio, said.kld, said.same_top, said.rms_dp)
    return Row(label, size.bpw, size.nbytes, *scores, speed, evaluation.gate.verdict)


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
