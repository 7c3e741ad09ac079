"""Read bandwidth of the memory: the limit that decode is measured against.

    python -m bench.bandwidth [--threads 1,2] [--pages 4k,2m] [--json FILE]

A compiled loop (`cpu_fallback.team.bandwidth`) reads a buffer that no cache holds. "2m" asks for
huge pages and says how many came; "4k" refuses them.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median

import click

from bench.ops.experiment import TEAMS, Listed, Row, experiment, turns
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.team.bandwidth import Reader

PAGES = ("4k", "2m")
DEFAULT_BYTES = 512 << 20

PAGES_READ = click.option(
    "--pages", type=click.Choice(PAGES), default="2m", show_default=True, help="of what is read"
)
MIB = click.option(
    "--mib",
    type=click.IntRange(2),
    default=DEFAULT_BYTES >> 20,
    show_default=True,
    help="Bytes to move.",
)


@experiment(
    "bandwidth",
    __doc__,
    "pages | huge | threads | GB/s | best",
    "{pages} | {huge_share:.0%} | {threads} | {gbps:.1f} | {best_gbps:.1f}",
    title="read",
    rounds=11,
)
@TEAMS
@click.option("--pages", type=Listed.of(PAGES), default=",".join(PAGES), show_default=True)
@MIB
def main(threads: tuple[int, ...], pages: tuple[str, ...], mib: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each kind of pages and thread count."""
    readers = {kind: Reader(kind, mib << 20) for kind in pages}
    runs = {
        (kind, count): partial(reader.gbps, count)
        for kind, reader in readers.items()
        for count in threads
    }
    for (kind, count), samples in turns(runs, rounds).items():
        yield {
            "op": "read",
            "pages": kind,
            "huge_share": readers[kind].huge_share,
            "threads": count,
            "isa": CURRENT.name,
            "gbps": median(samples),
            "best_gbps": max(samples),
            "samples": samples,
        }


if __name__ == "__main__":
    main()
