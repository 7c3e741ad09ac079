"""`clocher quantize`: from a checkpoint to a quantised model that runs."""

import os
import pkgutil
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console, columns, size
from clocher_runtime.command.flags import option, place, script, switch
from clocher_runtime.command.parameters import COUNT, FILE, PATH
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.convert import OUT_DIR, VERIFY, next_command, run_conversion

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint
    from clocher_runtime.quantize.job import Outcome

# Before numpy loads: waiting threads of its OpenBLAS would spin for 2^26 cycles, beside ours.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")

MANIFEST = "q4_manifest.json"
"""In the output directory: method and quality of each tensor."""
LIMITS = ("float", "int8", "kv", "fp8", "int4", "int3")
FORMATS = ("int4", "int8", "fp8", "fp8_e5m2", "mxfp4", "ternary", "tcq2", "tcq3", "tcq4", "tcq5")

_NEXT = {
    "fail": "try --calib-text, or more bits, or a looser limit",
    "undecided": "judge it with more text, or a looser limit",
}

PTQ_CODES = {
    ExitCode.OK: "done (and the gate, if there is one, accepts it); or --dry-run",
    ExitCode.REJECTED: "the gate rejects: there is a manifest NAME.rejected.json, no model",
    ExitCode.UNDECIDED: "the gate is undecided and needs more text: as 8",
    ExitCode.INTERRUPTED: "interrupted; run it again to go on after the last finished layer",
}

LIMIT_FLAGS: tuple[click.Parameter, ...] = (
    option("--max-ppl-ratio", float, "perplexity over that of the reference"),
    option("--max-kld", float, "mean KL divergence, nats"),
    option("--min-same-top", float, "share of tokens, 0 to 1"),
    option("--max-rms-dp", float, "RMS change of the true token's probability"),
    option("--min-tokens", COUNT, "fewer never pass; default: 32768"),
    option("--min-documents", COUNT, "fewer never pass; default: 64"),
)
FLAGS: tuple[click.Parameter, ...] = (
    option(
        "--format",
        click.Choice(FORMATS),
        "What the weights become; fp8 is e4m3, tcq a trellis of 2 to 5 bits. From floats ternary "
        "loses much: it is for models that were trained so.  [default: int4]",
    ),
    option(
        "--bits",
        float,
        "A whole number is for the weights of the blocks: 4 or 8, integers; 2, 3 or 5, trellises, "
        "with embeddings and head on top, in at least 4. A fraction from 2.25 to 5 is for all "
        "quantised weights together: it chooses a trellis per tensor, and needs --calib-text.",
    ),
    option(
        "--weights-only",
        click.IntRange(0, 1),
        "Only 1: activations are never quantised by a manifest (see --act-prec of clocher run).",
        default=1,
    ),
    option(
        "--granularity",
        click.Choice(["per-tensor", "per-row", "per-group", "per-block"]),
        "What shares a scale; per-block is 128 x 128, for fp8.  [default: per-group for int4, "
        "per-row for the others]",
    ),
    option(
        "--group",
        click.Choice(["32", "64", "128", "256"]),
        "Columns that share a scale, int4 and int8.  [default: 32]",
    ),
    option(
        "--symmetric/--affine",
        None,
        "Without or with a zero point per group.  [default: affine for 4 bits]",
        default=None,
    ),
    option("--scale-dtype", click.Choice(["f16", "bf16", "f32"])),
    option("--clamp", float, "Clamp weights to [-CLAMP, CLAMP] first."),
    option("--percentile", float, "Leave the largest 100 - PERCENTILE % out of a range."),
    switch("--mse", "Search each scale for the least squared error."),
    option(
        "--rules",
        FILE,
        "Manifest with rules (regex, first match wins) in place of the flags above.",
    ),
    option(
        "--method",
        click.Choice(["rtn", "imx", "gptq"]),
        "Rounding; search weighted by activations; GPTQ.  [default: rtn; with --calib-text gptq, "
        "imx for formats that have none]",
    ),
    option("--calib-text", FILE, "UTF-8 text for imx, gptq and --target-bpw."),
    option("--samples", click.IntRange(2), default=128),
    option("--seq-len", click.IntRange(8), default=512),
    option("--seed", click.IntRange(0), default=0),
    option(
        "--target-bpw", float, "Choose formats per tensor for so many bits per quantised weight."
    ),
    switch("--requantize", "Quantise tensors that are MXFP4, ternary or integers already; lossy."),
    option("--gate", FILE, "UTF-8 held-out text to judge the result on."),
    option("--gate-window", click.IntRange(2), default=256),
    option("--gate-limits", click.Choice(LIMITS), "Default: by format."),
    *LIMIT_FLAGS,
    option(
        "--cosine-threshold",
        click.FloatRange(-1, 1),
        "Least cosine of each quantised tensor with the float one; below it: rejected.",
    ),
    option("--threads", COUNT, "Default: all usable cores."),
    switch("--dry-run", "Print the plan, write nothing."),
)


