"""Attack whole runs: hostile models, flags, variables, files, streams, limits and signals."""

import base64
import json
import os
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a process with threads must not fork

import click
from fuzz.arena import Arena, End
from fuzz.attacks import Attack, compose

import clocher_kernels.cuda  # noqa: F401

# A run that is forked from here, maybe as another user, must not have to import anything.
import cpu_fallback.executor  # noqa: F401
from clocher_kernels import __version__
from clocher_runtime import cli
from clocher_runtime.command import run  # noqa: F401
from clocher_runtime.exit_codes import ExitCode
from cpu_fallback.lanes import jit, objects
from cpu_fallback.team import tape

SCHEMA = "clocher.attacks/1"
EPILOG = """\b
An attack fails if the run ends with another exit code than is right for it, writes anything but one
line of JSON to standard output, shows a traceback, hangs, or needs more than 1.5 times the memory
of an honest run. The first of each kind of failure is saved.

\b
Examples:
  python tests/attack_runs.py --runs 5000 --jobs 2 --seed 1
  python tests/attack_runs.py --replay build/attacks/1-1234.json

\b
Exit codes:
  0  every run ended as it should
  7  one did not"""


@contextmanager
def arenas(count: int) -> Iterator[list[Arena]]:
    """Yield arenas that share a copy of this user's kernels and know what an honest run needs."""
    __version__, jit.assembly(tape.lead)  # for what these import
    folder = Path(mkdtemp(prefix="clocher-attacks-"))
    try:
        mine = objects.ObjectCache.get().directory
        if mine is not None and mine.is_dir():
            unfinished = shutil.ignore_patterns(".*")  # others write them now: they may vanish
            shutil.copytree(mine, folder / "cache" / "kernels" / mine.name, ignore=unfinished)
        found = [Arena(folder / str(n), cli.main, folder / "cache") for n in range(count)]
        env = {"HOME": "{here}", "CLOCHER_CACHE_DIR": "{cache}"}
        honest = Attack(0, 0, flags=["--max-new", "9", "--threads", "2"], env=env)
        ends = [found[0].carry_out(honest) for _ in range(2)]  # the first compiles
        if any(end.code for end in ends):
            raise RuntimeError(f"an honest run failed: {ends}")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # another user may read it
        for arena in found:
            arena.honest_mib = ends[-1].mib
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def work(arena: Arena, seed: int, indices: range, connection: Connection) -> None:
    """Carry out attacks and send what became of each; never return: this is a fork."""
    try:
        for index in indices:
            attack = compose(seed, index)
            end = arena.carry_out(attack)
            out, err = end.out[:2000], end.err[-8000:]
            connection.send((index, replace(end, out=out, err=err), arena.judge(attack, end)))
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # what fails shows as runs that are missing


def campaign(seed: int, runs: int, jobs: int, start: int) -> Iterator[tuple[int, End, str]]:
    """Yield number, end and what is wrong, of every attack."""
    with arenas(jobs) as places:
        connections: list[Connection] = []
        for number, arena in enumerate(places):
            ours, theirs = Pipe()
            if not os.fork():
                ours.close()
                work(arena, seed, range(start + number, start + runs, jobs), theirs)
            theirs.close()
            connections.append(ours)
        while connections:
            ready = wait(connections)
            for connection in [c for c in connections if c in ready]:
                try:
                    yield connection.recv()
                except EOFError:
                    connections.remove(connection)


def save(folder: Path, attack: Attack, reason: str, end: End) -> Path:
    """Write an attack and how it ended."""
    document: dict[str, Any] = {"schema": SCHEMA, "reason": reason, **asdict(attack)}
    document["files"] = {k: base64.b64encode(v).decode() for k, v in attack.files.items()}
    document |= {"codes": sorted(attack.codes), "code": end.code, "mib": end.mib, "cpu": end.cpu}
    document |= {"stdout": end.out.decode(errors="replace"), "stderr": end.err}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{attack.seed}-{attack.index}.json"
    path.write_text(json.dumps(document, indent=1))
    return path


def load(path: Path) -> Attack:
    """Return an attack that `save` wrote."""
    document = json.loads(path.read_bytes())
    known = {name: document[name] for name in Attack.__dataclass_fields__}
    known["files"] = {k: base64.b64decode(v) for k, v in known["files"].items()}
    known["codes"] = frozenset(known["codes"])
    known["signal"] = known["signal"] and tuple(known["signal"])
    return Attack(**known)


@click.command(epilog=EPILOG, context_settings={"show_default": True, "max_content_width": 100})
@click.option("--runs", type=click.IntRange(1), default=500, help="How many attacks.")
@click.option("--seed", type=click.IntRange(0), default=0, help="The same seed, the same attacks.")
@click.option("--start", type=click.IntRange(0), default=0, help="Number of the first.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, help="Runs side by side.")
@click.option("--failures", type=click.Path(path_type=Path), default=Path("build/attacks"))
@click.option("--replay", type=click.Path(path_type=Path), help="Carry out a saved attack again.")
def main(runs: int, seed: int, start: int, jobs: int, failures: Path, replay: Path | None) -> None:
    """Attack whole runs; standard output gets one line of JSON with the counts."""
    if replay is not None:
        attack = load(replay)
        with arenas(1) as (arena,):
            end = arena.carry_out(attack)
            reason = arena.judge(attack, end)
        click.echo(f"{reason or 'as it should'}\n{end.err[-8000:]}\n{end}"[:12000], err=True)
        sys.exit(ExitCode.MISMATCH if reason else ExitCode.OK)
    codes: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for index, end, reason in campaign(seed, runs, jobs, start):
        codes[end.code] += 1
        if reason and reason not in reasons:
            click.echo(f"{reason}: {save(failures, compose(seed, index), reason, end)}", err=True)
        reasons += Counter([reason] if reason else [])
    document = {
        "schema": SCHEMA,
        "seed": seed,
        "runs": codes.total(),
        "codes": {str(code): count for code, count in sorted(codes.items())},
        "failed": reasons.total(),
        "failures": dict(reasons),
    }
    click.echo(json.dumps(document))
    complete = codes.total() == runs
    sys.exit(ExitCode.OK if complete and not reasons else ExitCode.MISMATCH)


if __name__ == "__main__":
    main()
