"""Every op of the op table at sizes of real models, with pytest-benchmark.

Usage: `make microbench ARGS="-k cpu-linear-mxfp4"`. A benchmark whose first call differs from the
reference fails. Data may stay in caches: for memory bandwidth see `python -m bench linear`.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import pytest

from bench.ops.op_timing import DEVICES, Timed, timed
from bench.ops.shapes import real_cases
from clocher_kernels.cuda.probe import unusable
from clocher_kernels.ops.contract import Case, OpSpec
from clocher_runtime.engine.topology import default_threads

ROWS = pytest.StashKey[list[dict[str, Any]]]()

_MOST_S = 0.1
_LEAST_ROUNDS = 5


def parameters(devices: Sequence[str]) -> list[Any]:
    """Return (op, case, device) for pytest, where the device has a kernel."""
    return [
        pytest.param(spec, case, device, id=f"{device}-{spec.name}-{case.id}")
        for device in devices
        for spec, case in real_cases()
        if device not in case.missing
    ]


def usable_devices() -> list[str]:
    """Return the devices of this machine."""
    return [device for device in DEVICES if device == "cpu" or not unusable()]


@pytest.fixture
def subject(spec: OpSpec, case: Case, device: str) -> Iterator[Timed]:
    """Bind the op to the device; release it afterwards."""
    made = timed(spec, case, device, default_threads())
    yield made
    made.close()


@pytest.mark.benchmark(max_time=_MOST_S, min_rounds=_LEAST_ROUNDS, disable_gc=True)
@pytest.mark.parametrize(("spec", "case", "device"), parameters(usable_devices()))
def test_op(subject: Timed, benchmark: Any, request: pytest.FixtureRequest) -> None:
    """Time an op; fail if its first call was wrong."""
    benchmark.extra_info |= subject.facts
    with subject.awake():
        benchmark(subject.run)
    if benchmark.stats is not None:  # --benchmark-disable runs it once
        benchmark.extra_info |= subject.rates(median(benchmark.stats.stats.data))
    facts = benchmark.extra_info
    row = {"name": request.node.callspec.id, "megabytes": facts["bytes"] / 1e6, **facts}
    request.config.stash.setdefault(ROWS, []).append(row)
    assert subject.facts["correct"], f"differs from the reference: {subject.facts}"
