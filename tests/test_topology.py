"""Thread counts from recorded trees of sysfs and cgroups."""

import pytest

from clocher_runtime import topology
from clocher_runtime.topology import cpu_quota, default_threads, parse_cpu_list, physical_cores


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
