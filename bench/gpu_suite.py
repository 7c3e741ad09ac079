"""Measure the CUDA back end on this machine's GPU; `pytest -m gpu` checks it.

    python -m bench.gpu_suite --out results
    python -m bench.gpu_suite --out results --part ops --only rms_norm

Each part is a process of its own under a time limit and writes PART.jsonl to the output folder as
it goes; what crashes or hangs is noted and the rest goes on. suite.json and suite.md put together
all parts in the folder. --dry-run runs tiny shapes in Triton's interpreter, without a GPU.
Exits 1 if a row failed or a part did not finish.
"""

import contextlib
import gc
import json
import os
import pkgutil
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
    """Its time limit, that of an item, and the maker of its items, in seconds."""

    seconds: float
    item_seconds: float
    items: str


PARTS = {
    "machine": Part(40, 40, "ops:machine_items"),  # a freshly started machine has a cold disk
    "ceilings": Part(35, 30, "ops:ceiling_items"),
    "steps": Part(200, 80, "models:step_items"),
    "ops": Part(150, 60, "ops:op_items"),
    "peers": Part(130, 80, "ops:peer_items"),
}
LOST, NO_DEVICE = 3, 4
"""Exit codes of a part: the GPU stopped answering (a new process goes on); there is none."""
_BAD = ("failed", "crashed", "timeout", "ended")
_DRY_SLACK, _MOST_STARTS = 6, 12


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="the output folder")
@click.option("--part", "names", multiple=True, type=click.Choice(list(PARTS)), help="default: all")
@click.option("--dry-run", "dry", is_flag=True, help="no GPU: tiny shapes, no speeds")
@click.option("--only", multiple=True, help="only items whose name contains this")
@click.option("--here", is_flag=True, hidden=True, help="run a part in this process")
def main(out: Path, names: Sequence[str], dry: bool, only: Sequence[str], here: bool) -> None:
    """Run the parts in order and print the report."""
    out.mkdir(parents=True, exist_ok=True)
    if here:
        raise SystemExit(run_items(names[0], out / f"{names[0]}.jsonl", dry, only))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    good = True
    for name in names or PARTS:
        click.echo(name, err=True)
        run_part(name, out, dry, only)
        good = report(out)
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
            setting.timer.synchronize()
        except Exception:  # after an illegal access; tearing the context down may hang
            os._exit(LOST)
    return 0


def run_part(name: str, out: Path, dry: bool, only: Sequence[str]) -> None:
    """Run a part, restart it after a crash or timeout, and record the cause."""
    slack, path = _DRY_SLACK if dry else 1, out / f"{name}.jsonl"
    item_seconds = PARTS[name].item_seconds * slack
    deadline = time.monotonic() + PARTS[name].seconds * slack
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


def report(out: Path) -> bool:
    """Write suite.json and suite.md of the parts in a folder; return whether all is well."""
    parts = {
        path.stem: [row for row in rows_of(path) if row["status"] != "begun"]
        for path in sorted(out.glob("*.jsonl"))
    }
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
    main()
