"""Thread counts and placements from recorded trees of sysfs and cgroups; scripts/set_numa.sh."""

import shutil
import subprocess
from pathlib import Path

import pytest

from clocher_kernels.errors import UsageError
from clocher_runtime.engine import topology
from clocher_runtime.engine.topology import (
    cpu_quota,
    default_threads,
    parse_cpu_list,
    physical_cores,
)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def smt_tree(siblings):
    """sysfs of CPUs whose core is given as a kernel list."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{text}\n"
        for cpu, text in siblings.items()
    }


TWO_CORES_FOUR_CPUS = smt_tree({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("0-1,4-5\n", {0, 1, 4, 5}),
        ("", set()),
        ("all", set()),
        ("1-", {1}),
    ],
)
def test_cpu_list(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    ("cpus", "cores"),
    [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1), ({0, 9}, 2)],
    ids=["all", "siblings", "one-of-each", "one", "unknown-cpu"],
)
def test_siblings_count_once(tmp_path, cpus, cores):
    root = write(tmp_path, TWO_CORES_FOUR_CPUS)
    assert physical_cores(frozenset(cpus), root) == cores


def test_older_kernels_name_the_file_differently(tmp_path):
    tree = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1\n" for cpu in (0, 1)
    }
    assert physical_cores(frozenset({0, 1}), write(tmp_path, tree)) == 1


def test_without_sysfs_every_cpu_is_a_core(tmp_path):
    assert physical_cores(frozenset({0, 1, 2}), tmp_path) == 3


V2 = {"proc/self/cgroup": "0::/kube/pod\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/a\n2:cpu,cpuacct:/docker/a\n1:name=systemd:/\n"}
V1_MOUNT = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/kube/pod/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/kube/pod/cpu.max": "250000 100000\n"}, 2.5),
        (
            V2
            | {
                "sys/fs/cgroup/kube/pod/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/kube/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        (V2 | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (V2 | {"sys/fs/cgroup/kube/pod/cpu.max": "garbage\n"}, None),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (
            V1
            | {
                f"{V1_MOUNT}/docker/a/cpu.cfs_quota_us": "50000\n",
                f"{V1_MOUNT}/docker/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            V1
            | {
                f"{V1_MOUNT}/cpu.cfs_quota_us": "200000\n",
                f"{V1_MOUNT}/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            V1
            | {
                f"{V1_MOUNT}/cpu.cfs_quota_us": "-1\n",
                f"{V1_MOUNT}/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
    ids=[
        "no-cgroups",
        "v2-no-file",
        "v2-max",
        "v2-limit",
        "v2-tighter-ancestor",
        "v2-container-root",
        "v2-garbage",
        "v2-outside-namespace",
        "v1-limit",
        "v1-container-root",
        "v1-no-limit",
        "v1-beside-v2",
    ],
)
def test_quota(tmp_path, files, quota):
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("cpus", "quota", "threads"),
    [
        ({0, 1, 2, 3}, "max", 2),
        ({0, 1, 2, 3}, "190000", 1),
        ({0, 1, 2, 3}, "50000", 1),
        ({0, 1, 2, 3}, "800000", 2),
        ({0}, "max", 1),
    ],
)
def test_default_is_the_tightest_of_cores_and_quota(tmp_path, monkeypatch, cpus, quota, threads):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    monkeypatch.setattr(topology, "usable_cpus", lambda: frozenset(cpus))
    assert default_threads(write(tmp_path, TWO_CORES_FOUR_CPUS | files)) == threads


def test_this_machine_has_at_least_one_thread():
    assert 1 <= default_threads() <= len(topology.usable_cpus())


TREES = Path(__file__).parent / "data" / "sysfs"


@pytest.fixture
def recorded(tmp_path):
    """A function that unfolds a recorded tree and returns its root."""

    def unfold(name):
        lines = (TREES / f"{name}.txt").read_text(encoding="ascii").splitlines()
        pairs = (line.split(" = ", 1) for line in lines if not line.startswith("#"))
        return write(tmp_path, {path: f"{text}\n" for path, text in pairs})

    return unfold


def all_of(count):
    return frozenset(range(count))


@pytest.mark.parametrize(
    ("name", "usable", "sockets", "nodes", "cores", "caches"),
    [
        ("one-socket", all_of(2), [0, 0], [0, 0], [0, 1], [32 << 20]),
        ("two-sockets", all_of(16), 2 * [0, 0, 0, 0, 1, 1, 1, 1], None, 2 * [*range(8)], None),
        ("smt", all_of(8), 8 * [0], 8 * [0], [0, 0, 2, 2, 4, 4, 6, 6], [64 << 20]),
        ("offline", all_of(6), [0, 0, 0], [0, 0, 0], [0, 2, 3], [32 << 20]),
        ("none", all_of(3), [0, 0, 0], [0, 0, 0], [0, 1, 2], [0]),
    ],
)
def test_recorded_machines(recorded, name, usable, sockets, nodes, cores, caches):
    cpus = topology.read_cpus(usable, recorded(name))
    assert [cpu.socket for cpu in cpus] == sockets
    assert [cpu.node for cpu in cpus] == (nodes or sockets)
    assert [cpu.core for cpu in cpus] == cores
    assert topology.cache_bytes(cpus) == (caches or [64 << 20])[0]


def test_only_usable_cpus_that_are_on_line(recorded):
    ids = [cpu.id for cpu in topology.read_cpus(frozenset({0, 1, 3, 5}), recorded("offline"))]
    assert ids == [0, 3]


@pytest.mark.parametrize(
    ("name", "cores"),
    [("one-socket", 2), ("two-sockets", 8), ("smt", 4), ("offline", 3), ("none", 16)],
)
def test_default_threads_of_recorded_machines(recorded, monkeypatch, name, cores):
    root = recorded(name)
    known = topology.read_cpus(all_of(16), root)
    there = {cpu.id for cpu in known if (root / f"sys/devices/system/cpu/cpu{cpu.id}").exists()}
    usable = frozenset(there) or all_of(16)
    monkeypatch.setattr(topology, "usable_cpus", lambda: usable)
    assert default_threads(root) == cores


@pytest.mark.parametrize(
    ("name", "affinity", "policy", "ids"),
    [
        ("two-sockets", "auto", "auto", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("two-sockets", "compact", "auto", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("two-sockets", "scatter", "auto", [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13]),
        ("two-sockets", "scatter", "compact", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("two-sockets", "compact", "scatter", [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13]),
        ("two-sockets", "auto", "socket:1", [4, 5, 6, 7, 12, 13, 14, 15]),
        ("smt", "compact", "auto", [0, 2, 4, 6, 1, 3, 5, 7]),
        ("smt", "auto", "auto", [0, 4, 2, 6, 1, 5, 3, 7]),
        ("smt", "scatter", "auto", [0, 4, 2, 6, 1, 5, 3, 7]),
        ("smt", "scatter", "socket:0", [0, 4, 2, 6, 1, 5, 3, 7]),
        ("offline", "scatter", "scatter", [0, 2, 3]),
        ("one-socket", "auto", "auto", [0, 1]),
        ("none", "scatter", "scatter", [0, 1, 2, 3]),
    ],
)
def test_order_in_which_threads_are_given_cpus(recorded, name, affinity, policy, ids):
    usable = all_of({"none": 4, "one-socket": 2, "smt": 8, "offline": 6}.get(name, 16))
    cpus = topology.read_cpus(usable, recorded(name))
    assert [cpu.id for cpu in topology.in_order(cpus, affinity, policy)][: len(ids)] == ids


def test_every_cpu_has_its_turn(recorded):
    cpus = topology.read_cpus(all_of(16), recorded("two-sockets"))
    for affinity in ("auto", "compact", "scatter"):
        for policy in ("auto", "compact", "scatter"):
            assert set(topology.in_order(cpus, affinity, policy)) == set(cpus)


def test_a_socket_that_is_not_there(recorded):
    cpus = topology.read_cpus(all_of(16), recorded("two-sockets"))
    with pytest.raises(UsageError, match=r"NUMA_POLICY=socket:2: .* on sockets 0, 1"):
        topology.in_order(cpus, policy="socket:2")
    outside = topology.read_cpus(frozenset({4, 5}), recorded("two-sockets"))
    with pytest.raises(UsageError, match=r"on sockets 1$"):
        topology.in_order(outside, policy="socket:0")


SCRIPT = Path(__file__).parents[1] / "scripts" / "set_numa.sh"


def set_numa(tmp_path, *arguments, numactl=True):
    """Run the script on a machine with nodes 0 and 1, with a numactl that says what it was told."""
    tools, nodes = tmp_path / "bin", tmp_path / "nodes"
    tools.mkdir(exist_ok=True)
    for node in (0, 1):
        (nodes / f"node{node}").mkdir(parents=True, exist_ok=True)
    for tool in ("sh", "ls", "sed", "tr", "cat"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    if numactl:
        (tools / "numactl").write_text('#!/bin/sh\necho "$@"\n')
        (tools / "numactl").chmod(0o755)
    environ = {"PATH": str(tools), "SET_NUMA_NODES": str(nodes)}
    return subprocess.run([SCRIPT, *arguments], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("interleave", "--interleave=all"),
        ("node:1", "--cpunodebind=1 --preferred=1"),
        ("strict", "--cpunodebind=0 --membind=0"),
        ("strict:1", "--cpunodebind=1 --membind=1"),
    ],
)
def test_set_numa_hands_the_command_to_numactl(tmp_path, policy, told):
    done = set_numa(tmp_path, policy, "--", "clocher-run", "--prompt", "a  b")
    assert done.stdout == f"{told} -- clocher-run --prompt a  b\n"
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "numactl", "code", "message"),
    [
        ((), True, 2, "no policy"),
        (("node", "ls"), True, 2, "policy node: expected interleave, node:X, strict"),
        (("node:x", "ls"), True, 2, "expected the number of a node, such as node:0"),
        (("node:", "ls"), True, 2, "expected the number of a node"),
        (("strict",), True, 2, "no command to run"),
        (("node:7", "ls"), True, 2, "no NUMA node 7; it has: 0 1"),
        (("interleave", "ls"), False, 5, "numactl is not installed; install the package numactl"),
    ],
    ids=lambda value: str(value),
)
def test_set_numa_says_what_is_wrong(tmp_path, arguments, numactl, code, message):
    done = set_numa(tmp_path, *arguments, numactl=numactl)
    assert done.returncode == code
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_cpu_name_comes_from_the_system(tmp_path):
    root = write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\n"})
    assert topology.cpu_name(root) == "Some CPU"
    assert topology.cpu_name(tmp_path / "none") == "unknown processor"
