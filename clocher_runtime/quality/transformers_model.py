"""Hugging Face transformers as the reference for a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import DeviceError, ModelError, OutOfMemory, UsageError
from clocher_runtime.checkpoints.locate import CONFIG
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.quality.verify import Encode

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TOLERANCES = {"fp32": 1e-3, "fp16": 0.03, "bf16": 0.25}
"""Largest error of a correct engine's logits; in 16 bits, 4 ULP of logits from 8 to 16."""
INSTALL = "python -m pip install torch transformers accelerate"


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
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
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
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"{directory}: transformers has no tokenizer for it: {error}") from None
    return lambda text: [int(token) for token in tokenizer(text)["input_ids"]]
