"""Inference ops `torch.ops.clocher.*` on CPUs and GPUs, with fake kernels, and `QuantLinear`."""

from collections.abc import Callable
from typing import Self

import torch

from clocher_kernels.cuda.prepack import TORCH_DTYPES, as_torch
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats import Format
from clocher_kernels.formats.bsr import Bsr
from clocher_kernels.library import format_of, matrix_sizes, quantize
from clocher_kernels.library.host import one_of_act_prec
from clocher_kernels.quant_tensor import QuantTensor
from clocher_kernels.torch.custom_ops import OPS, awake

__all__ = ["OPS", "QuantLinear", "awake", "quantize_linears"]


_LINEAR, _BSR_LINEAR = OPS["linear"], OPS["bsr_linear"]


class QuantLinear(torch.nn.Module):
    """y = x W^T + bias, W [out_features, in_features] in any format; for inference.

    Its buffers are the format's planes and `bias` (fp32), so `state_dict` has the stored bytes.
    `fmt` is a short or full name; block-sparse layers come only from `from_linear` and
    `from_weight`. `act_prec` is as in `clocher_kernels.linear`; GPUs make activations int8 only for
    ternary weights. `device` "meta" is for `load_state_dict(..., assign=True)`. ShapeError if the
    format cannot hold this shape.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: str | Format,
        bias: bool = False,
        *,
        act_prec: str = "",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format = format_of(fmt)
        self._format_name, self._is_sparse = self.format.name, isinstance(self.format, Bsr)
        self.act_prec = one_of_act_prec(act_prec)
        planes = self.format.planes((out_features, in_features))
        self._names = tuple(planes)
        for name, plane in planes.items():
            room = torch.zeros(plane.shape, dtype=TORCH_DTYPES[plane.dtype], device=device)
            self.register_buffer(name, room)
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)

    @classmethod
    def from_weight(
        cls, w: QuantTensor, bias: torch.Tensor | None = None, *, act_prec: str = ""
    ) -> Self:
        """Return a layer for a quantised matrix, logical [N, K], and a float bias [N]."""
        n, k = matrix_sizes(w)
        if bias is not None and tuple(bias.shape) != (n,):
            raise ShapeError(f"bias has shape {list(bias.shape)}; expected {[n]}")
        layer = cls(k, n, w.format, bias is not None, act_prec=act_prec, device="meta")
        for name, plane in w.format.planes(w.shape).items():
            setattr(layer, name, as_torch(w.planes[name].copy(), plane.dtype))
        if bias is not None:
            layer.bias = bias.detach().float().clone()
        return layer

    @classmethod
    def from_linear(cls, module: torch.nn.Linear, fmt: str | Format, *, act_prec: str = "") -> Self:
        """Return a quantised copy of a layer, on its device; UsageError if it has no values."""
        if not isinstance(module, torch.nn.Linear):
            raise UsageError(f"module is {type(module).__name__}; expected torch.nn.Linear")
        if module.weight.is_meta:
            raise UsageError("module is on the meta device and has no values; load them first")
        values = module.weight.detach().float().cpu().numpy()
        bias = None if module.bias is None else module.bias.detach()
        layer = cls.from_weight(quantize(values, fmt), bias, act_prec=act_prec)
        return layer.to(module.weight.device)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the buffers but keep their types: `half()` is for activations, not scales."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def planes(self) -> list[torch.Tensor]:
        """The stored planes in the format's order."""
        return [getattr(self, name) for name in self._names]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] of x [..., K], in x's type: fp32, fp16 or bf16."""
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"x has shape {list(x.shape)}; expected [..., {self.in_features}]")
        # Streaming a weight evicts Python from the caches: each line here costs 1-2 microseconds.
        buffers, shape = self._buffers, [self.out_features, self.in_features]
        planes, bias = [buffers[name] for name in self._names], buffers["bias"]
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y: torch.Tensor
        if self._is_sparse:
            y = _BSR_LINEAR(rows, planes, bias=bias, w_format=self._format_name, w_shape=shape)
        else:
            y = _LINEAR(
                rows,
                planes,
                bias=bias,
                w_format=self._format_name,
                w_shape=shape,
                act_prec=self.act_prec,
            )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the layer's description in `print`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.format.name}, bias={self.bias is not None}"
        )


def quantize_linears(
    module: torch.nn.Module,
    fmt: str | Format,
    *,
    act_prec: str = "",
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[str]:
    """Replace the `wanted` linear layers of a model in place; return their names."""
    found = [n for n, m in module.named_modules() if type(m) is torch.nn.Linear and wanted(n)]
    for name in found:
        layer = QuantLinear.from_linear(module.get_submodule(name), fmt, act_prec=act_prec)  # type: ignore[arg-type]
        module.set_submodule(name, layer)
    return found
