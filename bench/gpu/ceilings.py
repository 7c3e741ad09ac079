"""What this GPU reaches at all: bandwidth of copies and of reads, rate of matrix products."""

from functools import partial

import torch
import triton
import triton.language as tl

from bench.gpu.environment import state_item
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.timer import Timing

_MIB = 1 << 20
_SIZES = (16 * _MIB, 64 * _MIB, 256 * _MIB, 1024 * _MIB, 4096 * _MIB)
_TINY_SIZES = (4096,)


def items(dry: bool) -> list[Item]:
    """Return the items of the part."""
    sizes = _TINY_SIZES if dry else _SIZES
    return [
        *(Item(f"copy-{size}", partial(_copy, size=size)) for size in sizes),
        *(Item(f"read-{size}", partial(_read, size=size)) for size in sizes),
        *(Item(f"matmul-{d}", partial(_matmul, dtype=d)) for d in ("float16", "bfloat16")),
        state_item(),
    ]


def measure_copy(setting: Setting) -> float:
    """Measure the large copy that this process's shares are of, GB/s; warms the GPU up, too."""
    row = _copy(setting, 1024 * _MIB if not setting.dry else 4096)[0]
    setting.copy_gbs = max(setting.copy_gbs, float(row.get("gbs", 0.0)))
    return setting.copy_gbs


@triton.jit
def _sum(x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in range(0, SIZE, PROGRAMS * BLOCK):
        at = turn + pid * BLOCK + tl.arange(0, BLOCK)
        # One bit of each word is enough to make the load needed, and cannot overflow.
        total += tl.load(x + at, at < SIZE, other=0, eviction_policy="evict_first") & 1
    tl.store(y + pid, tl.sum(total))


def _copy(setting: Setting, size: int) -> list[Row]:
    count = setting.copies(2 * size)
    pairs = [_bytes(setting, 2, size) for _ in range(count)]
    calls = [partial(target.copy_, source) for target, source in pairs]
    timing = setting.timer.race({"copy": calls})["copy"]
    return [setting.measured(timing, 2 * size, kind="copy", size=size)]


def _read(setting: Setting, size: int) -> list[Row]:
    block = 8192 if not setting.dry else 256
    words = size // 4
    programs = min(words // block, setting.device.sms * 8)
    calls = []
    for _ in range(setting.copies(size)):
        x = _bytes(setting, 1, size)[0].view(torch.int32)
        y = torch.empty(programs, dtype=torch.int32, device=setting.place)
        calls.append(partial(launch_sum, x, y, words, block, programs))
    timing = setting.timer.race({"read": calls})["read"]
    return [setting.measured(timing, size, kind="read", size=size)]


def launch_sum(x: torch.Tensor, y: torch.Tensor, words: int, block: int, programs: int) -> None:
    """Count odd words: each program writes how many it saw to its place in y."""
    _sum[(programs,)](x, y, SIZE=words, BLOCK=block, PROGRAMS=programs, num_warps=8)


def _matmul(setting: Setting, dtype: str) -> list[Row]:
    size = 64 if setting.dry else 8192
    kind = getattr(torch, dtype)
    a, b = setting.randn(size, size, dtype=kind), setting.randn(size, size, dtype=kind)
    out = torch.empty_like(a)
    timing = setting.timer.race({"matmul": [partial(torch.mm, a, b, out=out)]})["matmul"]
    row = setting.measured(timing, 3 * a.nbytes, kind="matmul", dtype=dtype, size=size)
    if isinstance(timing, Timing) and not setting.dry:
        row["tflops"] = 2 * size**3 / timing.us / 1e6
        del row["gbs"]
    return [row]


def _bytes(setting: Setting, count: int, size: int) -> list[torch.Tensor]:
    draw = partial(torch.randint, 0, 256, (size,), generator=setting.random, dtype=torch.uint8)
    return [draw(device=setting.place) for _ in range(count)]
