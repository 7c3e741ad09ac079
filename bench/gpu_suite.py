"""Check and measure the CUDA back end on this machine's GPU, in three calls.

    python -m bench.gpu_suite --out call0 --call 0
    python -m bench.gpu_suite --out all --merge call0 --merge call1 --merge call2

Each part is a process of its own under a time limit and writes PART.jsonl (parity: parity.log) to
the output folder as it goes; what crashes or hangs is noted and the rest goes on. suite.json and
suite.md, written after each part, put them together. Without --call all run. --dry-run runs tiny
shapes in Triton's interpreter, without a GPU. Exits 1 if a check failed or a part did not finish.
"""

import contextlib
import gc
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click


class Part(NamedTuple):
    """The call that a part belongs to, its time limit, that of an item, the maker of its items."""

    call: int
    seconds: float
    item_seconds: float
    items: str = ""


CALLS = (0, 1, 2)
BUDGET = 520.0
"""Seconds of a call; the limits of its parts add up to no more."""

PARTS = {
    "machine": Part(0, 40, 40, "ops:machine_items"),  # a freshly started machine has a cold disk
    "smoke": Part(0, 75, 60, "models:tiny_items"),
    "ceilings": Part(0, 35, 30, "ops:ceiling_items"),
    "parity": Part(1, 480, 480),
    "steps": Part(2, 200, 80, "models:step_items"),
    "ops": Part(2, 150, 60, "ops:op_items"),
    "peers": Part(2, 130, 80, "ops:peer_items"),
}
LOST, NO_DEVICE = 3, 4
"""Exit codes of a part: the GPU stopped answering (a new process goes on); there is none."""
_PARITY = ("-m", "pytest", "-v", "--color=no", "tests/test_gpu_parity.py")
_WRONG = re.compile(
    r"(?:FAILED|ERROR) tests/\S+::(.+?)(?: - (.*))?$|::(\S+) (?:FAILED|ERROR)", re.M
)
_FINISHED = re.compile(r"^=* ?\d+ (passed|failed|skipped).* in \d", re.M)
_BAD = ("failed", "crashed", "timeout", "ended")
_DRY_SLACK, _MOST_STARTS = 6, 12
_PATH = click.Path(path_type=Path)


