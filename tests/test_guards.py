"""Memory that may be taken, from recorded trees of /proc and control groups; who asks for it."""

import numpy as np
import pytest
from sessions import make_session

from clocher_kernels import guards
from clocher_kernels.errors import OutOfMemory
from clocher_kernels.guards import available, require
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import WEIGHTS_ALONE
from clocher_runtime.engine.load import load_model
from clocher_runtime.models import build
from clocher_runtime.quality.evaluate import scoring
from cpu_fallback.executor import check_memory

MIB = 1 << 20
MACHINE = {"proc/meminfo": "MemTotal: 99999 kB\nMemAvailable:    8192 kB\n"}
V2 = MACHINE | {"proc/self/cgroup": "0::/kube/pod\n"}
V1 = MACHINE | {"proc/self/cgroup": "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n"}


def group(version, path, limit, used, stat=""):
    """Files of a control group, sizes in MiB."""
    mount = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max",)}[version]
    names = (*names, "memory.current")[:2]
    text = limit if isinstance(limit, str) else str(limit * MIB)
    return {
        f"{mount}{path}/{names[0]}": f"{text}\n",
        f"{mount}{path}/{names[1]}": f"{used * MIB}\n",
        f"{mount}{path}/memory.stat": stat,
    }


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CACHE = f"anon 5\ninactive_file {MIB}\nactive_file {MIB // 2}\n"
TOTALS = f"inactive_file 7\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MACHINE, 8 * MIB),
        (V2, 8 * MIB),
        (V2 | group(2, "/kube/pod", "max", 3), 8 * MIB),
        (V2 | group(2, "/kube/pod", 5, 3), 2 * MIB),
        (V2 | group(2, "/kube/pod", 99, 3), 8 * MIB),
        (V2 | group(2, "/kube/pod", 5, 3) | group(2, "/kube", 7, 6), MIB),
        (V2 | group(2, "", 4, 1), 3 * MIB),
        (V2 | group(2, "/kube/pod", 5, 5, CACHE), 3 * MIB // 2),
        (V2 | group(2, "/kube/pod", 5, 6), 0),
        (V2 | {"sys/fs/cgroup/kube/pod/memory.max": "5\n"}, 8 * MIB),
        (V1 | group(1, "/docker/a", 6, 4), 2 * MIB),
        (V1 | group(1, "", 6, 4), 2 * MIB),
        (V1 | group(1, "/docker/a", 6, 5, TOTALS), 3 * MIB),
        (V1 | group(1, "/docker/a", "9223372036854771712", 5), 8 * MIB),
        ({"proc/self/cgroup": "0::/\n"} | group(2, "", 4, 1), 3 * MIB),
    ],
    ids=[
        "nothing-known",
        "machine",
        "v2-no-file",
        "v2-max",
        "v2-limit",
        "v2-limit-above-the-machine",
        "v2-tighter-ancestor",
        "v2-container-root",
        "v2-page-cache-is-free",
        "v2-over-the-limit",
        "v2-usage-not-known",
        "v1-limit",
        "v1-container-root",
        "v1-page-cache-is-free",
        "v1-no-limit",
        "group-without-meminfo",
    ],
)
def test_available(tmp_path, files, expected):
    assert available(write(tmp_path, files)) == expected


def test_require_names_both_sizes_and_the_way_out(tmp_path):
    root = write(tmp_path, V2 | group(2, "/kube/pod", 5, 3))
    require(2 * MIB, "it needs", "take less", root)
    with pytest.raises(OutOfMemory, match=r"^it needs 2 MiB, 2 MiB are available to this process"):
        require(2 * MIB + 1, "it needs", "take less", root)
    require(1 << 60, "it needs", "take less", tmp_path / "absent")


@pytest.fixture
def little(monkeypatch):
    """Give this process a MiB."""
    monkeypatch.setattr(guards, "available", lambda root: MIB)


def test_a_session_asks_before_its_tables_are_made(little, monkeypatch):
    monkeypatch.setattr(build, "rope_tables", lambda *args: pytest.fail("tables were made"))
    with pytest.raises(OutOfMemory, match=r"KV cache and buffers need \d+ MiB, 1 MiB are"):
        make_session(load_model(open_checkpoint(embedded_model())), context=4096)


def test_tables_are_counted(monkeypatch):
    model = load_model(open_checkpoint(embedded_model()))
    asked = []
    monkeypatch.setattr(build, "require", lambda nbytes, *told: asked.append(nbytes))
    sizes = build.Sizes(tokens=1, rows=1, slots=1, context=512)
    plan = build.build_plan(model.spec, model.formats, sizes)
    build.build_plan(model.spec, model.formats, sizes, buffers=True)
    cos, sin = build.rope_tables(model.spec.rope, model.spec.head_dim, 512)
    assert asked == [cos.nbytes + sin.nbytes, asked[0] + plan.scratch_bytes()]
    assert cos.dtype == sin.dtype == np.float32


def test_packing_and_comparing_ask_too(little):
    check_memory(0, 1 << 40)  # nothing to pack: the buffers were asked for by who has them
    check_memory(MIB // 2, MIB // 2)
    with pytest.raises(OutOfMemory, match="--pretranspose none"):
        check_memory(MIB // 2, MIB)
    model = load_model(open_checkpoint(embedded_model()))
    with pytest.raises(OutOfMemory, match="lower --window"):
        scoring(model, 256, WEIGHTS_ALONE)
