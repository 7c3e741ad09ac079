"""Whole runs under attack: a documented exit code, one JSON line, no traceback, within bounds."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import python
from fuzz.arena import Arena, End
from fuzz.attacks import Attack, compose
from weight_files import ROOT

ERROR = b'{"schema": "clocher.run/1", "status": "error", "version": "1", "code": 2}\n'


def campaign(folder: Path, *flags: str) -> None:
    done = python(ROOT / "tests" / "attack_runs.py", "--failures", folder, *flags, timeout=7000)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout


@pytest.mark.timeout(900)
def test_a_few_attacks(tmp_path: Path) -> None:
    campaign(tmp_path, "--runs", "14", "--jobs", "2")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_thousand_attacks(tmp_path: Path) -> None:
    campaign(tmp_path, "--runs", "5000", "--jobs", "2", "--seed", "1")


def test_attacks_are_reproducible_and_differ() -> None:
    some = [compose(3, index) for index in range(300)]
    assert [compose(3, index) for index in reversed(range(300))] == some[::-1]
    assert len({repr(attack) for attack in some}) > 290
    assert compose(4, 0) != some[0]
    assert len({name for attack in some for name in attack.made_of}) == 13


def arena(path: Path) -> Arena:
    found = Arena(path, lambda: 0, path / "cache")
    found.honest_mib = 100.0
    return found


SOUND = End(2, ERROR, "", 90.0, 0.1, False)
REFUSED = Attack(0, 0, codes=frozenset({2}))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (SOUND, ""),
        (replace(SOUND, code=1), "exit code 1, expected [2]"),
        (replace(SOUND, code=-11), "exit code -11"),
        (replace(SOUND, err="Traceback (most recent call last):\n  x\nKeyError: 1"), "KeyError: 1"),
        (replace(SOUND, err="thread panicked at src/lib.rs"), "panicked at"),
        (replace(SOUND, hung=True), "hang"),
        (replace(SOUND, cpu=30.0), "slow"),
        (replace(SOUND, mib=300.0), "memory"),
        (replace(SOUND, out=b""), "not one JSON line"),
        (replace(SOUND, out=ERROR + ERROR), "not one JSON line"),
        (replace(SOUND, out=ERROR.replace(b"2}", b"3}")), "the line says code 3, the process 2"),
    ],
)
def test_what_fails_is_seen(tmp_path: Path, end: End, reason: str) -> None:
    found = arena(tmp_path).judge(REFUSED, end)
    assert reason in found and bool(found) == bool(reason)
