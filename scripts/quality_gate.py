"""Judge quantised models against the float model they were made from, on held-out text.

A MODEL is a directory, or a quantisation manifest, which is applied to the reference.
"""

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.script_run import reporting
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine.load import PRECISIONS, Model, load_model
from clocher_runtime.engine.session import KV_DTYPES
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.documents import Documents, cut
from clocher_runtime.quality.evaluate import Evaluation, Runs, decode_speed, evaluate, size_of
from clocher_runtime.quality.gate import LIMITS, Check, verdict_code, worst
from clocher_runtime.quality.report import Row, draw, require_matplotlib, table
from clocher_runtime.quantize.candidate import Records, open_candidate, records_by_model
from clocher_runtime.text.tokenizer import Tokenizer

EPILOG = """\b
Examples:
  python scripts/quality_gate.py --reference models/llama --model models/llama-int4 \\
      --text held_out.txt
  python scripts/quality_gate.py --reference models/llama --model models/llama \\
      --precision int8w --text held_out.txt
  python scripts/quality_gate.py --reference models/llama --model models/llama-int8 \\
      --model models/llama-int4 --text held_out.txt --report results/llama

\b
Exit codes:
  0  every model passes
  2  a flag or the text cannot be used
  3  a model is missing, damaged or not the reference's architecture
  5  a file cannot be written
  6  out of memory
  8  a model fails
  9  none fails, but one needs more text for a decision"""

_PROMPT = 32


