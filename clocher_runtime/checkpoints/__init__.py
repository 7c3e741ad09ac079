"""Weights: reading models, and converting them to IEBIN."""

from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.iebin import open_iebin
from clocher_runtime.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint", "open_iebin"]
