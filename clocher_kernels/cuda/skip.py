"""The MLP of a squared ReLU on a GPU: the dense products, which skip nothing.

A program multiplies several rows of a ternary weight, so it could end early only where the gates of
all of them are closed: with 80 % of the gates closed at random that is 3 % of programs with 16
rows, and these must still look at the weight's scale, since infinity times zero has to be seen.
Columns of the product that follows lie 64 in a vector of 16 bytes. So both are what they are equal
to, and the Plans of a GPU do not ask for them.
"""

import torch

from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.linear import linear, no_codes, sums_exactly
from clocher_kernels.cuda.tensors import DeviceTensor


def relu2_gate_up(
    *,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    gate: DeviceTensor,
    w: DeviceTensor,
    y: torch.Tensor,
    group: int = 0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.skip.relu2_gate_up`: two products, every row of both.

    Raises:
        UnsupportedOp: weights that are not ternary, or scales for groups.
    """
    up = device.scratch("relu2_up", tuple(y.shape), torch.float32)
    given = {"x": x, "x_scale": x_scale, "group": group, "device": device}
    return [
        *linear(w=w, y=up, **given),
        *linear(w=gate, y=y, times=up, activation="relu2", **given),
    ]


def skip_linear(
    *,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    times: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    cap: float = 1.0,
    group: int = 0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.skip.skip_linear`: `linear`, every column.

    Raises:
        UnsupportedOp: weights that are not ternary, or scales for groups.
    """
    if not sums_exactly(w.format, group):
        raise no_codes("skip_linear", w)
    tail = {"bias": bias, "times": times, "residual": residual}
    attrs = {"activation": activation, "cap": cap, "group": group}
    return linear(x=x, x_scale=x_scale, w=w, y=y, **tail, **attrs, device=device)


LOWER = {"relu2_gate_up": relu2_gate_up, "skip_linear": skip_linear}
