"""What else the machine did during a run: stolen time, throttling, work of others."""

import hashlib
import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clocher_runtime.engine.topology import cpu_name, numa_nodes, usable_cpus

STEAL_LIMIT = 1.0
OTHERS_LIMIT = 5.0
QUOTA_LIMIT = 1.0

_TICK = os.sysconf("SC_CLK_TCK")
_ROOT = Path("/")
# Fields of a line of /proc/stat; guest time is part of user time.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the machine at one moment; None: it does not have them.

    Attributes:
        seconds: the clock.
        busy_s: time that the usable CPUs worked, for anybody.
        stolen_s: time in which the hypervisor ran somebody else on them.
        own_s: CPU time of this process and of its children that have ended.
        throttles: thermal throttling events of all CPUs.
        quota_s: time for which a control group was kept off the CPUs.
    """

    seconds: float
    busy_s: float | None
    stolen_s: float | None
    own_s: float
    throttles: int | None
    quota_s: float | None


@dataclass(frozen=True, slots=True)
class State:
    """What happened to the machine during a run; None: not known here.

    Attributes:
        steal_percent: stolen time, of the time of the usable CPUs.
        others_percent: time that they worked for other processes, of the same.
        throttled_events: thermal throttling events.
        quota_throttled_s: time without CPU because the quota was used up.
        runnable: processes and threads that were ready to run after it.
        load1: load average of the last minute.
    """

    steal_percent: float | None
    others_percent: float | None
    throttled_events: int | None
    quota_throttled_s: float | None
    runnable: int | None
    load1: float

    def disturbances(self, elapsed_s: float, others_limit: float = OTHERS_LIMIT) -> list[str]:
        """Return the reasons for which a run of this length does not count."""
        why = []
        if (self.steal_percent or 0) > STEAL_LIMIT:
            why.append(f"steal: {self.steal_percent:.1f} % of CPU time (limit {STEAL_LIMIT:g} %)")
        if (self.others_percent or 0) > others_limit:
            why.append(
                f"other processes: {self.others_percent:.1f} % of CPU time "
                f"(limit {others_limit:g} %)"
            )
        if self.throttled_events:
            why.append(f"thermal throttling: {self.throttled_events} events")
        if (self.quota_throttled_s or 0) > elapsed_s * QUOTA_LIMIT / 100:
            why.append(f"CPU quota: {self.quota_throttled_s:.2f} s without CPU")
        return why

    def document(self) -> dict[str, Any]:
        """Return it for a result file."""
        return asdict(self)


def read(root: Path = _ROOT, cpus: frozenset[int] | None = None) -> Reading:
    """Read the counters.

    Args:
        root: root of the file system; tests pass a recorded tree.
        cpus: CPUs that count; None: those that this process may use.
    """
    cpus = usable_cpus() if cpus is None else cpus
    times = _cpu_times(root, cpus)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Reading(
        seconds=time.perf_counter(),
        busy_s=None if times is None else times[0] / _TICK,
        stolen_s=None if times is None else times[1] / _TICK,
        own_s=sum(usage.ru_utime + usage.ru_stime for usage in used),
        throttles=_throttles(root),
        quota_s=_quota_s(root),
    )


def between(before: Reading, after: Reading, cpus: int, root: Path = _ROOT) -> State:
    """Return what happened between two readings.

    Args:
        before: the first.
        after: the second, when the children of the time between have ended.
        cpus: usable CPUs.
        root: as for `read`.
    """
    available = max(after.seconds - before.seconds, 1e-9) * cpus
    busy, stolen = (
        None if a is None or b is None else max(a - b, 0.0)
        for a, b in ((after.busy_s, before.busy_s), (after.stolen_s, before.stolen_s))
    )
    own = after.own_s - before.own_s
    return State(
        steal_percent=None if stolen is None else 100 * stolen / available,
        others_percent=None if busy is None else 100 * max(busy - own, 0.0) / available,
        throttled_events=_difference(after.throttles, before.throttles),
        quota_throttled_s=_difference(after.quota_s, before.quota_s),
        runnable=_runnable(root),
        load1=os.getloadavg()[0],
    )


def since(before: Reading) -> tuple[float, State]:
    """Return the seconds since a reading, and what happened on the usable CPUs meanwhile."""
    after = read()
    return after.seconds - before.seconds, between(before, after, len(usable_cpus()))


def describe() -> dict[str, Any]:
    """Return what the machine is, without naming it."""
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


def note(state: Mapping[str, Any]) -> str:
    """Return the state of a result row as a phrase."""
    parts = [
        f"{title} {state[key]:.1f} %"
        for key, title in (("others_percent", "others"), ("steal_percent", "steal"))
        if state.get(key) is not None
    ]
    return ", ".join(parts) or "nothing known of the machine"


def _difference(after: Any, before: Any) -> Any:
    return None if after is None or before is None else after - before


def _cpu_times(root: Path, cpus: frozenset[int]) -> tuple[int, int] | None:
    """Return busy and stolen ticks of some CPUs."""
    busy = stolen = seen = 0
    for line in _read(root / "proc/stat").splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus:
            ticks = [int(field) for field in fields[: _STEAL + 1]]
            if len(ticks) <= _STEAL:
                return None
            busy += sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT] - ticks[_STEAL]
            stolen += ticks[_STEAL]
            seen += 1
    return (busy, stolen) if seen else None


def _throttles(root: Path) -> int | None:
    folder = root / "sys/devices/system/cpu"
    texts = [_read(p) for p in folder.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    counts = [int(text) for text in texts if text.isdigit()]
    return sum(counts) if counts else None


def _quota_s(root: Path) -> float | None:
    """Return the throttled time of this process's control group, version 2 or 1."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = path.strip("/")
        if not controllers:
            candidates = [mount / inside, mount]
        elif "cpu" in controllers.split(","):
            candidates = [m / p for m in (mount / controllers, mount / "cpu") for p in (inside, "")]
        else:
            continue
        for folder in candidates:
            for entry in _read(folder / "cpu.stat").splitlines():
                key, _, value = entry.partition(" ")
                if key in ("throttled_usec", "throttled_time") and value.isdigit():
                    return int(value) / (1e6 if key == "throttled_usec" else 1e9)
    return None


def _runnable(root: Path) -> int | None:
    for line in _read(root / "proc/stat").splitlines():
        key, _, value = line.partition(" ")
        if key == "procs_running" and value.isdigit():
            return int(value)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