@script(
    "clocher quantize",
    *place(
        "MODEL",
        "--model-dir",
        "The float model: a directory with safetensors or pytorch_model*.bin, a GGUF file, or "
        "owner/name of what `clocher pull` has fetched. It is only read.",
    ),
    *place("OUT_DIR", "--out-dir", f"{OUT_DIR} {MANIFEST} goes there, too."),
    *FLAGS,
    switch("--force", "Replace the IEBIN model that OUT_DIR holds."),
    VERIFY,
    examples=(
        ("4 bits, in a minute or so", "clocher quantize models/llama models/llama-int4"),
        (
            "Better 4 bits: GPTQ with what a text activates",
            "clocher quantize models/llama models/llama-int4 --calib-text calib.txt",
        ),
        (
            "Only if it is good enough on held-out text",
            "clocher quantize models/llama models/llama-int4 --calib-text calib.txt \\\n"
            "    --gate held_out.txt",
        ),
        (
            "The best model of 3.4 bits a weight",
            "clocher quantize models/llama models/llama-3 --bits 3.4 --calib-text calib.txt",
        ),
        ("8 bits; what would it take?", "clocher quantize models/llama out --bits 8 --dry-run"),
    ),
    epilog="Killed at any moment, it leaves the model that OUT_DIR held before, or none. Run it "
    "again to go on after the last finished layer.",
    exit_codes=PTQ_CODES,
)
def quantize(
    console: Console, model_dir: Path, out_dir: Path, force: bool, verify: bool, **options: Any
) -> int:
    """Quantise the weights of a model, and write one that runs.

    Without flags: int4 with a zero point and a scale for 32 columns, rounded; embeddings, head
    (but see --bits) and whatever is quantised already stay as they are.
    """
    from clocher_runtime.checkpoints.iebin import JSON_BYTES_PER_TENSOR
    from clocher_runtime.checkpoints.locate import locate
    from clocher_runtime.command.ptq import planned, quantised
    from clocher_runtime.convert.q4_entries import remove_planes
    from clocher_runtime.convert.to_iebin import Conversion, beside_tensors, open_source
    from clocher_runtime.disk.output_file import check_free
    from clocher_runtime.quality.gate import verdict_code
    from clocher_runtime.quantize.gradients import PART_TOKENS
    from clocher_runtime.quantize.job import is_tuned

    source = locate(model_dir, "MODEL")
    _refuse(source, out_dir, force)
    options["out"] = out_dir / MANIFEST
    job, plan = planned(console, lambda: open_source(source), options)
    job = replace(job, keeps=True)
    nbytes = plan.size["nbytes"] + plan.plane_nbytes + beside_tensors(job.checkpoint)
    nbytes += 2 * JSON_BYTES_PER_TENSOR * len(job.checkpoint.tensors)  # index and manifest
    check_free(out_dir / MANIFEST, nbytes)
    console.disk(job.checkpoint.path, out_dir, nbytes)
    if job.calibration:
        config, tokens = job.checkpoint.config, sum(map(len, job.calibration.sequences))
        kept = min(tokens, PART_TOKENS) * (config.get("num_hidden_layers", 0) + 3)
        states = config["hidden_size"] * (3 * tokens + kept)
        decoded = is_tuned(plan) * sum(tensor.params for tensor in plan.tensors.values())
        console.note(f"needs {size(4 * (states + decoded))} for temporary files (TMPDIR)")
    if options["dry_run"]:
        return ExitCode.OK
    outcome = quantised(console, job, plan)
    if outcome.verdict != "pass":
        again = ", which does not calibrate again" if job.calibration else ""
        ways = _NEXT[outcome.verdict]
        if job.calibration:
            ways = ways.removeprefix("try --calib-text, or ")
        console.note(f"no model was written: {ways}{again}")
        return verdict_code(outcome.verdict)
    conversion = Conversion(source, out_dir, outcome.path, lambda _: job.checkpoint)
    run_conversion(console, conversion, verify)
    # The model owns these planes now; copies would double the memory.
    remove_planes(outcome.path)
    click.echo(_table(job.given or job.checkpoint, outcome))
    console.note(next_command(out_dir))
    return ExitCode.OK


