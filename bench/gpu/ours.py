"""Clocher's matrix products on random weights, ready to be launched, and what they must give."""

from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu import weights
from bench.gpu.setting import Setting
from bench.gpu.timer import Call
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.tensors import TORCH_DTYPES, DeviceTensor
from clocher_kernels.formats import Ternary, parse_format
from clocher_kernels.formats.base import Format

_ROWS_AT_ONCE = 8192


@dataclass
class Product:
    """One launchable y = x W^T (+ residual), through `linear` or, if ternary, `linear_i8`."""

    fmt: Format
    x: torch.Tensor
    scale: torch.Tensor | None
    y: torch.Tensor
    launches: list[Launch]

    @property
    def run(self) -> Call:
        """A function that launches it."""
        return partial(execute, self.launches)


def product(
    setting: Setting,
    fmt: Format,
    w: DeviceTensor,
    m: int,
    act: str,
    residual: bool = False,
    x: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Product:
    """Lower a product of M tokens.

    Args:
        setting: where.
        fmt: format of the weight.
        w: the weight [N, K].
        m: tokens.
        act: how activations are stored.
        residual: y is fp32 and holds the residual that is added.
        x: activations [M, K] (int8 for ternary weights); None draws them.
        scale: of int8 activations [M].
    """
    n, k = w.shape
    y = torch.empty((m, n), dtype=TORCH_DTYPES["f32" if residual else act], device=setting.place)
    args: dict[str, object] = {"w": w, "y": y}
    if residual:
        y.copy_(setting.randn(m, n))
        args["residual"] = y
    if isinstance(fmt, Ternary):
        if x is None:
            draw = partial(torch.randint, -127, 128, (m, k), generator=setting.random)
            x = draw(dtype=torch.int8, device=setting.place)
        if scale is None:
            scale = setting.randn(m).abs() * 0.01
        args |= {"q": x, "scale": scale}
    else:
        if x is None:
            x = setting.randn(m, k, dtype=TORCH_DTYPES[act])
        args["x"] = x
    op = "linear_i8" if isinstance(fmt, Ternary) else "linear"
    launches = setting.lower(op, **args)
    return Product(fmt, x, scale, y, launches)


def contender(setting: Setting, name: str, n: int, k: int, m: int, act: str) -> list[Call]:
    """Return calls of a product, each on a weight of its own."""
    fmt = parse_format(name)
    copies = weights.random_copies(fmt, (n, k), setting)
    return [product(setting, fmt, w, m, act).run for w in copies]


def expected(product: Product, planes: weights.Planes, shape: tuple[int, int]) -> torch.Tensor:
    """Return x decode(w)^T in fp64 [M, N]; for ternary weights exactly what the contract says."""
    fmt = product.fmt
    if isinstance(fmt, Ternary):
        assert product.scale is not None
        total = _matmul(product.x.double(), weights.digits(planes)).float()
        factor = planes["scale"].float()
        factor = 1 / factor if fmt.inverse else factor
        return (total * (product.scale * factor)[:, None]).double()
    return _matmul(product.x.double(), weights.decode(fmt, shape, planes))


def _matmul(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    parts = [x @ rows.double().T for rows in dense.split(_ROWS_AT_ONCE)]
    return torch.cat(parts, 1)
