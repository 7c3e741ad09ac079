"""Weights: open a model in any container."""

import os
from pathlib import Path

from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME, Checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: Path | str, verify: bool = False) -> Checkpoint:
    """Open a model: IEBIN if `model.ie.json` is there, else Hugging Face, else GGUF.

    `verify` checks all hashes (IEBIN) and codes. Raises ModelNotFound, ModelError, WindowError.
    """
    # A run starts sooner without the containers that it does not open.
    path = Path(path)
    if os.path.isfile(path / JSON_NAME):
        if not os.path.isfile(path / BIN_NAME):
            from clocher_runtime.checkpoints.dedup.reader import has_dedup, open_deduplicated

            if has_dedup(path):
                return open_deduplicated(path, verify=verify)
        from clocher_runtime.checkpoints.iebin import open_iebin

        return open_iebin(path / JSON_NAME, verify=verify)
    from clocher_runtime.checkpoints.locate import find_hf, no_model

    if directory := find_hf(path):
        from clocher_runtime.checkpoints.hf.checkpoint import open_hf

        checkpoint = open_hf(directory)
    else:
        from clocher_runtime.checkpoints.gguf.checkpoint import find_gguf, open_gguf

        gguf = find_gguf(path)
        if gguf is None:
            raise no_model(path)
        checkpoint = open_gguf(gguf)
    if verify:
        checkpoint.verify()
    return checkpoint
