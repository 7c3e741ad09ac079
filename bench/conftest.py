"""The table under a run of bench/microbench.py."""

import pytest

from bench.microbench import ROWS
from bench.record import print_table, table

_COLUMNS = (
    "op = {name} | us = {us_per_call:.1f} | MB = {megabytes:.2f} | GB/s = {gbps:.2f} | "
    "GFLOP/s = {gflops:.2f} | correct"
)


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the results that pytest-benchmark's own table leaves out."""
    if rows := config.stash.get(ROWS, []):
        print_table(table(_COLUMNS, rows).on_terminal())
