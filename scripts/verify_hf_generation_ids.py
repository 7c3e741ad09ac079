"""Check a trace of clocher-run against Hugging Face transformers, step by step."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import Progress

from clocher_kernels.errors import (
    ClocherError,
    DeviceError,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    UsageError,
)
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.hf.checkpoint import CONFIG, find_hf
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.exit_codes import ExitCode, exit_code
from clocher_runtime.quality.trace import Trace, fingerprint, read_trace
from clocher_runtime.quality.verify import Checks, Encode, Report, verify

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
INSTALL = "python -m pip install torch transformers accelerate"
SHOWN = 20

EPILOG = """\b
Examples:
  clocher-run --model-dir DIR --trace-ids trace.jsonl --trace-topk 5
  python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR
  python scripts/verify_hf_generation_ids.py --trace-jsonl trace.jsonl --hf-dir DIR \\
      --tokenizer-only --check-prompt --out verify.json

\b
Exit codes:
  0  no difference (near ties are counted, not differences)
  2  a flag or the trace cannot be used, or transformers is not installed
  3  the model is missing, or transformers cannot load it
  5  the device is not there, or the report cannot be written
  6  out of memory
  7  a difference was found"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100, "show_default": True})
@click.option(
    "--trace-jsonl",
    type=click.Path(path_type=Path),
    required=True,
    help="What clocher-run --trace-ids wrote.",
)
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    envvar="HF_DIR",
    show_envvar=True,
    help="Directory of the Hugging Face model. Nothing is downloaded.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    envvar="HF_DEVICE",
    show_envvar=True,
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    envvar="HF_DTYPE",
    show_envvar=True,
    help="What transformers computes in. Default: fp32; bf16 for BitNet, which knows nothing else.",
)
@click.option(
    "--topk",
    type=click.IntRange(1, 1000),
    default=5,
    envvar="HF_TOPK",
    show_envvar=True,
    help="Size of the sets of largest logits that are compared.",
)
@click.option(
    "--logits-tol",
    type=click.FloatRange(0, 1e6),
    default=1e-3,
    envvar="HF_LOGITS_TOL",
    show_envvar=True,
    help="How far apart two logits may be. Another token within it is a near tie.",
)
@click.option("--tokenizer-only", is_flag=True, help="Load no model; implies --check-prompt.")
@click.option("--check-prompt", is_flag=True, help="Tokenise the prompts again and compare ids.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the report here, as JSON.")
def main(
    trace_jsonl: Path,
    hf_dir: Path,
    device: str,
    dtype: str | None,
    topk: int,
    logits_tol: float,
    tokenizer_only: bool,
    check_prompt: bool,
    out: Path | None,
) -> None:
    """Compare every generated id of a trace with the next id that transformers chooses.

    The Hugging Face model is fed the traced prompt ids and the engine's own ids, so each step is
    judged on its own.
    """
    checks = Checks(topk, logits_tol, check_prompt or tokenizer_only)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        traces = read_trace(trace_jsonl)
        directory = find_hf(hf_dir)
        if directory is None:
            raise ModelNotFound(f"{hf_dir}: no {CONFIG} there, nor in hf or hf/original below it")
        model = None if tokenizer_only else HfModel(directory, device, dtype)
        encode = hf_tokenizer(directory) if checks.check_prompt else None
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
            bar = bars.add_task("prompts", total=len(traces))
            report = verify(
                traces, checks, model, encode, lambda done, _: bars.update(bar, completed=done)
            )
        same = same_weights(traces, directory)
        if out is not None:
            settings = {
                "trace_jsonl": str(trace_jsonl),
                "hf_dir": str(hf_dir),
                "device": device,
                "dtype": model.dtype if model else None,
                "topk": topk,
                "logits_tol": logits_tol,
                "tokenizer_only": tokenizer_only,
                "check_prompt": checks.check_prompt,
                "same_weights": same,
            }
            text = json.dumps({**report.document(), **settings}, allow_nan=False, indent=1)
            write_file(out, f"{text}\n".encode())
    except (ClocherError, MemoryError, OSError) as error:
        console.print(f"verify: error: {error or type(error).__name__}", markup=False)
        sys.exit(ExitCode.DEVICE if isinstance(error, OSError) else exit_code(error))
    say(console, report, same)
    sys.exit(ExitCode.MISMATCH if report.verdict == "mismatch" else ExitCode.OK)


