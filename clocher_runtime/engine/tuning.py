"""Settings of the CPU back end that change speed and never results."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings of the CPU back end that change speed and never results.

    Attributes:
        cpus: CPU of each thread; empty: wherever the system puts them.
        sockets: socket of each of these CPUs.
        prefetch_distance: bytes of weights to ask for ahead of use; None: the kernel's own choice.
        stream_block_bytes: stored bytes of weights to decode at a time; None: the kernel's choice.
        hot_replicate: keep weights that every step reads once per socket.
        hot_limit: bytes of the copies of one socket, 0 for no limit.
        copied: weights to copy from the mapped file into large pages, if they are not packed.
        stamped: write the time between the launches of a step.
    """

    cpus: tuple[int, ...] = ()
    sockets: tuple[int, ...] = ()
    prefetch_distance: int | None = None
    stream_block_bytes: int | None = None
    hot_replicate: bool = False
    hot_limit: int = 0
    copied: frozenset[str] = frozenset()
    stamped: bool = False
