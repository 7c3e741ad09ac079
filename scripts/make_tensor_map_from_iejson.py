"""Write tensor_map.json."""

from clocher_runtime.command import start

start(__file__)
