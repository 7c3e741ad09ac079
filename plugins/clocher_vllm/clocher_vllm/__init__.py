"""Clocher's kernels as the quantisation method "clocher" of vLLM.

vLLM calls `register` in each of its processes, through the entry point group
`vllm.general_plugins`. Source: vLLM 0.33, docs/design/plugin_system.md.
"""

NAME = "clocher"


def register() -> None:
    """Make the method known to vLLM; once it is, this does nothing."""
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    if NAME not in QUANTIZATION_METHODS:
        from clocher_vllm.config import ClocherConfig

        register_quantization_config(NAME)(ClocherConfig)
