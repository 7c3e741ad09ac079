"""`clocher convert`: any checkpoint to IEBIN, GGUF or compressed-tensors; and hf_to_iebin."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import UsageError, counted
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import RESUMES, needed, option, place, script, switch
from clocher_runtime.command.parameters import COUNT, PATH
from clocher_runtime.convert import PRECISIONS, PRESETS
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.checkpoint import Checkpoint
    from clocher_runtime.convert.to_iebin import Conversion

_SYNTHETIC = "python scripts/make_synthetic.py --preset"
KINDS = ("iebin", "gguf", "compressed-tensors")
OUT_DIR = "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be."
VERIFY = switch(
    "--verify",
    "Read the result back and check every hash. Of IEBIN then compare every tensor with the input "
    "and write model.ie.certificate.json beside it, for `clocher convert --check`.",
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
        short="--hf-dir",
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
    option(
        "--q4-map",
        PATH,
        "Quantisation manifest (JSON): which matrices become int4 or int8, or where they lie "
        "already quantised. Without it every tensor is copied bit for bit.",
    ),
    VERIFY,
    switch("--pickled", "Read pytorch_model*.bin even beside safetensors."),
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
    console: Console,
    model_dir: Path | None,
    out_dir: Path | None,
    check: Path | None,
    pickled: bool,
    **how: Any,
) -> ExitCode:
    """Convert a model to IEBIN: one file of weights, ready to be mapped; or to another format.

    Tensors that are already quantised (MXFP4, BitNet, GPTQ, fp8) keep their exact numbers, in
    IEBIN their bytes. Two tensors at a time are in memory.
    """
    from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
    from clocher_runtime.checkpoints.locate import locate
    from clocher_runtime.convert.to_iebin import Conversion, open_source

    if check:
        if out_dir or any(how.values()):
            raise UsageError("--check stands alone, with or without MODEL: it writes nothing")
        return _check(console, check, model_dir and locate(model_dir, "MODEL"))
    if not (model_dir and out_dir):
        word, flag = ("OUT", "--out-dir") if model_dir else ("MODEL", "--model-dir")
        raise UsageError(f"{word} is missing; give it, or {flag}")
    found = model_dir if pickled else locate(model_dir, "MODEL")
    opener = open_torch_bin if pickled else open_source
    kind = how["to"] or ("gguf" if out_dir.suffix == ".gguf" else "iebin")
    q4_map, verify = how["q4_map"], how["verify"]
    if kind != "iebin":
        if q4_map:
            raise UsageError(f"--q4-map has no place beside --to {kind}: convert to IEBIN first")
        return _export(console, opener(found), out_dir, kind, how)
    if how["others"] or how["pre"]:
        flag = "--others" if how["others"] else "--pre"
        raise UsageError(f"{flag} has no place: IEBIN holds every model")
    with replacing_model(console, out_dir, q4_map):
        conversion = Conversion(found, out_dir, q4_map, opener)
        for note in conversion.notes:
            console.note(f"note: {note}")
        console.disk(conversion.source.path, out_dir, conversion.nbytes)
        run_conversion(console, conversion, verify)
    console.note(next_command(out_dir))
    return ExitCode.OK


def _check(console: Console, model_dir: Path, source: Path | None) -> ExitCode:
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import IebinIndex
    from clocher_runtime.convert.certificate import check_certificate

    work = partial(check_certificate, model_dir, source)
    found = console.progress(IebinIndex(model_dir / JSON_NAME).bin.nbytes, work)
    for problem in found.problems:
        console.note(problem)
    beside = f"source {found.source}" if found.source else "the source is not there any more"
    if found.problems:
        differences = counted(len(found.problems), "difference")
        console.say(f"{model_dir}: {differences} from its certificate")
        return ExitCode.MISMATCH
    console.say(
        f"{model_dir}: {found.tensors} tensors as certified, {found.identical} of them bit for bit "
        f"those of the source ({beside})"
    )
    return ExitCode.OK


def _export(
    console: Console, source: "Checkpoint", out: Path, kind: str, how: Mapping[str, Any]
) -> ExitCode:
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.convert.gguf_model import GgufConversion
    from clocher_runtime.convert.to_compressed import CompressedConversion

    notes, others = source.notes, how["others"]
    if kind == "gguf":
        job: Any = GgufConversion(source, out, others, how["pre"])
        notes += job.export.notes
    elif how["pre"]:
        raise UsageError("--pre is for GGUF")
    else:
        job = CompressedConversion(source, out, others)
    for note in notes:
        console.note(f"note: {note}")
    if job.floats:
        console.note(f"note: {len(job.floats)} matrices become {others}, such as {job.floats[0]}")
    console.disk(source.path, out, job.nbytes)
    console.progress(job.nbytes, job.run)
    if how["verify"]:
        open_checkpoint(out).verify()
    console.say(f"wrote {out}{', verified' if how['verify'] else ''}")
    return ExitCode.OK


def next_command(out_dir: Path) -> str:
    """Return the command to try a new model."""
    return f"next: clocher chat {shlex.quote(str(out_dir))}"


@contextmanager
def replacing_model(console: Console, out_dir: Path, q4_map: Path | None = None) -> Iterator[None]:
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
        console.note(text)


def run_conversion(console: Console, conversion: "Conversion", verify: bool) -> None:
    """Write a planned conversion, and report it."""
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import open_iebin
    from clocher_runtime.convert.certificate import write_certificate

    out_dir = conversion.out_dir
    resumed = console.progress(conversion.nbytes, conversion.run)
    counts = [f"{len(conversion.quantised)} quantised"] if conversion.quantised else []
    if resumed:
        counts.append(f"{resumed} taken over from a killed run")
    verified = ""
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
        work = partial(write_certificate, conversion.source, out_dir)
        identical, total = console.progress(conversion.source.nbytes, work)
        verified = f", verified: {identical} of {total} bit for bit those of the source"
    done = f" ({', '.join(counts)})" if counts else ""
    console.say(f"wrote {len(conversion.formats)} tensors{done} to {out_dir}{verified}")


@script(
    "make_synthetic",
    option("--preset", click.Choice(list(PRESETS)), "model shape", required=True),
    option(
        "--precision",
        click.Choice(PRECISIONS),
        "storage of matrices, integers in groups of 32; native: as published",
        default="native",
    ),
    needed("--out-dir", "directory for model.ie.json, model.ie.bin and vocab.json"),
    option("--seed", click.IntRange(0), default=0),
    option("--layers", COUNT, "keep only the first LAYERS layers"),
    switch("--gguf", "also write model.gguf with the same numbers, for llama.cpp"),
    examples=(
        ("Int4", f"{_SYNTHETIC} llama-1b --precision int4 --out-dir models/l1b-int4"),
        ("For llama.cpp, too", f"{_SYNTHETIC} llama-1b --precision int4 --out-dir DIR --gguf"),
        ("As published", f"{_SYNTHETIC} gpt-oss-20b --precision native --out-dir models/oss"),
    ),
    epilog="\b\nPresets:\n"
    + "\n".join(f"  {name:13} {about['summary']}" for name, about in PRESETS.items()),
)
def synthesize(console: Console, preset: str, out_dir: Path, precision: str, **given: Any) -> None:
    """Make a model with random weights, to measure speed at real shapes without a download.

    The same arguments give the same bytes.
    """
    from clocher_runtime.convert.synthetic import Synthesis

    synthesis = Synthesis(preset, precision, out_dir, **given)
    console.disk(preset, out_dir, synthesis.nbytes)
    console.progress(synthesis.nbytes, synthesis.run)
    more = " and model.gguf" if given["gguf"] else ""
    console.say(f"wrote {len(synthesis.formats)} tensors to {out_dir}{more}")
