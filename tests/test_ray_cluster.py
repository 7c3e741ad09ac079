"""Jobs on a real Ray cluster of this machine: what dies is done again, and every row once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow
ROWS = 24
NEW = 24
COMMAND = (
    "import sys; from clocher_runtime.cli import clocher; sys.exit(clocher(['ray', *sys.argv[1:]]))"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of two CPUs that outlives the drivers; its address."""
    # Sockets lie below it, whose names must be short.
    home = tmp_path_factory.mktemp("r", numbered=True)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    code = (
        "import ray, sys, time\n"
        "found = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)\n"
        "print(found.address_info['address'], flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(home / "log").open("w"),
        env=environment,
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        address = keeper.stdout.readline().strip()
        os.environ["RAY_AUTH_MODE"] = "disabled"
        assert address, (home / "log").read_text()
        try:
            yield address
        finally:
            keeper.communicate("", timeout=60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [
        {"prompt": f"def f{n}(", "max_new": NEW, "temperature": 0.7 if n % 2 else 0.0}
        for n in range(ROWS)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def alone() -> list[dict[str, object]]:
    """What one process without Ray makes of the rows, one by one."""
    code = (
        "import json, sys, numpy as np; from clocher_runtime.ray.actors import Lines\n"
        "lines = Lines('generate', None, batch=1, sampling={'max_new': 64, 'seed': 0})\n"
        f"for n in range({ROWS}):\n"
        "    heat = 0.7 if n % 2 else 0.0\n"
        f"    row = {{'prompt': f'def f{{n}}(', 'max_new': {NEW}, 'temperature': heat}}\n"
        "    batch = {'first': np.array([n]), 'lines': np.array([json.dumps(row)], object)}\n"
        "    print(lines(batch)['lines'][0], end='')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def driver(source: Path, out: Path, address: str) -> subprocess.Popen[str]:
    flags = ["--actors", "2", "--task-rows", "2", "--batch", "2", "--address", address]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "generate", source, out, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not what():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


def stored(out: Path) -> int:
    """Return how many rows are stored."""
    return sum(part.read_bytes().count(b"\n") for part in out.glob("tasks/*.jsonl"))


def actors() -> list[int]:
    """Return the processes of this user that Ray has given rows."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"MapWorker" in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def test_every_row_once_and_as_without_ray(
    cluster: str, source: Path, alone: list[dict[str, object]], tmp_path: Path
) -> None:
    process = driver(source, tmp_path / "out", cluster)
    seen: set[int] = set()
    while process.poll() is None:
        seen |= {*actors()}
        time.sleep(0.05)
    assert process.wait() == 0, process.communicate()[0]
    assert results(tmp_path / "out") == alone
    assert len(seen) >= 2, seen


def test_an_actor_that_is_killed_loses_no_row(
    cluster: str, source: Path, alone: list[dict[str, object]], tmp_path: Path
) -> None:
    process = driver(source, tmp_path / "out", cluster)
    wait_for(lambda: stored(tmp_path / "out") >= 4, process)
    os.kill(actors()[0], signal.SIGKILL)
    assert process.wait(120) == 0, process.communicate()[0]
    assert results(tmp_path / "out") == alone


def test_a_driver_that_is_killed_is_followed_by_one_that_goes_on(
    cluster: str, source: Path, alone: list[dict[str, object]], tmp_path: Path
) -> None:
    process = driver(source, tmp_path / "out", cluster)
    wait_for(lambda: stored(tmp_path / "out") >= 6, process)
    process.kill()
    process.wait()
    before = stored(tmp_path / "out")
    assert 6 <= before < ROWS, "it was done before it could be killed"
    process = driver(source, tmp_path / "out", cluster)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert f"rows done before: {before}" in said
    assert results(tmp_path / "out") == alone


def test_a_pipeline_of_ones_own(cluster: str) -> None:
    from clocher_runtime.api import load
    from clocher_runtime.ray.actors import Generate

    rows = [{"name": str(n), "prompt": f"def f{n}("} for n in range(5)]
    rows[3]["prompt"] = ""
    ray.init(address=cluster, log_to_driver=False)
    try:
        found = ray.data.from_items(rows).map_batches(
            Generate,
            fn_constructor_kwargs={"model": None, "batch": 2, "sampling": {"max_new": 6}},
            compute=ray.data.ActorPoolStrategy(size=2),
            batch_size=2,
            num_cpus=1,
        )
        answers = sorted(found.take_all(), key=lambda row: row["name"])
    finally:
        ray.shutdown()
    with load(threads=1) as model:
        for row, answer in zip(rows, answers, strict=True):
            assert answer["name"] == row["name"]
            if answer["error"]:
                assert row["prompt"] == "", answer["error"]
                continue
            assert answer["text"] == model.generate(row["prompt"], max_new=6)
            assert list(answer["ids"]) and answer["prompt_tokens"] > 0
