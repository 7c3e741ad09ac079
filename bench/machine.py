"""What disturbed the machine during a run: steal time, throttling, other processes."""

import hashlib
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels import guards
from clocher_runtime.engine.topology import cpu_name, numa_nodes, usable_cpus

STEAL_LIMIT, OTHERS_LIMIT, QUOTA_LIMIT = 1.0, 5.0, 1.0
"""Limits in % for a valid run: of CPU time for the first two, of the run's time for the last."""

_TICK = os.sysconf("SC_CLK_TCK")
_ROOT, _THROTTLES = Path("/"), "cpu[0-9]*/thermal_throttle/*_throttle_count"
# Fields of a line of /proc/stat; guest time is part of user time.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


class Reading(NamedTuple):
    """Counters of the machine, None where it has none; `own_s` includes ended children."""

    seconds: float
    busy_s: float | None
    stolen_s: float | None
    own_s: float
    throttles: int | None
    quota_s: float | None


class State(NamedTuple):
    """Disturbances during the `seconds` of a run, in % of its CPU time; None: unknown."""

    steal_percent: float | None
    others_percent: float | None
    throttled_events: int | None
    quota_throttled_s: float | None
    runnable: int | None
    load1: float
    seconds: float

    def disturbances(self, others_limit: float = OTHERS_LIMIT) -> list[str]:
        """Return the reasons why the run is void."""
        why = []
        if (self.steal_percent or 0) > STEAL_LIMIT:
            why.append(f"steal: {self.steal_percent:.1f} % of CPU time (limit {STEAL_LIMIT:g} %)")
        if (self.others_percent or 0) > others_limit:
            why.append(
                f"other processes: {self.others_percent:.1f} % of CPU time "
                f"(--others-limit {others_limit:g})"
            )
        if self.throttled_events:
            why.append(f"thermal throttling: {self.throttled_events} events")
        if (self.quota_throttled_s or 0) > self.seconds * QUOTA_LIMIT / 100:
            why.append(f"CPU quota: {self.quota_throttled_s:.2f} s without CPU")
        return why


def read(root: Path = _ROOT, cpus: frozenset[int] | None = None) -> Reading:
    """Read the counters of some CPUs; default: those that this process may use."""
    names = {f"cpu{number}" for number in (usable_cpus() if cpus is None else cpus)}
    lines = (line.split() for line in guards.read(root / "proc/stat").splitlines())
    ticks = [[int(text) for text in fields[:8]] for name, *fields in lines if name in names]
    stolen = sum(each[_STEAL] for each in ticks)
    waited = sum(each[_IDLE] + each[_IOWAIT] for each in ticks)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    throttles = [
        int(text)
        for path in (root / "sys/devices/system/cpu").glob(_THROTTLES)
        if (text := guards.read(path)).isdigit()
    ]
    return Reading(
        seconds=time.perf_counter(),
        busy_s=(sum(map(sum, ticks)) - waited - stolen) / _TICK if ticks else None,
        stolen_s=stolen / _TICK if ticks else None,
        own_s=sum(usage.ru_utime + usage.ru_stime for usage in used),
        throttles=sum(throttles) if throttles else None,
        quota_s=_quota_s(root),
    )


def between(before: Reading, after: Reading, cpus: int, root: Path = _ROOT) -> State:
    """Return the state of `cpus` CPUs between two readings."""
    seconds = max(after.seconds - before.seconds, 1e-9)
    _, busy, stolen, own, throttles, quota = (
        None if a is None or b is None else max(b - a, 0)
        for a, b in zip(before, after, strict=True)
    )
    available = seconds * cpus
    return State(
        steal_percent=None if stolen is None else 100 * stolen / available,
        others_percent=None if busy is None else 100 * max(busy - (own or 0), 0.0) / available,
        throttled_events=throttles,
        quota_throttled_s=quota,
        runnable=guards.fields(guards.read(root / "proc/stat")).get("procs_running"),
        load1=os.getloadavg()[0],
        seconds=seconds,
    )


def since(before: Reading) -> State:
    """Return the state of the usable CPUs since a reading."""
    return between(before, read(), len(usable_cpus()))


def describe() -> dict[str, Any]:
    """Describe the machine without its name."""
    cpus = len(usable_cpus())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = hashlib.sha256(f"{platform.node()}|{cpu_name()}|{cpus}|{memory}".encode())
    return {
        "cpu": cpu_name(),
        "cpus": cpus,
        "numa_nodes": numa_nodes(),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "host_sha256": name.hexdigest()[:12],
    }


def _quota_s(root: Path) -> float | None:
    """Return the throttled time of this process's control group, version 2 or 1."""
    for version, group in guards.groups("cpu", root):
        key, unit = ("throttled_usec", 1e6) if version == 2 else ("throttled_time", 1e9)
        if (found := guards.fields(guards.read(group / "cpu.stat")).get(key)) is not None:
            return found / unit
    return None
