"""What a run may ask of memory access and thread placement, and what came of it."""

from dataclasses import dataclass, field

from cpu_fallback.team.openmp import OpenMP
from cpu_fallback.team.placement import Placement


@dataclass(frozen=True, slots=True)
class Hints:
    """Settings of the CPU back end that change speed and never results; None: the kernel's own."""

    prefetch_distance: int | None = None  # bytes of weights to ask for ahead of use; 0: none
    stream_block_bytes: int | None = None  # stored bytes that are decoded at a time, of many tokens
    placement: Placement = field(default_factory=Placement)  # where threads run
    hot_replicate: bool = False  # keep weights that every step reads once per socket
    hot_limit: int = 0  # bytes of the copies of one socket, 0 for no limit
    # weights to copy into large pages if they lie in a mapped file and have no tiles
    copied: frozenset[str] = frozenset()
    adaptive: bool = True  # let threads sit out while others take their cores away
    stamped: bool = False  # write the time between launches (`stamps`)
    runtime: OpenMP | None = None  # whose threads take part; None: those of a team of its own


class Asked:
    """Hints as kernels ask for them when they are bound; `names` are the fields that matter."""

    def __init__(self, hints: Hints | None = None) -> None:
        self._hints = hints or Hints()
        self.names: set[str] = set()

    def prefetch_distance(self, default: int) -> int:
        """Return the bytes to ask for ahead of use, 0 for none."""
        self.names.add("prefetch_distance")
        wanted = self._hints.prefetch_distance
        return default if wanted is None else wanted

    def block_columns(self, default: int, row_bytes: int, columns: int, rows: int) -> int:
        """Return how many columns of a block of rows to decode at a time.

        It is a multiple of 128, at least that; `default` without a hint, and at most.
        """
        self.names.add("stream_block_bytes")
        wanted = self._hints.stream_block_bytes
        if wanted is None:
            return default
        fitting = wanted * columns // max(row_bytes * rows, 1)
        return max(128, min(fitting, default) // 128 * 128)
