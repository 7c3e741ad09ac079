"""Decode attention over a paged cache: contexts, cache types, batches; beside torch's SDPA."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.gpu import shapes
from bench.gpu.parity import judge
from bench.gpu.record import Row
from bench.gpu.setting import Item, Prepare, Setting
from bench.gpu.shapes import Heads
from clocher_kernels.cuda.launch import Launch, execute
from clocher_kernels.cuda.timer import Call
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.ops import OPS

_PAGE_CELLS = 64
_BATCHES = (1, 8)
_WINDOW_CONTEXT = 8192
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class _Case:
    heads: Heads
    context: int
    batch: int
    window: int

    @property
    def id(self) -> str:
        return f"{self.heads.model}-c{self.context}-b{self.batch}-w{self.window}"

    @property
    def keys(self) -> int:
        """Keys that each token sees."""
        return min(self.context, self.window) if self.window else self.context

    def nbytes(self, kv: str) -> int:
        """Bytes that one call has to read and write."""
        cells = 2 * self.batch * self.keys * self.heads.kv_heads
        scales = 4 * cells if kv == "i8" else 0
        vectors = self.batch * self.heads.heads * self.heads.dim * (4 + 2)
        return cells * self.heads.dim * STORAGE[kv].itemsize + scales + vectors


def items(dry: bool) -> list[Item]:
    """Return one race for each shape, context and batch."""
    return [Item(case.id, partial(_race, case=case)) for case in _cases(dry)]


def checked_items(dry: bool) -> list[Item]:
    """Return the items that check the same launches."""
    return [Item(f"{case.id}-attention", partial(_check, case=case)) for case in _cases(dry)]


def _cases(dry: bool) -> list[_Case]:
    contexts = shapes.TINY_CONTEXTS if dry else shapes.CONTEXTS
    return [
        _Case(heads, context, batch, window)
        for heads in shapes.heads(dry)
        for window in heads.windows
        for context in contexts
        if not window or context == _WINDOW_CONTEXT
        for batch in ((2,) if dry else _BATCHES)
    ]


def launches(setting: Setting) -> Iterator[tuple[str, Callable[[], list[Launch]]]]:
    """Return what checking attention launches, by the name of the case."""
    for case in _cases(setting.dry):
        for kv in _kv_dtypes(setting):
            yield case.id, lambda c=case, kv=kv: _make(setting, c, kv).launches


@dataclass
class _Call:
    q: torch.Tensor
    y: torch.Tensor
    pages: torch.Tensor
    planes: list[torch.Tensor]
    scales: list[torch.Tensor]
    sinks: torch.Tensor | None
    launches: list[Launch]

    @property
    def run(self) -> Call:
        return partial(execute, self.launches)


def _make(setting: Setting, case: _Case, kv: str) -> _Call:
    heads, batch = case.heads, case.batch
    blocks = -(-case.context // _PAGE_CELLS)
    integer = partial(torch.full, (batch,), dtype=torch.int32, device=setting.place)
    order = torch.randperm(batch * blocks, generator=setting.random, device=setting.place)
    pages = order.to(torch.int32).view(batch, blocks)
    shape = (batch * blocks, heads.kv_heads, _PAGE_CELLS, heads.dim)
    planes = [_plane(setting, shape, kv) for _ in "kv"]
    scales = []
    q = setting.randn(batch, heads.heads * heads.dim)
    y = torch.empty(q.shape, dtype=torch.float16, device=setting.place)
    args: dict[str, object] = {"k_cache": planes[0], "v_cache": planes[1]}
    if kv == "i8":
        draw = partial(torch.rand, shape[:3], generator=setting.random, device=setting.place)
        scales = [(0.5 + draw()) / 73 for _ in "kv"]
        args |= {"k_scale": scales[0], "v_scale": scales[1]}
    sinks = setting.randn(heads.heads) if heads.sinks else None
    if sinks is not None:
        args["sinks"] = sinks
    launches = setting.lower(
        "attention",
        q=q,
        slots=torch.arange(batch, dtype=torch.int32, device=setting.place),
        positions=integer(fill_value=case.context - 1),
        ends=integer(fill_value=case.context),
        ancestors=torch.zeros(batch, dtype=torch.int64, device=setting.place),
        pages=pages,
        y=y,
        kv_dtype=kv,
        scale=heads.dim**-0.5,
        window=case.window,
        **args,
    )
    return _Call(q, y, pages, planes, scales, sinks, launches)


def _plane(setting: Setting, shape: tuple[int, ...], kv: str) -> torch.Tensor:
    if kv == "i8":
        draw = partial(torch.randint, -127, 128, shape, generator=setting.random)
        return draw(dtype=torch.int8, device=setting.place)
    values = setting.randn(*shape)
    if kv in _FLOAT8:
        return values.to(_FLOAT8[kv]).view(torch.uint8)
    return values.to({"bf16": torch.bfloat16, "f16": torch.float16}[kv])


def _check(setting: Setting, case: _Case) -> list[Row]:
    rows = []
    for kv in _kv_dtypes(setting):
        call = _make(setting, case, kv)
        call.y.fill_(float("nan"))
        call.run()
        got, want = (t.float().cpu().numpy() for t in (call.y, _reference(call, case, kv)))
        row: Row = {"op": "attention", "case": f"{case.id} {kv}", "act": "f16"}
        rows.append(row | judge(OPS["attention"].allowed(None, "cuda", "f16"), got, want))
    return rows


def _reference(call: _Call, case: _Case, kv: str) -> torch.Tensor:
    heads, rows = case.heads, []
    for slot in range(case.batch):
        keys, values = (
            _cells(call, index, slot, case, kv).repeat_interleave(
                heads.heads // heads.kv_heads, dim=0
            )
            for index in (0, 1)
        )
        query = call.q[slot].double().view(heads.heads, 1, heads.dim)
        logits = (query * heads.dim**-0.5 @ keys.mT)[:, 0]
        if call.sinks is not None:
            logits = torch.cat([logits, call.sinks.double()[:, None]], 1)
        weights = logits.softmax(1)[:, None, : case.keys]
        rows.append((weights @ values).flatten())
    return torch.stack(rows)


def _cells(call: _Call, index: int, slot: int, case: _Case, kv: str) -> torch.Tensor:
    """Return the visible keys or values of a slot, fp64 [Hkv, keys, D]."""
    pages = call.pages[slot].long()
    stored = call.planes[index][pages]
    if kv in _FLOAT8:
        stored = stored.view(_FLOAT8[kv])
    values = stored.double()
    if call.scales:
        values *= call.scales[index][pages].double()[..., None]
    flat = values.transpose(0, 1).flatten(1, 2)
    return flat[:, case.context - case.keys : case.context]


def _race(setting: Setting, case: _Case) -> list[Row]:
    racing: dict[str, Prepare] = {
        f"clocher {kv}": partial(_calls, setting, case, kv) for kv in _kv_dtypes(setting)
    }
    if not case.window:
        racing["SDPA bf16"] = partial(_sdpa, setting, case, grouped=False)
        racing["SDPA bf16, heads as tokens"] = partial(_sdpa, setting, case, grouped=True)
    facts: Row = {"kind": "attention", "model": case.heads.model, "context": case.context}
    return setting.race(racing, **facts, batch=case.batch, window=case.window)


def _calls(setting: Setting, case: _Case, kv: str) -> tuple[int, list[Call]]:
    nbytes = case.nbytes(kv)
    return nbytes, [_make(setting, case, kv).run for _ in range(setting.copies(nbytes))]


def _sdpa(setting: Setting, case: _Case, grouped: bool) -> tuple[int, list[Call]]:
    """Return calls of torch's attention on a contiguous cache, without sinks.

    With the heads that share keys given as query tokens, it may split the keys over the GPU.
    """
    h, half = case.heads, torch.bfloat16
    attend = torch.nn.functional.scaled_dot_product_attention
    q = setting.randn(case.batch, h.heads, 1, h.dim, dtype=half)
    if grouped:
        q = q.view(case.batch, h.kv_heads, h.heads // h.kv_heads, h.dim)
    nbytes, calls = case.nbytes("bf16"), []
    for _ in range(setting.copies(nbytes)):
        k, v = (
            setting.randn(case.batch, h.kv_heads, case.context, h.dim, dtype=half) for _ in "kv"
        )
        calls.append(partial(attend, q, k, v, enable_gqa=not grouped))
    return nbytes, calls


def _kv_dtypes(setting: Setting) -> Sequence[str]:
    return shapes.TINY_KV_DTYPES if setting.dry else shapes.KV_DTYPES