_SELF = "python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json"


@script(
    "ptq",
    option(
        "--hf-dir",
        PATH,
        "Directory of the model (or with it in hf/ or hf/original/), or the name of a repository "
        "on the Hugging Face hub, which is then downloaded.",
    ),
    switch("--pickled", "Read its pytorch_model*.bin; only plain tensors are accepted."),
    option(
        "--source",
        str,
        "module:function (from here), your own code: it takes no arguments and returns a dict of "
        "float arrays, or (name, array) pairs.",
    ),
    option(
        "--out",
        click.Path(path_type=Path, dir_okay=False),
        "Manifest to write (JSON). Planes of imx and gptq go to NAME.planes.bin beside it.",
        required=True,
    ),
    *FLAGS,
    examples=(
        ("Rounding to 4 bits", f"{_SELF} --bits 4 --weights-only 1"),
        ("Better, and judged", f"{_SELF} \\\n    --calib-text calib.txt --gate held_out.txt"),
        (
            "Then the model; clocher quantize does both steps at once",
            "python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama \\\n"
            "    --q4-map quant/llama.json",
        ),
        (
            "Arrays of a function of yours",
            "python scripts/ptq_from_source.py --source my_weights:load --out quant/q4.json",
        ),
    ),
    exit_codes=PTQ_CODES,
)
def ptq(console: Console, **options: Any) -> int:
    """Quantise a checkpoint, or arrays, after training: write a q4 manifest."""
    from clocher_runtime.command.ptq import planned, quantised
    from clocher_runtime.quality.gate import verdict_code

    given = {name: options.pop(name) for name in ("hf_dir", "source", "pickled")}
    if (given["hf_dir"] is None) == (given["source"] is None):
        raise UsageError("expected one of --hf-dir and --source; give a model, or a function")
    job, plan = planned(console, lambda: _open(**given), options)
    return (
        ExitCode.OK if options["dry_run"] else verdict_code(quantised(console, job, plan).verdict)
    )


def _open(hf_dir: Path | None, source: str | None, pickled: bool) -> "Checkpoint":
    from clocher_runtime.checkpoints.checkpoint import open_arrays
    from clocher_runtime.checkpoints.hf.hub import local_or_fetched
    from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
    from clocher_runtime.convert.to_iebin import open_source

    if hf_dir is not None:
        return open_torch_bin(hf_dir) if pickled else open_source(local_or_fetched(hf_dir))
    assert source is not None  # one of them is there
    module, colon, function = source.partition(":")
    if not (module and colon and function):
        raise UsageError(f"--source {source}: expected module:function")
    sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(source)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--source {source}: {error}") from None
    if not callable(found):
        raise UsageError(f"--source {source}: {type(found).__name__} is not a function")
    return open_arrays(found(), source)


def _refuse(source: Path, out_dir: Path, force: bool) -> None:
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.gguf.checkpoint import find_gguf
    from clocher_runtime.convert.to_iebin import refuse_hf_folder

    model, out = source.resolve(), out_dir.resolve()
    if model in (out, *out.parents):
        raise UsageError(
            f"OUT_DIR {out_dir} is the model's own directory or inside it; the input is only "
            "read: choose a directory beside it"
        )
    refuse_hf_folder(out_dir)
    if (out / JSON_NAME).exists() and not force:
        raise UsageError(
            f"OUT_DIR {out_dir} holds a model already ({JSON_NAME}); choose another directory, or "
            "replace it with --force"
        )
    if out.is_dir() and (found := find_gguf(out)):
        raise UsageError(f"OUT_DIR {out_dir} holds a model already ({found.name}); choose another")


def _table(source: "Checkpoint", outcome: "Outcome") -> str:
    of = outcome.size
    before = 8 * source.nbytes / sum(prod(tensor.shape) for tensor in source.tensors.values())
    rows = [
        ("", "before", "after"),
        ("size", size(source.nbytes), size(of["nbytes"])),
        ("bits per weight", f"{before:.2f}", f"{of['bpw']:.2f}"),
        ("  of the quantised", "", f"{of['quantised_bpw']:.2f}"),
    ]
    if outcome.evaluation:
        found = outcome.evaluation.summary
        perplexities = f"{found.perplexity_reference:.4g}", f"{found.perplexity:.4g}"
        rows.append(("perplexity", *perplexities))
    return columns(rows, right=(1, 2))
