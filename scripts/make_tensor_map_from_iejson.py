"""Write tensor_map.json."""

from clocher_runtime.command.scripts import start

start(__file__)
