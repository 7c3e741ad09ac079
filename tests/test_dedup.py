"""clocher.dedup: every mode there and back, what is refused, and what is saved on real models."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sessions import make_session
from weight_files import BITNET, GPTOSS, LLAMA, ROOT, convert, rng

from clocher_kernels.dtypes import STORAGE
from clocher_kernels.errors import (
    FormatError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    UsageError,
)
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Plane
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.dedup.codec import UNIT, pack, unpack
from clocher_runtime.checkpoints.dedup.index import (
    FILE_NAMES,
    INDEX_NAME,
    KINDS,
    DedupIndex,
    FileFacts,
    StoredPlane,
    parse_index,
    placed,
)
from clocher_runtime.checkpoints.dedup.reader import DedupFile, open_deduplicated, open_pair
from clocher_runtime.checkpoints.iebin import IebinWriter
from clocher_runtime.command.dedup_weights import CACHE_NAME, open_weights
from clocher_runtime.config.commands import RunConfig
from clocher_runtime.config.values import Given
from clocher_runtime.convert import dedup_writer as encoder
from clocher_runtime.convert.dedup_writer import (
    Deduplication,
    choose,
    choose_stream,
    restore,
)
from clocher_runtime.disk.plane_index import Region, seal
from clocher_runtime.engine.load import load_model
from clocher_runtime.subcommands import compress as dedup_command

NAMES = [*FILE_NAMES.values(), INDEX_NAME]


class Memory:
    """What a plane is written into, in place of a file."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, array: np.ndarray) -> None:
        self.data += np.ascontiguousarray(array).tobytes()

    def pad(self, nbytes: int) -> None:
        self.data += bytes(max(nbytes - len(self.data), 0))


