"""The job of scripts/verify_hf_generation_ids.py: a trace against Hugging Face transformers."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from clocher_kernels.errors import DeviceError, ModelError, OutOfMemory, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import CONFIG, find_hf, no_model
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import needed, option, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.verify import Checks, Encode, fingerprint, read_trace, summary, verify

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TOLERANCES = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.25}
"""Largest error of a correct engine's logits; in 16 bits, 4 ULP of logits from 8 to 16."""
INSTALL = "python -m pip install torch transformers accelerate"
_FAILURES = (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError)


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
    console: Console, trace_jsonl: Path, hf_dir: Path, out: Path | None, **how: Any
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
    with console.counting() as tell:
        found = verify(traces, checks, model, encode, partial(tell, "prompts"))
    traced = {trace.fingerprint for trace in traces}
    try:
        same = None if None in traced else traced == {fingerprint(open_checkpoint(directory))}
    except ModelError:
        same = None
    if out is not None:
        paths = {"trace_jsonl": str(trace_jsonl), "hf_dir": str(hf_dir)}
        document = {**found.document(), **paths, **how, "same_weights": same}
        write_file(out, f"{json.dumps(document, allow_nan=False, indent=1)}\n".encode())
    for line in summary(found, same):
        console.say(line)
    return ExitCode.MISMATCH if found.verdict == "mismatch" else ExitCode.OK


class HfModel:
    """A causal transformers model from local safetensors; a model's own code is never run."""

    def __init__(self, directory: Path, device: str, dtype: str | None) -> None:
        """Load it. Raises UsageError, DeviceError, ModelError."""
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
        except _FAILURES as error:
            raise ModelError(f"{directory}: transformers cannot load it: {error}") from None
        self._torch = torch

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._model.get_input_embeddings().num_embeddings)

    def logits(self, ids: Sequence[int], last: int) -> np.ndarray:
        """Return the logits after the last ids, fp32 [last, V]."""
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
    """Return transformers' tokenizer as a function. Raises UsageError, ModelError."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{error}; install it: {INSTALL}") from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except _FAILURES as error:
        raise ModelError(f"{directory}: transformers has no tokenizer for it: {error}") from None
    return lambda text: [int(token) for token in tokenizer(text)["input_ids"]]
