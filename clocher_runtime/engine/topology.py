"""CPU topology from sysfs; without it every usable CPU is a core of its own on one socket."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_kernels.guards import ROOT, groups, read
from clocher_runtime.config.engine import EngineConfig

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class Cpu:
    """A usable CPU. `core`, `cache`: lowest CPU of its core, and of its last-level cache.

    `rank`: its place among the usable SMT siblings of its core.
    """

    id: int
    core: int
    rank: int
    socket: int
    node: int
    cache: int
    cache_bytes: int


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_name(root: Path = ROOT) -> str:
    """Return the processor's model name; tests use the root of a recorded file system."""
    lines = read(root / "proc/cpuinfo").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown processor")


def physical_cores(cpus: frozenset[int], root: Path = ROOT) -> int:
    """Return how many physical cores the CPUs belong to."""
    return len({_siblings(cpu, root) for cpu in cpus})


def read_cpus(usable: frozenset[int] | None = None, root: Path = ROOT) -> tuple[Cpu, ...]:
    """Return CPUs by number, by default those that this process may run on."""
    usable = usable_cpus() if usable is None else usable
    online = parse_cpu_list(read(root / _CPUS / "online"))
    nodes = {
        cpu: int(folder.name[4:])
        for folder in (root / _NODES).glob("node[0-9]*")
        for cpu in parse_cpu_list(read(folder / "cpulist"))
    }
    found: list[Cpu] = []
    for cpu in sorted(usable & online if online else usable):
        core = min(_siblings(cpu, root))
        socket = read(root / _CPUS / f"cpu{cpu}/topology/physical_package_id")
        cache, nbytes = _last_cache(cpu, root)
        rank = sum(other.core == core for other in found)
        number = int(socket) if socket.isdigit() else 0
        found.append(Cpu(cpu, core, rank, number, nodes.get(cpu, 0), cache, nbytes))
    return tuple(found)


def numa_nodes(root: Path = ROOT) -> int:
    """Return how many NUMA nodes are online; 1 if unknown."""
    return max(1, len(parse_cpu_list(read(root / _NODES / "online"))))


def cache_bytes(cpus: Sequence[Cpu]) -> int:
    """Return the bytes of last-level cache of some CPUs, 0 if unknown."""
    return sum({cpu.cache: cpu.cache_bytes for cpu in cpus}.values())


def in_order(cpus: Sequence[Cpu], affinity: str = "auto", policy: str = "auto") -> tuple[Cpu, ...]:
    """Return CPUs in pinning order: physical cores, then SMT siblings. Raises UsageError.

    `affinity` "compact" takes neighbours, "scatter" and "auto" alternate last-level caches;
    `policy` "compact" fills sockets, "scatter" alternates, "socket:N" uses one, "auto" follows
    `affinity`, filling sockets for "auto".
    """
    if policy.startswith("socket:"):
        wanted = int(policy.partition(":")[2])
        sockets = sorted({cpu.socket for cpu in cpus})
        cpus = [cpu for cpu in cpus if cpu.socket == wanted]
        if not cpus:
            known = ", ".join(map(str, sockets)) or "none"
            raise UsageError(
                f"NUMA_POLICY={policy}: no usable CPU is on that socket; there are usable CPUs on "
                f"sockets {known}"
            )
    turns = affinity == "scatter" if policy == "auto" else policy == "scatter"
    spread = affinity != "compact"
    near = sorted(cpus, key=lambda c: (c.socket, c.node, c.cache, c.core, c.id))
    in_cache = _places(near, lambda c: (c.cache, c.rank))
    local = sorted(near, key=lambda c: (c.rank, in_cache[c.id] if spread else 0))
    on_socket = _places(local, lambda c: (c.socket, c.rank))
    return tuple(sorted(local, key=lambda c: (c.rank, on_socket[c.id] if turns else 0, c.socket)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the tightest CPU quota of this process's control groups, v1 or v2; None: no limit."""
    limits = []
    for version, group in groups("cpu", root):
        if version == 2:
            quota, _, period = read(group / "cpu.max").partition(" ")
        else:
            quota, period = (read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        granted, length = (int(each) if each.isdigit() else 0 for each in (quota, period))
        if granted and length:  # else "max", -1 or a missing file
            limits.append(granted / length)
    return min(limits, default=None)


def default_threads(root: Path = ROOT, cpus: frozenset[int] | None = None) -> int:
    """Return the physical cores of `cpus`, at most the CPU quota, at least 1.

    SMT siblings share vector units and the memory port, so they are not counted.
    """
    cores = physical_cores(usable_cpus() if cpus is None else cpus, root)
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a kernel list such as "0-3,8"; empty if malformed."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def _places(cpus: Sequence[Cpu], group: Callable[[Cpu], tuple[int, int]]) -> dict[int, int]:
    counts: dict[tuple[int, int], int] = {}
    places: dict[int, int] = {}
    for cpu in cpus:
        places[cpu.id] = counts[group(cpu)] = counts.get(group(cpu), -1) + 1
    return places


def _siblings(cpu: int, root: Path) -> frozenset[int]:
    topology = root / _CPUS / f"cpu{cpu}/topology"
    text = read(topology / "core_cpus_list") or read(topology / "thread_siblings_list")
    return parse_cpu_list(text) or frozenset({cpu})


def _last_cache(cpu: int, root: Path) -> tuple[int, int]:
    """Return the lowest CPU that shares a CPU's last-level cache, and the cache's bytes."""
    found = (0, 0, 0)
    for folder in sorted((root / _CPUS / f"cpu{cpu}/cache").glob("index[0-9]*")):
        level, size = read(folder / "level"), read(folder / "size")
        sharing = parse_cpu_list(read(folder / "shared_cpu_list")) or {cpu}
        if level.isdigit() and int(level) > max(found[0], 1):
            kib = int(size[:-1]) if size[:-1].isdigit() and size[-1:] == "K" else 0
            found = (int(level), min(sharing), kib << 10)
    return found[1], found[2]


def threads_of(config: EngineConfig) -> int:
    """Return the threads of a configuration, on the socket it names. Raises UsageError."""
    if config.threads is not None:
        return config.threads
    if config.numa_policy.startswith("socket:"):
        cpus = in_order(read_cpus(), policy=config.numa_policy)
        return default_threads(cpus=frozenset(cpu.id for cpu in cpus))
    return default_threads()


def usable_threads(config: EngineConfig) -> int:
    """Return `threads_of`, at most the usable CPUs."""
    return min(threads_of(config), len(usable_cpus()))


def pinned_cpus(config: EngineConfig) -> tuple[Cpu, ...]:
    """Return the CPU of each thread; empty: not pinned. Raises UsageError."""
    every = read_cpus()
    copies = config.hot_replicate and len({cpu.socket for cpu in every}) > 1
    if not (config.use_affinity or config.numa_policy != "auto" or copies):
        return ()
    return in_order(every, config.affinity, config.numa_policy)[: threads_of(config)]
