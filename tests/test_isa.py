"""Every instruction set that this host has: same results, nothing read past an array's end."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import pytest
from op_cases import ALL, name_of

from clocher_kernels.errors import DeviceError, UsageError
from cpu_fallback.lanes import arm, isa

_TESTS = Path(__file__).parent
_NAMES = isa.available()
_DOTS = ("avx512", "avxvnni")
"""ISAs that differ from another one in the dot products of bytes only; they and `generic`, which
takes a minute and a half to compile, have all of their cases among the slow tests."""
_REST = [name for name in _NAMES if name not in (*_DOTS, "generic")]
_BYTES = (
    "linear-int4_sym_g32_f16-wide-m37-n48-k384-i8-g32",
    "linear-int4_asym_g64_bf16-odd-m2-n37-k100-i8-g128",
    "linear-int8_row_bf16-wide-m37-n48-k384-i8-g0",
    "linear-int8_g32_f16-ragged-m5-n52-k352-i8-g32",
    "linear-mxfp4-wide-m37-n48-k384-i8-g32",
    "linear-ternary-odd-m1-n36-k41-i8-g0",
    "linear-q6_k-odd-m2-n37-k256-i8-g128",
)
"""A case of each way to multiply bytes that is quickly compiled; all cases are slow tests."""


def _python(name: str, *args: str) -> str:
    environment = {**os.environ, isa.VARIABLE: name, "PYTHONPATH": str(_TESTS.parent)}
    done = subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (name, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def _few_products() -> list[str]:
    """Return the cases of all ops but `linear`, and of that one in four of each format."""
    seen: Counter[tuple[str, ...]] = Counter()
    chosen = []
    for spec, case in ALL:
        kind = (spec.name, *case.formats.values())
        if spec.name != "linear" or seen[kind] % 4 == crc32(repr(kind).encode()) % 4:
            chosen.append(f"test_cpu[cpu-{name_of(spec, case)}]")
        seen[kind] += 1
    return chosen


@pytest.mark.parametrize("name", [n for n in _REST if n != isa.CURRENT.name])
def test_parity_on_the_other_isas(name: str) -> None:
    _parity(name, _few_products())


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
        pytest.param(_REST, (), id="every case"),
        pytest.param(_NAMES, _BYTES, id="bytes"),
        pytest.param(_NAMES, (), id="every case on every ISA", marks=pytest.mark.slow),
    ],
)
def test_guard_pages_and_equal_bits(names: list[str], cases: tuple[str, ...]) -> None:
    path = str(_TESTS / "guarded_ops.py")
    results = {name: _python(name, path, *cases).split() for name in names}
    assert {int(done) for done, _ in results.values()} == {len(cases) or len(ALL)}
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


_COUNTED = ("avx2", "avxvnni", "avx512", "avx512vnni")


@pytest.mark.parametrize(
    "name", ["avx2", *(pytest.param(name, marks=pytest.mark.slow) for name in _COUNTED[1:])]
)
def test_products_take_as_many_instructions_as_the_table_says(name: str) -> None:
    if name not in _NAMES:
        return
    page = (_TESTS.parent / "docs" / "measured-facts.md").read_text()
    table = re.findall(r"^\| `(\w+)` \|" + r" (\d+) / (\d+) \|" * len(_COUNTED), page, re.M)
    at = 2 * _COUNTED.index(name)
    said = {row[0]: [int(count) for count in row[1:][at : at + 2]] for row in table}
    assert len(said) == 7
    for line in _python(name, str(_TESTS / "instruction_counts.py"), *said).splitlines():
        product, *counts = line.split()
        assert [int(c) for c in counts] == pytest.approx(said[product], rel=0.03), line


@pytest.mark.parametrize(
    ("name", "columns"), [("neon_dotprod", [0, 1, 2]), ("neon_i8mm", [0, 1, 3])]
)
def test_neon_products_are_compiled_on_any_host_as_the_table_says(
    name: str, columns: list[int]
) -> None:
    page = (_TESTS.parent / "docs" / "measured-facts.md").read_text()
    table = re.findall(r"^\| NEON `(\w+)`" + r" \| (\d+)" * 4 + r" \|$", page, re.M)
    said = {fmt: [int(counts[i]) for i in columns] for fmt, *counts in table}
    assert len(said) == 7
    for line in _python(name, str(_TESTS / "neon_code.py"), *said).splitlines():
        fmt, *counts = line.split()
        assert [int(c) for c in counts] == pytest.approx(said[fmt], rel=0.03), line


def test_choice() -> None:
    assert isa.choose(None) is isa.ISAS[_NAMES[0]]
    assert isa.choose("generic").name == "generic"
    with pytest.raises(UsageError, match=r"one of avx512vnni, .*, generic"):
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
        (("lse", "dotprod", "i8mm"), ("neon_i8mm", "neon_dotprod", "generic")),
    ],
)
def test_arm_processors(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """The bits that Linux tells of a Cortex-A72, a Neoverse N1 and a Neoverse V1."""
    bits = {"lse": (16, 1 << 8), "dotprod": (16, 1 << 20), "i8mm": (26, 1 << 13)}

    def getauxval(word: int) -> int:
        return sum(bit for name, (own, bit) in bits.items() if name in features and own == word)

    monkeypatch.setattr(arm.ctypes, "CDLL", lambda _: SimpleNamespace(getauxval=getauxval))
    monkeypatch.setattr(isa.os, "uname", lambda: SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(arm.sys, "platform", "linux")
    assert isa.available() == names
