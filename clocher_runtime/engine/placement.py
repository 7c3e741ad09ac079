"""How many threads a configuration asks for, and which CPUs they are pinned to."""

from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.topology import (
    Cpu,
    default_threads,
    in_order,
    read_cpus,
    usable_cpus,
)


def threads_of(config: EngineConfig) -> int:
    """Return the threads of a configuration, on the socket that its NUMA policy names if any.

    Raises:
        UsageError: none of the usable CPUs is on that socket.
    """
    if config.threads is not None:
        return config.threads
    if config.numa_policy.startswith("socket:"):
        cpus = in_order(read_cpus(), policy=config.numa_policy)
        return default_threads(cpus=frozenset(cpu.id for cpu in cpus))
    return default_threads()


def usable_threads(config: EngineConfig) -> int:
    """Return the same, at most the usable CPUs.

    More would wait for each other at every barrier and cannot be faster; results do not depend on
    their number.
    """
    return min(threads_of(config), len(usable_cpus()))


def pinned_cpus(config: EngineConfig) -> tuple[Cpu, ...]:
    """Return the CPU of each thread; empty: wherever the system puts them.

    Threads are pinned if IE_TP_USE_AFFINITY=1, if NUMA_POLICY says where to, or if each socket has
    weights of its own.

    Raises:
        UsageError: none of the usable CPUs is on the socket that NUMA_POLICY names.
    """
    every = read_cpus()
    copies = config.hot_replicate and len({cpu.socket for cpu in every}) > 1
    if not (config.use_affinity or config.numa_policy != "auto" or copies):
        return ()
    return in_order(every, config.affinity, config.numa_policy)[: threads_of(config)]