def stored(dtype: str, data: np.ndarray) -> StoredPlane:
    """Return a plane of these bytes that is stored as it is."""
    plane = Plane(dtype, (len(data) // STORAGE[dtype].itemsize,))
    return StoredPlane("t", "data", plane, hashlib.sha256(data.tobytes()).hexdigest())


def written(directory: Path, dtype: str, data: np.ndarray) -> DedupFile:
    """Deduplicate one plane, write the files, and open them through their JSON."""
    (plane,), _ = placed([choose(stored(dtype, data), data)])
    files = {kind: Memory() for kind in KINDS}

    def put(region: Region, array: np.ndarray) -> None:
        files[region.file].pad(region.offset)
        files[region.file].write(array)

    encoder.encode(plane, data, put)
    facts = {}
    for kind in KINDS:
        content = bytes(files[kind].data)
        (directory / FILE_NAMES[kind]).write_bytes(content)
        facts[kind] = FileFacts(len(content), hashlib.sha256(content).hexdigest())
    whole = FileFacts(len(data), hashlib.sha256(data.tobytes()).hexdigest())
    text = DedupIndex(whole, facts, (plane,)).text()
    index = parse_index(text, INDEX_NAME, whole, [stored(dtype, data)])
    names = {kind: directory / name for kind, name in FILE_NAMES.items()}
    return DedupFile(directory / INDEX_NAME, index, names)


def open_dedup(directory: Path) -> DedupFile:
    """Open the deduplicated weights beside a model."""
    return open_pair(directory)[1]


def there_and_back(directory: Path, dtype: str, data: np.ndarray) -> StoredPlane:
    """Return how a plane was stored, after all ways to read it gave the same bytes."""
    dedup = written(directory, dtype, data)
    assert dedup.plane(0, verify=True).tobytes() == data.tobytes()
    dedup.verify()
    return dedup.index.planes[0]


def bf16(values: np.ndarray) -> np.ndarray:
    """Return the bytes of values cut to bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def few(name: str, symbols: int, count: int, skew: float = 0.5) -> np.ndarray:
    """Return random symbols below `symbols`, the lower ones more frequent."""
    weights = skew ** np.arange(symbols)
    return rng(name).choice(symbols, count, p=weights / weights.sum()).astype(np.uint8)


LONG = 3 * UNIT + 4097
CASES: dict[str, tuple[str, Callable[[], np.ndarray], str, str]] = {
    "constant": ("u8", lambda: np.full(LONG, 7, np.uint8), "streams", "const"),
    "two values": ("e8m0", lambda: few("two", 2, LONG) + np.uint8(120), "streams", "code"),
    "a mask, few escapes": ("u8", lambda: few("mask", 9, LONG, 0.03), "streams", "code"),
    "MXFP4 scales": (
        "e8m0",
        lambda: few("scales", 6, LONG, 0.2) + np.uint8(118),
        "streams",
        "code",
    ),
    "signed bytes": ("i8", lambda: few("i8", 40, LONG, 0.6) - np.uint8(9), "streams", "code"),
    "ternary": (
        "u8",
        lambda: pack(few("trits", 3, 4 * LONG, 0.95), 2),
        "streams",
        "trits",
    ),
    "nibbles": ("u8", lambda: pack(few("nibbles", 16, 2 * LONG, 0.5), 4), "streams", "code"),
    "bf16 normal": (
        "bf16",
        lambda: bf16(rng("bf16").standard_normal(LONG) * 0.02),
        "streams",
        "code",
    ),
    "f32 from bf16": (
        "f32",
        lambda: (
            (bf16(rng("f32").standard_normal(LONG)).view(np.uint16).astype(np.uint32) << 16)
            .astype(np.uint32)
            .view(np.uint8)
        ),
        "streams",
        "code",
    ),
    "f16 scales": (
        "f16",
        lambda: (rng("f16").random(LONG) * 0.01 + 0.004).astype(np.float16).view(np.uint8),
        "streams",
        "code",
    ),
    "i32 indices": (
        "i32",
        lambda: np.arange(LONG, dtype=np.int32).view(np.uint8),
        "streams",
        "raw",
    ),
    "noise": ("u8", lambda: rng("noise").integers(0, 256, LONG, np.uint8), "raw", ""),
    "int4 g32 codes": (
        "u8",
        lambda: (
            encode(
                rng("g32").standard_normal((64, 4096)).astype(np.float32),
                parse_format("int4_sym_g32_f16"),
            )
            .planes["codes"]
            .reshape(-1)
        ),
        "raw",
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_mode_there_and_back(tmp_path: Path, name: str) -> None:
    dtype, make, mode, first = CASES[name]
    plane = there_and_back(tmp_path, dtype, make())
    assert plane.mode == mode
    assert (plane.streams[0].mode if plane.streams else "") == first
    if mode != "raw":
        assert plane.stored_bytes <= 0.95 * plane.plane.nbytes


@pytest.mark.parametrize(("symbols", "width"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_a_table_that_just_fits_needs_no_exceptions(
    tmp_path: Path, symbols: int, width: int
) -> None:
    data = rng(f"{symbols}").permutation(np.arange(LONG) % symbols).astype(np.uint8) * np.uint8(9)
    (stream,) = there_and_back(tmp_path, "i8", data).streams
    assert (stream.mode, stream.width, stream.escapes) == ("code", width, 0)
    assert stream.literal_bytes == stream.ranks == 0


BYTES = st.one_of(
    st.binary(min_size=1, max_size=400),
    st.builds(
        lambda table, picks, times: bytes(table[pick % len(table)] for pick in picks) * times,
        st.binary(min_size=1, max_size=20),
        st.binary(min_size=1, max_size=200),
        st.integers(1, 400),
    ),
)


@settings(max_examples=60)
@example(data=b"version https://git-lfs.github.com/spec/v1", dtype="u8")
@given(data=BYTES, dtype=st.sampled_from(["u8", "e8m0", "i8", "bf16", "f16", "f32", "i32"]))
def test_any_bytes_there_and_back(tmp_path_factory: Any, data: bytes, dtype: str) -> None:
    item = STORAGE[dtype].itemsize
    array = np.frombuffer(data * item, np.uint8)
    there_and_back(tmp_path_factory.mktemp("any"), dtype, array)


@settings(max_examples=50)
@given(st.integers(1, 8), st.binary(max_size=300), st.data())
def test_packed_symbols_are_found_anywhere(bits: int, data: bytes, draw: st.DataObject) -> None:
    symbols = np.frombuffer(data, np.uint8) & np.uint8((1 << bits) - 1)
    start = draw.draw(st.integers(0, len(symbols)))
    count = draw.draw(st.integers(0, len(symbols) - start))
    packed = pack(symbols, bits)
    assert len(packed) == -(-len(symbols) * bits // 8)
    assert np.array_equal(unpack(packed, bits, start, count), symbols[start : start + count])


def test_packed_bytes_are_pinned() -> None:
    assert pack(np.array([1, 2, 3, 4, 5], np.uint8), 3).tobytes() == bytes([0b11010001, 0b1011000])
    counts = np.zeros(256, np.int64)
    counts[[9, 4, 200, 7]] = [5, 7, 5, 1000]
    stream = choose_stream(counts, 8)
    assert stream.symbols is not None and stream.symbols.tolist() == [7, 4, 9, 200]
    assert (stream.mode, stream.width, stream.escapes) == ("code", 1, 17)


def iebin(model: Path, out: Path) -> Path:
    """Convert a model to IEBIN."""
    convert(model, out)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models as IEBIN pairs with their deduplicated form beside."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for model in (GPTOSS, BITNET, LLAMA):
        found[model.name] = iebin(model, root / model.name)
        Deduplication(root / model.name).run()
    return found


@pytest.fixture
def llama(models: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(models[LLAMA.name], tmp_path / "llama"))


@pytest.fixture
def gptoss(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models[GPTOSS.name], tmp_path / "gptoss"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ratio(planes: Iterable[StoredPlane]) -> float:
    """Return stored bytes for each byte."""
    pairs = [(sum(nbytes for _, nbytes in p.parts()), p.plane.nbytes) for p in planes]
    return sum(stored for stored, _ in pairs) / sum(nbytes for _, nbytes in pairs)


def planes_in(directory: Path, dtype: str) -> list[StoredPlane]:
    return [p for p in open_dedup(directory).index.planes if p.plane.dtype == dtype]


@pytest.mark.parametrize("name", [GPTOSS.name, BITNET.name, LLAMA.name])
def test_bf16_of_trained_models_shrinks_to_three_quarters(
    models: dict[str, Path], name: str
) -> None:
    assert ratio(planes_in(models[name], "bf16")) <= 0.751


def test_what_each_kind_of_weights_gains(models: dict[str, Path]) -> None:
    planes = open_dedup(models[GPTOSS.name]).index.planes
    experts = [p for p in planes if "experts" in p.tensor and p.plane.dtype != "bf16"]
    assert 0.94 <= ratio(experts) <= 0.96  # its scales only
    assert all(ratio([p]) == 1 for p in experts if p.plane.dtype == "u8")
    assert ratio(planes_in(models[BITNET.name], "u8")) <= 0.801


@pytest.mark.parametrize("name", [GPTOSS.name, BITNET.name, LLAMA.name])
def test_restored_byte_for_byte(models: dict[str, Path], tmp_path: Path, name: str) -> None:
    directory = Path(shutil.copytree(models[name], tmp_path / "m"))
    before = digest(directory / "model.ie.bin")
    (directory / "model.ie.bin").unlink()
    checkpoint = open_checkpoint(directory, verify=True)
    original = open_checkpoint(models[name])
    assert checkpoint.names == original.names
    for tensor in original.names:
        one, other = original.tensor(tensor), checkpoint.tensor(tensor)
        assert one.format.name == other.format.name
        for key, plane in one.planes.items():
            assert np.array_equal(plane, other.planes[key])
    restore(directory)
    assert digest(directory / "model.ie.bin") == before
    assert sorted(p.name for p in directory.iterdir()) == sorted(
        p.name for p in models[name].iterdir()
    )


def test_output_depends_on_the_input_alone(llama: Path, models: dict[str, Path]) -> None:
    plan = Deduplication(llama)
    plan.run()
    assert plan.nbytes == pytest.approx(
        sum((llama / name).stat().st_size for name in NAMES), rel=2e-3
    )
    for name in NAMES:
        assert (llama / name).read_bytes() == (models[LLAMA.name] / name).read_bytes()


def test_equal_tensors_are_stored_once(tmp_path: Path) -> None:
    data = rng("tied").integers(0, 1 << 16, (300, 64)).astype(np.uint16)
    tensor = QuantTensor((300, 64), parse_format("bf16"), {"data": data})
    with IebinWriter(tmp_path) as writer:
        writer.add("embed", tensor)
        writer.add("head", tensor)
        writer.commit({}, {}, {}, None, {"container": "none"})
    plan = Deduplication(tmp_path)
    plan.run()
    assert [plane.mode for plane in plan.planes] == ["raw", "same"]
    found = open_deduplicated(tmp_path, verify=True)
    assert np.array_equal(found.tensor("head").planes["data"], data)


def script(*arguments: object) -> tuple[int, str, str]:
    """Run `clocher dedup` in this process."""
    done = click.testing.CliRunner().invoke(dedup_command.dedup, list(map(str, arguments)))
    return done.exit_code, done.stdout, done.stderr


def int4_model(directory: Path) -> Path:
    """Write a model of int4 codes in groups of 32 and nothing else."""
    fmt = parse_format("int4_sym_g32_f16")
    directory.mkdir()
    with IebinWriter(directory) as writer:
        writer.add("w", encode(rng("w").standard_normal((64, 1024)).astype(np.float32), fmt))
        writer.commit({}, {}, {}, None, {"container": "none"})
    return directory


def test_refuses_to_grow_a_model(tmp_path: Path) -> None:
    model = int4_model(tmp_path / "int4")
    before = sorted(path.name for path in model.iterdir())
    code, out, err = script("--model-dir", model)
    assert code == 8
    assert "not worth it, nothing was written" in err
    codes = next(line for line in out.splitlines() if "w codes" in line)
    assert codes.split()[2] == "0.0%"
    assert sorted(path.name for path in model.iterdir()) == before
    code, _, err = script("--model-dir", model, "--keep-anyway")
    assert code == 0
    assert sorted(path.name for path in model.iterdir()) == sorted([*before, *NAMES])


def test_script_there_and_back(llama: Path) -> None:
    before = digest(llama / "model.ie.bin")
    code, out, err = script("--model-dir", llama, "--verify", "--remove-bin")
    assert code == 0, err
    assert "exponent 3-bit code" in out
    assert "30.3 % less" in err
    assert not (llama / "model.ie.bin").exists()
    assert script("--model-dir", llama, "--check")[0] == 0
    assert script("--model-dir", llama)[0] == 3
    assert script("--model-dir", llama, "--restore", "--remove-bin")[0] == 2
    assert script("--model-dir", llama, "--restore")[0] == 0
    assert digest(llama / "model.ie.bin") == before
    assert script("--model-dir", llama.parent / "none")[0] == 3
    (llama / FILE_NAMES["masks"]).write_bytes(b"x" + (llama / FILE_NAMES["masks"]).read_bytes()[1:])
    assert script("--model-dir", llama, "--check")[0] == 3


def test_a_damaged_source_is_refused(llama: Path) -> None:
    data = bytearray((llama / "model.ie.bin").read_bytes())
    data[1000] ^= 1
    (llama / "model.ie.bin").write_bytes(data)
    with pytest.raises(FormatError, match="the file is damaged"):
        Deduplication(llama)


def reseal(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON and correct its checksum."""
    document = json.loads((directory / INDEX_NAME).read_bytes())
    change(document)
    document.pop("sha256")
    body = json.dumps(document, ensure_ascii=False).encode()[:-1] + b",\n"
    (directory / INDEX_NAME).write_bytes(seal(body))


def planes_of_mode(document: dict[str, Any], mode: str) -> dict[str, Any]:
    return next(plane for plane in document["planes"] if plane["mode"] == mode)


def code_of(document: dict[str, Any]) -> dict[str, Any]:
    stream: dict[str, Any] = planes_of_mode(document, "streams")["streams"][0]
    assert stream["mode"] == "code"
    return stream


JSON_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "format": lambda d: d.update(format="dedup"),
    "unknown field": lambda d: d.update(extra={}),
    "missing field": lambda d: d.pop("totals"),
    "source size": lambda d: d["source"].update(nbytes=-1),
    "source hash": lambda d: d["source"].update(sha256="0" * 63),
    "file size": lambda d: d["files"]["masks"].update(nbytes=d["files"]["masks"]["nbytes"] + 8),
    "file kind": lambda d: d["files"].update(more=d["files"]["masks"]),
    "no planes": lambda d: d.update(planes=[]),
    "totals": lambda d: d["totals"].update(out=1),
    "dtype": lambda d: d["planes"][0].update(dtype="f64"),
    "shape": lambda d: d["planes"][0].update(shape=[1 << 40, 1 << 40]),
    "empty shape": lambda d: d["planes"][0].update(shape=[0, 4]),
    "mode": lambda d: d["planes"][0].update(mode="zip"),
    "mode type": lambda d: d["planes"][0].update(mode=["raw"]),
    "twice": lambda d: d["planes"].append(d["planes"][0]),
    "xor without base": lambda d: planes_of_mode(d, "streams").update(xor=True),
    "same as itself": lambda d: d["planes"][0].update(
        {k: d["planes"][0][k] for k in ("tensor",)} | {"mode": "same", "of": 0}
    ),
    "split": lambda d: planes_of_mode(d, "streams").update(split="nibble"),
    "streams": lambda d: planes_of_mode(d, "streams").update(streams=[]),
    "stream mode": lambda d: code_of(d).update(mode="huffman"),
    "width": lambda d: code_of(d).update(width=5),
    "table": lambda d: code_of(d).update(table=257),
    "escapes": lambda d: code_of(d).update(escapes=1 << 50),
    "escapes less": lambda d: code_of(d).update(escapes=code_of(d)["escapes"] - 1),
    "huge constant": lambda d: d["planes"].append(
        {
            "tensor": "huge",
            "plane": "data",
            "dtype": "u8",
            "shape": [1 << 40],
            "sha256": "0" * 64,
            "mode": "streams",
            "xor": False,
            "split": "byte",
            "streams": [{"mode": "const"}],
        }
    ),
}


@pytest.mark.parametrize("name", JSON_CHANGES)
def test_index_that_breaks_a_rule_is_refused(gptoss: Path, name: str) -> None:
    reseal(gptoss, JSON_CHANGES[name])
    with pytest.raises(FormatError, match=r"model\.dedup\."):
        open_dedup(gptoss).verify()


def test_other_versions_and_broken_seals_are_refused(gptoss: Path) -> None:
    data = (gptoss / INDEX_NAME).read_bytes()
    (gptoss / INDEX_NAME).write_bytes(data.replace(b"bf16", b"bf17", 1))
    with pytest.raises(FormatError, match="does not match its own SHA-256"):
        open_dedup(gptoss)
    (gptoss / INDEX_NAME).write_bytes(data)
    reseal(gptoss, lambda d: d.update(base={"nbytes": 1, "sha256": "0" * 64, "name_hint": "x"}))
    with pytest.raises(UnsupportedModel, match="builds on another model"):
        open_dedup(gptoss)
    reseal(gptoss, lambda d: d.update(version=2))
    with pytest.raises(UnsupportedModel, match="version 2"):
        open_dedup(gptoss)


@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_byte_goes_unnoticed(gptoss: Path, kind: str) -> None:
    path = gptoss / FILE_NAMES[kind]
    good = path.read_bytes()
    random = rng(kind)
    for _ in range(12):
        bad = bytearray(good)
        bad[random.integers(len(bad))] ^= 1 << int(random.integers(8))
        path.write_bytes(bad)
        with pytest.raises(FormatError):
            open_dedup(gptoss).verify()
    for bad_size in (good[:-1], good + b"\0", b""):
        path.write_bytes(bad_size)
        with pytest.raises(FormatError):
            open_dedup(gptoss)
    path.unlink()
    with pytest.raises(ModelError):
        open_dedup(gptoss)


def test_mutants_are_refused_with_a_model_error_or_decode_right(llama: Path) -> None:
    """A small run; tests/fuzz_readers.py does the large one."""
    random = rng("mutants")
    text = (llama / INDEX_NAME).read_bytes()
    document = json.loads(text)

    def number_somewhere(value: Any) -> None:
        while isinstance(value, dict | list) and value:
            keys = list(value) if isinstance(value, dict) else range(len(value))
            key = keys[int(random.integers(len(keys)))]
            if isinstance(value[key], dict | list):
                value = value[key]
                continue
            swaps = [0, -1, 1 << 62, "x", None, True, 3, []]
            value[key] = swaps[int(random.integers(len(swaps)))]
            return

    for _ in range(60):
        (llama / INDEX_NAME).write_bytes(text)
        reseal(llama, number_somewhere)
        try:
            open_dedup(llama)
        except ModelError:
            continue
    assert document["version"] == 1


def test_a_model_of_other_weights_is_refused(models: dict[str, Path], gptoss: Path) -> None:
    for name in NAMES:
        shutil.copy(models[LLAMA.name] / name, gptoss / name)
    with pytest.raises(FormatError, match=r"stands for another model\.ie\.bin"):
        open_deduplicated(gptoss)


KILLED = """
import sys, time
from pathlib import Path
from clocher_runtime.convert import dedup_writer as writer
real, left = writer.{function}, int(sys.argv[2])
def slow(*arguments):
    global left
    left -= 1
    if left < 0:
        print("here", flush=True)
        time.sleep(60)
    return real(*arguments)
writer.{function} = slow
writer.Deduplication(Path(sys.argv[1])).run()
"""


@pytest.mark.parametrize(("function", "calls"), [("encode", 20), ("write_file", 0)])
def test_killed_at_any_moment_it_leaves_the_model(llama: Path, function: str, calls: int) -> None:
    before = digest(llama / "model.ie.bin")
    kept = function != "write_file"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED.format(function=function), str(llama), str(calls)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert digest(llama / "model.ie.bin") == before
    assert (llama / INDEX_NAME).exists() == kept
    if kept:
        open_deduplicated(llama, verify=True)
    Deduplication(llama).run()
    open_deduplicated(llama, verify=True)
    assert not list(llama.glob("*.partial"))


def test_a_full_disk_leaves_nothing(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        (llama / name).unlink()
    plan = Deduplication(llama)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(OSError, match="too little"):
        plan.run()
    assert not list(llama.glob("model.dedup*"))


def configured(**fields: Any) -> RunConfig:
    """Return a run that was given these settings by their variables."""
    given = {name: Given(f"IE_{name.upper()}", str(value)) for name, value in fields.items()}
    return RunConfig(**fields, given=given)


def opened(directory: Path, **fields: Any) -> tuple[Any, tuple[str, ...]]:
    config = configured(**fields)
    checkpoint, ignored = open_weights(config, directory)
    return checkpoint or open_checkpoint(directory), config.unmet(ignored)


def uses_dedup(checkpoint: Any) -> bool:
    return any("dedup" in file.path.name for file in checkpoint.files)


def test_dedup_is_used_when_asked_for_or_alone(gptoss: Path) -> None:
    checkpoint, ignored = opened(gptoss)
    assert (uses_dedup(checkpoint), ignored) == (False, ())
    checkpoint, ignored = opened(gptoss, dedup=True, dedup_cache_mb=5)
    assert (uses_dedup(checkpoint), ignored) == (True, ("IE_DEDUP_CACHE_MB=5",))
    checkpoint, ignored = opened(gptoss, dedup_policy="cache", dedup=False)
    assert (uses_dedup(checkpoint), ignored) == (False, ("IE_DEDUP_POLICY=cache", "IE_DEDUP=False"))
    (gptoss / "model.ie.bin").unlink()
    assert uses_dedup(opened(gptoss)[0])
    for fields in ({"dedup": False}, {"dedup_policy": "off"}):
        with pytest.raises(ModelNotFound, match="deduplicated form only"):
            opened(gptoss, **fields)


def test_strict_refuses_and_the_rest_falls_back(
    gptoss: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="drop one"):
        opened(gptoss, dedup=True, dedup_strict=True, dedup_policy="off")
    path = gptoss / FILE_NAMES["exceptions"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="SHA-256"):
        opened(gptoss, dedup=True, dedup_strict=True)
    (gptoss / INDEX_NAME).unlink()
    with pytest.raises(FormatError, match="clocher dedup"):
        opened(gptoss, dedup=True, dedup_strict=True)
    checkpoint, ignored = opened(gptoss, dedup=True, dedup_policy="cache")
    assert not uses_dedup(checkpoint)
    assert ignored == ("IE_DEDUP=True", "IE_DEDUP_POLICY=cache")
    assert "model.ie.bin is used" in caplog.text


def test_cache_keeps_planes_in_files_up_to_its_size(gptoss: Path) -> None:
    def load(mib: int) -> int:
        checkpoint, ignored = opened(gptoss, dedup=True, dedup_policy="cache", dedup_cache_mb=mib)
        assert not ignored
        for name in checkpoint.names:
            expected = original.tensor(name).planes
            for key, plane in checkpoint.tensor(name).planes.items():
                assert np.array_equal(plane, expected[key])
        return sum(file.stat().st_size for file in cache.iterdir()) if cache.is_dir() else 0

    original = open_checkpoint(GPTOSS)
    cache = gptoss / CACHE_NAME
    assert load(0) == 0
    assert 1 << 20 < load(2) <= 2 << 20
    (cache / ("0" * 64)).write_bytes(b"of another model")
    whole = load(100)
    assert whole > 5 << 20
    times = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert load(100) == whole
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == times
    assert load(1) <= 1 << 20


def test_a_cache_that_is_a_link_is_left_alone(
    gptoss: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files there that look like those of a cache are not this model's to delete."""
    theirs = tmp_path / "blobs" / ("0" * 64)
    theirs.parent.mkdir()
    theirs.write_bytes(b"of somebody else")
    (gptoss / CACHE_NAME).symlink_to(theirs.parent)
    checkpoint, _ = opened(gptoss, dedup=True, dedup_policy="cache", dedup_cache_mb=100)
    for name in checkpoint.names:
        checkpoint.tensor(name)
    assert [file.name for file in theirs.parent.iterdir()] == [theirs.name]
    assert caplog.text.count("is a symbolic link: no decoded weights are kept there") == 1


def test_hot_tensors_get_memory_of_their_own(gptoss: Path) -> None:
    def in_memory(**fields: Any) -> list[str]:
        checkpoint, ignored = opened(gptoss, dedup=True, dedup_policy="replicate_hot", **fields)
        assert not ignored
        blocks = {n: checkpoint.tensor(n).planes.get("blocks") for n in checkpoint.names}
        return [n for n, b in blocks.items() if b is not None and b.flags.writeable]

    assert len(in_memory()) == 8
    assert len(in_memory(dedup_hot_list="*.0.mlp.experts.*, lm_head.weight")) == 2
    assert len(in_memory(dedup_hot_bytes=1 << 20)) in (1, 2, 3)
    with pytest.raises(UsageError, match="no tensor matches 'x'"):
        in_memory(dedup_hot_list="x")


def test_logits_are_bit_identical(gptoss: Path) -> None:
    rows = []
    for directory in (GPTOSS, gptoss):
        if directory == gptoss:
            (gptoss / "model.ie.bin").unlink()
        model = load_model(open_checkpoint(directory))
        session = make_session(model, backend="reference", context=32)
        for token in session.generate([[5, 6, 7]], 3, stop_ids=frozenset(), logits=True):
            assert token.logits is not None
            rows.append((token.id, token.logits.tobytes()))
    assert rows[:3] == rows[3:]


def test_clocher_run_makes_the_same_tokens(gptoss: Path) -> None:
    def run(**variables: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "clocher_runtime.cli", "--device", "cpu", "--model-dir",
             str(gptoss), "--prompt", "def f", "--max-new", "6", "--threads", "1"],
            capture_output=True,
            env={**os.environ, **variables},
            cwd=ROOT,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    plain = run()
    (gptoss / "model.ie.bin").unlink()
    dedup = run(IE_DEDUP="1", IE_DEDUP_STRICT="1", IE_VERIFY_TOUCH="1")
    assert dedup["outputs"] == plain["outputs"]
    assert dedup["hints_ignored"] == []
    assert dedup["precision"] == plain["precision"]


def test_index_text_is_what_is_parsed(models: dict[str, Path]) -> None:
    for directory in models.values():
        assert open_dedup(directory).index.text() == (directory / INDEX_NAME).read_bytes()


def test_reading_stays_within_bounds_of_memory(tmp_path: Path) -> None:
    data = bf16(rng("large").standard_normal(4 << 20))
    dedup = written(tmp_path, "bf16", data)
    tracemalloc.start()
    dedup.verify()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
