"""What every test run sets, and prints: how many tests it left out, and why."""

import os
import signal
from collections import Counter
from collections.abc import Sequence

import pytest

# Kernels of the CUDA back end run in Triton's interpreter; it must be chosen before the import.
os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what it puts in the background with SIGINT ignored, and so would be the processes
# that tests interrupt. A handler, unlike that, is not inherited: they get the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_left_out: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    if for_a_gpu(config):  # it runs what Triton compiles
        del os.environ["TRITON_INTERPRET"]


def for_a_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not for_a_gpu(config):
        return
    from clocher_kernels.cuda.probe import unusable

    reason = unusable()
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(bool(reason), reason=reason))


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        markers = [name for name in ("gpu", "slow") if item.get_closest_marker(name)]
        _left_out[" and ".join(markers) or "not asked for"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"not run: {count} test(s), {reason}")
