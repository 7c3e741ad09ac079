"""Embeddings and head that are one matrix, of which a file holds two roundings."""

from dataclasses import replace

import numpy as np

from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.rounding import look_up
from clocher_runtime.models.spec import EMBED, HEAD

_SAMPLE_ROWS = 1024
_APART = 0.02
"""Squared distance over the head's square: .007 of normal weights and their symmetric int4 in
groups of 32; 1.5 of clocher-tiny-llama, which has two matrices."""


def tied(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with one matrix for both if its embeddings and head are the same one.

    GGUF files are published so: embeddings in q4_k, and the same matrix in q6_k as the head. The
    finer one stays. Other checkpoints are returned as they are.
    """
    stored = checkpoint.tensors
    if not {EMBED, HEAD} <= set(stored) or stored[EMBED].shape != stored[HEAD].shape:
        return checkpoint
    count = stored[HEAD].shape[0]
    rows = np.arange(0, count, -(-count // _SAMPLE_ROWS))
    embed, head = (look_up(checkpoint.tensor(name), rows) for name in (EMBED, HEAD))
    apart = float(np.square(embed - head).sum() / max(float(np.square(head).sum()), 1e-30))
    if not apart <= _APART:  # NaN, too
        return checkpoint
    finer = max((HEAD, EMBED), key=lambda name: stored[name].nbytes)
    saved = min(stored[name].nbytes for name in (EMBED, HEAD)) / 1e6
    kinds = " and ".join(dict.fromkeys(stored[name].format.name for name in (EMBED, HEAD)))
    note = (
        f"embeddings and head are one matrix, stored twice ({kinds}, {apart:.2%} apart): that of "
        f"the {'head' if finer == HEAD else 'embeddings'} becomes both, {saved:.1f} MB less"
    )
    tensors = {name: tensor for name, tensor in stored.items() if name != HEAD}
    hashes = {name: known for name, known in checkpoint.hashes.items() if name not in (EMBED, HEAD)}
    if finer in checkpoint.hashes:
        hashes[EMBED] = checkpoint.hashes[finer]
    return replace(
        checkpoint,
        config={**checkpoint.config, "tie_word_embeddings": True},
        tensors=tensors | {EMBED: stored[finer]},
        hashes=hashes,
        notes=(*checkpoint.notes, note),
    )
