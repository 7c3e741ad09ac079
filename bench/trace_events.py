"""A step as trace events, for chrome://tracing and ui.perfetto.dev (the JSON trace format)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def trace(calls: Sequence[tuple[str, np.ndarray, int]], title: str) -> dict[str, object]:
    """Return the document of a step.

    Args:
        calls: name, start and end of each launch on each thread in ns [launches, threads, 2], and
            bytes.
        title: of the process.
    """
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}
    ]
    threads = max((spans.shape[1] for _, spans, _ in calls), default=0)
    for rank in range(threads):
        name = {"name": f"thread {rank}"}
        events.append({"ph": "M", "pid": 1, "tid": rank, "name": "thread_name", "args": name})
    for name, spans, nbytes in calls:
        for launch in spans.tolist():
            for rank, (start, end) in enumerate(launch):
                events.append(
                    {
                        "ph": "X",
                        "pid": 1,
                        "tid": rank,
                        "name": name,
                        "ts": start / 1e3,
                        "dur": (end - start) / 1e3,
                        "args": {"bytes": nbytes},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_trace(path: Path, calls: Sequence[tuple[str, np.ndarray, int]], title: str) -> None:
    """Write the document; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(trace(calls, title)), encoding="utf-8")
    os.replace(partial, path)