@click.command(help=__doc__, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option("--reference", type=click.Path(path_type=Path), required=True, help="float model")
@click.option("--model", "models", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option("--chars", type=click.IntRange(1), help="use the first CHARS characters of the text")
@click.option("--window", type=click.IntRange(2), default=256, show_default=True, help="tokens")
@click.option("--document-separator", help="text between documents; default: blocks of windows")
@click.option(
    "--document-windows",
    type=click.IntRange(1),
    help="windows of a document, without a separator; default: those in 1024 tokens",
)
@click.option("--documents", type=click.IntRange(1), help="score at most DOCUMENTS documents")
@click.option("--precision", type=click.Choice(PRECISIONS), help="of the models; default: stored")
@click.option(
    "--manifest",
    "manifests",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="manifest that a model was converted with",
)
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="f32", show_default=True)
@click.option(
    "--act-prec",
    type=click.Choice(["fp32", "default"]),
    default="fp32",
    show_default=True,
    help="activations of the models; default: what the runtime uses",
)
@click.option("--backend", type=click.Choice(["cpu", "cuda", "reference"]), default="cpu")
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--limits", type=click.Choice(list(LIMITS)), help="default: by what differs")
@click.option("--max-ppl-ratio", type=float, help="perplexity over that of the reference")
@click.option("--max-kld", type=float, help="mean KL divergence, nats")
@click.option("--min-same-top", type=float, help="share of tokens, 0 to 1")
@click.option("--max-rms-dp", type=float, help="RMS change of the true token's probability")
@click.option("--min-cosine", type=float, help="of each tensor; default: by its format")
@click.option("--min-tokens", type=int, help="fewer never pass; default: 32768")
@click.option("--min-documents", type=int, help="fewer never pass; default: 64")
@click.option(
    "--reference-cache", type=click.Path(path_type=Path), help="the reference's log-probabilities"
)
@click.option("--speed/--no-speed", default=True, show_default=True, help="measure decoding")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all numbers")
@click.option("--report", type=click.Path(path_type=Path), help="directory for table and picture")
def main(**options: Any) -> None:
    """Judge the models and print the table."""
    with reporting("quality_gate"):
        code = _judge(options)
    raise SystemExit(code)


def _judge(options: dict[str, Any]) -> ExitCode:
    """Run every model through the gate, print and write what was found."""
    if options["report"] is not None:
        require_matplotlib()
        options["report"].mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(options["reference"])
    reference = load_model(checkpoint)
    tokenizer = Tokenizer(checkpoint.tokenizer_json, checkpoint.tokenizer_config)
    text = options["text"].read_text(encoding="utf-8")[: options["chars"]]
    documents = cut(
        text,
        tokenizer.encode,
        options["window"],
        windows_per_document=options["document_windows"],
        separator=options["document_separator"],
        limit=options["documents"],
    )
    records = records_by_model(options["models"], options["manifests"])
    found = {
        label: _one(path, reference, records.get(path), documents, options)
        for label, path in _labels(options["models"]).items()
    }
    first = next(iter(found.values()))[0]
    size = size_of(reference)
    rows = [
        Row(
            "reference",
            size.bpw,
            size.nbytes,
            first.summary.perplexity_reference,
            tokens_per_s=_speed(reference, documents, options),
        )
    ]
    rows += [_row(label, evaluation, speed) for label, (evaluation, speed) in found.items()]
    click.echo(table(rows))
    for label, (evaluation, _) in found.items():
        click.echo(f"\n{label}: {evaluation.gate.verdict} ({evaluation.gate.limits_class} limits)")
        for check in evaluation.gate.checks:
            click.echo(f"  {_spell(check)}")
    _write(rows, found, documents, options)
    return verdict_code(worst(evaluation.gate.verdict for evaluation, _ in found.values()))


def _one(
    path: Path,
    reference: Model,
    records: Records | None,
    documents: Documents,
    options: dict[str, Any],
) -> tuple[Evaluation, float | None]:
    """Evaluate one model and time it."""
    threads = options["threads"] or default_threads()
    model = open_candidate(path, reference.checkpoint, options["precision"], threads)
    act_prec = None if options["act_prec"] == "default" else options["act_prec"]
    terminal = Console(stderr=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        bar = bars.add_task(path.name)
        evaluation = evaluate(
            reference,
            model,
            documents,
            runs=Runs(options["backend"], threads, options["kv_dtype"], act_prec),
            limits_class=options["limits"],
            given={
                name: options[name]
                for name in (
                    "max_ppl_ratio",
                    "max_kld",
                    "min_same_top",
                    "max_rms_dp",
                    "min_cosine",
                    "min_tokens",
                    "min_documents",
                )
            },
            records=records,
            cache=options["reference_cache"],
            progress=lambda what, done, total: bars.update(
                bar, description=f"{path.name}: {what}", completed=done, total=total
            ),
        )
    return evaluation, _speed(model, documents, options)


def _speed(model: Model, documents: Documents, options: dict[str, Any]) -> float | None:
    if not options["speed"]:
        return None
    prompt = list(documents.windows[0][:_PROMPT])
    threads = options["threads"] or default_threads()
    return decode_speed(model, prompt, options["backend"], threads)


def _labels(paths: tuple[Path, ...]) -> dict[str, Path]:
    """Name each model by its directory or file, or by its path where two are named alike."""
    names = [path.resolve().name.removesuffix(".json") for path in paths]
    return {
        name if names.count(name) == 1 else str(path): path
        for name, path in zip(names, paths, strict=True)
    }


def _row(label: str, evaluation: Evaluation, speed: float | None) -> Row:
    summary = evaluation.summary
    return Row(
        label,
        evaluation.size.bpw,
        evaluation.size.nbytes,
        summary.perplexity,
        summary.ppl_ratio,
        summary.kld,
        summary.same_top,
        summary.rms_dp,
        speed,
        evaluation.gate.verdict,
    )


def _spell(check: Check) -> str:
    """Return a check as a line for people."""
    sign = "<=" if check.at_most else ">="
    line = f"{check.verdict:9} {check.name} {check.value:.6g} {sign} {check.limit:.6g}"
    if check.low != check.high:
        line += f", 95 % interval [{check.low:.6g}, {check.high:.6g}]"
    if check.where:
        line += f", {check.where}"
    if check.verdict == "undecided":
        more = check.more_tokens
        line += f"; add about {more} tokens" if more is not None else "; it lies at its limit"
    return line


def _write(
    rows: list[Row],
    found: dict[str, tuple[Evaluation, float | None]],
    documents: Documents,
    options: dict[str, Any],
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
        "options": {k: options[k] for k in ("precision", "kv_dtype", "act_prec", "backend")},
        "rows": [_finite(asdict(row)) for row in rows],
        "models": {
            label: {
                **evaluation.gate.to_json(),
                "summary": _finite(asdict(evaluation.summary)),
                "tensors": [_finite(asdict(error)) for error in evaluation.errors],
            }
            for label, (evaluation, _) in found.items()
        },
    }
    data = json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
    if options["json_path"] is not None:
        write_file(options["json_path"], data)
    if options["report"] is not None:
        directory = options["report"]
        write_file(directory / "quality.json", data)
        write_file(directory / "quality.md", table(rows).encode() + b"\n")
        title = f"{documents.tokens} tokens of {options['text'].name}, {documents.count} documents"
        draw(rows, directory / "quality.png", title)
        click.echo(f"wrote quality.json, quality.md and quality.png to {directory}", err=True)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
