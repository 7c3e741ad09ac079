"""Helpers of all kernels: early launch, index bounds, non-finite values, activations, epilogue."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.launch import Device
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.errors import ShapeError
from clocher_kernels.ops.elementwise import check_activation

LARGEST_F16 = tl.constexpr(65504.0)


@triton.jit
def start(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    """Wait for the predecessor, release the successor; before it read only weights, tables.

    EARLY releases first: the successor, too, must not read what the predecessor writes before it
    has waited itself. Norms and GEMVs of a token so hide the next one's start (on an H200);
    kernels that fill the GPU for long lose by it.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def part_of(M: tl.constexpr, BM: tl.constexpr):
    """Return which rows a program has, by number, and its first token of M.

    Programs with the same rows are neighbours, so that weights are read once.
    """
    program = tl.program_id(0)
    SLICES: tl.constexpr = (M + BM - 1) // BM
    return (program // SLICES, program % SLICES * BM) if SLICES > 1 else (program, 0)


@triton.jit
def paired(row, HALF: tl.constexpr):
    """Return which row of two stacked matrices of HALF rows each, taken in turns, comes where."""
    return row // 2 + row % 2 * HALF if HALF > 0 else row


@triton.jit
def within(index, COUNT: tl.constexpr):
    """Clamp indices to 0 .. COUNT - 1 (`ops.contract`)."""
    return tl.minimum(tl.maximum(index, 0), COUNT - 1)


@triton.jit
def or_nan(x):
    """Replace infinities by NaN, fp32."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def saturated(x, LARGEST: tl.constexpr):
    """Clamp fp32 values to +-LARGEST; NaN where they are not finite."""
    inside = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(x) < float("inf"), inside, float("nan"))


@triton.jit
def as_activation(x, y):
    """Convert fp32 values to y's type; fp16 saturates."""
    if y.dtype.element_ty == tl.float16:
        x = saturated(x, LARGEST_F16)
    return x.to(y.dtype.element_ty)


@triton.jit
def probability_of(x, largest, temperature):
    """Return probabilities over that of the largest, fp64."""
    exponent = (x.to(tl.float64) - largest.to(tl.float64)) / temperature.to(tl.float64)
    # Infinity minus itself would be NaN.
    exponent = tl.where(x == largest, 0.0, exponent)
    return tl.exp(exponent)


@triton.jit
def weight_of(x, largest, temperature, UNIT: tl.constexpr):
    """Return weights in units, int64."""
    return (probability_of(x, largest, temperature) * UNIT + 0.5).to(tl.int64)


@triton.jit
def rank_of(x, token):
    """Return the ranks of tokens; both zeros are one logit."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def logit_of(rank):
    """Return the logits of ranks."""
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def uniform(seed, draw):
    """Return `ops.sampling.uniform` of int64 seeds, fp64."""
    z = seed.to(tl.uint64, bitcast=True) + (draw + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * (2.0**-53)


@triton.jit
def is_last(arrivals, PROGRAMS: tl.constexpr):
    """Return whether all other programs of the row have finished writing."""
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == PROGRAMS - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def tanh(x):
    """Return tanh x of fp32 values, clamped to 1 beyond 7.91; NaN stays NaN.

    A quotient of polynomials, as `cpu_fallback.lanes.language.tanh`: within 6.2 ulp plus 2 of the
    GPU's fast division; the GPU's own instruction has 11 bits only.

    Source: the coefficients of Eigen's `ptanh_float`, by rminimax (Filip 2018).
    """
    x = tl.where(x > 7.9073896408, 7.9073896408, tl.where(x < -7.9073896408, -7.9073896408, x))
    square = x * x
    p = square * 1.394553628e-8 + 2.102733560e-5
    p = p * square + 3.520756727e-3
    p = p * square + 1.340216100e-1
    q = square * 8.015776984e-7 + 3.326951409e-4
    q = q * square + 2.597254514e-2
    q = q * square + 4.673548340e-1
    return (x * square * p + x) / (q * square + 1.0)


@triton.jit
def activate(x, ACT: tl.constexpr, CAP: tl.constexpr = 1.0):
    """Return an activation (`ops.activations`) of fp32 values; NaN stays NaN."""
    if ACT == "relu2":
        x = tl.where(x < 0, 0.0, x)  # a maximum would lose NaN
        return x * x
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # x (1 + tanh u) / 2 is x / (1 + e^-2u).
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        e = tl.exp(-tl.abs(twice))
        return x * tl.where(twice < 0, e, 1.0) / (1.0 + e)
    elif ACT == "tanh":
        return CAP * tanh(x / CAP)
    elif ACT == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit
def gated(gate, up, C: tl.constexpr):
    """Return an expert's hidden values (`ops.moe.moe_gate_up`), fp32; NaN stays NaN."""
    if C.ACT == "clamped":
        odd = (gate != gate) | (up != up)
        gate = tl.minimum(gate, C.LIMIT)
        up = tl.minimum(tl.maximum(up, -C.LIMIT), C.LIMIT)
        hidden = (up + 1.0) * gate / (1.0 + tl.exp(-C.ALPHA * gate))
        return tl.where(odd, float("nan"), hidden)  # clamping lost NaN
    else:
        return activate(gate, C.ACT) * up


@triton.jit
def finish(total, bias, times, residual, y, m, n, kept, C: tl.constexpr, second=None, third=None):
    """Write y[m, n] where `kept`; m (tokens) and n (of N rows) broadcast to `total`, fp32.

    `bias` [N], `times` [tokens, F] (F is N or 1) and `residual` may be None; CAP is for "tanh".
    Rows from N1 on belong to the output `second`, from N2 on to `third`, if there are any.
    """
    at = m * C.N + n
    if bias is not None:
        total += tl.load(bias + n, n < C.N, other=0.0)
    if C.ACT != "none":
        total = activate(or_nan(total), C.ACT, C.CAP)
    if times is not None:
        factor = at if C.F == C.N else m + n * 0
        total *= tl.load(times + factor, kept, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at, kept, other=0.0).to(tl.float32)
    if second is not None:
        here, there = kept & (n < C.N1), kept & (n >= C.N1) & (n < C.N2)
        tl.store(y + m * C.N1 + n, total.to(y.dtype.element_ty), here)
        to = second + m * (C.N2 - C.N1) + (n - C.N1)
        tl.store(to, total.to(second.dtype.element_ty), there)
        if third is not None:
            to = third + m * (C.N - C.N2) + (n - C.N2)
            tl.store(to, total.to(third.dtype.element_ty), kept & (n >= C.N2))
    elif times is not None:
        tl.store(y + at, as_activation(total, y), kept)
    else:
        tl.store(y + at, total.to(y.dtype.element_ty), kept)


@triton.jit
def finish_gated(up, gate, bias, y, m, n, kept, C: tl.constexpr):
    """Write y[m, n] = activation(gate) * up, both with their `bias` [2 HALF]."""
    if bias is not None:
        up += tl.load(bias + n, n < C.HALF, other=0.0)
        gate += tl.load(bias + C.HALF + n, n < C.HALF, other=0.0)
    # What overflows y's type must not become finite again.
    value = activate(or_nan(gate), C.ACT, C.CAP) * up.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + m * C.HALF + n, as_activation(value, y), kept)


