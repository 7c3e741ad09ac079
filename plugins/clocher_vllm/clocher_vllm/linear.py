"""Linear layers of vLLM by `torch.ops.clocher.linear`."""

from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase

import clocher_kernels.torch  # noqa: F401  # registers torch.ops.clocher
from clocher_kernels.errors import ShapeError
from clocher_kernels.formats import Format
from clocher_kernels.torch.stored import TYPES
from clocher_vllm.planes import add, names, pack, take


class ClocherLinearMethod(LinearMethodBase):
    """Weights of a linear layer in a format of Clocher's.

    Args:
        fmt: the format.
        act_prec: see `clocher_kernels.linear`.
        stored: the files have its planes; else floats, which are rounded after loading.
    """

    def __init__(self, fmt: Format, act_prec: str, stored: bool) -> None:
        self.format, self.act_prec, self.stored = fmt, act_prec, stored
        self._names = names(fmt)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make room for what the files have; see `LinearMethodBase`.

        Raises:
            ShapeError: the format cannot hold the layer, or its planes cannot be cut as vLLM cuts
                them.
        """
        n, k = sum(output_partition_sizes), input_size_per_partition
        layer.clocher_shape = [n, k]
        planes = self.format.planes((n, k))
        if not self.stored:
            room = torch.empty(n, k, dtype=params_dtype)
            add(layer, "weight", room, input_dim=1, output_dim=0, **extra_weight_attrs)
            return
        whole = self.format.planes((n, input_size))
        for name, plane in planes.items():
            if plane.shape[:1] != (n,):
                raise ShapeError(
                    f"{self.format.name}: plane {name!r} of a [{n}, {k}] layer is "
                    f"{list(plane.shape)}, which has no row for each output; vLLM cannot join "
                    "layers stored so. Take a format with scales for rows or groups"
                )
            if len(plane.shape) > 1 and whole[name].shape[1] * k != plane.shape[1] * input_size:
                raise ShapeError(
                    f"{self.format.name}: {input_size} inputs cut to {k} on each GPU would cut a "
                    "group of weights in two; take fewer GPUs"
                )
            room = torch.empty(plane.shape, dtype=TYPES[plane.dtype])
            dims = {"output_dim": 0} | ({"input_dim": 1} if len(plane.shape) > 1 else {})
            add(layer, name, room, **dims, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Round floats, on the host; stored planes are what the kernels take."""
        if not self.stored and hasattr(layer, "weight"):
            pack(layer, "", take(layer, "weight"), self.format)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x W^T + bias, [..., N] in the type of x [..., K]."""
        n, k = layer.clocher_shape
        y: torch.Tensor = torch.ops.clocher.linear(
            x.reshape(prod(x.shape[:-1]), k),
            [getattr(layer, name) for name in self._names],
            bias=bias,
            w_format=self.format.name,
            w_shape=[n, k],
            act_prec=self.act_prec,
        )
        return y.view(*x.shape[:-1], n)
