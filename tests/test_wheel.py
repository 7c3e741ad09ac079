"""The wheel: everything that belongs to the product, nothing else, and it runs by itself."""

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from weight_files import LLAMA, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = ("clocher_kernels", "clocher_runtime", "cpu_fallback")
DIST_INFO = f"clocher-{PROJECT['version']}.dist-info"


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "-q", *map(str, args), "--no-index", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this source, built from a copy: building writes beside the source."""
    copy = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-build-isolation", "-w", copy / "dist", copy)
    (path,) = (copy / "dist").iterdir()
    return path


def test_it_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    expected = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if name.parts[0] != DIST_INFO} == expected


def test_it_runs_without_the_source(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "installed"
    pip("install", "--target", home, wheel)

    def python(*args: object) -> str:
        # -S: no .pth file is read, so that of an editable installation does not lead to the source.
        path = os.pathsep.join([str(home), *site.getsitepackages()])
        done = subprocess.run(
            [sys.executable, "-S", *map(str, args)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    program = home / "bin" / "clocher-run"
    line = json.loads(python(program, "--model-dir", LLAMA, "--max-new", 2))
    assert (line["version"], line["tokens_generated"]) == (PROJECT["version"], 2)
    # What a checkpoint goes through until it runs.
    clocher = home / "bin" / "clocher"
    python(clocher, "quantize", LLAMA, "q4")
    python(clocher, "convert", "q4", "copy")
    line = json.loads(python(program, "--model-dir", "copy", "--max-new", 2))
    assert line["tokens_generated"] == 2 and "int4" in line["precision"]
    helps = (
        "from clocher_runtime.cli import clocher\n"
        "from clocher_runtime.subcommands.table import SUBCOMMANDS\n"
        "print(*[int(clocher([name, '--help'])) for name in SUBCOMMANDS])"
    )
    assert set(python("-c", helps).splitlines()[-1].split()) == {"0"}
    found = python("-c", f"for name in {PACKAGES}: print(__import__(name).__file__)").split()
    assert [Path(file).parents[1] for file in found] == [home] * 3