@dataclass(frozen=True, slots=True)
class Tail:
    """The epilogue of a matmul, by the names of `ops.linear.linear`.

    `more` are outputs of the rows behind y's own. `gated`: rows are those of up, then those of
    gate, and y is activation(gate) * up.
    """

    bias: Tensor | None = None
    times: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "none"
    cap: float = 1.0
    more: tuple[Tensor, ...] = ()
    gated: bool = False

    def parts(self, count: int, step: int) -> Iterator[tuple[slice, "Tail"]]:
        """Yield at most `step` of `count` tokens, and their epilogue."""
        for first in range(0, count, step):
            tokens = slice(first, first + step)
            times, residual = (t if t is None else t[tokens] for t in (self.times, self.residual))
            yield tokens, replace(self, times=times, residual=residual)

    def given(self, op: str, y: Tensor, rows: int) -> dict[str, Any]:
        """Return the arguments of `finish` and `finish_gated`; UnsupportedOp, ShapeError."""
        if self.activation != "none":
            check_activation(op, self.activation)
        wide = 0 if self.times is None else self.times.shape[1]
        if wide not in (0, 1, rows):
            raise ShapeError(
                f"{op}: 'times' has {wide} values for a token; expected {rows}, one for each row "
                "of the weight, or 1"
            )
        second, third = (*self.more, None, None)[:2]
        tensors = {"bias": self.bias, "times": self.times, "residual": self.residual, "y": y}
        tensors |= {"second": second, "third": third}
        ends = {"N1": y.shape[1], "N2": y.shape[1] + sum(t.shape[1] for t in self.more[:1])}
        kind = {"F": wide, "ACT": self.activation, "CAP": float(self.cap)}
        return {**tensors, **ends, **kind, "HALF": rows // 2 if self.gated else 0}


PLAIN = Tail()


@dataclass(frozen=True, slots=True)
class Linear:
    """A call of `ops.linear.linear`: int8 activations have their scales beside them."""

    x: Tensor
    w: DeviceTensor
    y: Tensor
    device: Device
    x_scale: Tensor | None = None
    tail: Tail = PLAIN
