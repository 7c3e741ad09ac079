"""What a run asks of threads and memory on the CPU, and which of it was acted on."""

from collections.abc import Set

from clocher_runtime.command.config import RunConfig
from clocher_runtime.command.settings import SETTINGS
from clocher_runtime.engine.topology import default_threads, in_order, read_cpus, usable_cpus
from clocher_runtime.engine.tuning import Tuning

_PINNED = frozenset({"affinity", "use_affinity", "numa_policy"})
_REPLICATED = frozenset({"hot_replicate", "hot_repl_limit_mb"})
_MEMORY = frozenset({"pretranspose", "prefetch_distance", "stream_block_bytes"})


def choose_threads(config: RunConfig) -> int:
    """Return the threads of a run, on the socket that it names if it names one.

    They are at most the usable CPUs. More would wait for each other at every barrier and cannot be
    faster; results do not depend on their number.

    Raises:
        UsageError: none of the usable CPUs is on that socket.
    """
    if config.threads is not None:
        return min(config.threads, len(usable_cpus()))
    if config.numa_policy.startswith("socket:"):
        cpus = in_order(read_cpus(), policy=config.numa_policy)
        return default_threads(cpus=frozenset(cpu.id for cpu in cpus))
    return default_threads()


def tune(config: RunConfig, threads: int) -> Tuning:
    """Return the tuning of a run.

    Threads are pinned if IE_TP_USE_AFFINITY=1, if NUMA_POLICY says where to, or if each socket has
    weights of its own.

    Raises:
        UsageError: none of the usable CPUs is on the socket that NUMA_POLICY names.
    """
    every = read_cpus()
    sockets = {cpu.socket for cpu in every}
    copies = config.hot_replicate and len(sockets) > 1
    pinned = config.use_affinity or config.numa_policy != "auto" or copies
    cpus = in_order(every, config.affinity, config.numa_policy)[:threads] if pinned else ()
    ahead = config.prefetch_distance
    return Tuning(
        cpus=tuple(cpu.id for cpu in cpus),
        sockets=tuple(cpu.socket for cpu in cpus),
        prefetch_distance=ahead if isinstance(ahead, int) else None,
        stream_block_bytes=config.stream_block_bytes,
        hot_replicate=config.hot_replicate,
        hot_limit=config.hot_repl_limit_mb << 20,
    )


def not_acted_on(config: RunConfig, acted_on: Set[str]) -> tuple[str, ...]:
    """Return what a run asked for and did not get, as "NAME=value".

    Args:
        config: the run.
        acted_on: what the executor acted on, by field of its hints.
    """
    met = set(acted_on & _MEMORY)
    met |= _PINNED if "placement" in acted_on else set()
    met |= _REPLICATED if "hot_replicate" in acted_on else set()
    wanted = [name for name in SETTINGS if name in (_PINNED | _REPLICATED | _MEMORY) - met]
    given = [(name, config.given[name]) for name in wanted if name in config.given]
    return tuple(str(how) for name, how in given if how.raw not in SETTINGS[name].idle)
