"""The table under a run of bench/microbench.py."""

import pytest

from bench.microbench import ROWS
from bench.record import print_table, table

_HEADS = "op | us | MB | GB/s | GFLOP/s | correct"
_CELLS = "{name} | {us_per_call:.1f} | {megabytes:.2f} | {gbps:.2f} | {gflops:.2f} | {correct}"


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the results that pytest-benchmark's own table leaves out."""
    if rows := config.stash.get(ROWS, []):
        print_table(table(_HEADS, _CELLS, rows).on_terminal())
