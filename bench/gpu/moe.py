"""The mixture-of-experts block of gpt-oss: router, choice, gated half, weighted sum."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.gpu import weights
from bench.gpu.parity import judge
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting, ready
from bench.gpu.shapes import Experts, experts
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.timer import Call
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS

_FMT, _ROUTER = parse_format("mxfp4"), parse_format("bf16")
_LIMIT, _ALPHA = 7.0, 1.702
# Two layers of experts are more than five times the L2 cache; so are the calls' choices of one.
_LAYERS = 2
_CALLS = 24


@dataclass
class _Layer:
    shape: Experts
    up_planes: weights.Planes
    down_planes: weights.Planes
    up: DeviceTensor
    down: DeviceTensor
    router: DeviceTensor
    router_bias: torch.Tensor
    up_bias: torch.Tensor
    down_bias: torch.Tensor

    @classmethod
    def make(cls, setting: Setting, shape: Experts, keep: bool) -> "_Layer":
        e, k, i = shape.experts, shape.hidden, shape.inner
        up_shape, down_shape = (e, 2 * i, k), (e, k, i)
        up = weights.random_planes(_FMT, up_shape, setting)
        down = weights.random_planes(_FMT, down_shape, setting)
        place = weights.on_device if keep else weights.rearrange
        return cls(
            shape,
            up if keep else {},
            down if keep else {},
            place(_FMT, up_shape, up),
            place(_FMT, down_shape, down),
            weights.random_tensor(_ROUTER, (e, k), setting),
            setting.randn(e),
            setting.randn(e, 2 * i),
            setting.randn(e, k),
        )


@dataclass
class _Block:
    """One lowered block: its activations and its launches, piece by piece."""

    layer: _Layer
    x: torch.Tensor
    h: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gated: torch.Tensor
    pieces: dict[str, list[Launch]]

    @classmethod
    def make(cls, setting: Setting, layer: _Layer, m: int) -> "_Block":
        s = layer.shape
        empty = partial(torch.empty, device=setting.place)
        x, h = setting.randn(m, s.hidden, dtype=torch.float16), setting.randn(m, s.hidden)
        logits = empty((m, s.experts), dtype=torch.float32)
        ids = empty((m, s.active), dtype=torch.int32)
        chosen = empty((m, s.active), dtype=torch.float32)
        gated = empty((m, s.active, s.inner), dtype=torch.float16)
        pieces = {
            "router": setting.lower(
                "linear", x=x, w=layer.router, bias=layer.router_bias, y=logits
            ),
            "choice": setting.lower("route", logits=logits, ids=ids, weights=chosen),
            "gate_up": setting.lower(
                "moe_gate_up",
                x=x,
                ids=ids,
                w=layer.up,
                bias=layer.up_bias,
                y=gated,
                limit=_LIMIT,
                alpha=_ALPHA,
            ),
            "down": setting.lower(
                "moe_down",
                x=gated,
                ids=ids,
                weights=chosen,
                w=layer.down,
                bias=layer.down_bias,
                residual=h,
                y=h,
            ),
        }
        return cls(layer, x, h, logits, ids, chosen, gated, pieces)

    @property
    def launches(self) -> list[Launch]:
        return [launch for piece in self.pieces.values() for launch in piece]


def items(dry: bool) -> list[Item]:
    """Return one item for each number of tokens."""
    return [
        Item(f"{shape.model}-m{m}", partial(_race, shape=shape, m=m))
        for shape in experts(dry)
        for m in shape.tokens
    ]


def checked_items(dry: bool) -> list[Item]:
    """Return the items that check what is raced."""
    return [
        Item(f"{shape.model}-moe-m{m}", partial(_check, shape=shape, m=m))
        for shape in experts(dry)
        for m in shape.tokens
    ]


def launches(setting: Setting, shape: Experts, m: int) -> list[Launch]:
    """Return the launches of a block."""
    return _Block.make(setting, _Layer.make(setting, shape, keep=False), m).launches


def piece(setting: Setting, name: str) -> Call:
    """Return a call of one piece of a block, for a single token."""
    shape = experts(setting.dry)[0]
    block = _Block.make(setting, _Layer.make(setting, shape, keep=False), 1)
    execute(block.launches)
    return partial(execute, block.pieces[name])


def _check(setting: Setting, shape: Experts, m: int) -> list[Row]:
    """Compare the two experts' products of a block with fp64."""
    layer = _Layer.make(setting, shape, keep=True)
    block = _Block.make(setting, layer, m)
    before = block.h.double()
    block.gated.fill_(float("nan"))
    execute(block.launches)
    gated, y = _reference(block, before)
    facts: Row = {"case": f"{shape.model} m{m}", "act": "f16"}
    dense = weights.decode(_ROUTER, layer.router.shape, dict(layer.router.planes))
    logits = block.x.double() @ dense.double().T + layer.router_bias
    best = block.logits.topk(shape.active, 1).indices.sort(1).values
    routed = torch.equal(best, block.ids.long().sort(1).values)
    rows: list[Row] = [{"op": "route", **facts, "status": "ok" if routed else "failed"}]
    for op, got, want in (
        ("linear", block.logits, logits),
        ("moe_gate_up", block.gated, gated),
        ("moe_down", block.h, y),
    ):
        rows.append(
            {
                "op": op,
                **facts,
                **judge(OPS[op].allowed(None, "cuda", "f16"), _host(got), _host(want)),
            }
        )
    return rows


