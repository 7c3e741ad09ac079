"""What the GPU suite leaves behind: whole files after a kill, merged calls, carried kernels."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import gpu_suite
from bench.gpu import precompile as cache
from bench.gpu import record as records
from bench.gpu import report, targets, tools
from bench.gpu.record import Record, Row, write_json
from bench.gpu.setting import Setting, make_setting
from bench.gpu.supervise import BUDGET, CALLS, PARTS, parts_of
from clocher_kernels.cuda.timer import Timing

ROOT = Path(__file__).parents[1]

# A suite whose parts sleep: what is tested is what a kill leaves.
SLEEPING_SUITE = """
import sys
from bench import gpu_suite
from bench.gpu import supervise

CHILD = '''
import sys, time
from pathlib import Path
from bench.gpu.record import Record
from bench.gpu.supervise import die_with_parent
die_with_parent()
path = Path(sys.argv[1])
record = Record(path.stem.split(".")[0], dry=True)
record.save(path)
for item in range(3):
    record.running = str(item)
    record.save(path)
    time.sleep(0.05)
    record.add(str(item), [{"value": list(range(200))}])
    record.save(path)
record.finished = True
record.save(path)
'''

def jobs(name, part, folder, dry, shards, only=()):
    path = folder / f"{name}.0.json"
    command = [sys.executable, "-c", CHILD, str(path)]
    return [supervise.Job(name, command, path, 60, 60)]

