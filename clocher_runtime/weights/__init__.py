"""Weights: reading models, and converting them to IEBIN."""

from clocher_runtime.weights.base import Checkpoint
from clocher_runtime.weights.checkpoint import open_checkpoint
from clocher_runtime.weights.iebin.checkpoint import open_iebin

__all__ = ["Checkpoint", "open_checkpoint", "open_iebin"]
