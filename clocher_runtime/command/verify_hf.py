"""The job of scripts/verify_hf_generation_ids.py: a trace against Hugging Face transformers."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from clocher_kernels.errors import ModelError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import find_hf, no_model
from clocher_runtime.command.script_run import PATH, Report, needed, option, script, switch
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.transformers_model import DTYPES, TOLERANCES, HfModel, hf_tokenizer
from clocher_runtime.quality.verify import Checks, Trace, fingerprint, read_trace, summary, verify


@script(
    "verify",
    needed("--trace-jsonl", "What clocher-run --trace-ids wrote."),
    needed(
        "--hf-dir", "Directory of the Hugging Face model. Nothing is downloaded.", envvar="HF_DIR"
    ),
    option("--device", click.Choice(["cpu", "cuda"]), default="cpu", envvar="HF_DEVICE"),
    option(
        "--dtype",
        click.Choice(list(DTYPES)),
        "What transformers computes in. Default: fp32; bf16 for BitNet, which knows nothing else.",
        envvar="HF_DTYPE",
    ),
    option(
        "--topk",
        click.IntRange(1, 1000),
        "Size of the sets of largest logits that are compared.",
        default=5,
        envvar="HF_TOPK",
    ),
    option(
        "--logits-tol",
        click.FloatRange(0, 1e6),
        "How far apart two logits may be; another token within it is a near tie. Default: by "
        f"--dtype, {', '.join(f'{tol:g} for {name}' for name, tol in TOLERANCES.items())}.",
        envvar="HF_LOGITS_TOL",
    ),
    switch("--tokenizer-only", "Load no model; implies --check-prompt."),
    switch("--check-prompt", "Tokenise the prompts again and compare ids."),
    option("--out", PATH, "Write the report here, as JSON."),
    examples=(
        ("A trace", "clocher-run --model-dir DIR --trace-ids trace.jsonl --trace-topk 5"),
        (
            "Compare it",
            "python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR",
        ),
    ),
    exit_codes={
        ExitCode.OK: "no difference (near ties are counted, not differences)",
        ExitCode.USAGE: "a flag or the trace cannot be used, or transformers is not installed",
        ExitCode.MISMATCH: "a difference was found",
    },
)
def verify_ids(
    report: Report, trace_jsonl: Path, hf_dir: Path, out: Path | None, **how: Any
) -> ExitCode:
    """Compare every generated id of a trace with the next id that transformers chooses.

    The Hugging Face model is fed the traced prompt ids and the engine's own ids, so each step is
    judged on its own.
    """
    traces = read_trace(trace_jsonl)
    directory = find_hf(hf_dir)
    if directory is None:
        raise no_model(hf_dir)
    alone = how["tokenizer_only"]
    model = None if alone else HfModel(directory, how["device"], how["dtype"])
    how["dtype"] = model.dtype if model else None
    if how["logits_tol"] is None:
        how["logits_tol"] = TOLERANCES[how["dtype"] or "fp32"]
    how["check_prompt"] = how["check_prompt"] or alone
    checks = Checks(how["topk"], how["logits_tol"], how["check_prompt"])
    encode = hf_tokenizer(directory) if checks.check_prompt else None
    with report.counting() as tell:
        found = verify(traces, checks, model, encode, partial(tell, "prompts"))
    same = same_weights(traces, directory)
    if out is not None:
        paths = {"trace_jsonl": str(trace_jsonl), "hf_dir": str(hf_dir)}
        document = {**found.document(), **paths, **how, "same_weights": same}
        write_file(out, f"{json.dumps(document, allow_nan=False, indent=1)}\n".encode())
    for line in summary(found, same):
        report.done(line)
    return ExitCode.MISMATCH if found.verdict == "mismatch" else ExitCode.OK


def same_weights(traces: Sequence[Trace], directory: Path) -> bool | None:
    """Whether the run used exactly the weights of this directory; None: unknown."""
    traced = {trace.fingerprint for trace in traces}
    try:
        return None if None in traced else traced == {fingerprint(open_checkpoint(directory))}
    except ModelError:
        return None
