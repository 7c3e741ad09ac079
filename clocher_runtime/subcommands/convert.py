"""`clocher convert`: any checkpoint to IEBIN; and its older names, the hf_to_iebin scripts."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_runtime.command.script_run import (
    EXIT_CODES,
    PATH,
    RESUMES,
    Examples,
    Report,
    Script,
    Wrap,
    needed,
    option,
    place,
    script,
    switch,
)

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint
    from clocher_runtime.convert.to_iebin import Conversion

OUT_DIR = "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be."
VERIFY = switch("--verify", "Read the result back and check every hash.")
Q4_MAP = option(
    "--q4-map",
    PATH,
    "Quantisation manifest (JSON): which matrices become int4 or int8, or where they lie already "
    "quantised. Without it every tensor is copied bit for bit.",
)


@script(
    "clocher convert",
    place(
        "MODEL",
        "--model-dir",
        "The model: a directory with safetensors or pytorch_model*.bin (or with them in hf/ or "
        "hf/original/), a GGUF file, or owner/name of what `clocher pull` has fetched. It is only "
        "read; pickles are followed, never run.",
    ),
    place("OUT_DIR", "--out-dir", OUT_DIR),
    Q4_MAP,
    VERIFY,
    examples=(
        ("A Hugging Face directory", "clocher convert models/llama/hf models/llama"),
        ("A GGUF file; then check every byte", "clocher convert m.gguf models/m --verify"),
        (
            "With a manifest; clocher quantize does both steps at once",
            "clocher convert models/llama/hf models/llama-int4 --q4-map quant/q4_manifest.json",
        ),
    ),
    epilog=RESUMES,
    exit_codes=EXIT_CODES,
)
def convert(
    report: Report, model_dir: Path, out_dir: Path, q4_map: Path | None, verify: bool
) -> None:
    """Convert a model to IEBIN: one file of weights, ready to be mapped.

    Tensors that are already quantised (MXFP4, BitNet, GPTQ, fp8) keep their exact bytes. Two
    tensors at a time are in memory.
    """
    from clocher_runtime.command.model_choice import locate
    from clocher_runtime.convert.to_iebin import open_any, plan_conversion

    found = locate(model_dir, "MODEL")
    _convert(report, plan_conversion(found, out_dir, q4_map, open_any), verify)
    report.note(next_command(out_dir))


COMMAND = convert
main = convert.run


def next_command(out_dir: Path) -> str:
    """Return what to type once a model is there."""
    return f"next: clocher chat {shlex.quote(str(out_dir))}"


def converter(
    name: str,
    about: str,
    *options: Wrap,
    examples: Examples = (),
    weights: str = "safetensors weights (or with them in hf/ or hf/original/), or a GGUF file",
    opener: "Callable[[Path], Checkpoint] | None" = None,
) -> Script:
    """Return a script that converts a checkpoint to IEBIN.

    Args:
        name: of the script, for messages.
        about: what its help says.
        options: what it takes besides --hf-dir, --out-dir and --verify.
        examples: besides the plain one.
        weights: what --hf-dir holds, as its help says it.
        opener: opens --hf-dir; None: that of safetensors and GGUF.
    """
    line = f"python scripts/{name}.py --hf-dir models/llama/hf --out-dir models/llama"

    @script(
        name,
        needed("--hf-dir", f"Directory with config.json and {weights}. It is only read."),
        needed("--out-dir", OUT_DIR),
        VERIFY,
        *options,
        examples=(("Convert a model", line), *examples),
        epilog=RESUMES,
        help=about,
    )
    def main(
        report: Report, hf_dir: Path, out_dir: Path, verify: bool, q4_map: Path | None = None
    ) -> None:
        from clocher_runtime.convert.to_iebin import open_source, plan_conversion

        _convert(report, plan_conversion(hf_dir, out_dir, q4_map, opener or open_source), verify)

    return main


def _convert(report: Report, conversion: "Conversion", verify: bool) -> None:
    for note in conversion.notes:
        report.note(f"note: {note}")
    source, out_dir = conversion.source.path, conversion.out_dir
    report.disk(source, out_dir, conversion.nbytes, conversion.free_bytes)
    run_conversion(report, conversion, verify)


def run_conversion(report: Report, conversion: "Conversion", verify: bool) -> None:
    """Write what was planned, and say so."""
    from clocher_runtime.checkpoints.iebin import JSON_NAME, open_iebin

    out_dir = conversion.out_dir
    with report.progress(conversion.nbytes) as progress:
        resumed = conversion.run(progress)
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
    counts = [f"{len(conversion.quantised)} quantised"]
    if resumed:
        counts.append(f"{resumed} taken over from a killed run")
    verified = ", verified" if verify else ""
    report.done(
        f"wrote {len(conversion.formats)} tensors ({', '.join(counts)}) to {out_dir}{verified}"
    )
