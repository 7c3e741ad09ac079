"""The table under a run of bench/microbench.py."""

import pytest
from rich.table import Table

from bench.measure import machine, print_table
from bench.microbench import ROWS


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print what was measured, with what pytest-benchmark's own table leaves out."""
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    table = Table("op", "us", "MB", "GB/s", "GFLOP/s", "correct", title=machine())
    for row in rows:
        rates = [f"{row[key]:.2f}" if key in row else "" for key in ("gbps", "gflops")]
        us = f"{row['us_per_call']:.1f}" if "us_per_call" in row else ""
        mark = "yes" if row["correct"] else "NO"
        table.add_row(row["name"], us, f"{row['bytes'] / 1e6:.2f}", *rates, mark)
    print_table(table)
