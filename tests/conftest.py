"""What every test run sets, and prints: how many tests it left out, and why."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compatibility
import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run: what fails, fails again. How long it takes depends on the machine.
settings.register_profile(
    "same",
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")

# Tests start hundreds of processes, which would all compile the same sources.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What references compute is small, and two test processes share the cores: threads of BLAS and of
# torch would mostly wait for each other, and take three times the time. Both look at their import.
for library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(library, "1")

# Kernels of the CUDA back end run in Triton's interpreter; it must be chosen before the import.
os.environ["TRITON_INTERPRET"] = "1"

# No test fetches a model: a command without one takes what ships with Clocher.
os.environ["CLOCHER_EMBEDDED"] = "1"

# A shell starts what it puts in the background with SIGINT ignored, and so would be the processes
# that tests interrupt. A handler, unlike that, is not inherited: they get the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

Run = Callable[..., tuple[int, dict[str, Any], str]]

# Whole files are dealt out to two processes. Those that take longest come first, so that both
# processes end together; test_isa.py compiles each kernel twice where the cache is empty.
LONGEST = ("test_isa.py", "test_converters.py", "test_docs.py", "test_ops_parity.py")
LONGEST += ("test_fuzz_readers.py", "test_quantize.py", "test_ptq.py")

_left_out: Counter[str] = Counter()
_seen = compatibility.Seen()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-compatibility",
        type=Path,
        metavar="FILE",
        help="add what the parity tests see to FILE, which docs/compatibility.md is made of",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported
    config.option.loadscopereorder = False  # pytest-xdist would begin with files of many tests
    if for_a_gpu(config):  # it runs what Triton compiles
        del os.environ["TRITON_INTERPRET"]


def for_a_gpu(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    thin(items)
    if not for_a_gpu(config):
        return
    from clocher_kernels.cuda import unusable

    reason = unusable()
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skipif(bool(reason), reason=reason))


def thin(items: Sequence[pytest.Item]) -> None:
    """Leave all but one in n cases of a function that is marked `one_in(n)` to the slow run.

    With `of` they are counted by the name of that parameter, so that of each name some are left.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            key: tuple[str, ...] = (item.nodeid.partition("[")[0],)
            if of := mark.kwargs.get("of"):
                key += (item.callspec.params[of].name,)  # type: ignore[attr-defined]
            if seen[key] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[key] += 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch the model that some tests run; from now on the garbage is what tests make."""
    real = [item for item in session.items if item.get_closest_marker("real")]
    if reason := default_is_missing() if real else "":
        for item in real:
            item.add_marker(pytest.mark.skipif(True, reason=reason))
    gc.enable()
    gc.collect()
    gc.freeze()


def default_is_missing() -> str:
    """Return why the default model cannot be fetched, or ""."""
    from clocher_runtime.command.console import Console
    from clocher_runtime.command.default_model import NotFetched, fetch_default

    try:
        fetch_default(Console("tests"))
    except NotFetched as reason:
        return f"SmolLM2-135M-Instruct cannot be fetched: {reason}"
    return ""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        markers = [name for name in ("gpu", "slow") if item.get_closest_marker(name)]
        _left_out[" and ".join(markers) or "not asked for"] += 1


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if workeroutput := getattr(session.config, "workeroutput", None):  # of pytest-xdist
        workeroutput["left out"] = dict(_left_out)
        workeroutput["compatibility"] = _seen.dump()
    elif path := session.config.getoption("record_compatibility"):
        _seen.write(path)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", None):  # a process that crashed has none
        _left_out.update(found["left out"])
        _seen.merge(found["compatibility"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reason, count in sorted(_left_out.items()):
        terminalreporter.write_line(f"not run: {count} test(s), {reason}")


@pytest.fixture
def saw(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Take note of how near a model came to its reference; see `compatibility.Row`.

    The function takes fields of a row; `variable` names the environment variable that a test needs.
    """

    def note(*key: str, variable: str = "", **found: Any) -> None:
        test = request.node.path.relative_to(request.config.rootpath).as_posix()
        how = compatibility.command(test, request.config.getoption("markexpr"), variable)
        made = {"date": compatibility.today(), "isa": compatibility.isa(), "command": how}
        _seen.add(compatibility.Row(*key, **found, **made))

    return note


@pytest.fixture
def inside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run clocher-run in this process, on the reference back end, in an empty directory.

    The function takes flags, and variables by name; it returns (code, line, standard error).
    """
    from commands import VARIABLES, only_line

    from clocher_runtime import cli
    from clocher_runtime.command import loading

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "choose", lambda device: ("reference", "test"))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def run(*flags: str, **env: str) -> tuple[int, dict[str, Any], str]:
        with monkeypatch.context() as patch:
            for variable, value in env.items():
                patch.setenv(variable, value)
            code = cli.main(flags)
        out, err = capsys.readouterr()
        return code, only_line(out), err

    return run