gpu_suite.jobs_of = jobs
supervise._TICK_SECONDS = 0.05
gpu_suite.main()
"""


def whole(out: Path) -> Row:
    """Check that each of the three files is whole; return the result."""
    result = records.read(out)
    assert (out / records.TEXT).read_text().endswith(" s\n")
    with tarfile.open(out / records.ARCHIVE) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".json"):
                assert Record(**json.load(content)).dry
    assert len(list(out.iterdir())) <= 6  # three files, and a temporary one of each
    return result


def merge(out: Path, *paths: Path) -> Result:
    flags = [flag for path in paths for flag in ("--merge", str(path))]
    return CliRunner().invoke(gpu_suite.main, ["--out", str(out), *flags])


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_kill_at_any_moment_leaves_whole_files(tmp_path: Path) -> None:
    rng = random.Random(4)
    for seen in (0, 1, 4, 9):
        out = tmp_path / str(seen)
        command = [sys.executable, "-c", SLEEPING_SUITE, "--out", str(out), "--dry-run"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as suite:
            while not (out / records.ARCHIVE).exists() or rows_of(records.read(out)) < seen:
                time.sleep(0.01)
                assert suite.poll() is None
            time.sleep(rng.random() / 2)
            children = children_of(suite.pid)
            suite.kill()
        result = whole(out)
        assert set(result["parts"]) == set(PARTS) and rows_of(result) >= seen
        assert not report.is_good(result) and result["ended_early"]
        merged = merge(tmp_path / f"merged{seen}", out)
        assert merged.exit_code == 1 and "Traceback" not in merged.output
        assert records.read(tmp_path / f"merged{seen}")["parts"] == result["parts"]
        assert not [pid for pid in children if is_running(pid)]


def rows_of(result: Row) -> int:
    return sum(len(part["rows"]) for part in result["parts"].values())


def is_running(pid: int) -> bool:
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return False
        time.sleep(0.1)
    return True


def test_a_run_that_is_asked_to_end_saves_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLEEPING_SUITE, "--out", str(tmp_path), "--dry-run"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as suite:
        while not (tmp_path / records.ARCHIVE).exists() or not whole(tmp_path)["seconds"] > 0.5:
            time.sleep(0.05)
        suite.terminate()
    assert suite.returncode == 128 + signal.SIGTERM
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert whole(tmp_path)["ended_early"]


def test_the_limits_of_a_call_fit_its_budget() -> None:
    limits = [sum(part.seconds for part in parts_of([call]).values()) for call in CALLS]
    assert {part.call for part in PARTS.values()} == set(CALLS)
    assert max(limits) <= BUDGET < 9 * 60
    assert limits[0] <= 150 and sum(limits[:4]) <= 27 * 60, "half an hour, less start and copies"
    assert list(parts_of([0])) == ["environment", "smoke", "ceilings"]
    assert list(parts_of([1])) == ["environment", "decode", "parity"]
    assert list(PARTS)[-1] == "slow_peers"


def test_the_commands_of_the_page_exist() -> None:
    page = (ROOT / "bench/gpu/README.md").read_text(encoding="utf-8")
    command = r"^python3? -m bench\.gpu_suite (.+)$"
    lines = [shlex.split(line) for line in re.findall(command, page, re.M)]
    known = {flag for param in gpu_suite.main.params for flag in param.opts}
    assert {word for line in lines for word in line if word.startswith("--")} <= known
    assert [line[line.index("--call") + 1] for line in lines if "--call" in line] == [
        str(call) for call in CALLS
    ]
    shown = dict(re.findall(r"^\| (\d) \| (\d+) s \|", page, re.M))
    limits = {c: sum(part.seconds for part in parts_of([c]).values()) for c in CALLS}
    assert {int(call): int(seconds) for call, seconds in shown.items()} == limits


def result_of(parts: dict[str, list[Row]], *, unfinished: tuple[str, ...] = ()) -> Row:
    records = []
    for name, rows in parts.items():
        record = Record(name, finished=name not in unfinished)
        record.add("item", rows)
        records.append(record)
    ended = {f"{name}.0": "time limit" for name in unfinished}
    return report.combine(records, ended, dry=False, seconds=10)


def test_merged_calls_are_one_result(tmp_path: Path) -> None:
    gpu: Row = {"gpu": "G", "status": "ok"}
    names = [name for name in PARTS if name != "environment"]
    first = {"environment": [gpu], **{name: [{"value": name}] for name in names[:4]}}
    second = {"environment": [gpu], **{name: [{"value": name}] for name in names[4:]}}
    write_json(tmp_path / "a/suite.json", result_of(first, unfinished=(names[3],)))
    write_json(tmp_path / "b/suite.json", result_of(second))
    done = merge(tmp_path / "ab", tmp_path / "a", tmp_path / "b/suite.json")
    assert done.exit_code == 1 and "time limit" in done.output
    assert merge(tmp_path / "a2", tmp_path / "a").output.count("in none of the merged runs") == len(
        names[4:]
    )
    again = result_of({names[3]: [{"value": "again"}]})
    write_json(tmp_path / "c/suite.json", {**again, "some_items": True})
    assert merge(tmp_path / "abc", *(tmp_path / n for n in "abc")).exit_code == 1
    write_json(tmp_path / "c/suite.json", again)
    done = merge(tmp_path / "abc", *(tmp_path / n for n in "abc"))
    assert done.exit_code == 0, done.output
    merged = records.read(tmp_path / "abc")
    assert set(merged["parts"]) == set(PARTS) and merged["seconds"] == 30
    assert [r["value"] for r in merged["parts"][names[3]]["rows"]] == [names[3], "again"]
    assert len(merged["parts"]["environment"]["rows"]) == 2
    assert merge(tmp_path / "twice", tmp_path / "abc").exit_code == 0


def test_a_failure_is_not_hidden_by_running_again(tmp_path: Path) -> None:
    bad = result_of({"parity": [{"status": "failed", "reason": "wrong"}]})
    merged = report.merge([bad, result_of({"parity": [{"value": 1}]})], ["parity"])
    assert not report.is_good(merged)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"schema": 1}, "has schema 1"),
        ([1], "has schema None"),
        ("{", "cannot be read"),
        (result_of({"environment": [{"gpu": "other"}]}), "runs on G and other"),
        ({**result_of({}), "dry": True}, "a dry run and a run on a GPU"),
    ],
)
def test_what_cannot_be_merged_is_refused(other: object, why: str, tmp_path: Path) -> None:
    write_json(tmp_path / "a/suite.json", result_of({"environment": [{"gpu": "G"}]}))
    text = other if isinstance(other, str) else json.dumps(other)
    (tmp_path / "b.json").write_text(text)
    done = merge(tmp_path / "out", tmp_path / "a", tmp_path / "b.json")
    assert done.exit_code == 2 and why in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_an_archive_of_compiled_kernels_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "parts/x.0.json", {"a": 1})
    kernel = tmp_path / "k.cubin"
    kernel.write_bytes(random.Random(0).randbytes(5000))
    assert records.archive(tmp_path / "out", tmp_path / "parts", [("cache/k", kernel)]) == 1
    with tarfile.open(tmp_path / "out" / records.ARCHIVE) as tar:
        assert tar.getnames() == ["parts/x.0.json", "cache/k"]
    monkeypatch.setattr(records, "MOST_ARCHIVE_BYTES", 4000)
    assert records.archive(tmp_path / "out", tmp_path / "parts", [("cache/k", kernel)]) == 0
    with tarfile.open(tmp_path / "out" / records.ARCHIVE) as tar:
        assert tar.getnames() == ["parts/x.0.json"]


@pytest.mark.parametrize(("copy", "read"), [(3000.0, 2000.0), (2500.0, 3000.0)])
def test_more_than_copies_and_reads_reach_fails_the_suite(copy: float, read: float) -> None:
    setting: Setting = make_setting(dry=True)
    setting.timer.dry = False
    setting.copy_gbs, setting.read_gbs = copy, read
    facts: Row = {"kind": "decode", "model": "gpt-oss-20b", "batch": 1, "context": 1024}
    facts["tokens_per_s"] = 9999.0
    good = setting.measured(Timing(10, 9, 11, 15), 31_400_000, **facts)
    bad = setting.measured(Timing(10, 9, 11, 15), 31_600_000, **facts)
    assert "status" not in good and good["share"] == pytest.approx(3140 / copy)
    assert bad["status"] == "failed" and "copies and reads reach 3000" in bad["reason"]
    assert report.is_good(result_of({"decode": [good]}))
    assert not report.is_good(result_of({"decode": [good, bad]}))
    found = result_of({"decode": [bad]})["targets"]
    assert all(row["measured"] is None for row in found)


@pytest.mark.parametrize(("copy", "met"), [(3000.0, True), (4300.0, False)])
def test_targets_grow_with_the_bandwidth_of_the_gpu(copy: float, met: bool) -> None:
    step: Row = {"kind": "decode", "model": "gpt-oss-20b", "batch": 1, "context": 1024}
    step |= {"us": 1e6 / 600, "tokens_per_s": 600.0, "copy_gbs": copy}
    block: Row = {"kind": "moe", "m": 1, "who": "clocher block", "us": 24.0, "copy_gbs": copy}
    found = {row["target"]: row for row in targets.verdicts([step, block])}
    tokens = found["gpt-oss-20b, batch 1, 1k"]
    assert tokens["must"] == pytest.approx(500 * copy / 3000) and tokens["met"] is met
    assert found["gpt-oss-20b MoE block, M = 1"]["must"] == pytest.approx(26 * 3000 / copy)
    assert found["gpt-oss-20b MoE block, M = 1"]["met"] is met
    assert found["int4 vs gemlite, M = 1"]["must"] == 1.5


NCU = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","launch__registers_per_thread"
"","","ns","byte","register/thread"
"0","_gate_up(int)","12,345","26,542,080","40"
"""


