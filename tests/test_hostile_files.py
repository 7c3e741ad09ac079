"""Files made to break the readers: only ModelError escapes, quickly, in little memory."""

import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weight_files import (
    BITNET,
    GPTOSS,
    LLAMA,
    Array,
    array,
    copy_model,
    header_of,
    mutants,
    resealed,
    rng,
    safetensors_bytes,
    write_hf,
    write_iebin,
    write_sharded,
)

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.convert.q4_map import load_q4_map
from clocher_runtime.disk.strict_json import parse_json

MEMORY = 128 << 20
RELAXED = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


# Hypothesis makes its table of characters here, because under the limit it could not.
st.text().validate()


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Make a large allocation fail (where the system lets a process be limited)."""
    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def accepts(model: Path) -> bool:
    """Open and verify; whatever is accepted must be usable in full."""
    try:
        checkpoint = open_checkpoint(model, verify=True)
    except ModelError as error:
        assert len(str(error)) < 20_000
        return False
    for name in checkpoint.names:
        checkpoint.tensor(name).decode()
    return True


def test_the_memory_limit_of_these_tests_bites() -> None:
    if Path("/proc/self/statm").exists():
        with pytest.raises(MemoryError):
            np.ones(MEMORY // 4)


# Mutants that know the structure.


@pytest.mark.parametrize("part", range(4))
@pytest.mark.one_in(4)
def test_mutants_of_iebin(part: int, tmp_path: Path) -> None:
    """Every node of the JSON replaced by every hostile value, with a correct checksum."""
    model = write_iebin(tmp_path)
    path = model / "model.ie.json"
    document = json.loads(path.read_bytes())
    count = accepted = 0
    for index, mutant in enumerate(mutants(document)):
        if index % 4 == part and isinstance(mutant, dict):
            path.write_bytes(resealed(mutant))
            accepted += accepts(model)
            count += 1
    # The free-form objects take almost any value; nothing else does.
    assert count > 1000 and accepted < count / 10


SHARD: dict[str, Array] = {
    "w": array("BF16", 2, 3),
    "e_blocks": array("U8", 2, 3, 1, 16),
    "e_scales": array("U8", 2, 3, 1),
    "s": array("F32", 1),
}


def test_mutants_of_a_safetensors_header(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    model = write_hf(tmp_path, SHARD, config)
    path = model / "model.safetensors"
    data = b"".join(stored[2] for stored in SHARD.values())
    assert accepts(model)
    count = accepted = 0
    for mutant in mutants(header_of(SHARD) | {"__metadata__": {"format": "pt"}}):
        path.write_bytes(safetensors_bytes(json.dumps(mutant).encode(), data))
        accepted += accepts(model)
        count += 1
    assert count > 800 and accepted < count / 10


def test_mutants_of_an_index(tmp_path: Path) -> None:
    model = write_sharded(
        tmp_path / "m", {"a.safetensors": {"w": SHARD["w"]}, "b.safetensors": {"s": SHARD["s"]}}
    )
    shutil.copy(model / "a.safetensors", tmp_path / "a.safetensors")
    path = model / "model.safetensors.index.json"
    assert accepts(model)
    count = accepted = 0
    for mutant in mutants(json.loads(path.read_text())):
        path.write_text(json.dumps(mutant))
        accepted += accepts(model)
        count += 1
    assert count > 100 and accepted < count / 2


ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


@pytest.mark.parametrize("source", [GPTOSS, BITNET, LLAMA], ids=lambda path: path.name)
def test_mutants_of_quantization_config(source: Path, tmp_path: Path) -> None:
    """The rest of config.json is for the model families to check."""
    model = copy_model(source, tmp_path / "m")
    path = model / "config.json"
    config = json.loads(path.read_text())
    quantised = {"quantization_config": config.get("quantization_config", ONLINE)}
    for mutant in mutants(quantised):
        path.write_text(json.dumps(config | mutant))
        try:
            assert open_checkpoint(model).names
        except ModelError:
            continue


def test_mutants_of_a_manifest(tmp_path: Path) -> None:
    rule = {"pattern": "a.*", "dtype": "int4w", "group": 64, "zero": "per-tensor"}
    path = tmp_path / "q4.json"
    count = accepted = 0
    for mutant in mutants({"version": 1, "rules": [rule, rule | {"scale": "per-channel"}]}):
        path.write_text(json.dumps(mutant))
        count += 1
        try:
            load_q4_map(path)
        except UsageError:
            continue
        accepted += 1
    # A pattern may be any text.
    assert count > 400 and accepted < count / 4


# Bytes that know nothing.


def random_edits(data: bytes, count: int, name: str) -> Iterator[bytes]:
    """Yield copies with bytes changed, cut out, inserted or repeated."""
    generator = rng(name)
    for _ in range(count):
        start = int(generator.integers(len(data)))
        length = int(generator.integers(1, 9))
        piece = generator.integers(0, 256, length, np.uint8).tobytes()
        kinds = (
            data[:start] + piece + data[start + length :],
            data[:start] + data[start + length :],
            data[:start] + piece + data[start:],
            data[:start] + data[start : start + 40] + data[start:],
            data[:start],
        )
        yield kinds[int(generator.integers(len(kinds)))]


@pytest.mark.parametrize("name", ["model.ie.json", "model.ie.bin", "vocab.json"])
def test_random_edits_of_iebin_are_refused(name: str, tmp_path: Path) -> None:
    model = write_iebin(tmp_path)
    sound = (model / name).read_bytes()
    for edited in random_edits(sound, 400, name):
        if edited != sound:
            (model / name).write_bytes(edited)
            assert not accepts(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_random_edits_of_an_hf_model(name: str, tmp_path: Path) -> None:
    model = write_hf(tmp_path, SHARD, {"quantization_config": {"quant_method": "mxfp4"}})
    for edited in random_edits((model / name).read_bytes(), 600, name):
        (model / name).write_bytes(edited)
        accepts(model)


@given(header=st.binary(max_size=200), data=st.binary(max_size=40))
@RELAXED
def test_any_header_bytes(header: bytes, data: bytes, tmp_path: Path) -> None:
    model = write_hf(tmp_path, SHARD)
    (model / "model.safetensors").write_bytes(safetensors_bytes(b"{" + header, data))
    accepts(model)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
KEYS = st.text('ab"\\,{[]}:é', max_size=4)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(value=JSON_VALUES, ascii_only=st.booleans())
@RELAXED
def test_the_json_parser_loses_nothing(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert parse_json(text, "x") == value


@given(text=st.text('{}[]",:\\ud8019eE.-tfn', max_size=60) | st.text(max_size=60))
@RELAXED
def test_the_json_parser_accepts_nothing_that_python_refuses(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    try:
        value = parse_json(data, "x")
    except FormatError:
        return
    assert json.loads(text) == value


# Bombs.

BOMBS: dict[str, bytes] = {
    "deep lists": b"[" * 10_000_000,
    "deep objects": b'{"a":' * 1_000_000,
    "deep and closed": b"[" * 65 + b"]" * 65,
    "many lists": b"[" + b"[]," * 3_000_000 + b"[]]",
    "many objects": b"[" + b"{}," * 3_000_000 + b"{}]",
    "many numbers": b"[" + b"1," * 5_000_000 + b"1]",
    "many closers": b"]" * 10_000_000,
    "open string of escapes": b'["' + b'\\"' * 5_000_000,
    "open string of backslashes": b'["' + b"\\" * 9_999_999,
    "a long number": b"[" + b"9" * 1_000_000 + b"]",
    "a long exponent": b"[1e" + b"9" * 1_000_000 + b"]",
    "one key a million times": b"{" + b'"a":0,' * 1_000_000 + b'"a":0}',
    "the last key twice": b"{" + b"".join(b'"%d":0,' % i for i in range(300_000)) + b'"9":0}',
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_json_bombs_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^x: .{10,300}$"):
        parse_json(data, "x")


@pytest.mark.parametrize(
    "data",
    [
        b'{"\\ud800": 1}',
        b'["\\uDFFF"]',
        b'["\\udc00\\ud800"]',
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf{}",
    ],
    ids=["high", "low", "swapped", "raw", "byte order mark"],
)
def test_text_that_is_not_unicode_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_json(data, "x")
    assert parse_json(b'["\\ud83d\\ude00", "\\\\ud800"]', "x") == ["\U0001f600", "\\ud800"]


def test_the_depth_limit_is_exact_and_blind_to_strings() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64, "x")
    assert parse_json(b'["' + b'[{\\"' * 1000 + b'"]', "x")


def test_a_file_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    model = write_hf(tmp_path, SHARD)
    with (model / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match=r"config\.json: 1099511627776 bytes; the limit"):
        open_checkpoint(model)
