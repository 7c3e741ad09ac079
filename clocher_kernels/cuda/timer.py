"""How long calls take on a GPU: CUDA graphs between events, contenders taking turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# Long enough for the host to get ahead, so that no event waits for a graph to be launched.
_HEAD_START_CYCLES = 3_000_000


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over the rounds, and the quartiles as spread."""

    us: float
    low: float
    high: float
    rounds: int


class GpuTimer:
    """Times CUDA graphs of at least `calls` calls, the contenders of a race taking turns."""

    dry = False
    calls = 20

    def __init__(self, rounds: int = 15) -> None:
        self.rounds = rounds

    def race(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Timing | str]:
        """Capture each contender's calls and replay the graphs in turn.

        Args:
            contenders: calls by name, each on its own copy of the weights so that a replay finds
                nothing in the L2 cache; they are repeated up to `calls` if there are fewer.

        Returns:
            The time of one call, or why there is none, by name.
        """
        results: dict[str, Timing | str] = {}
        graphs: dict[str, tuple[Call, int]] = {}
        for name, calls in contenders.items():
            count = -(-max(self.calls, len(calls)) // len(calls)) * len(calls)
            try:
                graphs[name] = self.replay((list(calls) * count)[:count]), count
            except Exception as error:
                results[name] = reason(error)
        for replay, _ in graphs.values():
            replay()
            replay()
        samples = self._rounds(graphs)
        for name, (_, count) in graphs.items():
            us = sorted(ms * 1e3 / count for ms in samples[name])
            quartiles = statistics.quantiles(us, n=4)
            results[name] = Timing(statistics.median(us), quartiles[0], quartiles[2], len(us))
        return results

    def _rounds(self, graphs: Mapping[str, tuple[Call, int]]) -> dict[str, list[float]]:
        """Return the milliseconds of each replay by contender."""
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
        order = list(graphs)
        for turn in range(self.rounds):
            torch.cuda._sleep(_HEAD_START_CYCLES)
            # Nobody always runs after the same neighbour.
            for name in order[turn % max(len(order), 1) :] + order[: turn % max(len(order), 1)]:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
                start.record()
                graphs[name][0]()
                end.record()
                marks[name].append((start, end))
        torch.cuda.synchronize()
        return {name: [s.elapsed_time(e) for s, e in pairs] for name, pairs in marks.items()}

    def replay(self, calls: Sequence[Call]) -> Call:
        """Capture the calls into one CUDA graph, after running each once; return its replay."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        return graph.replay

    def synchronize(self) -> None:
        """Wait for the GPU; raises what has gone wrong on it."""
        torch.cuda.synchronize()


def reason(error: BaseException) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
