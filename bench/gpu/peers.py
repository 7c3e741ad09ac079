"""Other people's matrix products, side by side with ours; none of them has to be there.

A peer prepares calls on random weights of its own, each call on another copy. The part `peers`
compares what they return with fp64, so that nobody is measured who computes something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu.record import Row
from bench.gpu.setting import Item, Prepare, Setting
from clocher_kernels.cuda.timer import Call, reason

_WRONG = 0.05


@dataclass
class Prepared:
    """A peer's calls.

    Attributes:
        calls: each returns y [M, N].
        nbytes: what one call reads and writes at least.
        x: activations [M, K] as the peer sees them.
        dense: the first call's decoded weight [N, K].
    """

    calls: Sequence[Callable[[], torch.Tensor]]
    nbytes: int
    x: torch.Tensor
    dense: Callable[[], torch.Tensor]


Peer = Callable[[Setting, int, int, int], Prepared]


def items(dry: bool) -> list[Item]:
    """Return one item for each peer that starts quickly; the others are checked where they race."""
    return [Item(name, partial(check, prepare=PEERS[name], name=name)) for name in QUICK]


def contender(setting: Setting, name: str, n: int, k: int, m: int) -> Prepare:
    """Return what a peer does before a race."""

    def prepared() -> tuple[int, Sequence[Call]]:
        made = PEERS[name](setting, n, k, m)
        return made.nbytes, made.calls

    return prepared


def check(setting: Setting, prepare: Peer, name: str) -> list[Row]:
    """Compare what a peer returns with fp64."""
    rows = []
    for m in (1, 8):
        n, k = (32, 128) if setting.dry else (1024, 2048)
        row: Row = {"peer": name, "m": m}
        try:
            prepared = prepare(setting, n, k, m)
            got = prepared.calls[0]().double()
            want = prepared.x.double() @ prepared.dense().double().T
        except Exception as error:
            rows.append({**row, "status": "not measured", "reason": reason(error)})
            continue
        error_ = float((got - want).norm() / want.norm())
        good = error_ < _WRONG
        rows.append({**row, "rms": error_, "status": "ok" if good else "not measured"})
        if not good:
            rows[-1]["reason"] = f"its answer is off by {error_:.3g}: wrongly called here"
    return rows


def _traffic(n: int, k: int, m: int, weight: int, act: int = 2) -> int:
    return weight + m * (act * k + 2 * n)


def _cublas(setting: Setting, n: int, k: int, m: int, dtype: torch.dtype) -> Prepared:
    x = setting.randn(m, k, dtype=dtype)
    copies = [setting.randn(n, k, dtype=dtype) * k**-0.5 for _ in range(setting.copies(2 * n * k))]
    y = torch.empty((m, n), dtype=dtype, device=setting.place)
    calls = [partial(torch.mm, x, w.T, out=y) for w in copies]
    return Prepared(calls, _traffic(n, k, m, 2 * n * k), x, lambda: copies[0])


def _tinygemm(setting: Setting, n: int, k: int, m: int) -> Prepared:
    group = next(g for g in (128, 64, 32) if k % g == 0)
    tiles = next(t for t in (8, 4, 2) if k % (16 * t) == 0)
    nbytes = n * k // 2 + 4 * n * (k // group)
    x = setting.randn(m, k, dtype=torch.bfloat16)
    calls, first = [], None
    for _ in range(setting.copies(nbytes)):
        codes = _codes(setting, (n, k))
        shape = (k // group, n, 2)
        draw = torch.rand(shape, generator=setting.random, device=setting.place)
        affine = ((draw + 0.5) * k**-0.5 / 5).to(torch.bfloat16)
        packed = torch.ops.aten._convert_weight_to_int4pack(
            (codes[:, ::2] << 4) | codes[:, 1::2], tiles
        )
        calls.append(partial(torch.ops.aten._weight_int4pack_mm, x, packed, group, affine))
        first = first or (codes, affine)

    def dense() -> torch.Tensor:
        assert first is not None
        scales, zeros = (first[1][..., i].T.float().repeat_interleave(group, 1) for i in (0, 1))
        return (first[0].float() - 8) * scales + zeros

    return Prepared(calls, _traffic(n, k, m, nbytes), x, dense)


def _int8pack(setting: Setting, n: int, k: int, m: int) -> Prepared:
    x = setting.randn(m, k, dtype=torch.bfloat16)
    calls, first = [], None
    for _ in range(setting.copies(n * k)):
        w, scales = _int8(setting, n, k)
        calls.append(partial(torch.ops.aten._weight_int8pack_mm, x, w, scales))
        first = first or (w, scales)
    return Prepared(calls, _traffic(n, k, m, n * k + 2 * n), x, lambda: _scaled_rows(first))


def _compiled_int8(setting: Setting, n: int, k: int, m: int) -> Prepared:
    """Weight-only int8 as gpt-fast writes it, compiled by torch."""
    if setting.dry:
        raise RuntimeError("torch.compile is left out of a dry run")

    @torch.compile(dynamic=False)
    def forward(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, w.to(x.dtype)) * scales

    x = setting.randn(m, k, dtype=torch.bfloat16)
    copies = [_int8(setting, n, k) for _ in range(setting.copies(n * k))]
    calls = [partial(forward, x, w, scales) for w, scales in copies]
    traffic = _traffic(n, k, m, n * k + 2 * n)
    return Prepared(calls, traffic, x, lambda: _scaled_rows(copies[0]))


def _scaled_mm(setting: Setting, n: int, k: int, m: int) -> Prepared:
    """fp8 weights and fp8 activations, one scale each; the activations are fp8 already."""
    x = setting.randn(m, k).to(torch.float8_e4m3fn)
    one = torch.ones((), device=setting.place)
    scale = one * k**-0.5
    copies = [setting.randn(n, k).to(torch.float8_e4m3fn) for _ in range(setting.copies(n * k))]
    calls = [
        partial(torch._scaled_mm, x, w.T, scale_a=one, scale_b=scale, out_dtype=torch.bfloat16)
        for w in copies
    ]
    traffic = _traffic(n, k, m, n * k, 1)
    return Prepared(calls, traffic, x.float(), lambda: copies[0].float() * scale)


def _gemlite(setting: Setting, n: int, k: int, m: int) -> Prepared:
    from gemlite.core import DType, GemLiteLinear

    group = next(g for g in (128, 64) if k % g == 0)
    nbytes = n * k // 2 + 4 * n * (k // group)
    x = setting.randn(m, k, dtype=torch.float16)
    layers, first = [], None
    for _ in range(setting.copies(nbytes)):
        codes = _codes(setting, (n, k))
        draw = torch.rand((n * k // group, 1), generator=setting.random, device=setting.place)
        scales = ((draw + 0.5) * k**-0.5 / 5).to(torch.float16)
        zeros = torch.full_like(scales, 8)
        half = DType.FP16
        layer = GemLiteLinear(4, group, k, n, input_dtype=half, output_dtype=half)
        layer.pack(codes, scales, zeros, None)
        layers.append(layer)
        first = first or (codes, scales)

    def dense() -> torch.Tensor:
        assert first is not None
        return ((first[0].float() - 8).view(-1, group) * first[1].float()).view(n, k)

    calls = [partial(layer, x) for layer in layers]
    return Prepared(calls, _traffic(n, k, m, nbytes), x, dense)


def _bitsandbytes(setting: Setting, n: int, k: int, m: int) -> Prepared:
    import bitsandbytes as bnb

    nbytes = n * k // 2 + 4 * n * k // 64
    x = setting.randn(m, k, dtype=torch.float16)
    copies = []
    for _ in range(setting.copies(nbytes)):
        w = setting.randn(n, k, dtype=torch.float16) * k**-0.5
        copies.append(bnb.functional.quantize_4bit(w, blocksize=64, quant_type="nf4"))
    calls = [partial(bnb.matmul_4bit, x, packed.t(), state) for packed, state in copies]

    def dense() -> torch.Tensor:
        return bnb.functional.dequantize_4bit(*copies[0])

    return Prepared(calls, _traffic(n, k, m, nbytes), x, dense)


def _torchao(setting: Setting, n: int, k: int, m: int) -> Prepared:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    x = setting.randn(m, k, dtype=torch.bfloat16)
    layers: list[Any] = []
    for _ in range(setting.copies(n * k)):
        layer = torch.nn.Linear(k, n, bias=False, device=setting.place, dtype=torch.bfloat16)
        quantize_(layer, Int8WeightOnlyConfig())
        layers.append(layer.requires_grad_(False))
    run = _apply if setting.dry else torch.compile(_apply, dynamic=False)
    calls = [partial(run, layer, x) for layer in layers]
    traffic = _traffic(n, k, m, n * k + 2 * n)
    return Prepared(calls, traffic, x, lambda: layers[0].weight.dequantize())


def _apply(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def _codes(setting: Setting, shape: tuple[int, int]) -> torch.Tensor:
    draw = partial(torch.randint, 0, 16, shape, generator=setting.random, dtype=torch.uint8)
    return draw(device=setting.place)


def _int8(setting: Setting, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.randint(
        -127, 128, (n, k), generator=setting.random, device=setting.place, dtype=torch.int8
    )
    draw = torch.rand(n, generator=setting.random, device=setting.place)
    return w, ((draw + 0.5) * k**-0.5 / 73).to(torch.bfloat16)


def _scaled_rows(pair: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    assert pair is not None
    return pair[0].float() * pair[1].float()[:, None]


PEERS: dict[str, Peer] = {
    "cuBLAS bf16": partial(_cublas, dtype=torch.bfloat16),
    "cuBLAS f16": partial(_cublas, dtype=torch.float16),
    "torch tinygemm int4": _tinygemm,
    "torch int8pack": _int8pack,
    "torch scaled_mm fp8": _scaled_mm,
    "torch.compile int8": _compiled_int8,
    "gemlite int4": _gemlite,
    "bitsandbytes nf4": _bitsandbytes,
    "torchao int8": _torchao,
}
SLOW = ("torch.compile int8", "gemlite int4", "torchao int8")
"""They compile or tune for every shape, some for a minute: they run last, where the targets ask."""
QUICK = tuple(name for name in PEERS if name not in SLOW)