@click.command(help=__doc__)
@click.option("--out", type=_PATH, required=True, help="the output folder")
@click.option("--call", "calls", multiple=True, type=click.Choice([str(c) for c in CALLS]))
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="default: all")
@click.option("--dry-run", "dry", is_flag=True, help="no GPU: tiny shapes, no speeds")
@click.option("--only", multiple=True, help="only items whose name contains this")
@click.option("--budget", type=float, help=f"seconds for all parts  [default: {BUDGET:g} a call]")
@click.option("--merge", "folders", multiple=True, type=_PATH, help="put these calls together")
@click.option("--here", is_flag=True, hidden=True, help="run a part in this process")
def main(out: Path, calls: Sequence[str], names: Sequence[str], **given: Any) -> None:
    """Run the parts in order and print the report."""
    out.mkdir(parents=True, exist_ok=True)
    if given["here"]:
        raise SystemExit(
            run_items(names[0], out / f"{names[0]}.jsonl", given["dry"], given["only"])
        )
    try:
        good = bool(given["folders"]) and report(out, given["folders"], list(PARTS))
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    chosen = [n for n, p in PARTS.items() if not calls or n == "machine" or str(p.call) in calls]
    chosen = [name for name in chosen if not names or name in names]
    count = max(len(calls), 1 if names else len(CALLS))
    end = time.monotonic() + (given["budget"] or BUDGET * count)
    for name in chosen if not given["folders"] else ():
        left = end - time.monotonic()
        click.echo(f"{left:4.0f} s left: {name}", err=True)
        if left > 0:
            run_part(name, out, left, given["dry"], given["only"])
        good = report(out, [out], chosen)
    click.echo((out / "suite.md").read_text())
    raise SystemExit(not good)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a part's file, without a half-written last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def note(path: Path, *rows: dict[str, Any]) -> None:
    """Append rows to a part's file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run_items(part: str, path: Path, dry: bool, only: Sequence[str]) -> int:
    """Run the items that the file does not list yet; return the exit code."""
    os.environ["TRITON_INTERPRET"] = str(int(dry))  # read when triton is imported
    done = {row["item"] for row in rows_of(path)}
    try:
        from bench.gpu.setting import make_setting, run_item

        items = pkgutil.resolve_name(f"bench.gpu.{PARTS[part].items}")(dry)
        setting = make_setting(dry)
    except Exception as error:
        status = "failed" if isinstance(error, ImportError) else "not measured"
        note(path, {"item": "start", "status": status, "reason": str(error)})
        return NO_DEVICE
    for name, run in items:
        if name in done or (only and not any(text in name for text in only)):
            continue
        note(path, {"item": name, "status": "begun"})
        note(path, *run_item(setting, (name, run)))
        gc.collect()
        try:
            setting.synchronize()
        except Exception:  # after an illegal access; tearing the context down may hang
            os._exit(LOST)
    return 0


def run_part(name: str, out: Path, left: float, dry: bool, only: Sequence[str]) -> None:
    """Run a part, restart it after a crash or timeout, and record the cause."""
    slack, path = _DRY_SLACK if dry else 1, out / f"{name}.jsonl"
    item_seconds = PARTS[name].item_seconds * slack
    deadline = time.monotonic() + min(left, PARTS[name].seconds * slack)
    if name == "parity":
        jobs = ["-n", str(max(1, min(14, (os.cpu_count() or 1) - 2)))]
        command = [*_PARITY, *(["-m", "not slow and not gpu"] if dry else ["-m", "gpu", *jobs])]
        command += ["-k", " or ".join(only)] if only else ["-k", "in_the_interpreter"] * dry
        run(command, out / "parity.log", path, deadline, item_seconds)
        return
    command = ["-m", "bench.gpu_suite", "--here", "--out", str(out), "--part", name]
    command += ["--dry-run"] * dry + [f"--only={text}" for text in only]
    for start in range(1, _MOST_STARTS + 1):
        code = run(command, out / "suite.log", path, deadline, item_seconds)
        rows = rows_of(path)
        if code == 0:
            return
        if rows and rows[-1]["status"] == "begun":
            tail = " | ".join((out / "suite.log").read_text().splitlines()[-8:])[-500:]
            status, why = "timeout" if code is None else "crashed", f"exit status {code}: {tail}"
            note(path, {"item": rows[-1]["item"], "status": status, "reason": why})
        late = time.monotonic() > deadline
        if late or code == NO_DEVICE or sum(row["status"] == "begun" for row in rows) < start:
            break
    why = "time limit" if late else f"exit status {code}; see suite.log"
    note(path, {"item": name, "status": "ended", "reason": why})


def run(command: Sequence[str], log: Path, path: Path, deadline: float, item: float) -> int | None:
    """Run Python; return its exit code, None after a timeout."""
    # CPU work is small, and many processes run side by side.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    given: dict[str, Any] = {"env": {**os.environ, **threads}, "start_new_session": True}
    with log.open("ab") as output:
        given |= {"stdout": output, "stderr": subprocess.STDOUT}
        child = subprocess.Popen([sys.executable, *command], **given)
    began = time.time()
    try:
        while child.poll() is None:
            written = path.stat().st_mtime if path.exists() else began
            if time.monotonic() > deadline or time.time() - max(written, began) > item:
                return None
            time.sleep(0.1)
        return child.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def rows_in(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the parts in a folder."""
    parts = {path.stem: rows_of(path) for path in sorted(folder.glob("*.jsonl"))}
    if (log := folder / "parity.log").exists():
        text, rows = log.read_text(errors="replace"), []
        wrong = {test or other: why for test, why, other in _WRONG.findall(text)}
        for test, why in wrong.items():
            rows.append({"item": test, "status": "failed", "reason": why or "see parity.log"})
        rows.append({"item": "passed", "status": "ok", "count": text.count(" PASSED")})
        if not _FINISHED.search(text):
            rows.append({"item": "parity", "status": "ended", "reason": "cut short"})
        parts["parity"] = rows
    return parts


def report(out: Path, folders: Sequence[Path], names: Sequence[str]) -> bool:
    """Write suite.json and suite.md of some calls, on one GPU; return whether all is well."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        found = rows_in(folder)
        if not found and folder != out:
            raise ValueError(f"--merge: {folder} has no results of this suite")
        for name, rows in found.items():
            parts.setdefault(name, []).extend(row for row in rows if row["status"] != "begun")
    gpus = {row["gpu"] for rows in parts.values() for row in rows if "gpu" in row}
    if len(gpus) > 1:
        raise ValueError(f"--merge: calls on {' and '.join(sorted(gpus))}; merge those of one GPU")
    for name in names:
        parts.setdefault(name, [{"item": name, "status": "ended", "reason": "not run"}])
    (out / "suite.json").write_text(json.dumps({"parts": parts}, indent=1))
    (out / "suite.md").write_text("\n".join(_page(parts)) + "\n")
    return not any(row["status"] in _BAD for rows in parts.values() for row in rows)


def _page(parts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "# GPU suite"
    for name, rows in parts.items():
        counts = Counter(row["status"] for row in rows)
        said = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        yield f"\n## {name}: {said}\n"
        for row in sorted(rows, key=lambda row: row["status"] not in _BAD):
            if row["status"] != "ok":
                yield f"- {row['status']}: {row['item']} {row.get('who', '')}: {row['reason']}"
        good = [row for row in rows if row["status"] == "ok"]
        heads = [head for head in dict.fromkeys(k for row in good for k in row) if head != "status"]
        if good:
            yield f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
            yield from (f"| {' | '.join(_cell(row.get(head)) for head in heads)} |" for row in good)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
