"""Matrices as parameters of vLLM's layers: a parameter for each plane of the format."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.model_executor.utils import set_weight_attrs

from clocher_kernels.formats import Format
from clocher_kernels.library.arrays import quantize
from clocher_kernels.torch.stored import from_numpy


def add(layer: torch.nn.Module, name: str, values: torch.Tensor, **attrs: object) -> None:
    """Give a layer a parameter without gradients, with attributes that vLLM's loaders read."""
    parameter = torch.nn.Parameter(values, requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attrs)


def take(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """Remove a parameter from a layer and return its values."""
    values: torch.Tensor = getattr(layer, name).data
    delattr(layer, name)
    return values


def pack(
    layer: torch.nn.Module,
    prefix: str,
    matrices: Sequence[torch.Tensor] | torch.Tensor,
    fmt: Format,
    arrange: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> None:
    """Round matrices to a format and make parameters of their planes.

    They are rounded one after another, for fp32 copies of all experts would need much memory.

    Args:
        layer: gets the parameters.
        prefix: of their names.
        matrices: one, floats [N, K], or several, [E, N, K].
        fmt: the format.
        arrange: takes the rows of each to their places, [N, K] fp32.
    """
    several = [matrices] if matrices.ndim == 2 else list(matrices)
    made = [quantize(arrange(each.detach().float().cpu().numpy()), fmt) for each in several]
    device = several[0].device
    for name, plane in fmt.planes(made[0].shape).items():
        each = [from_numpy(w.planes[name], plane.dtype).view(plane.shape) for w in made]
        whole = each[0] if matrices.ndim == 2 else torch.stack(each)
        add(layer, prefix + name, whole.to(device))


def names(fmt: Format) -> tuple[str, ...]:
    """Return the names of a format's planes, in their order."""
    return tuple(fmt.planes((256, 256)))