def test_counters_are_read_from_what_ncu_prints() -> None:
    (row,) = tools.read_counters(NCU)
    assert row["kernel"] == "_gate_up(int)"
    assert row["metrics"] == {"ns": 12345.0, "bytes read": 26542080.0, "registers": 40.0}
    assert tools.read_counters("==ERROR== no permission") == []


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TRITON_CACHE_DIR", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    yield


@pytest.mark.usefixtures("environment")
def test_wheels_are_importable_in_the_parts(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_peer.py", "NAME = 'peer'")
    gpu_suite._unpack(tmp_path, tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", "import a_peer; print(a_peer.NAME)"], capture_output=True, text=True
    )
    assert done.stdout == "peer\n", done.stderr
    done = (
        CliRunner()
        .invoke(gpu_suite.main, ["--out", str(tmp_path / "o"), "--wheels", str(tmp_path / "site")])
        .output
    )
    assert "has no *.whl" in done


WITHOUT = """
import json, sys
missing = ("msgspec", "tokenizers", "re2", "safetensors", "huggingface_hub", "numba", "llvmlite")
sys.modules.update(dict.fromkeys(missing))
import bench.gpu_suite
from bench.gpu.setting import make_setting, run_item
from bench.gpu.supervise import NAMES, items_of
setting, found = make_setting(dry=True), {}
for part in NAMES:
    items = [item for item in items_of(part, dry=True) if item.id.startswith("import")]
    found[part] = [row["reason"] for item in items for row in run_item(setting, item)]
print(json.dumps(found))
"""


def test_parts_need_only_what_they_use() -> None:
    """On a fresh machine with torch and Triton alone most parts run, and the others say why not."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    runtime = {"decode", "batches", "generate", "passes", "speculation"}
    some_items = {"parity", "variants"}  # those that step a model
    assert {part for part, why in found.items() if why} == runtime | some_items | {"environment"}
    assert len(found["environment"]) == 4
    for part in runtime | some_items:
        assert found[part] == ["ModuleNotFoundError: import of msgspec halted; None in sys.modules"]


def compiled_ahead(out: Path) -> str:
    command = [sys.executable, "-m", "bench.gpu.precompile", "--out", str(out), "--jobs", "1"]
    command += ["--only", "gather_rows-r5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("environment")
@pytest.mark.slow
def test_kernels_compiled_ahead_are_found_after_they_moved(tmp_path: Path) -> None:
    """Compiles in a process of its own, without the interpreter and without a GPU."""
    archive, moved = tmp_path / "here.tar.xz", tmp_path / "there.tar.xz"
    assert "kernels compiled ahead are used" in compiled_ahead(archive)
    with tarfile.open(archive) as packed:
        names = set(packed.getnames())
    assert {Path(name).suffix for name in names} == {".cubin", ".json"}
    os.rename(archive, moved)
    os.rename(tmp_path / "here", tmp_path / "gone")
    used = cache.use([moved])
    assert "kernels compiled ahead are used" in used.said
    compiled_ahead(moved)
    assert used.files() == [], "nothing was compiled again, so nothing has to be carried back"
    assert not list(used.path.glob("*/*.ptx")), "nothing was compiled again"
    with tarfile.open(moved) as packed:
        assert set(packed.getnames()) == names


@pytest.mark.usefixtures("environment")
def test_kernels_travel_there_and_new_ones_back(tmp_path: Path) -> None:
    """A kernel here is two small files, as Triton leaves them."""

    def compile_one(used: cache.Cache, name: str) -> None:
        for suffix in ("cubin", "json", "ptx", "ttir"):
            write_json(used.path / name / f"k.{suffix}", name)
        children = {f"k.{s}": str(used.path / name / f"k.{s}") for s in ("cubin", "json", "ptx")}
        write_json(used.path / name / "__grp__k.json", {"child_paths": children})

    ahead = cache.use([tmp_path / "ahead.tar.xz"])
    assert "none came along" in ahead.said and ahead.files() == []
    compile_one(ahead, "A")
    records.write_whole(tmp_path / "carried.tar.xz", records.tar(ahead.files()))
    there = cache.use([tmp_path / "carried.tar.xz"])
    assert "1 kernels compiled ahead are used" in there.said and there.files() == []
    (group,) = there.path.glob("A/__grp__*")
    named = json.loads(group.read_text())["child_paths"]
    assert set(named) == {"k.cubin", "k.json"}
    assert all(Path(path).parent == there.path / "A" for path in named.values())
    compile_one(there, "B")
    assert len(there.files()) == 3 and all("/B/" in name for name, _ in there.files())
    records.archive(tmp_path / "out", tmp_path / "parts", there.files())
    both = cache.use([tmp_path / "next.tar.xz", tmp_path / "out" / records.ARCHIVE])
    assert {path.name for path in both.path.iterdir()} == {"B", cache.KEY}
    both = cache.use([tmp_path / "carried.tar.xz", tmp_path / "out" / records.ARCHIVE])
    assert "2 kernels compiled ahead are used" in both.said


@pytest.mark.usefixtures("environment")
def test_kernels_of_another_triton_are_not_used(tmp_path: Path) -> None:
    write_json(tmp_path / "k/abc/key.json", {"triton": "3.0.0", "libtriton_sha256": "abc"})
    used = cache.use([tmp_path / "k.tar.xz"])
    assert used.path.name != "abc" and os.environ["TRITON_CACHE_DIR"] == str(used.path)
    assert "no kernel is compiled ahead: those in" in used.said and "3.0.0 with abc" in used.said


@pytest.mark.parametrize("name", ["kernels", "kernels.tar.xz"])
def test_what_is_no_archive_of_kernels_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("no archive")
    flags = ["--out", str(tmp_path / "o"), "--cache", str(tmp_path / name)]
    done = CliRunner().invoke(gpu_suite.main, flags)
    assert done.exit_code == 2 and "--cache:" in done.output
