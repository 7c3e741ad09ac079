"""What every item of a part is given: the device, the timer, and the ceilings of this run."""

import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from bench.gpu.record import Row
from clocher_kernels.cuda.launch import INTERPRETER, Launch
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.cuda.timer import Call, Timing, reason
from clocher_kernels.cuda.workbench import Workbench, gpu_workbench
from clocher_kernels.errors import UnsupportedOp

# How a reason starts if there is no kernel for what was asked.
REFUSALS = ("UnsupportedOp", "ShapeError")
_LARGE, _TINY = 1 << 30, 4096
_MARGIN = 1.05
"""A row may reach this much of the highest bandwidth that its process measured."""

Prepare = Callable[[], tuple[int, Sequence[Call]]]
"""What a contender of a race does first: the bytes that a call has to move, and calls, each on a
copy of its own of the weights. What it raises is the reason why it does not take part."""


def ready(nbytes: int, calls: Sequence[Call]) -> Prepare:
    """Return what a contender does whose calls are made already."""
    return lambda: (nbytes, calls)


@triton.jit
def _sum(x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    pid = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for turn in range(0, SIZE, PROGRAMS * BLOCK):
        at = turn + pid * BLOCK + tl.arange(0, BLOCK)
        # One bit of each word is enough to make the load needed, and cannot overflow.
        total += tl.load(x + at, at < SIZE, other=0, eviction_policy="evict_first") & 1
    tl.store(y + pid, tl.sum(total))


def launch_sum(x: torch.Tensor, y: torch.Tensor, words: int, block: int, programs: int) -> None:
    """Count odd words: each program writes how many it saw to its place in y."""
    _sum[(programs,)](x, y, SIZE=words, BLOCK=block, PROGRAMS=programs, num_warps=8)


class DryTimer:
    """Executes everything once or twice on the CPU. Its numbers mean nothing.

    This is the only place where a dry run and a run on a GPU differ in how they execute things.
    """

    dry = True
    calls = 2

    def race(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Timing | str]:
        """Run each contender's calls; return a time, or why there is none, by name."""
        results: dict[str, Timing | str] = {}
        for name, calls in contenders.items():
            try:
                start = time.perf_counter()
                for call in itertools.islice(itertools.cycle(calls), self.calls):
                    call()
                us = (time.perf_counter() - start) / self.calls * 1e6
                results[name] = Timing(us, us, us, 1)
            except Exception as error:
                results[name] = reason(error)
        return results

    def replay(self, calls: Sequence[Call]) -> Call:
        """Return a function that makes the calls again."""

        def again() -> None:
            for call in calls:
                call()

        return again

    def synchronize(self) -> None:
        """Wait for nothing."""


@dataclass
class Setting(Workbench):
    """A workbench whose items seed `random` by their id.

    Attributes:
        copy_gbs: GB/s (read plus written) of a large copy in this process; 0 until measured.
        read_gbs: GB/s of reading as much.
    """

    copy_gbs: float = 0.0
    read_gbs: float = 0.0

    def lower(self, op: str, **arguments: object) -> list[Launch]:
        """Return the launches of an op.

        Raises:
            UnsupportedOp: there is no kernel.
        """
        if op not in LOWER:
            raise UnsupportedOp(f"the CUDA back end has no kernel for {op!r}")
        return LOWER[op](**arguments, device=self.device)

    def bytes(self, size: int) -> torch.Tensor:
        """Return random bytes on the device."""
        draw = partial(torch.randint, 0, 256, (size,), generator=self.random, dtype=torch.uint8)
        return draw(device=self.place)

    def copy(self, size: int) -> Row:
        """Time copies of some bytes."""
        pairs = [(self.bytes(size), self.bytes(size)) for _ in range(self.copies(2 * size))]
        calls = [partial(target.copy_, source) for target, source in pairs]
        timing = self.timer.race({"copy": calls})["copy"]
        return self.measured(timing, 2 * size, kind="copy", size=size)

    def read(self, size: int) -> Row:
        """Time reads of some bytes."""
        block = 256 if self.dry else 8192
        words = size // 4
        programs = min(words // block, self.device.sms * 8)
        calls = []
        for _ in range(self.copies(size)):
            x = self.bytes(size).view(torch.int32)
            y = torch.empty(programs, dtype=torch.int32, device=self.place)
            calls.append(partial(launch_sum, x, y, words, block, programs))
        timing = self.timer.race({"read": calls})["read"]
        return self.measured(timing, size, kind="read", size=size)

    def measure_bandwidth(self) -> None:
        """Measure what this process's shares are of, and may not exceed; warms the GPU up, too."""
        if not self.copy_gbs:
            size = _TINY if self.dry else _LARGE
            copied, read = self.copy(size), self.read(size)
            self.copy_gbs = float(copied.get("gbs", 0.0))
            self.read_gbs = float(read.get("gbs", 0.0))

    def race(self, contenders: Mapping[str, Prepare], **facts: object) -> list[Row]:
        """Time contenders in turns and return a row for each.

        Args:
            contenders: what each does first, by name.
            facts: what all rows say besides.
        """
        self.measure_bandwidth()
        sizes, calls, timings = {}, {}, {}
        for name, prepare in contenders.items():
            try:
                sizes[name], calls[name] = prepare()
            except Exception as error:
                timings[name] = reason(error)
        timings |= self.timer.race(calls)
        return [
            self.measured(timing, sizes.get(name, 0), **facts, who=name)
            for name, timing in timings.items()
        ]

    def measured(self, timing: Timing | str, nbytes: int, **facts: object) -> Row:
        """Return the row of one contender: time, bandwidth and its share of the copy's.

        Args:
            timing: the time of a call, or why there is none.
            nbytes: bytes that a call has to move.
            facts: what the row says besides.
        """
        if isinstance(timing, str):
            return {**facts, "status": _status_of(facts.get("who"), timing), "reason": timing}
        row: Row = {**facts, "nbytes": nbytes}
        if self.dry:
            return row
        gbs = nbytes / timing.us / 1e3
        row |= {"us": timing.us, "us_low": timing.low, "us_high": timing.high, "gbs": gbs}
        return self.with_share(row, gbs)

    def with_share(self, row: Row, gbs: float) -> Row:
        """Note the share of the copy's bandwidth that a row reaches.

        What is faster than copies and reads, by more than they vary, is no measurement.

        Args:
            row: what was measured.
            gbs: the bytes that it had to move, over its time.
        """
        if self.copy_gbs:
            row |= {"share": gbs / self.copy_gbs, "copy_gbs": self.copy_gbs}
            most = max(self.copy_gbs, self.read_gbs)
            if gbs > _MARGIN * most:
                why = f"{gbs:.0f} GB/s, where copies and reads reach {most:.0f}: its bytes came "
                why += "from a cache, or are fewer than counted"
                row |= {"status": "failed", "reason": why}
        return row


def _status_of(who: object, why: str) -> str:
    """Return why there is no time: a peer may be missing, our own kernels may not."""
    if not str(who).startswith("clocher"):
        return "not measured"
    return "refused" if why.startswith(REFUSALS) else "failed"


@dataclass(frozen=True)
class Item:
    """One thing that a part does. `run` returns rows; an exception becomes a failed row."""

    id: str
    run: Callable[[Setting], Sequence[Row]]


def run_item(setting: Setting, item: Item) -> list[Row]:
    """Return the rows of an item; what it raises becomes a row."""
    setting.random.manual_seed(zlib.crc32(item.id.encode()))
    try:
        with torch.no_grad():
            rows = list(item.run(setting))
        setting.timer.synchronize()
    except Exception as error:
        why = reason(error)
        rows = [{"status": "refused" if why.startswith(REFUSALS) else "failed", "reason": why}]
    for row in rows:
        row.setdefault("status", "ok")
    return rows


def is_lost(setting: Setting) -> bool:
    """Return whether the GPU has stopped answering, as it does after an illegal access."""
    try:
        setting.timer.synchronize()
    except Exception:
        return True
    return False


def make_setting(dry: bool) -> Setting:
    """Return the setting of this machine."""
    if dry:
        from bench.gpu import interpreter  # noqa: F401  changes the interpreter

        return Setting(INTERPRETER, DryTimer(), 1 << 20, torch.Generator("cpu"))
    made = gpu_workbench()
    return Setting(made.device, made.timer, made.l2_bytes, made.random)
