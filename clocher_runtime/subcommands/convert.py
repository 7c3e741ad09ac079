"""`clocher convert`: any checkpoint to IEBIN, GGUF or compressed-tensors; and hf_to_iebin."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import (
    PATH,
    RESUMES,
    Report,
    Script,
    needed,
    option,
    place,
    script,
    switch,
)
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint
    from clocher_runtime.convert.to_iebin import Conversion

KINDS = ("iebin", "gguf", "compressed-tensors")
OUT_DIR = "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be."
VERIFY = switch(
    "--verify",
    "Read the result back and check every hash. Of IEBIN then compare every tensor with the input "
    "and write model.ie.certificate.json beside it, for `clocher convert --check`.",
)
Q4_MAP = option(
    "--q4-map",
    PATH,
    "Quantisation manifest (JSON): which matrices become int4 or int8, or where they lie already "
    "quantised. Without it every tensor is copied bit for bit.",
)


@script(
    "clocher convert",
    *place(
        "MODEL",
        "--model-dir",
        "The model: a directory with safetensors or pytorch_model*.bin (or with them in hf/ or "
        "hf/original/), a GGUF file, or owner/name of what `clocher pull` has fetched. It is only "
        "read; pytorch_model*.bin needs torch.",
        needed=False,
    ),
    *place(
        "OUT",
        "--out-dir",
        f"{OUT_DIR} Or a file whose name ends in .gguf, or with --to another.",
        needed=False,
    ),
    option(
        "--to",
        click.Choice(KINDS),
        "What to write: compressed-tensors is a Hugging Face directory, for vLLM and "
        "transformers.  [default: gguf if OUT ends so, else iebin]",
    ),
    option(
        "--others",
        click.Choice(["bf16", "f16", "f32"]),
        "Type of the matrices whose numbers the other format cannot hold.  [default: refuse]",
    ),
    option("--pre", str, "GGUF: name of how text is split, where none is exact (llama-bpe, ...)."),
    Q4_MAP,
    VERIFY,
    option(
        "--check",
        PATH,
        "Convert nothing: compute again all that the certificate of the IEBIN model in this "
        "directory lists, of the input, too, if it is still there (or given as MODEL).",
    ),
    examples=(
        ("A Hugging Face directory", "clocher convert models/llama/hf models/llama"),
        ("A GGUF file; then check every byte", "clocher convert m.gguf models/m --verify"),
        ("Check it again, later", "clocher convert --check models/m"),
        (
            "4 bits for llama.cpp, which calls them Q4_0",
            "clocher quantize models/llama q4 --symmetric\n  clocher convert q4 q4.gguf",
        ),
        (
            "fp8 for vLLM",
            "clocher quantize models/llama fp8 --format fp8\n"
            "  clocher convert fp8 llama-fp8 --to compressed-tensors",
        ),
        (
            "With a manifest; clocher quantize does both steps at once",
            "clocher convert models/llama/hf models/llama-int4 --q4-map quant/q4_manifest.json",
        ),
    ),
    epilog=RESUMES,
    exit_codes={ExitCode.MISMATCH: "--check: something is not as it was certified"},
)
def convert(
    report: Report,
    model_dir: Path | None,
    out_dir: Path | None,
    to: str | None,
    others: str | None,
    pre: str | None,
    q4_map: Path | None,
    verify: bool,
    check: Path | None,
) -> ExitCode:
    """Convert a model to IEBIN: one file of weights, ready to be mapped; or to another format.

    Tensors that are already quantised (MXFP4, BitNet, GPTQ, fp8) keep their exact numbers, in
    IEBIN their bytes. Two tensors at a time are in memory.
    """
    from clocher_runtime.checkpoints.locate import locate
    from clocher_runtime.convert.to_iebin import open_source, plan_conversion

    if check:
        if out_dir or to or others or pre or q4_map or verify:
            raise UsageError("--check stands alone, with or without MODEL: it writes nothing")
        return _check(report, check, model_dir and locate(model_dir, "MODEL"))
    if not (model_dir and out_dir):
        word, flag = ("OUT", "--out-dir") if model_dir else ("MODEL", "--model-dir")
        raise UsageError(f"{word} is missing; give it, or {flag}")
    found = locate(model_dir, "MODEL")
    kind = to or ("gguf" if out_dir.suffix == ".gguf" else "iebin")
    if kind != "iebin":
        if q4_map:
            raise UsageError(f"--q4-map has no place beside --to {kind}: convert to IEBIN first")
        _export(report, kind, open_source(found), out_dir, others, pre, verify)
        return ExitCode.OK
    if others or pre:
        flag = "--others" if others else "--pre"
        raise UsageError(f"{flag} has no place: IEBIN holds every model")
    with replacing_model(report, out_dir, q4_map):
        _convert(report, plan_conversion(found, out_dir, q4_map), verify)
    report.note(next_command(out_dir))
    return ExitCode.OK


def _check(report: Report, model_dir: Path, source: Path | None) -> ExitCode:
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import read_index
    from clocher_runtime.convert.certificate import check_certificate

    with report.progress(read_index(model_dir / JSON_NAME).bin.nbytes) as progress:
        found = check_certificate(model_dir, source, progress)
    for problem in found.problems:
        report.note(problem)
    beside = f"source {found.source}" if found.source else "the source is not there any more"
    if found.problems:
        count = len(found.problems)
        differences = f"{count} difference{'s' * (count > 1)}"
        report.done(f"{model_dir}: {differences} from its certificate")
        return ExitCode.MISMATCH
    report.done(
        f"{model_dir}: {found.tensors} tensors as certified, {found.identical} of them bit for bit "
        f"those of the source ({beside})"
    )
    return ExitCode.OK


def _export(
    report: Report,
    kind: str,
    source: "Checkpoint",
    out: Path,
    others: str | None,
    pre: str | None,
    verify: bool,
) -> None:
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.convert.gguf_model import plan_gguf_model
    from clocher_runtime.convert.to_compressed import plan_compressed

    notes = source.notes
    if kind == "gguf":
        job: Any = plan_gguf_model(source, out, others, pre)
        notes += job.export.notes
    elif pre:
        raise UsageError("--pre is for GGUF")
    else:
        job = plan_compressed(source, out, others)
    for note in notes:
        report.note(f"note: {note}")
    if job.floats:
        report.note(f"note: {len(job.floats)} matrices become {others}, such as {job.floats[0]}")
    report.disk(source.path, out, job.nbytes)
    with report.progress(job.nbytes) as progress:
        job.run(progress)
    if verify:
        open_checkpoint(out).verify()
    report.done(f"wrote {out}{', verified' if verify else ''}")


COMMAND = convert
main = convert.run


def next_command(out_dir: Path) -> str:
    """Return the command to try a new model."""
    return f"next: clocher chat {shlex.quote(str(out_dir))}"


_BYTES = """Tensors that are already quantised (MXFP4, BitNet, fp8) keep their exact bytes. Two
tensors at a time are in memory."""


def _converter(name: str, about: str, *options: click.Parameter, pickles: bool = False) -> Script:
    line = f"python scripts/{name}.py --hf-dir models/llama/hf --out-dir models/llama"
    with_manifest = f"{line}-q4 \\\n    --q4-map quant/q4_manifest.json --verify"
    weights = (
        "pytorch_model*.bin weights" if pickles else "safetensors or pytorch_model*.bin weights"
    )
    or_gguf = "" if pickles else ", or a GGUF file"

    @script(
        name,
        needed(
            "--hf-dir",
            f"Directory with config.json and {weights} (or with them in hf/ or hf/original/)"
            f"{or_gguf}. It is only read.",
        ),
        needed("--out-dir", OUT_DIR),
        VERIFY,
        *options,
        examples=(
            ("Convert a model", line),
            *([("With a quantisation manifest", with_manifest)] if options else []),
        ),
        epilog=RESUMES,
        help=f"{about}\n\n{_BYTES}",
    )
    def main(
        report: Report, hf_dir: Path, out_dir: Path, verify: bool, q4_map: Path | None = None
    ) -> None:
        from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
        from clocher_runtime.convert.to_iebin import open_source, plan_conversion

        opener = open_torch_bin if pickles else open_source
        with replacing_model(report, out_dir, q4_map):
            _convert(report, plan_conversion(hf_dir, out_dir, q4_map, opener), verify)

    return main


hf_to_iebin = _converter(
    "hf_to_iebin", "Convert a checkpoint to IEBIN: one file of weights, ready to be mapped.", Q4_MAP
)
hf_to_iebin_raw = _converter(
    "hf_to_iebin_raw",
    "Convert a checkpoint to IEBIN bit for bit: hf_to_iebin.py without --q4-map.",
)
hf_to_iebin_stream = _converter(
    "hf_to_iebin_stream",
    "Convert a checkpoint to IEBIN, streaming as hf_to_iebin.py does, which has --q4-map too.",
)
hf_to_iebin_stream_pt = _converter(
    "hf_to_iebin_stream_pt",
    "Convert a checkpoint with pickled weights to IEBIN, without running what is in the pickle. "
    "Files that ask for more than plain tensors are refused.",
    Q4_MAP,
    pickles=True,
)


@contextmanager
def replacing_model(report: Report, out_dir: Path, q4_map: Path | None = None) -> Iterator[None]:
    """Say that a model was replaced, and remove its manifest unless it is `q4_map`.

    The certificate is removed by the writer.
    """
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME

    held, manifest = (out_dir / JSON_NAME).exists(), out_dir / "q4_manifest.json"
    yield
    if held:
        text = f"note: replaced the model that {out_dir} held"
        if manifest.is_file() and not (q4_map and q4_map.samefile(manifest)):
            manifest.unlink()
            text += f", and removed its {manifest.name}"
        report.note(text)


def _convert(report: Report, conversion: "Conversion", verify: bool) -> None:
    for note in conversion.notes:
        report.note(f"note: {note}")
    source, out_dir = conversion.source.path, conversion.out_dir
    report.disk(source, out_dir, conversion.nbytes)
    run_conversion(report, conversion, verify)


def run_conversion(report: Report, conversion: "Conversion", verify: bool) -> None:
    """Write a planned conversion, and report it."""
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import open_iebin
    from clocher_runtime.convert.certificate import write_certificate

    out_dir = conversion.out_dir
    with report.progress(conversion.nbytes) as progress:
        resumed = conversion.run(progress)
    counts = [f"{len(conversion.quantised)} quantised"]
    if resumed:
        counts.append(f"{resumed} taken over from a killed run")
    verified = ""
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
        with report.progress(conversion.source.nbytes) as progress:
            identical, total = write_certificate(conversion.source, out_dir, progress)
        verified = f", verified: {identical} of {total} bit for bit those of the source"
    report.done(
        f"wrote {len(conversion.formats)} tensors ({', '.join(counts)}) to {out_dir}{verified}"
    )
