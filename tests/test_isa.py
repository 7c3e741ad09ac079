"""Every instruction set that this host has: same results, nothing read past an array's end."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from op_cases import ALL, ONE_EACH, name_of

from clocher_kernels.errors import DeviceError, UsageError
from clocher_kernels.ops.contract import Case, OpSpec
from cpu_fallback.lanes import isa

_TESTS = Path(__file__).parent
_NAMES = isa.available()
_DOTS = ("avx512", "avxvnni", *["avx512vnni"] * ("amx" in _NAMES))
"""ISAs that differ from another one in the dot products of bytes only; they and `generic`, which
takes a minute and a half to compile, have all of their cases among the slow tests."""
_REST = [name for name in _NAMES if name not in (*_DOTS, "generic")]


def _python(name: str, *args: str) -> str:
    environment = {**os.environ, isa.VARIABLE: name, "PYTHONPATH": str(_TESTS.parent)}
    done = subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (name, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


@pytest.mark.parametrize("name", [n for n in _REST if n != isa.CURRENT.name])
def test_parity_on_the_other_isas(name: str) -> None:
    _parity(name, [f"test_cpu[cpu-{name_of(*own)}]" for own in ONE_EACH])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in _NAMES if n != isa.CURRENT.name])
def test_parity_of_every_case_on_the_other_isas(name: str) -> None:
    _parity(name, ["test_cpu"])


def _parity(name: str, tests: list[str]) -> None:
    path = _TESTS / "test_ops_parity.py"
    _python(name, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{path}::{t}" for t in tests))


@pytest.mark.parametrize(
    ("names", "cases"),
    [
        pytest.param(_REST, ONE_EACH, id="a case of each kernel"),
        pytest.param(_NAMES, ALL, id="every case on every ISA", marks=pytest.mark.slow),
    ],
)
def test_guard_pages_and_equal_bits(names: list[str], cases: Sequence[tuple[OpSpec, Case]]) -> None:
    chosen = () if cases is ALL else [name_of(*own) for own in cases]
    path = str(_TESTS / "guarded_ops.py")
    results = {name: _python(name, path, *chosen).split() for name in names}
    assert {int(done) for done, _ in results.values()} == {len(cases)}
    with_fma = {digest for name, (_, digest) in results.items() if isa.ISAS[name].fma}
    assert len(with_fma) <= 1, results


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_guard_pages_with_sizes_drawn_at_random(name: str) -> None:
    done, _ = _python(name, str(_TESTS / "guarded_ops.py"), "--random", "1500").split()
    assert int(done) == 1500


@pytest.mark.parametrize(
    ("name", "wanted", "forbidden"),
    [
        ("amx", r"\bvfmadd.*zmm", r"\bcall.*fma"),
        ("avx512vnni", r"\bvfmadd.*zmm", r"\bcall.*fma"),
        ("avx512", r"\bvfmadd.*zmm", r"\bcall.*fma"),
        ("avxvnni", r"\bvfmadd.*ymm", r"zmm|%k[1-7]"),
        ("avx2", r"\bvfmadd.*ymm", r"zmm|%k[1-7]"),
        ("generic", r"\bmulps.*xmm", r"[yz]mm|vfmadd|fmaf"),
    ],
)
@pytest.mark.one_in(2)
def test_code_is_for_the_isa(name: str, wanted: str, forbidden: str) -> None:
    if name not in _NAMES or "x86" not in os.uname().machine:
        return
    code = _python(
        name,
        "-c",
        "from cpu_fallback.lanes import jit; from cpu_fallback.ops import product; "
        "print(jit.assembly(product.product))",
    )
    assert re.search(wanted, code)
    assert not re.search(forbidden, code)


@pytest.mark.skipif("x86" not in os.uname().machine, reason="compiles for x86-64")
def test_products_of_tiles_are_compiled_on_any_host() -> None:
    code = _python(
        isa.CURRENT.name,
        "-c",
        "from cpu_fallback.lanes import isa; isa.CURRENT = isa.ISAS['amx']; "
        "from cpu_fallback.lanes import jit; from cpu_fallback.tiles import layout, tile_product; "
        "print(jit.assembly(tile_product.strip_product_of(layout.Layout('int4', 'row'), 128)))",
    )
    assert re.search(r"\btdpbssd\b", code)
    assert re.search(r"\btilestored\b", code)


def test_amx_needs_permission_from_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(("avx2", *isa.ISAS["amx"].needs), True)
    monkeypatch.setattr(isa.llvm, "get_host_cpu_features", lambda: features)
    monkeypatch.setattr(isa.os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    for refused, best in ((0, "amx"), (-1, "avx512vnni")):
        system = SimpleNamespace(syscall=lambda *_, answer=refused: answer)
        monkeypatch.setattr(isa.ctypes, "CDLL", lambda _, system=system: system)
        assert isa.available()[0] == best


_COUNTED = ("avx2", "avxvnni", "avx512", "avx512vnni")
_ONE, _EVERY = ("int4_sym_g32_f16",), ()
"""Formats whose instructions are counted: each takes seconds to compile."""


def _counts(name: str, script: str, row: str, columns: list[int], formats: Sequence[str]) -> None:
    """Compare the instructions of inner loops with a table of docs/measured-facts.md."""
    page = (_TESTS.parent / "docs" / "measured-facts.md").read_text()
    said = {fmt: [int(counts[i]) for i in columns] for fmt, *counts in re.findall(row, page, re.M)}
    assert len(said) == 7
    for line in _python(name, str(_TESTS / script), *(formats or said)).splitlines():
        fmt, *counts = line.split()
        assert [int(c) for c in counts] == pytest.approx(said[fmt], rel=0.03), line


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("avx2", _ONE),
        *(pytest.param(name, _EVERY, marks=pytest.mark.slow) for name in _COUNTED),
    ],
)
def test_products_take_as_many_instructions_as_the_table_says(
    name: str, formats: Sequence[str]
) -> None:
    if name in _NAMES:
        row = r"^\| `(\w+)` \|" + r" (\d+) / (\d+) \|" * len(_COUNTED)
        at = 2 * _COUNTED.index(name)
        _counts(name, "instruction_counts.py", row, [at, at + 1], formats)


@pytest.mark.parametrize("formats", [_ONE, pytest.param(_EVERY, marks=pytest.mark.slow)])
def test_neon_products_are_compiled_on_any_host_as_the_table_says(formats: Sequence[str]) -> None:
    row = r"^\| NEON `(\w+)`" + r" \| (\d+)" * 4 + r" \|$"
    _counts("neon_dotprod", "neon_code.py", row, [0, 1, 2, 3], formats)


def test_choice() -> None:
    assert isa.choose(None) is isa.ISAS[_NAMES[0]]
    assert isa.choose("generic").name == "generic"
    with pytest.raises(UsageError, match=r"one of amx, .*, generic"):
        isa.choose("sse5")


def test_a_missing_isa_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "host_features", lambda: {"avx2": True})
    assert isa.available() == ("generic",)
    with pytest.raises(DeviceError, match=r"lacks .*avx512f.*it can run generic"):
        isa.choose("avx512vnni")


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ((), ("generic",)),
        (("lse", "dotprod"), ("neon_dotprod", "generic")),
    ],
)
def test_arm_processors(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """The bits that Linux tells of a Cortex-A72 and a Neoverse N1."""
    bits = {"lse": (16, 1 << 8), "dotprod": (16, 1 << 20)}

    def getauxval(word: int) -> int:
        return sum(bit for name, (own, bit) in bits.items() if name in features and own == word)

    monkeypatch.setattr(isa.ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=getauxval))
    monkeypatch.setattr(isa.os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(isa.sys, "platform", "linux")
    assert isa.available() == names
