"""Convert a checkpoint to IEBIN without quantising: hf_to_iebin.py without --q4-map."""

from clocher_runtime.command import start

start(__file__)
