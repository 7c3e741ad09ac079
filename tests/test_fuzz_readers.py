"""Mutants of every kind of model file: only typed errors, no crash, no hang, little memory."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from commands import python
from fuzz import oracle
from fuzz.campaign import Tally, load, save
from fuzz.mutations import (
    mutate_bytes,
    mutate_gguf,
    mutate_json,
    mutate_lines,
    mutate_safetensors,
    mutate_sealed,
)
from fuzz.oracle import Folder, Judgement, bounded_memory, judge
from fuzz.readers import READERS, Mutator
from weight_files import ROOT

from clocher_kernels.errors import FormatError, ModelError
from clocher_runtime.checkpoints.hf.shards import open_safetensors
from clocher_runtime.disk import strict_json
from clocher_runtime.disk.plane_index import unsealed
from clocher_runtime.disk.strict_json import parse_json
from clocher_runtime.engine.topology import usable_cpus

fuzz_readers = partial(python, ROOT / "tests" / "fuzz_readers.py", timeout=3000)
MUTANTS = 120
# Most of a mutant of a text reader is the library's work, and some of it another process's.
MUTANTS_OF_TEXT = 40
TEXT = ("tokenizer", "templates")


# The campaign


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("failures")
    document: dict[str, Any] = {"readers": {}, "stderr": ""}
    others = [name for name in READERS if name not in TEXT]
    for names, mutants in ((others, MUTANTS), (TEXT, MUTANTS_OF_TEXT)):
        flags = [flag for name in names for flag in ("--reader", name)]
        flags += ["--mutants", str(mutants), "--jobs", "2", "--failures", str(folder)]
        done = fuzz_readers(*flags)
        assert done.returncode in (0, 7), done.stderr
        document["readers"] |= json.loads(done.stdout)["readers"]
        document["stderr"] += done.stderr
    return document


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_survives_its_mutants(name: str, counts: dict[str, Any]) -> None:
    found = counts["readers"][name]
    assert found["failed"] == 0, (found["failures"], counts["stderr"])
    mutants = MUTANTS_OF_TEXT if name in TEXT else MUTANTS
    assert found["mutants"] == mutants == found["accepted"] + sum(found["refused"].values())
    # Neither does everything break, nor is what is changed left unread.
    assert 0 < found["accepted"] < mutants / 2
    assert f"{name:<14}" in counts["stderr"]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", READERS)
def test_a_reader_survives_a_million_mutants(name: str, tmp_path: Path) -> None:
    flags = ("--reader", name, "--mutants", "1000000", "--jobs", str(len(usable_cpus())))
    done = fuzz_readers(*flags, "--failures", tmp_path, timeout=None)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["readers"][name]["mutants"] == 1_000_000


# Mutations


@pytest.mark.parametrize("name", READERS)
def test_mutants_are_reproducible_and_differ(name: str) -> None:
    mutator = Mutator(READERS[name], 3)
    some = [mutator.mutant(index) for index in range(60)]
    again = Mutator(READERS[name], 3)
    assert [again.mutant(index) for index in reversed(range(60))] == some[::-1]
    assert mutator.mutant(0) != Mutator(READERS[name], 4).mutant(0)
    assert len({str(sorted(files.items())) for files in some}) > 45
    assert max(len(data) for files in some for data in files.values()) <= 2 << 19


def parses(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def test_most_mutants_of_json_are_json() -> None:
    seed = b'{"a": [1, 2, {"b": "c"}], "d": null, "e": 1.5, "f": {"g": true}}'
    made = [mutate_json(seed, Random(n), ("a", "zz")) for n in range(500)]
    assert 0.7 < sum(map(parses, made)) / 500 < 0.99
    assert len(set(made)) > 200


def test_most_mutants_of_a_header_keep_their_frame() -> None:
    (seed, *_) = Mutator(READERS["safetensors"], 0).originals
    made = [mutate_safetensors(seed["model.safetensors"], Random(n), ()) for n in range(300)]
    fits = [8 + int.from_bytes(data[:8], "little") <= len(data) for data in made]
    assert 0.6 < np.mean(fits) < 0.95


def is_sealed(data: bytes) -> bool:
    try:
        unsealed(data, "x")
    except ModelError:
        return False
    return True


def test_most_mutants_of_a_sealed_file_are_sealed() -> None:
    (seed, *_) = Mutator(READERS["iebin"], 0).originals
    made = [mutate_sealed(seed["model.ie.json"], Random(n), ()) for n in range(200)]
    assert np.mean([is_sealed(data) for data in made]) > 0.8


def test_mutants_of_gguf_change_its_integers() -> None:
    (seed, *_) = Mutator(READERS["gguf"], 0).originals
    made = [mutate_gguf(seed["m.gguf"], Random(n), ()) for n in range(200)]
    same_size = [data for data in made if len(data) == len(seed["m.gguf"])]
    assert len(same_size) > 150
    changed = np.array([np.frombuffer(data, np.uint8) for data in same_size])
    where = np.flatnonzero((changed != np.frombuffer(seed["m.gguf"], np.uint8)).any(axis=0))
    assert where.min() < 24 and len(where) > 100


@pytest.mark.parametrize("mutate", [mutate_bytes, mutate_lines])
def test_every_byte_can_change(mutate: Callable[..., bytes]) -> None:
    seed = b'{"a": 1}\n{"b": [2, 3]}\n'
    made = [mutate(seed, Random(n), ()) for n in range(400)]
    assert {len(data) > len(seed) for data in made} == {True, False}
    assert all(any(data[i : i + 1] != seed[i : i + 1] for data in made) for i in range(len(seed)))


# The oracle


def fine(folder: Path) -> None:
    assert (folder / "a").read_bytes() == b"x"


def typed(folder: Path) -> None:
    raise FormatError("bad")


def talkative(folder: Path) -> None:
    raise FormatError("x" * 30_000)


def untyped(folder: Path) -> None:
    [].pop()


def endless(folder: Path) -> None:
    while True:
        pass


def greedy(folder: Path) -> None:
    # Far beyond the limit: a process that has run many tests has memory to give back.
    np.zeros(oracle.EXTRA_BYTES + (8 << 30), np.uint8)


def panic(folder: Path) -> None:
    raise BaseException("a panic")


def too_deep(folder: Path) -> None:
    too_deep(folder)


@pytest.mark.parametrize(
    "read, outcome, detail",
    [
        (fine, "accepted", ""),
        (typed, "refused", "FormatError"),
        (talkative, "message", "FormatError at ?"),
        (untyped, "error", "IndexError at ?"),
        (endless, "hang", "Hang at ?"),
        (greedy, "memory", "MemoryError at ?"),
        (panic, "error", "BaseException at ?"),
        (too_deep, "error", "RecursionError at ?"),
    ],
)
def test_the_oracle(
    read: Callable[[Path], None], outcome: str, detail: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(oracle, "CPU_SECONDS", 0.2)
    folder = Folder(tmp_path)
    folder.put({"a": b"x"})
    with bounded_memory(oracle.EXTRA_BYTES):
        judgement = judge(read, (ModelError,), tmp_path)
    assert judgement.outcome == outcome
    assert judgement.detail.endswith(detail)  # NumPy has a MemoryError of its own
    assert judgement.failed == (outcome not in ("accepted", "refused"))
    assert bool(judgement.trace) == judgement.failed


def test_the_memory_limit_leaves_room_for_what_is_allowed(tmp_path: Path) -> None:
    def modest(folder: Path) -> None:
        np.zeros(oracle.EXTRA_BYTES // 2, np.uint8)

    with bounded_memory(oracle.EXTRA_BYTES):
        assert judge(modest, (), tmp_path).outcome == "accepted"
    np.zeros(4 * oracle.EXTRA_BYTES, np.uint8)


def test_a_failure_names_its_place_in_the_code(tmp_path: Path) -> None:
    def read(folder: Path) -> None:
        parse_json("text, not bytes", "x")  # type: ignore[arg-type]

    judgement = judge(read, (ModelError,), tmp_path)
    assert re.fullmatch(r"TypeError at strict_json\.py:[0-9]+", judgement.detail)


def test_the_folder_holds_exactly_one_mutant(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.put({"a": b"1", "sub/b": b"2"})
    folder.put({"sub/b": b"3", "c": b""})
    found = {
        str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == {"sub/b": b"3", "c": b""}


# Files that are large: mutants of small ones do not show what memory grows with


def bombs(size: int) -> dict[str, bytes]:
    """Return JSON texts of about a size whose values take many times as much."""
    keys = b",".join(b'"%06x":0' % index for index in range(size // 11))
    return {
        "lists": b"[" + b"[]," * (size // 3) + b"[]]",
        "objects": b"[" + b"{}," * (size // 3) + b"{}]",
        "integers": b"[" + b"1234567," * (size // 8) + b"9]",
        "floats": b"[" + b"1.5," * (size // 4) + b"9]",
        "keys": b"{" + keys + b"}",
        "objects of a key": b"[" + b'{"a":0},' * (size // 8) + b"0]",
        "strings": b"[" + b'"abc",' * (size // 6) + b"0]",
        "a string": b'["' + b"a" * size + b'"]',
        "a string with a wide character": ('["' + "a" * size + '\U0001f600"]').encode(),
        "a string with an escape": b'["' + b"a" * size + b'\\ud83d\\ude00"]',
        "spaces": b"[" + b" " * size + b"]",
        "backslashes": b'["' + b"\\" * (size // 2 * 2) + b'"]',
    }


@pytest.mark.parametrize(
    "size",
    [pytest.param(4 << 20, id="4MiB"), pytest.param(20 << 20, id="20MiB", marks=pytest.mark.slow)],
)
def test_json_takes_twice_its_size_and_64_mib(size: int) -> None:
    for name, data in bombs(size).items():
        with bounded_memory(oracle.EXTRA_BYTES + 2 * len(data)):
            try:
                parse_json(data, "x")
            except FormatError as error:
                assert "of memory" in str(error) or "JSON values" in str(error), name


def test_a_header_may_take_more_where_the_file_is_larger(tmp_path: Path) -> None:
    """60 000 tensors in one file are unusual, and sound."""
    header = {
        f"model.layers.{index}.mlp.weight": {
            "dtype": "U8",
            "shape": [32, 40],
            "data_offsets": [1280 * index, 1280 * (index + 1)],
        }
        for index in range(60_000)
    }
    text = json.dumps(header).encode()
    with pytest.raises(FormatError, match="of memory"):
        parse_json(text, "x")
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 1280 * 60_000)
    with bounded_memory(oracle.EXTRA_BYTES + 2 * path.stat().st_size):
        assert len(open_safetensors(path)[0]) == 60_000


@pytest.mark.parametrize("shift", range(4))
def test_escapes_at_the_border_of_pieces(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is looked at piece by piece; no border may fall into an escape."""
    monkeypatch.setattr(strict_json, "_STEP", 5)
    text = json.dumps([" " * shift, '\\"[[', "\\\\", '"' * 9, {"a\\": ["]"]}]).encode()
    assert parse_json(text, "x") == json.loads(text)
    outside = b"".join(piece.tobytes() for piece in strict_json._outside_strings(text))
    assert outside.replace(b" ", b"").replace(b'"', b"") == b"[,,,,{:[]}]"
    deep = b"[" * 60 + b'"\\\\\\"' + b"[" * 9 + b'"' + b"]" * 60
    assert parse_json(deep, "x")
    with pytest.raises(FormatError, match="deeper"):
        parse_json(b" " * shift + b"[" * 65 + b"]" * 65, "x")