def _reference(block: _Block, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gated half, and the block's output from the gated half that the kernel wrote."""
    layer, s = block.layer, block.layer.shape
    gated, y = torch.empty_like(block.gated, dtype=torch.float64), before.clone()
    for m, ids in enumerate(block.ids.tolist()):
        for a, e in enumerate(ids):
            up = weights.decode(_FMT, (2 * s.inner, s.hidden), weights.expert(layer.up_planes, e))
            h = up.double() @ block.x[m].double() + layer.up_bias[e]
            gate, linear = h[0::2].clamp(max=_LIMIT), h[1::2].clamp(-_LIMIT, _LIMIT)
            gated[m, a] = (linear + 1) * gate * torch.sigmoid(_ALPHA * gate)
            down = weights.decode(_FMT, (s.hidden, s.inner), weights.expert(layer.down_planes, e))
            part = down.double() @ block.gated[m, a].double() + layer.down_bias[e]
            y[m] += block.weights[m, a].double() * part
    return gated, y


def _race(setting: Setting, shape: Experts, m: int) -> list[Row]:
    layers = [_Layer.make(setting, shape, keep=False) for _ in range(_LAYERS)]
    count = 2 if setting.dry else _CALLS
    blocks = [_Block.make(setting, layers[i % _LAYERS], m) for i in range(count)]
    for block in blocks:
        execute(block.launches)
    distinct = sum(len(set(b.ids.flatten().tolist())) for b in blocks) / count
    layer = layers[0]
    sizes = {
        name: int(weight.nbytes / shape.experts * distinct)
        for name, weight in (("gate_up", layer.up), ("down", layer.down))
    }
    whole = sum(sizes.values()) + layer.router.nbytes
    racing = {"clocher block": ready(whole, [partial(execute, b.launches) for b in blocks])}
    for name, nbytes in sizes.items():
        calls = [partial(execute, b.pieces[name]) for b in blocks]
        racing[f"clocher {name}"] = ready(nbytes, calls)
    dense = int(6 * shape.hidden * shape.inner * distinct)
    racing["torch grouped_mm bf16"] = lambda: (dense, _grouped(setting, shape, m, count))
    return setting.race(racing, kind="moe", model=shape.model, m=m, distinct_experts=distinct)


def _grouped(setting: Setting, shape: Experts, m: int, count: int) -> list[Call]:
    """Return calls of the two products in bf16 by torch, the routing left out.

    The rows are sorted by expert already, which flatters it.
    """
    e, k, i = shape.experts, shape.hidden, shape.inner
    half = torch.bfloat16
    up = setting.randn(e, 2 * i, k, dtype=half) * k**-0.5
    down = setting.randn(e, k, i, dtype=half) * i**-0.5
    calls: list[Call] = []
    for _ in range(count):
        draws = torch.rand(m, e, generator=setting.random, device=setting.place)
        chosen = draws.argsort(1)[:, : shape.active].flatten()
        offsets = torch.bincount(chosen, minlength=e).cumsum(0).to(torch.int32)
        x = setting.randn(m * shape.active, k, dtype=half)
        calls.append(partial(_grouped_step, x, up.mT, down.mT, offsets))
    return calls


def _grouped_step(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    h = torch._grouped_mm(x, up, offs=offsets)
    gate, linear = h[:, 0::2].clamp(max=_LIMIT), h[:, 1::2].clamp(-_LIMIT, _LIMIT)
    gated = (linear + 1) * gate * torch.sigmoid(_ALPHA * gate)
    return torch._grouped_mm(gated, down, offs=offsets)


def _host(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()