class HfModel:
    """A causal language model of transformers, loaded from local safetensors files.

    Code that comes with a model is never run.
    """

    def __init__(self, directory: Path, device: str, dtype: str | None) -> None:
        """Load it.

        Raises:
            UsageError: transformers is not installed, or the model does not run in this dtype.
            DeviceError: there is no such device.
            ModelError: transformers cannot load it.
        """
        config = parse_object((directory / CONFIG).read_bytes(), str(directory / CONFIG))
        quantization = config.get("quantization_config") or {}
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        self.dtype = dtype or ("bf16" if method == "bitnet" else "fp32")
        if method == "bitnet" and self.dtype != "bf16":
            raise UsageError(
                f"--dtype {self.dtype}: transformers runs BitNet in bf16 only; leave it out"
            )
        try:
            import torch
            import transformers
        except ImportError as error:
            raise UsageError(f"{error}; install it: {INSTALL}") from None
        hf: Any = transformers  # half of it is typed
        if device == "cuda" and not torch.cuda.is_available():
            raise DeviceError("--device cuda: torch finds no CUDA device; use --device cpu")
        hf.logging.set_verbosity_error()
        hf.utils.logging.disable_progress_bar()
        more: dict[str, Any] = {}
        if method == "mxfp4":
            more["quantization_config"] = hf.Mxfp4Config(dequantize=True)
        try:
            model = hf.AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, DTYPES[self.dtype]),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                **more,
            )
            self._model = model.to(device).eval()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{directory}: {error}") from None
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"{directory}: transformers cannot load it: {error}") from None
        self._torch = torch

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def logits(self, ids: Sequence[int], last: int) -> np.ndarray:
        """Return the logits after each of the last ids, fp32 [last, V]."""
        torch = self._torch
        try:
            with torch.inference_mode():
                inputs = torch.tensor([ids], device=self._model.device)
                out = self._model(inputs, logits_to_keep=last, use_cache=False)
                logits: np.ndarray = out.logits[0].float().cpu().numpy()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{len(ids)} tokens: {error}; use --device cpu") from None
        return logits


def hf_tokenizer(directory: Path) -> Encode:
    """Return the tokenizer of transformers, as a function from text to ids.

    Raises:
        UsageError: transformers is not installed.
        ModelError: it cannot load the tokenizer.
    """
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{error}; install it: {INSTALL}") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"{directory}: transformers has no tokenizer for it: {error}") from None
    return lambda text: [int(token) for token in tokenizer(text)["input_ids"]]


def same_weights(traces: Sequence[Trace], directory: Path) -> bool | None:
    """Whether the run had the weights of this directory bit for bit; None: not known."""
    traced = {trace.fingerprint for trace in traces}
    try:
        return None if None in traced else traced == {fingerprint(open_checkpoint(directory))}
    except ModelError:
        return None


def say(console: Console, report: Report, same: bool | None) -> None:
    """Sum up for a person."""

    def line(text: str) -> None:
        console.print(text, markup=False)

    # The first of each kind in each prompt says most; what follows it is often its consequence.
    first = {(f.prompt, f.kind): f for f in reversed(report.findings)}
    shown = [f for f in report.findings if first[f.prompt, f.kind] is f][:SHOWN]
    for finding in shown:
        line(f"verify: {finding}")
    if more := len(report.findings) - len(shown) + report.findings_left_out:
        line(f"verify: and {more} more")
    if same is False:
        line("verify: note: the run used other weights (quantised, or another model)")
    if report.prompts_checked or report.prompts_without_text:
        line(
            f"verify: prompts: {report.prompts_equal} of {report.prompts_checked} tokenised alike"
            f", {report.prompts_without_text} without text"
        )
    if report.steps:
        line(
            f"verify: tokens: {report.equal} of {report.steps} equal, {report.near_ties} near "
            f"ties, {report.mismatches} mismatches, {report.in_topk} in the top k"
        )
    if report.topk_overlap is not None:
        largest = report.logits_max_diff
        line(
            f"verify: logits: top-k overlap {report.topk_overlap:.1%}, largest difference "
            f"{'-' if largest is None else format(largest, '.3g')}, "
            f"{report.logits_beyond_tol} of {report.traced_steps} steps beyond the tolerance"
        )
    line(f"verify: {report.verdict} ({report.prompts} prompts)")


if __name__ == "__main__":
    main()