# Worker processes

PLANTED = """
import ctypes, os, signal, sys
from pathlib import Path
from clocher_kernels.errors import FormatError, ModelError
from fuzz import campaign, readers
from fuzz.mutations import mutate_bytes

def read(folder):
    data = (folder / "f").read_bytes()
    if data == b"seed":
        return
    if len(data) % 7 == 3:
        ctypes.string_at(0)
    if len(data) % 7 == 5:
        {}["bug"]
    raise FormatError("no")

readers.READERS = campaign.READERS = {
    "planted": readers.Reader(
        "planted", lambda: [{"f": b"seed"}], {"f": (mutate_bytes, 1)}, read, (ModelError,)
    )
}
if __name__ == "__main__":
    tally = campaign.fuzz(["planted"], 1, 10, 60, 2)["planted"]
    print(tally.mutants, tally.accepted + sum(tally.refused.values()) + tally.failed)
    for key, failure in sorted(tally.failures.items()):
        path = campaign.save(Path(sys.argv[1]), "planted", 1, failure)
        again = campaign.reproduce(campaign.load(path)[1], "planted")
        print(key, failure.count, "|", again.outcome, again.detail)
"""


@pytest.mark.timeout(600)
def test_a_crash_is_found_counted_and_reproduced(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    done = python(script, tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    totals, *failures = done.stdout.splitlines()
    assert totals == "60 60"
    found = [line.split(" | ") for line in failures]
    assert [key.rsplit(" ", 1)[0] for key, _ in found] == [again for _, again in found]
    assert [again for _, again in found] == ["crash exit code -11", "error KeyError at ?"]
    assert all(int(key.rsplit(" ", 1)[1]) >= 2 for key, _ in found)


def test_tallies_add_up() -> None:
    one, two = Tally(), Tally()
    bug = Judgement("error", "KeyError at x.py:1", "trace")
    one.note(Judgement("accepted"), 0, {})
    one.note(bug, 1, {"a": b"1"})
    two.note(Judgement("refused", "FormatError"), 2, {})
    two.note(bug, 3, {"a": b"3"})
    one.add(two)
    assert one.document() == {
        "mutants": 4,
        "accepted": 1,
        "refused": {"FormatError": 1},
        "failed": 2,
        "failures": {"error KeyError at x.py:1": 2},
    }
    assert one.failures["error KeyError at x.py:1"].index == 1


def test_a_saved_mutant_is_loaded_as_it_was(tmp_path: Path) -> None:
    tally = Tally()
    files = {"q4.json": b"\x00\xff{", "q4.parts/a": b""}
    tally.note(Judgement("error", "KeyError", "line\nline"), 7, files)
    (failure,) = tally.failures.values()
    path = save(tmp_path / "new", "q4-map", 5, failure)
    assert path.name == "q4-map-5-7.json"
    assert load(path) == ("q4-map", files)
    done = fuzz_readers("--reproduce", str(path))
    assert (done.returncode, done.stdout) == (0, "")
    assert "q4-map: refused UsageError" in done.stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "clocher.mutant/1", "reader": "x", "files": {}}',
        '{"schema": "clocher.mutant/1", "reader": "gguf", "files": {"../../a": ""}}',
    ],
)
def test_what_is_no_saved_mutant_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    done = fuzz_readers("--reproduce", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert str(path) in done.stderr


def test_an_unknown_reader_is_refused() -> None:
    done = fuzz_readers("--reader", "elf")
    assert done.returncode == 2
    assert "known: all, safetensors" in done.stderr


def test_a_campaign_can_go_on_where_another_ended(tmp_path: Path) -> None:
    flags = ("--reader", "q4-map", "--seed", "9", "--jobs", "1", "--failures", tmp_path)
    ranges = ((0, 16), (16, 24), (0, 40))
    runs = [fuzz_readers(*flags, "--start", start, "--mutants", count) for start, count in ranges]
    parts = [json.loads(run.stdout)["readers"]["q4-map"] for run in runs]
    assert [part["mutants"] for part in parts] == [16, 24, 40]
    assert parts[0]["accepted"] + parts[1]["accepted"] == parts[2]["accepted"]
