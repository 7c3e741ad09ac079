"""What a run may ask of memory access and thread placement, and what came of it."""

from dataclasses import dataclass, field

from cpu_fallback.team.placement import Placement


@dataclass(frozen=True, slots=True)
class Hints:
    """Settings of the CPU back end that change speed and never results.

    None stands for the kernel's own choice.
    """

    # bytes of weights to ask for ahead of use; 0 asks for none
    prefetch_distance: int | None = None
    # stored bytes of weights that are decoded at a time for many tokens
    stream_block_bytes: int | None = None
    placement: Placement = field(default_factory=Placement)  # where threads run
    hot_replicate: bool = False  # keep weights that every step reads once per socket
    hot_limit: int = 0  # bytes of the copies of one socket, 0 for no limit
    # weights to copy into large pages if they lie in a mapped file and have no tiles
    copied: frozenset[str] = frozenset()
    adaptive: bool = True  # let threads sit out while others take their cores away
    stamped: bool = False  # write the time between launches (`stamps`)


class Asked:
    """Hints as kernels ask for them when they are bound. It remembers which ones were asked for.

    Args:
        hints: the hints of the executor.

    Attributes:
        names: fields of `Hints` that change what the bound kernels do.
    """

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

        Args:
            default: unless there is a hint; also the most.
            row_bytes: stored bytes of a row.
            columns: columns of a row.
            rows: rows of a block.

        Returns:
            A multiple of 128, at least that.
        """
        self.names.add("stream_block_bytes")
        wanted = self._hints.stream_block_bytes
        if wanted is None:
            return default
        fitting = wanted * columns // max(row_bytes * rows, 1)
        return max(128, min(fitting, default) // 128 * 128)
