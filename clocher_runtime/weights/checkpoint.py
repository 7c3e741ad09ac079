"""Opening a model: which container a directory holds, and the checkpoint in it."""

import os
from pathlib import Path

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.weights.base import Checkpoint
from clocher_runtime.weights.hf import CONFIG, SUBFOLDERS, find_hf, open_hf
from clocher_runtime.weights.iebin import JSON_NAME, open_iebin

__all__ = ["Checkpoint", "open_checkpoint", "open_iebin"]


def open_checkpoint(path: Path | str, verify: bool = False) -> Checkpoint:
    """Open the model in a directory: IEBIN if `model.ie.json` is there, else Hugging Face.

    Args:
        path: the model's directory, or one with the model in `hf` or `hf/original`.
        verify: read everything: check all hashes (IEBIN) and all stored codes.

    Raises:
        ModelNotFound: no model, or one of its files is missing.
        ModelError: the model is damaged or not known; see `open_iebin` and `open_hf`.
        WindowError: a timed window is open.
    """
    path = Path(path)
    if os.path.isfile(path / JSON_NAME):
        return open_iebin(path / JSON_NAME, verify=verify)
    directory = find_hf(path)
    if directory is None:
        looked = ", ".join([JSON_NAME, *(str(Path(folder, CONFIG)) for folder in SUBFOLDERS)])
        raise ModelNotFound(f"{path}: no model there; looked for {looked}")
    checkpoint = open_hf(directory)
    if verify:
        checkpoint.verify()
    return checkpoint
