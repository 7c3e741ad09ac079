"""What every item of a part gets: the device, races on it and the measured bandwidth."""

import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from clocher_kernels.cuda.launch import INTERPRETER, Device, current_device

Row = dict[str, Any]
"""A result; status "ok", or "failed", "crashed", "timeout", "not measured" with a reason."""
Call = Callable[[], object]
Prepare = Callable[[], tuple[int, Sequence[Call]]]
"""Returns the bytes of one call, and calls that each use their own copy of the weights."""
Item = tuple[str, Callable[["Setting"], Iterable[Row]]]

cuda: Any = torch.cuda  # untyped

_LARGE, _TINY = 1 << 30, 4096
_MARGIN = 1.05  # tolerance of a row over the measured bandwidth
_COLD = 5  # copies of the weights exceed this many L2 caches
_MOST_COPIES, _CALLS, _ROUNDS = 64, 20, 15
_HEAD_START_CYCLES = 2_000_000  # the host queues a whole round during this delay


def reason(error: BaseException) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


@dataclass
class Setting:
    """The device of items; `random` is seeded by the item's name.

    A `dry` run, without a GPU, calls everything once, with tiny shapes, and measures no speeds.
    """

    device: Device
    random: torch.Generator
    dry: bool
    l2_bytes: int = 1 << 20
    bandwidths: tuple[float, float] = (0.0, 0.0)
    """GB/s of copies and of reads; zeros before `measure_bandwidth`."""

    def synchronize(self) -> None:
        """Wait for the GPU; raises its pending errors."""
        if not self.dry:
            torch.cuda.synchronize()

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return normal random numbers on the device."""
        place = self.device.torch_device
        return torch.randn(shape, generator=self.random, device=place).to(dtype)

    def integers(self, shape: Sequence[int], end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return random integers below `end` on the device."""
        given = {"generator": self.random, "dtype": dtype, "device": self.device.torch_device}
        return torch.randint(end, tuple(shape), **given)

    def copies(self, nbytes: int) -> int:
        """Return how many copies of a weight a race rotates through to miss the cache."""
        return 1 if self.dry else min(_COLD * self.l2_bytes // max(nbytes, 1) + 1, _MOST_COPIES)

    def bandwidth(self, size: int) -> list[Row]:
        """Time copies and reads of `size` bytes."""
        made = [self.integers((2, size // 4), 2, torch.int32) for _ in range(self.copies(size))]
        copies = [partial(pair[0].copy_, pair[1]) for pair in made]
        reads = [partial(torch.amax, pair[0]) for pair in made]
        racing = {"copy": lambda: (2 * size, copies), "read": lambda: (size, reads)}
        return self.race(racing, size=size)

    def measure_bandwidth(self) -> None:
        """Measure the bandwidth that rows refer to, once; also warms up the GPU."""
        if not any(self.bandwidths):
            copied, read = self.bandwidth(_TINY if self.dry else _LARGE)
            self.bandwidths = copied.get("gbs", 0.0), read.get("gbs", 0.0)

    def replay(self, calls: Sequence[Call]) -> Call:
        """Capture the calls into one CUDA graph after running each once; return its replay."""
        if self.dry:
            return lambda: [call() for call in calls]
        stream, graph = cuda.Stream(), cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            self.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for call in calls:
                    call()
        self.synchronize()
        replay: Call = graph.replay
        return replay

    def race(self, contenders: Mapping[str, Prepare], **facts: object) -> list[Row]:
        """Time contenders in turns; return a row for each, with `facts` in all rows."""
        sizes: dict[str, int] = {}
        # A graph reads the memory of the calls that it was captured from: they stay alive.
        graphs: dict[str, tuple[Call, Sequence[Call]]] = {}
        rows: dict[str, Row] = {}
        for who, prepare in contenders.items():
            try:
                sizes[who], calls = prepare()
                many = list(calls) * (1 if self.dry else -(-_CALLS // len(calls)))
                replay = self.replay(many)
                replay()
                graphs[who] = replay, many
            except Exception as error:
                own = who.startswith(("clocher", "copy", "read"))
                status = "failed" if own else "not measured"
                rows[who] = {"status": status, "reason": reason(error)}
        for who, us in self._rounds(graphs).items():
            rows[who] = self.measured(us, sizes[who])
        return [{**facts, "who": who, **rows[who]} for who in contenders]

    def _rounds(self, graphs: Mapping[str, tuple[Call, Sequence[Call]]]) -> dict[str, list[float]]:
        """Return the microseconds of a call in each round; `graphs`: replays, and their calls."""
        marks: dict[str, list[tuple[Any, Any]]] = {who: [] for who in graphs}
        order = list(graphs)
        for turn in range(0 if self.dry else _ROUNDS):
            cuda._sleep(_HEAD_START_CYCLES)
            first = turn % max(len(order), 1)
            for who in order[first:] + order[:first]:  # rotate the order
                start, end = (cuda.Event(enable_timing=True) for _ in "se")
                start.record()
                graphs[who][0]()
                end.record()
                marks[who].append((start, end))
        self.synchronize()
        return {
            who: [start.elapsed_time(end) * 1e3 / len(graphs[who][1]) for start, end in pairs]
            for who, pairs in marks.items()
        }

    def measured(self, us: Sequence[float], nbytes: int) -> Row:
        """Return time, bandwidth and its share of the copy's; a row above both bandwidths fails."""
        if self.dry:
            return {}
        middle, most = statistics.median(us), max(self.bandwidths)
        gbs = nbytes / middle / 1e3
        row: Row = {"us": middle, "us_low": min(us), "us_high": max(us), "gbs": gbs}
        if most:
            row["share"] = gbs / self.bandwidths[0]
        if most and gbs > _MARGIN * most:
            why = f"{gbs:.0f} GB/s, but copies and reads reach {most:.0f}: its bytes came from a "
            row |= {"status": "failed", "reason": f"{why}cache, or are fewer than counted"}
        return row


def run_item(setting: Setting, item: Item) -> list[Row]:
    """Return the rows of an item; an exception becomes one."""
    name, run = item
    setting.random.manual_seed(zlib.crc32(name.encode()))
    try:
        with torch.no_grad():
            rows = list(run(setting))
        setting.synchronize()
    except Exception as error:
        rows = [{"status": "failed", "reason": reason(error)}]
    return [{"item": name, "status": "ok", **row} for row in rows]


def make_setting(dry: bool) -> Setting:
    """Return the setting of this machine."""
    if dry:
        return Setting(INTERPRETER, torch.Generator("cpu"), dry)
    size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return Setting(current_device(), torch.Generator("cuda"), dry, size)
