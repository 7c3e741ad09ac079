"""Norms, rotary embedding, gated activations, row gathers."""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch


@triton.jit
def _glu(gate, up, y, SIZE: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    g = tl.load(gate + at, inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, inside, other=0.0).to(tl.float32)
    if ACT == "relu2":
        g = tl.maximum(g, 0.0)
        g = g * g
    else:
        g = g / (1.0 + tl.exp(-g))
    tl.store(y + at, (g * u).to(y.dtype.element_ty), inside)


def glu(
    *, gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor, act: str, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.glu`."""
    block = 1024
    constants = {"SIZE": gate.numel(), "ACT": act, "BLOCK": block}
    grid = (triton.cdiv(gate.numel(), block),)
    return [Launch(_glu, grid, {"gate": gate, "up": up, "y": y}, constants)]


LOWER = {"glu": glu}
